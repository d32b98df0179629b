package hub

import (
	"fmt"
	"math"
	"slices"
	"sync"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// route is where the chunks of a room go at the decode side. Immutable.
type route struct {
	sizes []int             // of each chunk over there
	spans [][]transfer.Span // of each chunk; nil if there are pages

	exchange *kv.Exchange // nil: chunks are opaque blocks and go byte for byte
	bounds   []int
	have     int           // tokens that the decode side has already
	pages    [][]kv.PageID // of each chunk
}

// plans makes a session's kv.Exchange when it is first wanted.
type plans struct {
	once sync.Once
	x    *kv.Exchange
	err  error
}

// get plans for pools of ours pages here and, as far as we know, any number over there: the
// transport checks that a write stays within its grant.
func (p *plans) get(src, dst kv.Shards, ours int) (*kv.Exchange, error) {
	p.once.Do(func() { p.x, p.err = kv.NewExchange(src, dst, ours, math.MaxUint32) })
	return p.x, p.err
}

// routeOf checks that a grant fits the request and lays its pages out. The cause is of the room.
func (h *Senders) routeOf(sess *session.ServerSession, p *plans, g session.Grant, o transfer.OpenSender) (*route, *room.Cause) {
	spans, err := place(g.Pages, g.PageBytes, g.Chunks)
	if err != nil {
		return nil, &room.Cause{Code: room.CodeProtocol, Detail: "grant does not fit its chunks: " + err.Error()}
	}
	r := &route{sizes: g.Chunks, spans: spans}
	want := o.Chunks
	dst := sess.Client().Shards
	paged := h.cfg.Shards != (kv.Shards{})
	switch last := slices.Max(append([]int{0}, o.Bounds...)); {
	case !paged && g.Have != 0, g.Have < 0, g.Have > last:
		return nil, &room.Cause{Code: room.CodeProtocol, Detail: fmt.Sprintf("grant says that %d tokens are there already, of the %d that could be", g.Have, last)}
	case paged && dst == kv.Shards{}: // the hello refuses such a worker
		return nil, &room.Cause{Code: room.CodeProtocol, Detail: "grant of a worker without ranks"}
	case paged:
		want = chunkSizes(dst, o.Bounds, g.Have)
		if g.PageBytes != dst.PageBytes() {
			return nil, &room.Cause{Code: room.CodeProtocol, Detail: fmt.Sprintf("grant has pages of %d bytes; those of the worker's ranks have %d", g.PageBytes, dst.PageBytes())}
		}
	}
	if g.Digest != o.Digest || !slices.Equal(g.Chunks, want) {
		return nil, &room.Cause{Code: room.CodeMismatch,
			Detail: fmt.Sprintf("the two workers see different prompts (digest %x and %x, %d and %d chunks); check that both got the same request and run the same tokenizer",
				o.Digest, g.Digest, len(o.Chunks), len(g.Chunks))}
	}
	if !paged {
		return r, nil
	}
	if r.exchange, err = p.get(h.cfg.Shards, dst, h.cfg.Staging.Stats().Total); err != nil {
		return nil, &room.Cause{Code: room.CodeMismatch, Detail: err.Error()}
	}
	r.spans, r.bounds, r.have = nil, o.Bounds, g.Have
	ids := make([]kv.PageID, len(g.Pages))
	for i, p := range g.Pages {
		ids[i] = kv.PageID(p)
	}
	r.pages = perChunk(ids, g.PageBytes, g.Chunks)
	return r, nil
}

// copies bring chunk i of size bytes from its staging pages to its place; in the order of the checksum, which is
// that of the place if there are pages, and otherwise that of the chunk's bytes.
func (r *route) copies(pool *kv.Pool, lease *kv.Lease, i, size int) ([]kv.Copy, error) {
	if r.exchange == nil {
		src, err := kv.Spans(pool.PageBytes(), []int{size}, lease.Pages())
		if err != nil {
			return nil, err
		}
		return zip(src[0], r.spans[i]), nil
	}
	from, to := tokensOf(r.bounds, i)
	first := min(max(from, r.have), to)
	return r.exchange.Copies(kv.Piece{Pages: lease.Pages(), First: from}, kv.Piece{Pages: r.pages[i], First: first}, first, to)
}

// tokensOf gives the tokens [from, to) of chunk i; none for the empty chunk of a short prompt.
func tokensOf(bounds []int, i int) (from, to int) {
	if i+1 >= len(bounds) {
		return 0, 0
	}
	return bounds[i], bounds[i+1]
}

// chunkSizes are what a worker with these shards makes of a prompt of which it has some tokens.
func chunkSizes(s kv.Shards, bounds []int, have int) []int {
	out := make([]int, max(len(bounds)-1, 1))
	for i := range out {
		from, to := tokensOf(bounds, i)
		out[i] = s.ChunkBytes(to - max(from, have))
	}
	return out
}

// perChunk cuts a list of pages along the chunks they were counted for.
func perChunk(pages []kv.PageID, pageBytes int, chunks []int) [][]kv.PageID {
	per, _ := kv.PagesFor(pageBytes, chunks)
	out := make([][]kv.PageID, len(per))
	for i, n := range per {
		out[i], pages = pages[:n:n], pages[n:]
	}
	return out
}

// badChunks says why a request's chunks are not those of a worker with these shards; nil for
// zero shards, whose chunks only the engine understands.
func badChunks(s kv.Shards, pool *kv.Pool, bounds, chunks []int) error {
	switch {
	case s == kv.Shards{}:
		return nil
	case pool.PageBytes() != s.PageBytes():
		return fmt.Errorf("the pool has pages of %d bytes, the engine's ranks of %d", pool.PageBytes(), s.PageBytes())
	case len(bounds) == 0 || bounds[0] != 0 || !slices.IsSorted(bounds):
		return fmt.Errorf("tokens %v are no chunks", bounds)
	case !slices.Equal(chunks, chunkSizes(s, bounds, 0)):
		return fmt.Errorf("chunks of %v bytes, the engine's ranks make %v", chunks, chunkSizes(s, bounds, 0))
	}
	return nil
}
