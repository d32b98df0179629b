package hub_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// rankWorld is a world between two engines whose ranks and pages differ.
type rankWorld struct {
	*world
	a, b   *sim.Engine
	cfg    sim.Config
	caches bool
}

const rankChunk = 16

func newRankWorld(t *testing.T, prefill, decode string, o options) *rankWorld {
	t.Helper()
	r := &rankWorld{}
	open := func(text string) *sim.Engine {
		c, err := sim.ParseConfig(text)
		if err != nil {
			t.Fatal(err)
		}
		c.ChunkTokens, c.Recheck = rankChunk, true
		e, err := sim.Open(c)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		r.cfg = c
		return e
	}
	r.a, r.b = open(prefill), open(decode)
	o.src, o.dst = r.a.Info().Shards, r.b.Info().Shards
	if o.pages == 0 {
		o.pages = 256
	}
	r.world, r.caches = newWorld(t, o), o.cache > 0
	return r
}

// bounds are those of a prompt's chunks; the last token is the decode side's to compute.
func bounds(n int) []int {
	b := []int{0}
	for p := 0; p < n-1; {
		p = min(p+rankChunk, n-1)
		b = append(b, p)
	}
	return b
}

func sizes(e *sim.Engine, b []int) []int {
	out := []int{}
	for i := 1; i < len(b); i++ {
		out = append(out, e.ChunkBytes(b[i]-b[i-1]))
	}
	return out
}

// begin opens both ends of a room for p.
func (w *rankWorld) begin(id uint64, p []engine.Token) (transfer.Sending, transfer.Receiving) {
	w.t.Helper()
	b, end := bounds(len(p)), time.Now().Add(time.Minute)
	var prefixes []kv.Prefix
	if w.caches {
		prefixes = kv.Prefixes(p, w.b.Info().Shards.PageEnds(b, rankChunk))
	}
	s, err := w.senders.Open(transfer.OpenSender{Key: room.Key{Room: id}, Deadline: end, Chunks: sizes(w.a, b), Bounds: b, Digest: id})
	if err != nil {
		w.t.Fatal(err)
	}
	r, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: id}, Addr: w.addr, Deadline: end, Chunks: sizes(w.b, b), Bounds: b, Prefixes: prefixes, Digest: id})
	if err != nil {
		w.t.Fatal(err)
	}
	return s, r
}

// send computes chunk i of p and hands it over.
func (w *rankWorld) sendChunk(s transfer.Sending, p []engine.Token, i int) {
	w.t.Helper()
	b := bounds(len(p))
	buf, err := s.Buffer(w.t.Context(), i)
	if err != nil {
		w.t.Fatal(err)
	}
	w.must(w.a.Prefill(w.t.Context(), 0, p[b[i]:b[i+1]], b[i]))
	w.must(w.a.Export(0, b[i], b[i+1], buf))
	s.Send(i)
}

func (w *rankWorld) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// answer hands p over and goes on with it at the decode engine.
func (w *rankWorld) answer(id uint64, p []engine.Token) []engine.Token {
	w.t.Helper()
	s, r := w.begin(id, p)
	await(w.t, "grant", s.Granted())
	b := bounds(len(p))
	for i := range len(b) - 1 {
		w.sendChunk(s, p, i)
		if got := await(w.t, "chunk", r.Landed()); got != i || r.Err() != nil {
			w.t.Fatalf("chunk %d landed, want %d: %v", got, i, r.Err())
		}
		w.must(w.b.Import(0, b[i], b[i+1], r.Chunk(i)))
	}
	await(w.t, "sender's end", s.Done())
	await(w.t, "receiver's end", r.Done())
	if s.Err() != nil || r.Err() != nil {
		w.t.Fatalf("%v, %v", s.Err(), r.Err())
	}
	s.Release()
	r.Release()
	smp, err := w.b.NewSampler(engine.Sampling{})
	w.must(err)
	var out []engine.Token
	for last, pos := p[len(p)-1], len(p)-1; len(out) < 10; pos++ {
		got, err := w.b.Step(w.t.Context(), []engine.Row{{Seq: 0, Token: last, Pos: pos, Sampler: smp}})
		w.must(err)
		last = got[0].Token
		out = append(out, last)
	}
	w.a.FreeSeq(0)
	w.b.FreeSeq(0)
	return out
}

