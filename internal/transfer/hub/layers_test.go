package hub_test

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// watched is a transport that tells of each write's completion.
type watched struct {
	transfer.Transport
	done chan watchedWrite
}

type watchedWrite struct {
	key   room.Key
	bytes int
	note  bool // a chunk's, not only a part's
	err   error
}

func watch(into **watched) func(transfer.Transport) transfer.Transport {
	return func(t transfer.Transport) transfer.Transport {
		*into = &watched{t, make(chan watchedWrite, 1024)}
		return *into
	}
}

func (w *watched) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	p, err := w.Transport.Dial(ctx, d, s)
	return watchedPeer{p, w}, err
}

type watchedPeer struct {
	transfer.Peer
	w *watched
}

func (p watchedPeer) Post(w transfer.Write) error {
	seen, done := watchedWrite{key: w.Key, note: hub.MakesWhole(w.Notify)}, w.Done
	for _, s := range w.Segments {
		seen.bytes += len(s.Src)
	}
	var once sync.Once
	w.Done = func(err error) {
		once.Do(func() { seen.err = err; p.w.done <- seen })
		done(err)
	}
	return p.Peer.Post(w)
}

// layer computes chunk i of p and hands each group of layers over when it is computed; then calls after.
func (w *rankWorld) layer(s transfer.Sending, p []engine.Token, i int, after func(g int)) {
	w.t.Helper()
	b := bounds(len(p))
	buf, err := s.Buffer(w.t.Context(), i)
	w.must(err)
	w.must(w.a.PrefillLayers(w.t.Context(), 0, p[b[i]:b[i+1]], b[i], func(g int) error {
		w.part(s, i, b, g, buf)
		if after != nil {
			after(g)
		}
		return nil
	}))
}

func (w *rankWorld) part(s transfer.Sending, i int, b []int, g int, buf [][]byte) {
	w.t.Helper()
	ranges, err := w.a.ExportLayers(0, b[i], b[i+1], g, buf)
	w.must(err)
	spans := make([]transfer.Span, len(ranges))
	for k, r := range ranges {
		spans[k] = transfer.Span(r)
	}
	s.SendPart(i, spans, g == w.a.LayerGroups()-1)
}

// TestLayersTravelWhileOthersAreComputed: each group but the last is applied at the decode side before the next one is
// computed, the notification comes when all of them have left, and the answer is right; on every transport, for blocks and
// for ranks of every kind, with a part of the prompt there already.
func TestLayersTravelWhileOthersAreComputed(t *testing.T) {
	for name, c := range map[string]struct {
		prefill, decode string
		have            int
	}{
		"block":       {"layers=6,layer-group=2", "layers=6", 0},
		"same pages":  {"layers=4,layer-group=1,tp=1,page=16", "layers=4,tp=1,page=16", 0},
		"tp 1 to 4":   {"layers=4,heads=4,layer-group=1,tp=1", "layers=4,heads=4,tp=4,page=5", 21},
		"pp 2 to 1":   {"layers=5,layer-group=2,pp=2,hnd=true", "layers=5,pp=1", 0},
		"many stores": {manySegments + ",layer-group=8,tp=1", manySegments + ",tp=32", 0},
	} {
		for _, kind := range []string{"mem", "tcp", "shm"} {
			t.Run(name+" "+kind, func(t *testing.T) {
				var seen *watched
				w := newRankWorld(t, c.prefill, c.decode, options{over: over(t, kind), wrap: watch(&seen), pages: 512, cache: 4 * c.have})
				p := rankPrompt(40)
				if c.have > 0 {
					w.answer(2, p[:c.have+1])
					w.drained()
					for len(seen.done) > 0 {
						<-seen.done
					}
				}
				s, r := w.begin(1, p)
				await(t, "grant", s.Granted())
				b, last := bounds(len(p)), w.a.LayerGroups()-1
				for i := range len(b) - 1 {
					sent, first, noted := 0, max(b[i], c.have), false
					w.layer(s, p, i, func(g int) {
						for want := w.until(g, b[i+1]-first, w.b); sent < want; {
							x := await(t, "write of a group", seen.done)
							if x.err != nil || x.note && (g != last || x.bytes != 0) {
								t.Fatalf("chunk %d group %d: a write of %d bytes, note %v, after %d of %d bytes: %v", i, g, x.bytes, x.note, sent, want, x.err)
							}
							sent, noted = sent+x.bytes, noted || x.note
						}
						if g == last {
							return
						}
						if left, want := hub.Unsummed(r, i), max(w.until(last, b[i+1]-first, w.b)-sent, 0); left != want {
							t.Errorf("chunk %d group %d: %d bytes are not summed, %d have not come", i, g, left, want)
						}
					})
					if !noted {
						if x := await(t, "notification", seen.done); !x.note || x.err != nil {
							t.Fatalf("chunk %d: %+v instead of the notification", i, x)
						}
					}
					if got := await(t, "chunk", r.Landed()); got != i || r.Err() != nil {
						t.Fatalf("chunk %d landed, want %d: %v", got, i, r.Err())
					}
					w.must(w.b.Import(0, b[i], b[i+1], r.Chunk(i)))
				}
				await(t, "receiver's end", r.Done())
				await(t, "sender's end", s.Done())
				s.Release()
				r.Release()
				if got, want := w.goOn(p), sim.Expected(w.cfg, p, 10); !slices.Equal(got, want) {
					t.Errorf("%v, want %v", got, want)
				}
				w.drained()
				if st := w.staging.Stats(); !st.Idle() {
					t.Errorf("staging: %+v", st)
				}
			})
		}
	}
}

