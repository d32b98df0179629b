package hub_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// TestRandomParts: rooms at the same time over queues that are too short for them, chunks whole and in parts of any shape, in half
// of the rooms an end at any moment, by either side. Rooms that nobody ended succeed with the right bytes, the others fail with a cause of
// that end; every page comes back.
func TestRandomParts(t *testing.T) {
	const rooms, at = 240, 6
	for name, tr := range map[string]transfer.Transport{
		"mem": mem.New(mem.NewRegistry(), mem.Queue(3)), "tcp": tcp.New(tcp.Config{Queue: 3, FrameBytes: 4096}), "shm": shm.New(shm.Config{Dir: t.TempDir(), Queue: 3}),
	} {
		t.Run(name, func(t *testing.T) {
			seed := rand.Uint64()
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("seed %d", seed)
				}
			})
			w := newWorld(t, options{pages: 128, over: tr})
			var all sync.WaitGroup
			for k := range uint64(at) {
				all.Go(func() {
					for id := k + 1; id <= rooms; id += at {
						w.random(id, rand.New(rand.NewPCG(seed, id)))
					}
				})
			}
			all.Wait()
			w.drained()
			await(t, "both sides idle", w.idle(t))
		})
	}
}

// random is one room of TestRandomParts.
func (w *world) random(id uint64, rnd *rand.Rand) {
	n := 1 + rnd.IntN(4)
	r, s := w.receive(id, n), w.send(id, n)
	fate, when, now := rnd.IntN(6), rnd.IntN(3*n), make(chan struct{})
	step := func() {
		if when--; when == 0 {
			close(now)
		}
	}
	var end sync.WaitGroup
	gone := &room.Cause{Code: room.CodeClientGone}
	end.Go(func() {
		<-now
		switch fate {
		case 0:
			r.Cancel(gone)
		case 1:
			s.Cancel(gone)
		case 2:
			r.Release()
		}
	})
	if when == 0 {
		close(now)
	}
	select {
	case <-s.Granted():
	case <-s.Done():
	}
	for i := range n {
		b, err := s.Buffer(w.t.Context(), i)
		if err != nil {
			break
		}
		for _, p := range b {
			for k := range p {
				p[k] = byte(id) + byte(i)
			}
		}
		sendRandom(s, i, rnd, step)
	}
	for when > 0 {
		step()
	}
	await(w.t, "end of the receiver", r.Done())
	await(w.t, "end of the sender", s.Done())
	end.Wait()
	if r.State() == room.StateSuccess && fate != 2 { // else the pages may be another's
		for i := range n {
			for _, p := range r.Chunk(i) {
				if v := byte(id) + byte(i); !bytes.Equal(p, bytes.Repeat([]byte{v}, len(p))) {
					w.t.Errorf("room %d: chunk %d does not hold %#x alone", id, i, v)
				}
			}
		}
	}
	for _, err := range []error{r.Err(), s.Err()} {
		var c *room.Cause
		if errors.As(err, &c) && (fate > 2 || c.Code != room.CodeClientGone && c.Code != room.CodeAborted) {
			w.t.Errorf("room %d, fate %d: %v", id, fate, err)
		}
	}
	r.Release()
	s.Release()
}

// sendRandom sends chunk i whole, or in parts with random borders and in random order; step is called between them.
func sendRandom(s transfer.Sending, i int, rnd *rand.Rand, step func()) {
	step()
	if rnd.IntN(3) == 0 {
		s.Send(i)
		return
	}
	var spans []transfer.Span
	for off := 0; off < chunkBytes; {
		n := min(1+rnd.IntN(900), chunkBytes-off)
		spans = append(spans, transfer.Span{Off: uint64(off), Len: uint64(n)})
		off += n
	}
	rnd.Shuffle(len(spans), func(a, b int) { spans[a], spans[b] = spans[b], spans[a] })
	for len(spans) > 0 {
		n := 1 + rnd.IntN(len(spans))
		s.SendPart(i, spans[:n], n == len(spans))
		spans = spans[n:]
		step()
	}
}