func rankPrompt(n int) []engine.Token {
	p := make([]engine.Token, n)
	for i := range p {
		p[i] = engine.Token(3 + (i*37+n)%250)
	}
	return p
}

// over opens a fresh transport.
func over(t *testing.T, kind string) transfer.Transport {
	switch kind {
	case "tcp":
		return tcp.New(tcp.Config{Listen: "127.0.0.1:0"})
	case "shm":
		return shm.New(shm.Config{Dir: t.TempDir()})
	default:
		return mem.New(mem.NewRegistry())
	}
}

// manySegments makes a chunk of 16 * 16 layers * 2 * 32 heads = 16,384 stores, twice what one write may have.
const manySegments = "layers=16,heads=32,dim=1,page=16"

// TestChunkOfManyWrites: the answer is right though the first write comes last, after the chunk's own notification.
func TestChunkOfManyWrites(t *testing.T) {
	for _, kind := range []string{"tcp", "shm", "mem"} {
		t.Run(kind, func(t *testing.T) {
			w := newRankWorld(t, manySegments+",tp=1", manySegments+",tp=32", options{over: over(t, kind), rules: "post room=1 nth=1 delay=50ms"})
			p := rankPrompt(40)
			if got, want := w.answer(1, p), sim.Expected(w.cfg, p, 10); !slices.Equal(got, want) {
				t.Errorf("%v, want %v", got, want)
			}
			w.drained()
		})
	}
}

// TestOneOfManyWritesFails: the room fails once, and an abort between two writes of a chunk waits for those that are out.
func TestOneOfManyWritesFails(t *testing.T) {
	t.Run("error", func(t *testing.T) {
		w := newRankWorld(t, manySegments+",tp=1", manySegments+",tp=32", options{rules: `post room=1 nth=1 error="link down"`})
		p := rankPrompt(10)
		s, r := w.begin(1, p)
		await(t, "grant", s.Granted())
		w.sendChunk(s, p, 0)
		await(t, "sender's end", s.Done())
		failed(t, "sender", s.State(), s.Err(), room.CodePeerLost)
		await(t, "receiver's end", r.Done())
		s.Release()
		r.Release()
		w.drained()
	})
	t.Run("abort", func(t *testing.T) {
		w := newRankWorld(t, manySegments+",tp=1", manySegments+",tp=32", options{unfenced: true, rules: "post room=1 nth=1 halfway until=go"})
		p := rankPrompt(17)
		s, r := w.begin(1, p)
		await(t, "grant", s.Granted())
		w.sendChunk(s, p, 0)
		await(t, "write in the middle", w.rules.Waiting("go"))
		r.Cancel(&room.Cause{Code: room.CodeClientGone, Side: room.SideReceiver, Detail: "test"})
		await(t, "sender's end", s.Done())
		r.Release()
		if st := w.landing.Stats(); st.Quarantine == 0 {
			t.Errorf("pages are not in quarantine while a write is out: %+v", st)
		}
		w.rules.Release("go")
		s.Release()
		w.drained()
		failed(t, "receiver", r.State(), r.Err(), room.CodeClientGone)
	})
}