// until is how many bytes of n positions the groups 0..g have at the decode side.
func (w *rankWorld) until(g, n int, b *sim.Engine) int {
	i := w.a.Info()
	if i.Shards.TP == 0 { // a header, then layers of the same size
		const header = 16
		return header + (b.ChunkBytes(n)-header)*(g+1)/w.a.LayerGroups()
	}
	s := b.Info().Shards
	total := n * s.Layers * len(s.Parts()) * s.KVHeads * s.HeadDim * s.Replicas()
	per := (s.Layers + w.a.LayerGroups() - 1) / w.a.LayerGroups()
	return total / s.Layers * min(s.Layers, (g+1)*per)
}

// goOn is what the decode engine says after p.
func (w *rankWorld) goOn(p []engine.Token) (out []engine.Token) {
	w.t.Helper()
	smp, err := w.b.NewSampler(engine.Sampling{})
	w.must(err)
	for last, pos := p[len(p)-1], len(p)-1; len(out) < 10; pos++ {
		got, err := w.b.Step(w.t.Context(), []engine.Row{{Seq: 0, Token: last, Pos: pos, Sampler: smp}})
		w.must(err)
		last = got[0].Token
		out = append(out, last)
	}
	return out
}

const layeredBlock = "layers=4,layer-group=1"

// TestAbortInTheMiddleOfALayeredChunk: while the engine computes layer 1 the decode side ends the room. If layer 0 has been
// applied, it gets its pages back at once; if its write is half way, when that is over. The staging memory stays
// until the engine, which may be storing there, has let go of it.
func TestAbortInTheMiddleOfALayeredChunk(t *testing.T) {
	for name, rules := range map[string]string{"between writes": "", "in a write": "post room=1 nth=1 halfway until=go"} {
		t.Run(name, func(t *testing.T) {
			var seen *watched
			w := newRankWorld(t, layeredBlock, "layers=4", options{unfenced: true, rules: rules, wrap: watch(&seen)})
			p := rankPrompt(17)
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			w.layer(s, p, 0, func(g int) {
				if g != 0 {
					return // the engine goes on until somebody stops it
				}
				if rules == "" {
					if x := await(t, "layer 0", seen.done); x.err != nil || x.note {
						t.Errorf("layer 0: %+v", x)
					}
				} else {
					await(t, "write in the middle", w.rules.Waiting("go"))
				}
				r.Cancel(&room.Cause{Code: room.CodeClientGone, Side: room.SideReceiver, Detail: "test"})
				await(t, "sender's end", s.Done())
				r.Release()
				if rules != "" {
					if st := w.landing.Stats(); st.Quarantine == 0 {
						t.Errorf("pages are not in quarantine while a write is out: %+v", st)
					}
					w.rules.Release("go")
				}
				w.emptied()
				if st := w.staging.Stats(); st.Idle() {
					t.Errorf("staging memory has returned while the engine stores there: %+v", st)
				}
			})
			if st := w.staging.Stats(); !st.Idle() {
				t.Errorf("the last part did not give the buffer back: %+v", st)
			}
			s.Release()
			w.drained()
			failed(t, "receiver", r.State(), r.Err(), room.CodeClientGone)
			failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
			for len(seen.done) > 0 {
				if x := <-seen.done; x.note || x.err == nil && rules == "" {
					t.Errorf("a write after the abort: %+v", x)
				}
			}
		})
	}
}

