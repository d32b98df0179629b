package room

import (
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// linTarget is what the histories are made with: the registry, or one that is broken on
// purpose.
type linTarget interface {
	Open(Key, time.Time, int, any) (*Room, error)
	Get(Key) *Room
	Ended(Key) (*Cause, bool)
	Abort(Key, *Cause) (Effects, bool)
	apply(*Room, Event) Effects
	state(*Room) State
	cause(*Room) *Cause
}

// linHonest is the registry as it is.
type linHonest struct{ *Registry }

func (linHonest) apply(r *Room, e Event) Effects { return r.Apply(e) }
func (linHonest) state(r *Room) State            { return r.State() }
func (linHonest) cause(r *Room) *Cause           { return r.Cause() }

// linRec is a room's value: what the executor saw of it, in its order.
type linRec struct {
	life, key, chunks int
	followUp          bool // the executor answers FxRevoke with EvFenced
	born              bool // its abort came first

	// Under the room's lock: the race detector holds the registry to that.
	seen           []linSeen
	begun, settled int // writes, or chunks landed
	progress       atomic.Uint64
}

type linSeen struct {
	ev Event
	fx Effects
	at int64
}

// linRun is one history: a few goroutines, a few keys, a fresh registry.
type linRun struct {
	seed   uint64
	side   Side
	expiry bool
	reg    *Registry
	target linTarget
	clock  atomic.Int64 // logical: every call, answer and executor call has its own time
	ids    atomic.Int64 // of opens and causes
	keys   []Key
	latest []atomic.Pointer[Room] // by key

	mu   sync.Mutex
	recs map[int]*linRec
	ops  []*linOp
	bad  []string // what needs no model to be wrong
}

const (
	linGoroutines = 4 // to 7
	linOps        = 6 // each, to 9
)

// newLinRun makes a history from seed alone; only the interleaving is the machine's.
func newLinRun(seed uint64, wrap func(*linRun) linTarget) *linRun {
	rng := rand.New(rand.NewPCG(seed, 0))
	h := &linRun{seed: seed, side: SideSender + Side(rng.IntN(2)), expiry: rng.IntN(4) == 0, recs: map[int]*linRec{}}
	c := Config{Side: h.side, Log: quiet(), Shards: 1 << rng.IntN(3), Execute: h.execute,
		Peer: func(*Room) string { runtime.Gosched(); return "peer:1" }}
	if h.expiry {
		c.TombstoneTTL = time.Duration(1+rng.IntN(30)) * time.Microsecond
	}
	h.reg = NewRegistry(c)
	h.target = linHonest{h.reg}
	if wrap != nil {
		h.target = wrap(h)
	}
	for i := range 1 + rng.IntN(2) {
		h.keys = append(h.keys, Key{Room: uint64(100 + i), Gen: uint32(i % 2)})
	}
	h.latest = make([]atomic.Pointer[Room], len(h.keys))
	return h
}

// execute is the shell: it notes what it is told and in which order. It yields, so that
// others run into the held lock.
func (h *linRun) execute(r *Room, e Event, fx Effects) []Event {
	rec := r.Value().(*linRec)
	rec.seen = append(rec.seen, linSeen{e, fx, h.clock.Add(1)})
	switch {
	case fx.Has(FxWrite):
		rec.begun++
	case fx.Has(FxLanded):
		rec.settled++
	}
	rec.progress.Store(uint64(rec.begun)<<32 | uint64(rec.settled))
	runtime.Gosched()
	if rec.followUp && fx.Has(FxRevoke) {
		return []Event{{Kind: EvFenced, Cause: &Cause{Code: CodePeerLost, Detail: "follow-up"}}}
	}
	return nil
}

// run lets the goroutines loose and returns when all have ended.
func (h *linRun) run() {
	rng := rand.New(rand.NewPCG(h.seed, 1))
	start := make(chan struct{})
	var wg sync.WaitGroup
	for g := range linGoroutines + rng.IntN(4) {
		w := &linWorker{h: h, by: g, rng: rand.New(rand.NewPCG(h.seed, uint64(g+2)))}
		wg.Go(func() {
			<-start
			for range linOps + w.rng.IntN(4) {
				w.one()
			}
			h.mu.Lock()
			h.ops = append(h.ops, w.ops...)
			h.mu.Unlock()
		})
	}
	if rng.IntN(4) == 0 {
		wg.Go(func() {
			<-start
			runtime.Gosched()
			o := &linOp{kind: linClose, key: -1, by: 99, call: h.clock.Add(1)}
			h.reg.Close()
			o.ret = h.clock.Add(1)
			h.mu.Lock()
			h.ops = append(h.ops, o)
			h.mu.Unlock()
		})
	}
	close(start)
	wg.Wait()
	h.reg.Close()
}

// linWorker is one goroutine of a history.
type linWorker struct {
	h   *linRun
	by  int
	rng *rand.Rand
	ops []*linOp
}

// one does one operation on one key.
func (w *linWorker) one() {
	h := w.h
	k := w.rng.IntN(len(h.keys))
	o := &linOp{key: k, by: w.by, id: int(h.ids.Add(1))}
	r := h.latest[k].Load()
	switch p := w.rng.IntN(20); {
	case p < 3:
		w.open(o)
	case p < 4:
		w.get(o)
	case p < 5:
		o.kind = linEnded
		w.do(o, func() { o.cause, o.ok = h.target.Ended(h.keys[k]) })
	case p < 7:
		o.kind, o.ev = linAbort, Event{Kind: h.reg.abortKind(), Cause: w.reason(o, CodeAborted)}
		w.do(o, func() { o.fx, o.ok = h.target.Abort(h.keys[k], o.ev.Cause) })
	case r == nil:
		w.open(o)
	case p < 15:
		w.event(o, r)
	default:
		w.read(o, r)
	}
}

// do stamps the call and its answer. Some calls yield inside their stamps, for wide
// overlaps; most do not, for sharp ones.
func (w *linWorker) do(o *linOp, f func()) {
	wide := w.rng.IntN(4) == 0
	o.call = w.h.clock.Add(1)
	if wide {
		runtime.Gosched()
	}
	f()
	o.ret = w.h.clock.Add(1)
	w.ops = append(w.ops, o)
}

func (w *linWorker) reason(o *linOp, code Code) *Cause {
	return &Cause{Code: code, Detail: fmt.Sprintf("op %d", o.id)}
}

func (w *linWorker) open(o *linOp) {
	h := w.h
	rec := &linRec{life: o.id, key: o.key, chunks: 1 + w.rng.IntN(2), followUp: h.side == SideReceiver && w.rng.IntN(2) == 0}
	h.mu.Lock()
	h.recs[o.id] = rec
	h.mu.Unlock()
	after := time.Hour
	if w.rng.IntN(6) == 0 {
		after = time.Duration(w.rng.IntN(40)) * time.Microsecond
	}
	o.kind, o.life = linOpen, o.id
	var r *Room
	var err error
	w.do(o, func() { r, err = h.target.Open(h.keys[o.key], time.Now().Add(after), rec.chunks, rec) })
	if o.ok = err == nil; o.ok {
		h.latest[o.key].Store(r)
		return
	}
	o.code = CauseOf(err).Code
}

func (w *linWorker) get(o *linOp) {
	o.kind = linGet
	var r *Room
	w.do(o, func() { r = w.h.target.Get(w.h.keys[o.key]) })
	if r != nil {
		o.life = r.Value().(*linRec).life
		w.h.latest[o.key].Store(r)
	}
}

// event applies one event, mostly one that brings the room on.
func (w *linWorker) event(o *linOp, r *Room) {
	h := w.h
	rec := r.Value().(*linRec)
	at := rec.progress.Load()
	begun, settled := int(at>>32), int(uint32(at))
	from := []EventKind{EvGrant, EvBegin, EvBegin, EvSettle, EvSettle}
	end := []EventKind{EvSettleError, EvDrop, EvCancel, EvDeadline, EvPeerLost, EvRelease, EvRelease}
	if h.side == SideReceiver {
		from = []EventKind{EvGranted, EvLanded, EvLanded}
		end = []EventKind{EvFenced, EvAck, EvCancel, EvDeadline, EvPeerLost, EvRelease, EvRelease}
	}
	if w.rng.IntN(3) == 0 {
		from = end
	}
	e := Event{Kind: from[w.rng.IntN(len(from))]}
	switch e.Kind {
	case EvBegin:
		e.Chunk = begun
	case EvSettle, EvSettleError:
		e.Chunk = max(0, begun-1)
	case EvLanded:
		e.Chunk, e.Last = settled, settled == rec.chunks-1
	}
	e.Cause = w.reason(o, CodeEngine)
	o.kind, o.life, o.ev = linApply, rec.life, e
	w.do(o, func() { o.fx = h.target.apply(r, e) })
	if o.fx.Has(FxTerminal) && (!isClosed(r.Done()) || !isClosed(r.Granted())) {
		h.wrong("%v: Done or Granted is open after the event that ended the room", o)
	}
}

// read asks one lock-free question, or polls: the state, and the cause when it is Failed.
func (w *linWorker) read(o *linOp, r *Room) {
	o.life = r.Value().(*linRec).life
	switch w.rng.IntN(6) {
	case 0:
		o.kind = linDrain
		w.do(o, func() { o.drain = r.Drain() })
	case 1:
		o.kind = linOutstanding
		w.do(o, func() { o.n = r.Outstanding() })
	case 2:
		o.kind = linCause
		w.do(o, func() { o.cause = w.h.target.cause(r) })
	case 3:
		if isClosed(r.Done()) && !r.State().Terminal() {
			w.h.wrong("life %d: Done is closed, state %v", o.life, r.State())
		}
	default:
		o.kind = linState
		w.do(o, func() { o.state = w.h.target.state(r) })
		c := &linOp{kind: linCause, key: o.key, life: o.life, by: w.by}
		w.do(c, func() { c.cause = w.h.target.cause(r) })
		if o.state == StateFailed && c.cause == nil {
			w.h.wrong("life %d: Failed without a cause", o.life)
		}
	}
}

func (h *linRun) wrong(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.bad = append(h.bad, fmt.Sprintf(format, args...))
}

// finish makes the registry's own steps out of what the executor saw, and gives each event
// its place in the executor's order.
func (h *linRun) finish() {
	byID := map[int]*linOp{}
	byCause := map[*Cause]*linOp{}
	for _, o := range h.ops {
		if o.kind != linOpen || o.ok {
			byID[o.id] = o
		}
		if o.ev.Cause != nil {
			byCause[o.ev.Cause] = o
		}
	}
	for _, rec := range h.recs {
		open := byID[rec.life]
		if open == nil {
			continue // refused
		}
		var parent *linOp
		left := int64(1 << 40)
		for i, s := range rec.seen {
			o := byCause[s.ev.Cause]
			if o == nil || o.kind == linAbort && !o.ok {
				o = &linOp{kind: linInner, key: rec.key, life: rec.life, by: -1, ev: s.ev, fx: s.fx, call: open.call, ret: s.at}
				switch {
				case s.ev.Kind == EvDeadline:
					o.follow = innerDeadline
				case s.ev.Kind == h.reg.abortKind():
					o.follow, rec.born = innerBirth, true
				default:
					o.follow, o.call = innerFollowUp, rec.seen[i-1].at
				}
				h.ops = append(h.ops, o)
			} else if o.kind == linAbort {
				if o.life = rec.life; left < o.call {
					h.bad = append(h.bad, fmt.Sprintf("%v: its room was forgotten before", o))
				}
			}
			o.seq = i + 1
			if o.follow != innerFollowUp {
				parent = o
			}
			if s.fx.Has(FxForget) {
				gone := &linOp{kind: linForget, key: rec.key, life: rec.life, by: -1, call: s.at, ret: max(parent.ret, o.ret)}
				if parent.by < 0 {
					gone.ret = left // the registry's goroutine: by the end
				}
				left = gone.ret
				h.ops = append(h.ops, gone)
			}
		}
	}
}

// check is what is wrong with the history; "" if the sequential registry could have given
// the same answers in an order that keeps to real time.
func (h *linRun) check() string {
	h.finish()
	if len(h.bad) > 0 {
		return strings.Join(h.bad, "\n")
	}
	model := linModel(h.side, h.expiry, h.recs)
	for k := range h.keys {
		var history []porcupine.Operation
		for _, o := range h.ops {
			if o.key == k || o.kind == linClose {
				history = append(history, porcupine.Operation{ClientId: max(0, o.by), Input: o, Call: o.call, Return: o.ret})
			}
		}
		if res := porcupine.CheckOperationsTimeout(model, history, time.Minute); res != porcupine.Ok {
			return fmt.Sprintf("%v: no order of these operations on key %d explains the answers (side %v, tombstones expire: %v)\n%sthe longest order found:\n%s",
				res, k, h.side, h.expiry, h.print(k), longest(model, history))
		}
	}
	return ""
}

// longest is the longest order of a refused history that is explained.
func longest(model porcupine.Model, history []porcupine.Operation) string {
	_, info := porcupine.CheckOperationsVerbose(model, history, time.Minute)
	var best []porcupine.Operation
	for _, order := range info.PartialLinearizationsOperations()[0] {
		if len(order) > len(best) {
			best = order
		}
	}
	var b strings.Builder
	for _, o := range best {
		fmt.Fprintln(&b, o.Input)
	}
	return b.String()
}

func (h *linRun) print(key int) string {
	var own []*linOp
	for _, o := range h.ops {
		if o.key == key || o.kind == linClose {
			own = append(own, o)
		}
	}
	slices.SortFunc(own, func(a, b *linOp) int { return int(a.call - b.call) })
	var b strings.Builder
	for _, o := range own {
		fmt.Fprintln(&b, o)
	}
	return b.String()
}

// counted holds the registry's counters against what it answered.
func (h *linRun) counted() string {
	var opened, stale, dup, late, skip uint64
	add := func(fx Effects) {
		for _, c := range []struct {
			fx Effects
			n  *uint64
		}{{FxStale, &stale}, {FxDuplicate, &dup}, {FxLateCause, &late}, {FxSkip, &skip}} {
			if fx.Has(c.fx) {
				*c.n++
			}
		}
	}
	for _, o := range h.ops {
		switch {
		case o.kind == linOpen && o.ok:
			opened++
		case o.kind == linAbort && !o.ok:
			add(o.fx)
		}
	}
	for _, rec := range h.recs {
		for _, s := range rec.seen {
			add(s.fx)
		}
	}
	st := h.reg.Stats()
	if st.Opened != opened || st.Stale != stale || st.Duplicates != dup || st.LateCauses != late || st.Skipped != skip {
		return fmt.Sprintf("counted %+v; the answers say opened %d, stale %d, duplicates %d, late causes %d, skipped %d", st, opened, stale, dup, late, skip)
	}
	return ""
}

// linTally is what a set of histories has been through, so that a tame one fails.
type linTally struct {
	ops, overlapping, opened, refused, born, deadlines, followUps, forgotten, reopened, closes, success, failed int
}

func (n *linTally) add(h *linRun) {
	lives := map[int]int{}
	for _, o := range h.ops {
		n.ops++
		if slices.ContainsFunc(h.ops, func(p *linOp) bool {
			return p != o && p.by != o.by && p.key == o.key && p.by >= 0 && o.by >= 0 && p.call < o.ret && o.call < p.ret
		}) {
			n.overlapping++
		}
		switch {
		case o.kind == linOpen && !o.ok:
			n.refused++
		case o.kind == linOpen:
			n.opened++
			if lives[o.key]++; lives[o.key] > 1 {
				n.reopened++
			}
		case o.kind == linForget:
			n.forgotten++
		case o.kind == linClose:
			n.closes++
		case o.follow == innerBirth:
			n.born++
		case o.follow == innerDeadline:
			n.deadlines++
		case o.follow == innerFollowUp:
			n.followUps++
		case o.kind == linState && o.state == StateSuccess:
			n.success++
		case o.kind == linState && o.state == StateFailed:
			n.failed++
		}
	}
}

// TestLinearizable: whatever goroutines do to a registry at once, its answers, its lock-free
// reads and the order in which its executor was called are those of the pure machines with
// tombstones, one operation after the other. -seed repeats one history's decisions, not its
// interleaving. BATON_PROVE=1 takes twenty times as many histories.
func TestLinearizable(t *testing.T) {
	histories := 6000
	if os.Getenv("BATON_PROVE") != "" {
		histories *= 20
	}
	first := rand.Uint64()
	if *seed != 0 {
		first = *seed
	}
	var n linTally
	for i := range histories {
		h := newLinRun(first+uint64(i), nil)
		h.run()
		if bad := h.check(); bad != "" {
			t.Fatalf("-seed %d: %s", h.seed, bad)
		}
		if bad := h.counted(); bad != "" {
			t.Fatalf("-seed %d: %s\n%s", h.seed, bad, h.print(0))
		}
		n.add(h)
	}
	t.Logf("-seed %d: %d histories, %+v", first, histories, n)
	if n.overlapping < n.ops/10 || min(n.opened, n.refused, n.forgotten, n.failed) < histories/10 ||
		min(n.born, n.deadlines, n.followUps, n.reopened, n.closes, n.success) < histories/100 {
		t.Errorf("too tame to prove anything: %+v", n)
	}
}
