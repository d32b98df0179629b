package session

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// ProtocolVersion is refused if it differs. 2: chunks that come in parts, see hub.chunkNote.
const ProtocolVersion = 2

// Fingerprint is what two workers must have in common to exchange KV.
type Fingerprint struct {
	Engine, ModelDigest, KVLayout, Attention string
	ChunkTokens                              int
}

// Diff names the first field in which f and g differ; ok false if none.
func (f Fingerprint) Diff(g Fingerprint) (field, ours, theirs string, differ bool) {
	for _, p := range []struct{ n, a, b string }{
		{"engine", f.Engine, g.Engine},
		{"model_digest", f.ModelDigest, g.ModelDigest},
		{"kv_layout", f.KVLayout, g.KVLayout},
		{"attention", f.Attention, g.Attention},
		{"chunk_tokens", strconv.Itoa(f.ChunkTokens), strconv.Itoa(g.ChunkTokens)},
	} {
		if p.a != p.b {
			return p.n, p.a, p.b, true
		}
	}
	return "", "", "", false
}

// differs compares the two hellos; field is "" if none differs.
func differs(serverVersion, clientVersion uint32, server, client Identity) (field, serverValue, clientValue string, differ bool) {
	if serverVersion != clientVersion {
		return "protocol_version", strconv.Itoa(int(serverVersion)), strconv.Itoa(int(clientVersion)), true
	}
	if field, serverValue, clientValue, differ = server.Diff(client.Fingerprint); differ {
		return field, serverValue, clientValue, differ
	}
	return shardsDiffer(server.Shards, client.Shards)
}

// shardsDiffer names the property that keeps two workers' KV from being laid out anew on the
// way; the prefill worker's is the source.
func shardsDiffer(server, client kv.Shards) (field, serverValue, clientValue string, differ bool) {
	none := kv.Shards{}
	if server == client {
		return "", "", "", false
	}
	if server == none || client == none {
		return "kv_layout", server.String(), client.String(), true
	}
	var e *kv.LayoutError
	if errors.As(kv.Compatible(server, client), &e) {
		return e.Field, e.Src, e.Dst, true
	}
	return "", "", "", false
}

// fieldTP is the one field that may differ, but not by any factor.
const fieldTP = "tp"

// mismatchDetail is the text of a CodeMismatch.
func mismatchDetail(field, serverValue, clientValue string) string {
	why := ""
	if field == fieldTP {
		why = "; one number of tensor-parallel ranks must be a multiple of the other, or the heads of a rank do not divide"
	}
	return fmt.Sprintf("%s differs: the prefill worker has %q, the decode worker has %q%s", field, serverValue, clientValue, why)
}

// Identity is who a worker is.
type Identity struct {
	WorkerID string // for people: host:port of its HTTP side
	Epoch    uint64 // random at process start: the generation of the worker
	Fingerprint
	// Shards is how the worker cuts up its KV; zero if its chunks are opaque blocks.
	Shards kv.Shards
}

// NewEpoch makes the generation of a starting worker: random, never 0.
func NewEpoch() uint64 { return randomID() }

// randomID is never 0. crypto/rand.Read does not fail.
func randomID() uint64 {
	var b [8]byte
	for {
		_, _ = rand.Read(b[:])
		if v := binary.LittleEndian.Uint64(b[:]); v != 0 {
			return v
		}
	}
}

// Grant is the decode side's permission, as sent.
type Grant struct {
	Key       room.Key
	ID        transfer.GrantID
	Pages     []uint32      // in chunk order; chunk i takes ceil(Chunks[i]/PageBytes) of them
	PageBytes int           // of the decode side's pool
	Chunks    []int         // exact bytes of each chunk as the decode side computed them
	Digest    uint64        // of the prompt's tokens
	Timeout   time.Duration // until the request's deadline, at the moment of sending
	// Have is how many tokens of the prompt the decode side holds already; Chunks and Pages are
	// for the rest.
	Have int
}

// String is for logs.
func (g Grant) String() string {
	return fmt.Sprintf("grant %d room %s, %d chunks, %d pages", g.ID, g.Key, len(g.Chunks), len(g.Pages))
}

// ClientHandler hears the prefill side. Called in order from the session's
// receive goroutine; must not block.
type ClientHandler interface {
	// Failed: the sender of this room ended with this cause, or does not serve its grant g. g 0: any.
	Failed(s transfer.SessionID, key room.Key, g transfer.GrantID, c *room.Cause)
	// AbortAck: no write under this grant is or will be outstanding.
	AbortAck(s transfer.SessionID, key room.Key, g transfer.GrantID)
	// Down: the session has ended; once, after every other call for s.
	Down(s transfer.SessionID, addr string, c *room.Cause)
}

// ServerHandler hears the decode side; same rules.
type ServerHandler interface {
	Grant(s *ServerSession, g Grant)
	// Abort: g is 0 if the decode side never sent a grant for the room.
	Abort(s *ServerSession, key room.Key, g transfer.GrantID, c *room.Cause)
	Down(s *ServerSession, c *room.Cause)
}