// emptied waits until the landing pages have returned.
func (w *world) emptied() {
	w.t.Helper()
	ctx, stop := context.WithTimeout(w.t.Context(), patience)
	defer stop()
	if err := w.receivers.Drain(ctx); err != nil {
		w.t.Errorf("receivers: %v", err)
	}
	w.receivers.Flush()
	if st := w.landing.Stats(); !st.Idle() {
		w.t.Errorf("landing pages: %+v", st)
	}
}

// TestAnOwnerThatStopsInTheMiddle: Drop, or Release alone, of a chunk whose first layers have left ends the room on both sides and
// returns all memory.
func TestAnOwnerThatStopsInTheMiddle(t *testing.T) {
	for name, stop := range map[string]func(transfer.Sending){
		"drop":    func(s transfer.Sending) { s.Drop(0, &room.Cause{Code: room.CodeEngine, Detail: "test"}) },
		"cancel":  func(s transfer.Sending) { s.Cancel(&room.Cause{Code: room.CodeEngine, Detail: "test"}) },
		"release": func(transfer.Sending) {},
	} {
		t.Run(name, func(t *testing.T) {
			w := newRankWorld(t, layeredBlock, "layers=4", options{})
			p := rankPrompt(17)
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			buf, err := s.Buffer(t.Context(), 0)
			w.must(err)
			end := errors.New("end")
			if err := w.a.PrefillLayers(t.Context(), 0, p[:16], 0, func(g int) error {
				w.part(s, 0, bounds(17), g, buf)
				if g == 1 {
					return end
				}
				return nil
			}); !errors.Is(err, end) {
				t.Error(err)
			}
			stop(s)
			s.Release()
			await(t, "receiver's end", r.Done())
			r.Release()
			w.drained()
			if st := w.staging.Stats(); !st.Idle() {
				t.Errorf("staging: %+v", st)
			}
			w.emptied()
		})
	}
}

// TestPartsThatAreNotTheChunk: a scheduler that forgets bytes or names some that are none fails its room, and the decode side never
// takes the chunk.
func TestPartsThatAreNotTheChunk(t *testing.T) {
	for name, c := range map[string]struct {
		parts  [][]transfer.Span
		detail string
	}{
		"a hole":       {[][]transfer.Span{{{Off: 0, Len: 100}}, {{Off: 101, Len: chunkBytes - 101}}}, "do not add up"},
		"nothing":      {[][]transfer.Span{nil}, "do not add up"},
		"past the end": {[][]transfer.Span{{{Off: 0, Len: chunkBytes + 1}}}, "of 4096"},
		"overflow":     {[][]transfer.Span{{{Off: 1, Len: 1<<64 - 1}}}, "of 4096"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options{})
			r, s := w.receive(1, 1), w.send(1, 1)
			await(t, "grant", s.Granted())
			w.fill(s, 1, 0)
			for i, part := range c.parts {
				s.SendPart(0, part, i == len(c.parts)-1)
			}
			await(t, "sender's end", s.Done())
			await(t, "receiver's end", r.Done())
			failed(t, "sender", s.State(), s.Err(), room.CodeInternal)
			if !strings.Contains(s.Err().Error(), c.detail) {
				t.Errorf("%v does not tell %q", s.Err(), c.detail)
			}
			s.Release()
			r.Release()
			w.drained()
			if st := w.staging.Stats(); !st.Idle() {
				t.Errorf("staging: %+v", st)
			}
		})
	}
}

