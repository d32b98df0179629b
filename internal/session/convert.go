package session

import (
	"fmt"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// Limits of the wire. What is above them is refused, not cut, except for the
// texts of causes, which are for people.
const (
	maxMessage    = 4 << 20 // bytes of one message
	maxRoom       = 1<<63 - 1
	maxPages      = 1 << 19
	maxChunks     = 1 << 16
	maxBytes      = 1 << 40 // of a page or a chunk
	maxTokens     = 1 << 30 // of a prompt
	maxTimeout    = 7 * 24 * time.Hour
	maxID         = 256 // bytes of a worker id
	maxField      = 64 << 10
	maxOffers     = 16
	maxMeta       = 64
	maxCauseShort = 256 // bytes of code, phase and peer of a cause
	maxDetail     = 4096
)

// badValue is a message that can be attributed to a room, whose values are not
// acceptable. It ends the room, not the session.
type badValue struct {
	key  room.Key
	what string
}

// Error names the room and the value.
func (e *badValue) Error() string { return fmt.Sprintf("room %s: %s", e.key, e.what) }

// toKey checks a room on the wire. Without a valid one a message belongs to nobody.
func toKey(id uint64, gen uint32) (room.Key, error) {
	if id > maxRoom {
		return room.Key{}, fmt.Errorf("room %d is not below 2^63", id)
	}
	return room.Key{Room: id, Gen: gen}, nil
}

// toGrant checks every value. A *badValue blames the room only.
func toGrant(m *pb.Grant) (Grant, error) {
	key, err := toKey(m.GetRoom(), m.GetGeneration())
	if err != nil {
		return Grant{}, fmt.Errorf("grant: %w", err)
	}
	if what := badGrant(m); what != "" {
		return Grant{}, &badValue{key, "grant refused: " + what}
	}
	g := Grant{
		Key: key, ID: transfer.GrantID(m.GetGrantId()), Pages: m.GetPages(), PageBytes: int(m.GetPageBytes()),
		Chunks: make([]int, len(m.GetChunks())), Digest: m.GetDigest(), Timeout: time.Duration(m.GetTimeoutNs()),
		Have: int(m.GetHaveTokens()),
	}
	for i, c := range m.GetChunks() {
		g.Chunks[i] = int(c)
	}
	return g, nil
}

// badGrant says what is wrong with the values of a grant; "" if nothing.
func badGrant(m *pb.Grant) string {
	switch {
	case m.GetGrantId() == 0:
		return "its id is 0"
	case len(m.GetPages()) > maxPages:
		return fmt.Sprintf("%d pages are more than %d", len(m.GetPages()), maxPages)
	case len(m.GetChunks()) == 0 || len(m.GetChunks()) > maxChunks:
		return fmt.Sprintf("%d chunks are not between 1 and %d", len(m.GetChunks()), maxChunks)
	case m.GetPageBytes() < 1 || m.GetPageBytes() > maxBytes:
		return fmt.Sprintf("page size %d is not between 1 and 2^40", m.GetPageBytes())
	case m.GetTimeoutNs() < 0 || m.GetTimeoutNs() > int64(maxTimeout):
		return fmt.Sprintf("timeout %v is not between 0 and %v", time.Duration(m.GetTimeoutNs()), maxTimeout)
	}
	if m.GetHaveTokens() < 0 || m.GetHaveTokens() > maxTokens {
		return fmt.Sprintf("%d tokens that are there already are not between 0 and %d", m.GetHaveTokens(), maxTokens)
	}
	for i, c := range m.GetChunks() {
		if c < 0 || c > maxBytes {
			return fmt.Sprintf("size %d of chunk %d is not between 0 and 2^40", c, i)
		}
	}
	return ""
}

// fromGrant is the inverse. A deadline that has just passed is sent as the shortest timeout.
func fromGrant(g Grant) *pb.Grant {
	m := &pb.Grant{
		Room: g.Key.Room, Generation: g.Key.Gen, GrantId: uint64(g.ID), Pages: g.Pages, PageBytes: int64(g.PageBytes),
		Chunks: make([]int64, len(g.Chunks)), Digest: g.Digest, TimeoutNs: int64(min(g.Timeout, maxTimeout)),
		HaveTokens: int64(g.Have),
	}
	if g.Timeout < 0 {
		m.TimeoutNs = 1
	}
	for i, c := range g.Chunks {
		m.Chunks[i] = int64(c)
	}
	return m
}

// wireCodes are the kinds a cause may have on the wire; others would grow the label sets of
// metrics at a peer's will.
var wireCodes = map[room.Code]bool{
	room.CodeAborted: true, room.CodeClientGone: true, room.CodeDeadline: true, room.CodePeerLost: true,
	room.CodeTransferFailed: true, room.CodeChunkDropped: true, room.CodeMismatch: true, room.CodeCapacity: true,
	room.CodeEngine: true, room.CodeShutdown: true, room.CodeDuplicate: true, room.CodeProtocol: true,
	room.CodeInvalid: true, room.CodeUnavailable: true, room.CodeInternal: true,
}

// toCause never fails: the cause of a failure must not be lost over its spelling. nil gives nil.
func toCause(m *pb.Cause) *room.Cause {
	if m == nil {
		return nil
	}
	c := &room.Cause{
		Code: room.Code(m.GetCode()), Phase: clip(m.GetPhase(), maxCauseShort), Peer: clip(m.GetPeer(), maxCauseShort),
		Detail: clip(m.GetDetail(), maxDetail), Retryable: m.GetRetryable(),
	}
	if !wireCodes[c.Code] {
		c.Detail = clip(fmt.Sprintf("unknown code %q: %s", clip(m.GetCode(), maxCauseShort), c.Detail), maxDetail)
		c.Code = room.CodeProtocol
	}
	if s := m.GetSide(); s <= uint32(room.SideRouter) {
		c.Side = room.Side(s)
	}
	if key, err := toKey(m.GetRoom(), m.GetGeneration()); err == nil {
		c.Key = key
	}
	return c
}

// fromCause makes every text valid for the wire. nil gives nil.
func fromCause(c *room.Cause) *pb.Cause {
	if c == nil {
		return nil
	}
	return &pb.Cause{
		Code: clip(string(c.Code), maxCauseShort), Side: uint32(c.Side), Phase: clip(c.Phase, maxCauseShort),
		Room: c.Key.Room, Generation: c.Key.Gen, Peer: clip(c.Peer, maxCauseShort), Detail: clip(c.Detail, maxDetail),
		Retryable: c.Retryable,
	}
}

// clip makes s valid UTF-8 of at most n bytes.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// toIdentity checks who the peer says it is. what is "" or names the bad field.
func toIdentity(m *pb.Identity) (id Identity, what string) {
	f := m.GetFingerprint()
	id = Identity{WorkerID: m.GetWorkerId(), Epoch: m.GetEpoch(), Fingerprint: Fingerprint{
		Engine: f.GetEngine(), ModelDigest: f.GetModelDigest(), KVLayout: f.GetKvLayout(), Attention: f.GetAttention(),
		ChunkTokens: int(f.GetChunkTokens()),
	}}
	switch {
	case id.WorkerID == "" || len(id.WorkerID) > maxID || strings.ContainsFunc(id.WorkerID, func(r rune) bool { return r < ' ' || r == 0x7f }):
		return id, fmt.Sprintf("worker_id %q is not a printable text of 1 to %d bytes", clip(id.WorkerID, maxID), maxID)
	case id.Epoch == 0:
		return id, "epoch is 0"
	case f == nil:
		return id, "fingerprint is missing"
	}
	for _, s := range []string{id.Engine, id.ModelDigest, id.KVLayout, id.Attention} {
		if len(s) > maxField {
			return id, fmt.Sprintf("a fingerprint field of %d bytes is too long", len(s))
		}
	}
	if id.Shards, what = toShards(m.GetShards()); what != "" {
		return id, what
	}
	return id, ""
}

// toShards checks how the peer says its KV is cut up; nil gives none.
func toShards(m *pb.Shards) (s kv.Shards, what string) {
	if m == nil {
		return s, ""
	}
	for _, v := range []int64{m.GetLayers(), m.GetKvHeads(), m.GetHeadDim(), m.GetElemBytes(), m.GetTp(), m.GetPp(), m.GetPageTokens()} {
		if v < 0 || v > math.MaxInt32 { // an int may have 32 bits
			return s, fmt.Sprintf("shards: %d is not between 0 and 2^31", v)
		}
	}
	s.Model = kv.Model{Layers: int(m.GetLayers()), KVHeads: int(m.GetKvHeads()), HeadDim: int(m.GetHeadDim()), ElemBytes: int(m.GetElemBytes()), Latent: m.GetLatent()}
	s.Split = kv.Split{TP: int(m.GetTp()), PP: int(m.GetPp()), PageTokens: int(m.GetPageTokens()), HeadsFirst: m.GetHeadsFirst()}
	if err := s.Validate(); err != nil {
		return s, "shards: " + err.Error()
	}
	return s, ""
}

// fromShards is the inverse.
func fromShards(s kv.Shards) *pb.Shards {
	if s == (kv.Shards{}) {
		return nil
	}
	return &pb.Shards{
		Layers: int64(s.Layers), KvHeads: int64(s.KVHeads), HeadDim: int64(s.HeadDim), ElemBytes: int64(s.ElemBytes), Latent: s.Latent,
		Tp: int64(s.TP), Pp: int64(s.PP), PageTokens: int64(s.PageTokens), HeadsFirst: s.HeadsFirst,
	}
}

func fromIdentity(id Identity) *pb.Identity {
	return &pb.Identity{WorkerId: clip(id.WorkerID, maxID), Epoch: id.Epoch, Fingerprint: &pb.Fingerprint{
		Engine: clip(id.Engine, maxField), ModelDigest: clip(id.ModelDigest, maxField), KvLayout: clip(id.KVLayout, maxField),
		Attention: clip(id.Attention, maxField), ChunkTokens: int64(id.ChunkTokens),
	}, Shards: fromShards(id.Shards)}
}

// hello is a checked [pb.Hello].
type hello struct {
	session transfer.SessionID
	client  Identity
	offers  []transfer.Descriptor
	wait    time.Duration // how long the client waits for the answer; > 0
}

// toHello checks the form, not whether the two workers fit together.
func toHello(m *pb.Hello) (hello, error) {
	h := hello{session: transfer.SessionID(m.GetSessionId()), wait: time.Duration(m.GetWaitNs())}
	id, what := toIdentity(m.GetIdentity())
	h.client = id
	switch {
	case what != "":
		return h, fmt.Errorf("hello: %s", what)
	case h.session == 0:
		return h, fmt.Errorf("hello: session_id is 0")
	case h.wait <= 0 || h.wait > maxTimeout:
		return h, fmt.Errorf("hello: wait of %v is not between 0 and %v", h.wait, maxTimeout)
	case len(m.GetOffers()) > maxOffers:
		return h, fmt.Errorf("hello: %d offers are more than %d", len(m.GetOffers()), maxOffers)
	}
	for _, o := range m.GetOffers() {
		if len(o.GetMeta()) > maxMeta {
			return h, fmt.Errorf("hello: offer %q has %d meta entries, more than %d", clip(o.GetKind(), maxID), len(o.GetMeta()), maxMeta)
		}
		d := transfer.Descriptor{Kind: o.GetKind(), Addr: o.GetAddr(), Host: o.GetHost(), Size: o.GetSize()}
		if o.GetMeta() != nil {
			d.Meta = make(map[string]string, len(o.GetMeta()))
			for k, v := range o.GetMeta() {
				d.Meta[k] = string(v)
			}
		}
		h.offers = append(h.offers, d)
	}
	return h, nil
}

// fromHello is the inverse.
func fromHello(h hello) *pb.Hello {
	m := &pb.Hello{ProtocolVersion: ProtocolVersion, SessionId: uint64(h.session), Identity: fromIdentity(h.client), WaitNs: int64(h.wait)}
	for _, d := range h.offers {
		o := &pb.Descriptor{Kind: clip(d.Kind, maxID), Addr: clip(d.Addr, maxField), Host: clip(d.Host, maxField), Size: d.Size}
		if d.Meta != nil {
			o.Meta = make(map[string][]byte, len(d.Meta))
			for k, v := range d.Meta {
				o.Meta[k] = []byte(v)
			}
		}
		m.Offers = append(m.Offers, o)
	}
	return m
}
