package hub_test

import (
	"slices"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// granted yields the tokens that each grant says are there already.
func granted(into chan int) func(h *hub.Senders) session.ServerHandler {
	return func(h *hub.Senders) session.ServerHandler {
		return liar{h, func(g *session.Grant) { into <- g.Have }}
	}
}

// other is a prompt that begins with n tokens of p and goes on otherwise.
func other(p []engine.Token, n, size int) []engine.Token {
	out := slices.Clone(p[:n])
	for i := n; i < size; i++ {
		out = append(out, engine.Token(3+(i*41+n)%250))
	}
	return out
}

// TestPrefixIsNotSent: what an earlier prompt has brought takes no new pages and no writes, wherever it ends, and every byte of the
// prompt, also what was not sent, is as the answer needs it.
func TestPrefixIsNotSent(t *testing.T) {
	for name, c := range map[string]struct{ prefill, decode string }{
		"tp 1 to 4": {"layers=4,heads=4,tp=1,page=16", "layers=4,heads=4,tp=4,pp=2,page=5"},
		"tp 4 to 1": {"layers=4,heads=4,tp=4,page=3,hnd=true", "layers=4,heads=4,tp=1,page=4"},
		"pp 3 to 2": {"layers=6,pp=3", "layers=6,pp=2,page=1"},
		"big pages": {"tp=2,page=8", "tp=2,page=64"},
		"latent":    {"heads=1,mla=true,tp=4", "heads=1,mla=true,tp=2,page=8"},
	} {
		for _, kind := range []string{"mem", "tcp", "shm"} {
			t.Run(name+" "+kind, func(t *testing.T) {
				haves := make(chan int, 16)
				var seen *watched
				w := newRankWorld(t, c.prefill, c.decode, options{over: over(t, kind), cache: 1024, pages: 1024, handler: granted(haves), wrap: watch(&seen)})
				p, s := rankPrompt(200), w.b.Info().Shards
				id, longest := uint64(0), 0
				for _, q := range [][]engine.Token{p[:6], p[:38], p[:38], p[:60], other(p, 22, 50), other(p, 0, 40), p[:49], p[:60], p[:150]} {
					id++
					if got, want := w.answer(id, q), sim.Expected(w.cfg, q, 10); !slices.Equal(got, want) {
						t.Errorf("prompt %d: %v, want %v", id, got, want)
					}
					w.drained()
					have, sent := <-haves, 0
					for len(seen.done) > 0 {
						sent += (<-seen.done).bytes
					}
					if want := s.Layers * len(s.Parts()) * s.KVHeads * s.HeadDim * s.Replicas() * (len(q) - 1 - have); sent != want {
						t.Errorf("prompt %d: %d bytes sent with %d tokens there already, want %d", id, sent, have, want)
					}
					longest = max(longest, have)
					ends := s.PageEnds(bounds(len(q)), rankChunk)
					if (id == 3 || id == 8) && len(ends) > 0 && have != ends[len(ends)-1] {
						t.Errorf("prompt %d was there: grant says %d tokens, its pages end at %v", id, have, ends)
					}
				}
				if st := w.landing.Stats(); longest < 48 || st.PrefixReused == 0 || st.Cached == 0 || st.PrefixEvicted != 0 {
					t.Errorf("%d tokens at most were there: %+v", longest, st)
				}
			})
		}
	}
}

// TestFailedDeltaLeavesTheCache: a request that shares cached pages and fails in the middle of a write, by abort, a lost session or a damaged
// byte, harms none of them: its own pages alone wait in quarantine, and the next prompt is answered from what was there.
func TestFailedDeltaLeavesTheCache(t *testing.T) {
	for name, end := range map[string]func(w *rankWorld, s transfer.Sending, r transfer.Receiving){
		"abort": func(_ *rankWorld, _ transfer.Sending, r transfer.Receiving) {
			r.Cancel(&room.Cause{Code: room.CodeClientGone, Side: room.SideReceiver, Detail: "test"})
		},
		"sender fails": func(_ *rankWorld, s transfer.Sending, _ transfer.Receiving) {
			s.Cancel(&room.Cause{Code: room.CodeEngine, Side: room.SideSender, Detail: "test"})
		},
		"session lost": func(w *rankWorld, _ transfer.Sending, _ transfer.Receiving) {
			old, err := w.client.Get(w.t.Context(), w.addr)
			w.must(err)
			w.cut()
			eventually(w.t, "another session", func() bool {
				sess, err := w.client.Get(w.t.Context(), w.addr)
				return err == nil && sess.ID() != old.ID()
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			haves := make(chan int, 16)
			w := newRankWorld(t, "layers=4,heads=4,tp=1", "layers=4,heads=4,tp=4,page=4", options{unfenced: true, cache: 256, handler: granted(haves),
				rules: "post room=2 nth=3 halfway until=go"})
			p := rankPrompt(60)
			w.answer(1, p[:33])
			w.drained()
			before := w.landing.Stats()
			if have := <-haves; have != 0 || before.Cached != 32 || before.Shared != 0 {
				t.Fatalf("%d there at first; %+v", have, before)
			}
			s, r := w.begin(2, p)
			await(t, "grant", s.Granted())
			if have := <-haves; have != 32 {
				t.Errorf("%d tokens are there", have)
			}
			if st := w.landing.Stats(); st.Shared != 32 || st.Granted != 28 || st.Cached != 32 {
				t.Errorf("while it runs: %+v", st)
			}
			for i := range 3 { // the first write with bytes is the third chunk's
				w.sendChunk(s, p, i)
			}
			await(t, "write in the middle", w.rules.Waiting("go"))
			end(w, s, r)
			await(t, "sender's end", s.Done())
			await(t, "receiver's end", r.Done())
			r.Release()
			// The end of a lost session may have fenced already.
			if st := w.landing.Stats(); st.Quarantine != 28 && name != "session lost" || st.Shared != 0 || st.Cached != 32 {
				t.Errorf("while a write is out: %+v", st)
			}
			w.rules.Release("go")
			s.Release()
			w.drained()
			eventually(t, "pages back", func() bool { return w.landing.Stats().Idle() })
			w.a.FreeSeq(0)
			if st := w.landing.Stats(); st.Cached != 32 || w.landing.CheckFree() != 0 {
				t.Errorf("after the end: %+v", st)
			}
			if got, want := w.answer(3, p), sim.Expected(w.cfg, p, 10); !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			if have := <-haves; have != 32 {
				t.Errorf("%d tokens were there for the third", have)
			}
			w.drained()
		})
	}
}

// TestDamagedDeltaIsNotKept: bytes that come wrong fail the room and do not get into the cache; what was there stays.
func TestDamagedDeltaIsNotKept(t *testing.T) {
	pages := make(chan []uint32, 16)
	w := newRankWorld(t, "tp=1", "tp=1,page=16", options{rules: "landed room=2 nth=2 stall until=check", cache: 64, pages: 64,
		handler: func(h *hub.Senders) session.ServerHandler {
			return liar{h, func(g *session.Grant) { pages <- g.Pages }}
		}})
	p := rankPrompt(33)
	w.answer(1, p[:17])
	w.drained()
	<-pages
	s, r := w.begin(2, p)
	await(t, "grant", s.Granted())
	w.sendChunk(s, p, 0)
	w.sendChunk(s, p, 1)
	await(t, "landed", w.rules.Waiting("check"))
	w.landing.Page(kv.PageID((<-pages)[0]))[3] ^= 1
	w.rules.Release("check")
	await(t, "receiver's end", r.Done())
	failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
	r.Release()
	s.Release()
	w.drained()
	eventually(t, "pages back", func() bool { return w.landing.Stats().Idle() })
	w.a.FreeSeq(0)
	if st := w.landing.Stats(); st.Cached != 1 || st.PrefixKept != 1 {
		t.Errorf("after the second prompt: %+v", st)
	}
	if got, want := w.answer(3, p), sim.Expected(w.cfg, p, 10); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestCacheGivesWay: a request that needs pages gets those of the cache at once, and one that shares what little is left does not lock up.
func TestCacheGivesWay(t *testing.T) {
	haves := make(chan int, 16)
	w := newRankWorld(t, "tp=1,page=4", "tp=1,page=4", options{pages: 12, staging: 64, cache: 12, handler: granted(haves)})
	p := rankPrompt(200)
	for i, q := range [][]engine.Token{p[:41], other(p, 0, 41), p[:41], other(p, 16, 49), other(p, 0, 49)} {
		id := uint64(i + 1)
		if got, want := w.answer(id, q), sim.Expected(w.cfg, q, 10); !slices.Equal(got, want) {
			t.Errorf("prompt %d: %v, want %v", id, got, want)
		}
		w.drained()
	}
	for i, want := range []int{0, 0, 8, 16, 0} {
		if have := <-haves; have != want {
			t.Errorf("prompt %d: %d tokens were there, want %d", i+1, have, want)
		}
	}
	if st := w.landing.Stats(); st.Exhausted != 0 || st.PrefixEvicted == 0 {
		t.Errorf("%+v", st)
	}
}

// TestPrefixesThatAreNone: a scheduler whose prefixes are not pages of its chunks is refused at once.
func TestPrefixesThatAreNone(t *testing.T) {
	w := newRankWorld(t, "tp=2", "tp=1,page=5", options{cache: 10})
	p, end := rankPrompt(33), time.Now().Add(time.Minute)
	b := bounds(len(p))
	for name, ends := range map[string][]int{
		"not a page": {4}, "a page left out": {10}, "over a chunk's end": {5, 10, 15, 20}, "beyond the prompt": {5, 10, 15, 16, 21, 26, 31, 32, 33},
	} {
		o := transfer.OpenReceiver{Key: room.Key{Room: 1}, Addr: w.addr, Deadline: end, Chunks: sizes(w.b, b), Bounds: b, Prefixes: kv.Prefixes(p, ends)}
		if _, err := w.receivers.Open(o); err == nil {
			t.Errorf("%s: the receivers took it", name)
		}
	}
	blocks := newWorld(t, options{})
	if _, err := blocks.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 1}, Addr: w.addr, Deadline: end, Chunks: []int{5},
		Prefixes: kv.Prefixes(p, []int{5})}); err == nil {
		t.Error("blocks have no pages to share")
	}
}