// TestPartsInAnyOrder: the parts of a chunk may be any bytes of it in any order, and Send takes what they left.
func TestPartsInAnyOrder(t *testing.T) {
	w := newWorld(t, options{})
	r, s := w.receive(1, 2), w.send(1, 2)
	await(t, "grant", s.Granted())
	w.fill(s, 1, 0)
	s.SendPart(0, []transfer.Span{{Off: 3000, Len: 1000}}, false)
	s.SendPart(0, nil, false)
	s.SendPart(0, []transfer.Span{{Off: 0, Len: 1}, {Off: 1000, Len: 2000}}, false)
	s.SendPart(0, []transfer.Span{{Off: 1, Len: 999}, {Off: 4000, Len: 96}}, true)
	w.fill(s, 1, 1)
	s.SendPart(1, []transfer.Span{{Off: 1, Len: 1}}, false)
	s.Send(1)
	await(t, "receiver's end", r.Done())
	await(t, "sender's end", s.Done())
	if s.Err() != nil || r.Err() != nil {
		t.Fatalf("%v, %v", s.Err(), r.Err())
	}
	holds(t, r, 0, 1)
	holds(t, r, 1, 2)
	r.Release()
	s.Release()
	w.drained()
}

// TestBytesThatChangeAfterTheyLeft: the checksum is of the whole chunk as the prefill side has it at its end, so that bytes which were
// handed over too early are refused, and so is one that was damaged on the way.
func TestBytesThatChangeAfterTheyLeft(t *testing.T) {
	for name, rules := range map[string]string{"in staging": "", "on the way": "post room=1 nth=2 corrupt"} {
		t.Run(name, func(t *testing.T) {
			var seen *watched
			w := newRankWorld(t, layeredBlock, "layers=4", options{rules: rules, wrap: watch(&seen)})
			p := rankPrompt(17)
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			w.layer(s, p, 0, func(g int) {
				if g == 0 && rules == "" {
					await(t, "layer 0", seen.done)
					mem, _ := w.staging.Memory()
					mem[bytes.IndexByte(mem, 'S')+40] ^= 1 // the header begins with "SIM1"
				}
			})
			await(t, "receiver's end", r.Done())
			failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
			if !strings.Contains(r.Err().Error(), "checksum") {
				t.Error(r.Err())
			}
			await(t, "sender's end", s.Done())
			s.Release()
			r.Release()
			w.drained()
		})
	}
}

// TestNotificationsStayInOrder: the first write of chunk 0 is held; the rest of it, its notification and the bytes of the
// other chunks overtake it. No chunk may land before it.
func TestNotificationsStayInOrder(t *testing.T) {
	var seen *watched
	w := newWorld(t, options{rules: "post room=1 nth=1 stall until=go", wrap: watch(&seen)})
	r, s := w.receive(1, 3), w.send(1, 3)
	await(t, "grant", s.Granted())
	w.fill(s, 1, 0)
	s.SendPart(0, []transfer.Span{{Off: 0, Len: 1000}}, false)
	await(t, "first write held", w.rules.Waiting("go"))
	s.SendPart(0, []transfer.Span{{Off: 1000, Len: chunkBytes - 1000}}, true)
	w.chunk(s, 1, 1)
	w.chunk(s, 1, 2)
	for k := range 4 {
		if x := await(t, "write that overtakes", seen.done); x.note != (k == 1) || x.note && x.bytes > 0 || x.err != nil {
			t.Errorf("%+v", x)
		}
	}
	select {
	case got := <-r.Landed():
		t.Errorf("chunk %d landed without its first bytes", got)
	default:
	}
	w.rules.Release("go")
	landsInOrder(t, w, r, s, 3)
}

