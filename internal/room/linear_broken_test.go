package room

import (
	"runtime"
	"sync"
	"testing"
	"time"
)

// The registries below are broken in one way each. They stand for faults that were, or
// could be, in such code; the checker must find every one.

// linLossy loses the tombstone of an abort that comes before its room.
type linLossy struct{ linHonest }

func (l linLossy) Abort(k Key, c *Cause) (Effects, bool) {
	if l.Get(k) != nil {
		return l.linHonest.Abort(k, c)
	}
	if _, ended := l.Ended(k); ended {
		return l.linHonest.Abort(k, c)
	}
	return FxSendAck, false
}

// linRacy asks whether a key is free and takes it in two steps.
type linRacy struct {
	linHonest
	mu    sync.Mutex
	alias map[Key]Key // where the key's newest room is
	next  uint32
}

func (l *linRacy) at(k Key) Key {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a, ok := l.alias[k]; ok {
		return a
	}
	return k
}

func (l *linRacy) Open(k Key, d time.Time, chunks int, v any) (*Room, error) {
	free := l.Registry.Get(l.at(k)) == nil
	if _, ended := l.Registry.Ended(l.at(k)); !free || ended {
		return nil, &Cause{Code: CodeDuplicate}
	}
	runtime.Gosched()
	r, err := l.Registry.Open(k, d, chunks, v)
	if CauseOf(err) == nil || CauseOf(err).Code != CodeDuplicate {
		return r, err
	}
	l.mu.Lock()
	l.next++
	a := Key{Room: k.Room, Gen: 1000 + l.next}
	l.alias[k] = a
	l.mu.Unlock()
	return l.Registry.Open(a, d, chunks, v)
}

func (l *linRacy) Get(k Key) *Room                       { return l.linHonest.Get(l.at(k)) }
func (l *linRacy) Ended(k Key) (*Cause, bool)            { return l.linHonest.Ended(l.at(k)) }
func (l *linRacy) Abort(k Key, c *Cause) (Effects, bool) { return l.linHonest.Abort(l.at(k), c) }

// linMax merges states with max(), in which Failed is the least: the fault Baton was
// made to exclude.
type linMax struct {
	linHonest
	most sync.Map // *Room -> State
}

func (l *linMax) state(r *Room) State {
	now := r.State()
	if was, ok := l.most.Load(r); ok {
		now = max(now, was.(State))
	}
	l.most.Store(r, now)
	return now
}

// linTwice delivers some events twice and answers for the first.
type linTwice struct{ linHonest }

func (l linTwice) apply(r *Room, e Event) Effects {
	fx := r.Apply(e)
	if e.Kind == EvCancel || e.Kind == EvRelease {
		r.Apply(Event{Kind: e.Kind, Cause: &Cause{Code: CodeEngine, Detail: "again"}})
	}
	return fx
}

// linStale answers with the state that the question before got.
type linStale struct {
	linHonest
	last sync.Map
}

func (l *linStale) state(r *Room) State {
	was, ok := l.last.Swap(r, r.State())
	if !ok {
		return r.State()
	}
	return was.(State)
}

// linNewest gives the newest cause, not the first.
type linNewest struct {
	linHonest
	newest sync.Map
}

func (l *linNewest) apply(r *Room, e Event) Effects {
	fx := r.Apply(e)
	if fx.Has(FxLateCause) {
		c := *e.Cause
		c.Phase, c.Side = r.Cause().Phase, r.Cause().Side
		l.newest.Store(r, &c)
	}
	return fx
}

func (l *linNewest) cause(r *Room) *Cause {
	if c, ok := l.newest.Load(r); ok {
		return c.(*Cause)
	}
	return r.Cause()
}

// TestBrokenRegistriesAreFound: the checker of TestLinearizable refuses each of these. How
// many histories it took is logged.
func TestBrokenRegistriesAreFound(t *testing.T) {
	const most = 3000
	for name, wrap := range map[string]func(*linRun) linTarget{
		"lost abort tombstone": func(h *linRun) linTarget { return linLossy{linHonest{h.reg}} },
		"open in two steps": func(h *linRun) linTarget {
			return &linRacy{linHonest: linHonest{h.reg}, alias: map[Key]Key{}}
		},
		"max of states": func(h *linRun) linTarget { return &linMax{linHonest: linHonest{h.reg}} },
		"events twice":  func(h *linRun) linTarget { return linTwice{linHonest{h.reg}} },
		"stale reads":   func(h *linRun) linTarget { return &linStale{linHonest: linHonest{h.reg}} },
		"newest cause":  func(h *linRun) linTarget { return &linNewest{linHonest: linHonest{h.reg}} },
	} {
		t.Run(name, func(t *testing.T) { found(t, most, wrap, nil) })
	}
	// The executor is told of two events in the other order.
	t.Run("executor out of order", func(t *testing.T) {
		found(t, most, nil, func(h *linRun) {
			for _, rec := range h.recs {
				for i := 1; i < len(rec.seen); i++ {
					a, b := &rec.seen[i-1], &rec.seen[i]
					if a.fx != b.fx && a.fx&b.fx&FxForget == 0 && a.ev.Cause.Detail != "follow-up" && b.ev.Cause.Detail != "follow-up" {
						a.ev, b.ev, a.fx, b.fx = b.ev, a.ev, b.fx, a.fx
						return
					}
				}
			}
		})
	})
}

// found runs histories until one is refused.
func found(t *testing.T, most int, wrap func(*linRun) linTarget, spoil func(*linRun)) {
	for i := range most {
		h := newLinRun(uint64(i+1), wrap)
		h.run()
		if spoil != nil {
			spoil(h)
		}
		if h.check() != "" {
			t.Logf("found in history %d", i+1)
			return
		}
	}
	t.Errorf("%d histories of a broken registry passed", most)
}
