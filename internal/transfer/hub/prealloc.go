package hub

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/kv"
)

// maxBypass is how many later requests may take pages before an earlier one that does
// not fit yet; then pages are kept for it.
const maxBypass = 16

// overdueGrace is how long after its deadline a lease may still be on its ordinary way back.
const overdueGrace = 2 * time.Second

// prealloc gives pages to waiting rooms in turn: first come first served, but a
// request that does not fit now lets up to maxBypass later ones pass. One goroutine,
// woken by the pool and by new waiters.
type prealloc struct {
	pool *kv.Pool
	log  *slog.Logger
	mu   sync.Mutex
	q    []*pageWaiter
	kick chan struct{} // cap 1
	stop chan struct{}
	done chan struct{}
}

type pageWaiter struct {
	prefixes []kv.Prefix // of the prompt, see kv.Pool.AllocPrompt
	pages    int
	label    string
	deadline time.Time
	bypassed int
	got      chan pageResult // cap 1
	gone     bool            // guarded by prealloc.mu: nobody waits any more
}

type pageResult struct {
	lease *kv.Lease
	err   error
}

func newPrealloc(p *kv.Pool, log *slog.Logger) *prealloc {
	a := &prealloc{pool: p, log: log, kick: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{})}
	go a.run()
	return a
}

func (a *prealloc) run() {
	defer close(a.done)
	for {
		freed := a.pool.Freed()
		a.serve()
		timer := a.overdue()
		select {
		case <-freed:
		case <-a.kick:
		case <-timer.C:
		case <-a.stop:
			timer.Stop()
			return
		}
		timer.Stop()
	}
}

// overdue reports leases whose request's deadline has passed and that are held all
// the same: quarantined until drained or fenced, because time is no proof. It returns a
// timer for the next one.
func (a *prealloc) overdue() *time.Timer {
	now := time.Now()
	for _, l := range a.pool.Expired(now.Add(-overdueGrace)) {
		a.log.Warn("KV pages are held beyond their deadline, until their writer has drained or is fenced", "lease", l.String())
	}
	next, ok := a.pool.NextExpiry()
	if next = next.Add(overdueGrace); !ok {
		next = now.Add(time.Hour)
	}
	return time.NewTimer(max(next.Sub(now), time.Millisecond))
}

// serve gives pages to whoever can have them now.
func (a *prealloc) serve() {
	a.mu.Lock()
	defer a.mu.Unlock()
	keep := a.q[:0:0]
	for i, w := range a.q {
		if w.gone {
			continue
		}
		lease, err := a.pool.AllocPrompt(w.prefixes, w.pages, w.label, w.deadline)
		if err == nil || !errors.Is(err, kv.ErrExhausted) {
			w.got <- pageResult{lease, err}
			if err == nil {
				for _, b := range keep {
					b.bypassed++
				}
			}
			continue
		}
		keep = append(keep, w)
		if keep[0].bypassed >= maxBypass {
			keep = append(keep, a.q[i+1:]...)
			break
		}
	}
	a.q = keep
}

// wait returns a lease; an error that waiting can not mend, or that ctx ended first; or nil, nil
// when ended is closed first. deadline is the lease's.
func (a *prealloc) wait(ctx context.Context, ended <-chan struct{}, prefixes []kv.Prefix, pages int, label string, deadline time.Time) (*kv.Lease, error) {
	w := &pageWaiter{prefixes: prefixes, pages: pages, label: label, deadline: deadline, got: make(chan pageResult, 1)}
	var err error
	a.mu.Lock()
	a.q = append(a.q, w)
	a.mu.Unlock()
	select {
	case a.kick <- struct{}{}:
	default:
	}
	select {
	case r := <-w.got:
		return r.lease, r.err
	case <-ended:
	case <-ctx.Done():
		s := a.pool.Stats()
		err = fmt.Errorf("%d landing pages were waited for when the request's time was over; %d of %d are free, %d in quarantine, %d requests wait: %w",
			pages, s.Free, s.Total, s.Quarantine, a.waiting(), ctx.Err())
	}
	a.mu.Lock()
	w.gone = true
	a.mu.Unlock()
	select {
	case r := <-w.got: // came too late
		if r.lease != nil {
			r.lease.ReleaseRequest()
		}
	default:
	}
	select { // a head that leaves may let others run
	case a.kick <- struct{}{}:
	default:
	}
	return nil, err
}

// waiting is the number of requests in the queue.
func (a *prealloc) waiting() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.q {
		if !w.gone {
			n++
		}
	}
	return n
}

// close ends the goroutine; nobody may be waiting (their rooms are cancelled first).
func (a *prealloc) close() {
	close(a.stop)
	<-a.done
}
