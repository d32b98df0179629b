package legacy

import (
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// TestMerge: update_status for every pair, as the releases have it, and with repair A.
func TestMerge(t *testing.T) {
	legacyRules, _ := PolicyNamed("legacy")
	sticky, _ := PolicyNamed("fix-a")
	all := []status{absent, failed, bootstrapping, waiting, transferring, success}
	for _, cur := range all {
		for _, want := range all[1:] {
			got, write := legacyRules.merge(cur, want)
			switch {
			case cur == absent && want == failed:
				if write {
					t.Error("Failed creates a room again")
				}
			case want == failed && got != failed, want != failed && got != max(cur, want), !write:
				t.Errorf("%v and %v give %v (%v)", cur, want, got, write)
			}
			got, write = sticky.merge(cur, want)
			if cur.terminal() && (write || got != cur) {
				t.Errorf("sticky: %v and %v give %v", cur, want, got)
			}
			if lg, lw := legacyRules.merge(cur, want); !cur.terminal() && (lg != got || lw != write) {
				t.Errorf("sticky: %v and %v give %v, want %v", cur, want, got, lg)
			}
		}
	}
}

// TestUnlockedAloneIsLocked: a read and a write with nothing between them are the locked update.
func TestUnlockedAloneIsLocked(t *testing.T) {
	for _, p := range Policies() {
		if p.production {
			continue
		}
		for _, v := range Variants() {
			if p.mooncake && len(v.requests) == maxRequests {
				continue // many states, no other updates
			}
			locked, unlocked := &machine{p: p, v: v}, &machine{p: p, v: v, unlocked: true}
			walk(locked, func(s *State, steps []step) {
				for _, want := range steps {
					for _, half := range unlocked.next(s, nil) {
						if half.act.note != halfway || half.act.thread != want.act.thread || half.act.at != want.act.at || half.act.req != want.act.req {
							continue
						}
						got, ok := unlocked.stepOf(&half.to, want.act.thread)
						if !ok || got.to != want.to {
							t.Fatalf("%s, %s, at %v: %s\nunlocked %s\nlocked   %s", v.Name, p.Name, want.act.at, locked.show(s), locked.show(&got.to), locked.show(&want.to))
						}
					}
				}
			})
		}
	}
}

// real is a production registry beside the model, given the same events.
type real struct {
	t     *testing.T
	reg   *room.Registry
	rooms [maxRequests]*room.Room
	acked [maxRequests]bool
}

func newReal(t *testing.T) *real {
	w := &real{t: t}
	w.reg = room.NewRegistry(room.Config{Side: room.SideSender, Shards: 1, TombstoneTTL: time.Hour, Log: slog.New(slog.DiscardHandler),
		Execute: func(r *room.Room, _ room.Event, fx room.Effects) []room.Event {
			if fx.Has(room.FxSendAck) {
				w.acked[r.Value().(uint8)] = true
			}
			return nil
		}})
	return w
}

func keyOf(req uint8) room.Key { return room.Key{Room: 7, Gen: uint32(req)} }

func (w *real) open(v *Variant, req uint8) {
	r, err := w.reg.Open(keyOf(req), time.Now().Add(time.Hour), int(v.requests[req].chunks), req)
	if err != nil {
		w.t.Fatal(err)
	}
	w.rooms[req] = r
}

// follow does for real what step st did in the model.
func (w *real) follow(v *Variant, before *State, st step) {
	a := st.act
	apply := func(kind room.EventKind, why reason) {
		w.rooms[a.req].Apply(room.Event{Kind: kind, Chunk: int(a.chunk), Cause: causes[why]})
	}
	granted := func() {
		if before.lives[a.req].snd.State() == room.StateBootstrapping && st.to.lives[a.req].snd.State() == room.StateWaitingForInput {
			a.chunk = 0
			apply(room.EvGrant, noReason)
		}
	}
	switch a.at {
	case atBegin:
		apply(room.EvBegin, outOfOrder)
	case atSettle:
		apply(room.EvSettle, noReason)
	case atCancel:
		apply(room.EvCancel, cancelled)
	case atClear:
		apply(room.EvRelease, noReason)
	case atCreate:
		w.open(v, a.req)
	case atGrant, atRecheck, atDeliver:
		granted()
	case atAbort:
		unfound := before.hands[control].twice
		if _, known := w.reg.Abort(keyOf(a.req), causes[aborted]); !known || unfound {
			w.acked[a.req] = true
		}
	}
}

// TestTheShellIsTheRegistrys: what baton.go does around room.Sender is what room.Registry does. Seeded random
// executions are played on both.
func TestTheShellIsTheRegistrys(t *testing.T) {
	p, _ := PolicyNamed("baton")
	for _, v := range Variants() {
		m := &machine{p: p, v: v}
		for seed := range uint64(100) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			w := newReal(t)
			s := m.start()
			for i, rq := range v.requests {
				if rq.ready {
					w.open(&v, uint8(i))
					w.rooms[i].Apply(room.Event{Kind: room.EvGrant})
				}
			}
			for {
				steps := m.next(&s, nil)
				if len(steps) == 0 {
					break
				}
				st := steps[rnd.IntN(len(steps))]
				w.follow(&v, &s, st)
				s = st.to
				for i := range v.requests {
					w.compare(&v, seed, m, &s, uint8(i), st)
				}
			}
			w.reg.Close()
		}
	}
}

func (w *real) compare(v *Variant, seed uint64, m *machine, s *State, req uint8, st step) {
	w.t.Helper()
	l, r := &s.lives[req], w.rooms[req]
	if (r != nil) != (l.open || l.gone) || l.acked != w.acked[req] || (w.reg.Get(keyOf(req)) != nil) != l.open {
		w.t.Fatalf("%s, seed %d, after %s: model %s, acked %v; registry: room %v, acked %v", v.Name, seed, m.words(st.act), m.show(s), l.acked, w.reg.Get(keyOf(req)) != nil, w.acked[req])
	}
	if r != nil && (r.State() != l.snd.State() || r.Drain() != l.snd.Node().Drain || reasonOf(r.Cause()) != reasonOf(l.snd.Cause())) {
		w.t.Fatalf("%s, seed %d, after %s: model %v (%v), registry %v/%v (%v)", v.Name, seed, m.words(st.act), l.snd.Node(), l.snd.Cause(), r.State(), r.Drain(), r.Cause())
	}
}
