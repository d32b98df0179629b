package transfer

import (
	"context"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
)

// Senders and Receivers are what the schedulers need of the hubs.
// The hubs satisfy them; tests may use fakes.
type Senders interface {
	// Open creates the sender of a room. Errors are *room.Cause (CodeDuplicate, CodeShutdown).
	// A room aborted before it existed opens failed: Done is closed already.
	Open(o OpenSender) (Sending, error)
}

// OpenSender describes a prompt whose KV will be sent.
type OpenSender struct {
	Key      room.Key
	Deadline time.Time
	// Chunks are the exact exported sizes in bytes, one a chunk; at least one
	// entry: a prompt of one token has one chunk of 0 bytes.
	Chunks []int
	// Bounds: chunk i is tokens [Bounds[i], Bounds[i+1]) of the prompt; needed where chunks are pages of
	// ranks (kv.Shards). The empty chunk of a prompt of one token has only Bounds[0].
	Bounds []int
	// Digest of the prompt's tokens; the grant must carry the same, or the room
	// fails with CodeMismatch.
	Digest uint64
}

// Sending is the prefill side of one room.
type Sending interface {
	// Granted is closed when chunks may be sent, or when the room has ended.
	Granted() <-chan struct{}
	// Done is closed once the room is terminal. Err is then nil on success.
	Done() <-chan struct{}
	Err() error
	State() room.State
	// Ended is when the room became terminal, which who waits for Done hears a little later; zero before.
	Ended() time.Time
	// Buffer returns staging memory for chunk i (parts adding up to Chunks[i]),
	// waiting for room in the staging pool; an error if the room or ctx ended. With a ctx that
	// has ended before, it takes what is there and does not wait.
	Buffer(ctx context.Context, i int) ([][]byte, error)
	// Send hands chunk i's buffer over; chunks in order, the last ends the data. Never
	// blocks. If the room has ended, the buffer is taken back and nothing is sent. After
	// parts it hands over what they left.
	Send(i int)
	// SendPart hands over the bytes of chunk i's buffer that are named (offsets from its start, parts end to
	// end; disjoint) while the owner still stores others there; bytes that were handed over may not change any
	// more. The chunk begins with its first part and must be sent up to its last one, with which all of it has been
	// named, before the next begins; if it never will be, Drop or Release say so. Never blocks.
	SendPart(i int, bytes []Span, last bool)
	// Drop says that chunk i will never be sent, which ends the room.
	Drop(i int, c *room.Cause)
	// Cancel fails the room (first cause wins). Idempotent.
	Cancel(c *room.Cause)
	// Release says that the owner is finished with it; after it only in-flight writes
	// hold memory. A room not yet terminal is cancelled (CodeAborted).
	Release()
}

// Receivers is the decode side.
type Receivers interface {
	Open(o OpenReceiver) (Receiving, error)
}

// OpenReceiver describes a prompt whose KV is awaited.
type OpenReceiver struct {
	Key      room.Key
	Addr     string // host:port of the prefill worker's bootstrap (session) port
	Deadline time.Time
	Chunks   []int // exact sizes
	Bounds   []int // as of OpenSender
	// Prefixes are the beginnings of the prompt that end with a page, in order (kv.Shards.PageEnds); only where chunks are
	// pages of ranks. What the pool has of them is not sent, and what comes is kept for others, as far as the
	// pool's bound allows. nil: neither.
	Prefixes []kv.Prefix
	Digest   uint64
	Tokens   int // prompt length, for messages
}

// Receiving is the decode side of one room.
type Receiving interface {
	// Granted is closed when pages are held and the grant is sent, or the room has ended.
	Granted() <-chan struct{}
	// Landed yields the index of every chunk, in order, once its bytes are applied
	// and its checksum is right; closed at the terminal state (after the last
	// chunk on success).
	Landed() <-chan int
	// Chunk is the memory of a landed chunk with what was there already, valid until Release; read only.
	Chunk(i int) [][]byte
	Done() <-chan struct{}
	Err() error
	State() room.State
	Cancel(c *room.Cause)
	// Release lets go of the request's hold on the pages. They return to the pool when
	// the transfer has let go too. A room not yet terminal is cancelled (CodeAborted).
	Release()
}

// Digest is FNV-1a (64 bit) over the tokens as little-endian int32; both sides
// compute it from their own tokenization of the request.
func Digest[T ~int32](tokens []T) uint64 {
	h := uint64(14695981039346656037)
	for _, t := range tokens {
		v := uint32(t)
		for range 4 {
			h ^= uint64(v & 0xff)
			h *= 1099511628211
			v >>= 8
		}
	}
	return h
}