// landsInOrder: n chunks of room 1 land, one after the other and with their bytes, and both sides end well.
func landsInOrder(t *testing.T, w *world, r transfer.Receiving, s transfer.Sending, n int) {
	t.Helper()
	for want := range n {
		if got, ok := <-r.Landed(); !ok || got != want {
			t.Fatalf("chunk %d landed, want %d: %v", got, want, r.Err())
		}
		holds(t, r, want, 1+byte(want))
	}
	await(t, "sender's end", s.Done())
	s.Release()
	r.Release()
	w.drained()
}

// TestPartBehindOneThatFailed: the rest of a chunk is sent when a part of it was refused and the room has not heard of it so far. The cause is
// the part's.
func TestPartBehindOneThatFailed(t *testing.T) {
	w := newWorld(t, options{})
	r, s := w.receive(1, 2), w.send(1, 2)
	await(t, "grant", s.Granted())
	w.fill(s, 1, 0)
	s.SendPart(0, nil, false)
	hears := hub.FailBegun(s, transfer.ErrGrant)
	s.SendPart(0, []transfer.Span{{Off: 0, Len: 100}}, false)
	s.SendPart(0, []transfer.Span{{Off: 100, Len: chunkBytes - 100}}, true)
	hears()
	await(t, "sender's end", s.Done())
	failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
	await(t, "receiver's end", r.Done())
	s.Release()
	r.Release()
	w.drained()
}

// settling holds the first settling of a chunk until release is closed.
type settling struct{ begun, release chan struct{} }

func (settling) Opened(*room.Room, int) {}
func (settling) Forgotten(*room.Room)   {}

func (s settling) Stepped(_ *room.Room, e room.Stepped) {
	if e.Event.Kind == room.EvSettle && e.Event.Chunk == 0 {
		close(s.begun)
		<-s.release
	}
}

// TestNotificationsAreOvertakenByNone: chunk 0 is over, which lets the notification of chunk 1 go; before the goroutine that found so
// has handed it over, the whole of chunk 2 is sent from another. It has its place behind.
func TestNotificationsAreOvertakenByNone(t *testing.T) {
	var seen *watched
	hold := settling{make(chan struct{}), make(chan struct{})}
	w := newWorld(t, options{rules: "post room=1 nth=1 stall until=go", wrap: watch(&seen), observe: hold})
	r, s := w.receive(1, 3), w.send(1, 3)
	await(t, "grant", s.Granted())
	w.fill(s, 1, 0)
	s.SendPart(0, []transfer.Span{{Off: 0, Len: 1000}}, false)
	await(t, "first write held", w.rules.Waiting("go"))
	s.SendPart(0, []transfer.Span{{Off: 1000, Len: chunkBytes - 1000}}, true)
	w.chunk(s, 1, 1)
	for range 3 { // the rest of chunk 0, its notification, the bytes of chunk 1
		await(t, "write that overtakes", seen.done)
	}
	w.fill(s, 1, 2)
	s.SendPart(2, nil, false) // begun, which the room's lock would not allow below
	w.rules.Release("go")
	await(t, "settling of chunk 0", hold.begun)
	s.SendPart(2, []transfer.Span{{Off: 0, Len: chunkBytes}}, true)
	close(hold.release)
	landsInOrder(t, w, r, s, 3)
}

// TestOneOfManyPartsFails: the room fails once, with the part's error, whichever it is.
func TestOneOfManyPartsFails(t *testing.T) {
	for _, nth := range []string{"1", "2", "4"} {
		t.Run(nth, func(t *testing.T) {
			w := newRankWorld(t, layeredBlock, "layers=4", options{rules: "post room=1 nth=" + nth + ` error="link down"`})
			p := rankPrompt(33)
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			w.layer(s, p, 0, nil)
			w.a.FreeSeq(0)
			await(t, "sender's end", s.Done())
			failed(t, "sender", s.State(), s.Err(), room.CodePeerLost)
			await(t, "receiver's end", r.Done())
			s.Release()
			r.Release()
			w.drained()
			if st := w.staging.Stats(); !st.Idle() {
				t.Errorf("staging: %+v", st)
			}
		})
	}
}
