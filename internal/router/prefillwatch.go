package router

import (
	"context"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// prefillWatch holds the prefill leg to limits of its own: how long its worker may be silent at first, and after it has begun to
// answer. Where its failure matters it ends the attempt, which is tried on another pair; where the decode worker has begun to answer and so
// has the KV, it ends the leg alone. The leg's goroutine uses it; the timers' functions are the exception.
type prefillWatch struct {
	l     *leg
	first *time.Timer // nil: no limit
	gap   *stall
	seen  int // events, or bytes of an answer that is no stream
	quit  context.CancelFunc
	once  sync.Once
	// alone is the failure with which the leg alone was ended.
	alone atomic.Pointer[failure]
}

// watchPrefill starts the clock of the first byte. quit ends the leg; stop must be called.
func (l *leg) watchPrefill(quit context.CancelFunc) *prefillWatch {
	w := &prefillWatch{l: l, quit: quit}
	c := &l.a.r.cfg
	w.gap = newStall(c.PrefillGapTimeout, func() { w.late(c.PrefillGapTimeout, "sent nothing more of its answer", "--prefill-gap-timeout") })
	if c.PrefillFirstByteTimeout > 0 {
		w.first = time.AfterFunc(c.PrefillFirstByteTimeout, func() { w.late(c.PrefillFirstByteTimeout, "sent nothing", "--prefill-first-byte-timeout") })
	}
	return w
}

func (w *prefillWatch) stop() {
	w.gap.stop()
	if w.first != nil {
		w.first.Stop()
	}
}

// before a read.
func (w *prefillWatch) before() { w.gap.before(w.seen > 0) }

// after a read; seen is how much has come in all.
func (w *prefillWatch) after(seen int) {
	if w.seen = seen; seen > 0 && w.first != nil {
		w.first.Stop()
	}
	w.gap.after(seen)
}

// reader watches the reading of an answer that is no stream.
func (w *prefillWatch) reader(r io.Reader) io.Reader { return &watchedReader{r, w, 0} }

type watchedReader struct {
	r io.Reader
	w *prefillWatch
	n int
}

func (r *watchedReader) Read(p []byte) (int, error) {
	r.w.before()
	n, err := r.r.Read(p)
	r.n += n
	r.w.after(r.n)
	return n, err
}

// late: a limit has passed.
func (w *prefillWatch) late(limit time.Duration, what, flag string) {
	w.once.Do(func() {
		l, a := w.l, w.l.a
		if l.over.Load() {
			return
		}
		l.w.probeNow()
		f := l.failed(room.CodeDeadline, true, "%s for %v (%s); decode worker %s: %s", what, limit, flag, a.decode.w.name, a.decode.phase())
		if a.prefillMoot() {
			a.r.cfg.Log.Warn("prefill leg is ended: it is silent, and its work is done", "worker", l.w.name, "room", a.key().String(), "error", f.err)
			w.alone.Store(f)
			if a.r.group.enter() {
				a.r.releaseLeg(l)
				a.r.group.leave()
			}
			w.quit()
			return
		}
		if !a.staged() { // it may be the decode worker that keeps it waiting
			f.blame = blameBoth
			a.decode.w.probeNow()
		}
		a.cancel(f)
	})
}