// TestPaddingIsNotKV: a byte that is damaged fails the room if it is KV, and only then.
func TestPaddingIsNotKV(t *testing.T) {
	for name, damage := range map[string]int{"kv": 0, "padding": 1} {
		t.Run(name, func(t *testing.T) {
			w := newRankWorld(t, "tp=1", "tp=1,page=32", options{rules: "landed room=1 nth=1 stall until=check", pages: 16})
			p := rankPrompt(17) // 16 tokens in a page of 32
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			w.sendChunk(s, p, 0)
			await(t, "landed", w.rules.Waiting("check"))
			ranges, err := w.b.Info().Shards.Payload(kv.Piece{Pages: []kv.PageID{0}}, 16, 0, 16)
			w.must(err)
			bytes, _ := w.landing.Memory()
			at := ranges[0].Off
			if damage == 1 {
				at += ranges[0].Len
			}
			bytes[at] ^= 1
			w.rules.Release("check")
			await(t, "receiver's end", r.Done())
			if damage == 0 {
				failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
			} else if r.Err() != nil {
				t.Errorf("a byte that holds nothing failed the room: %v", r.Err())
			}
			r.Release()
			s.Release()
			w.drained()
		})
	}
}

// liar changes grants before the hub hears them.
type liar struct {
	*hub.Senders
	change func(*session.Grant)
}

func (l liar) Grant(s *session.ServerSession, g session.Grant) {
	l.change(&g)
	l.Senders.Grant(s, g)
}

// TestGrantsOfRanksThatDoNotFit: whatever a decode worker says of its pages, its room fails with a cause that tells what, and
// nothing else is harmed.
func TestGrantsOfRanksThatDoNotFit(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*session.Grant)
		code   room.Code
		detail string
	}{
		"page size":         {func(g *session.Grant) { g.PageBytes *= 2; g.Chunks[0] *= 2 }, room.CodeProtocol, "pages of"},
		"too many there":    {func(g *session.Grant) { g.Have = 17 }, room.CodeProtocol, "there already"},
		"fewer than it has": {func(g *session.Grant) { g.Have = 9 }, room.CodeMismatch, "different prompts"},
		"a page twice":      {func(g *session.Grant) { g.Pages[1] = g.Pages[0] }, room.CodeProtocol, "twice"},
		"pages missing":     {func(g *session.Grant) { g.Pages = g.Pages[1:] }, room.CodeProtocol, "pages"},
		"a page outside":    {func(g *session.Grant) { g.Pages[1] = 1 << 31 }, room.CodeTransferFailed, "write"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newRankWorld(t, "tp=2,page=4", "tp=1,page=8", options{handler: func(h *hub.Senders) session.ServerHandler {
				return liar{h, c.change}
			}})
			p := rankPrompt(17)
			s, r := w.begin(1, p)
			await(t, "grant", s.Granted())
			if s.State() != room.StateFailed {
				w.sendChunk(s, p, 0)
			}
			await(t, "sender's end", s.Done())
			await(t, "receiver's end", r.Done())
			failed(t, "sender", s.State(), s.Err(), c.code)
			if s.Err() == nil || !strings.Contains(s.Err().Error(), c.detail) {
				t.Errorf("the cause does not tell %q: %v", c.detail, s.Err())
			}
			if r.State() != room.StateFailed {
				t.Errorf("receiver: %v", r.State())
			}
			s.Release()
			r.Release()
			w.drained()
		})
	}
}

// TestChunksThatAreNone: a scheduler whose chunks are not those of the ranks is refused at once.
func TestChunksThatAreNone(t *testing.T) {
	w := newRankWorld(t, "tp=2", "tp=1", options{})
	end := time.Now().Add(time.Minute)
	for name, o := range map[string]transfer.OpenReceiver{
		"no bounds":   {Chunks: sizes(w.b, []int{0, 16})},
		"other sizes": {Chunks: []int{5}, Bounds: []int{0, 16}},
		"backwards":   {Chunks: []int{0}, Bounds: []int{0, -4}},
	} {
		o.Key, o.Addr, o.Deadline = room.Key{Room: 1}, w.addr, end
		if _, err := w.receivers.Open(o); err == nil {
			t.Errorf("%s: the receivers took it", name)
		}
		if _, err := w.senders.Open(transfer.OpenSender{Key: o.Key, Deadline: end, Chunks: []int{1}, Bounds: o.Bounds}); err == nil {
			t.Errorf("%s: the senders took it", name)
		}
	}
}
