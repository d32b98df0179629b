package sglang

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// First frames of the control messages.
const (
	tagGuard     = "NixlMsgGuard"
	tagStatus    = "KV_STATUS"
	tagAbort     = "ABORT"
	tagAbortAck  = "ABORT_ACK"
	tagBootstrap = "BOOTSTRAP"

	registrationRoom = "None" // second frame of a registration, where metadata have their room
)

// Words that only fleets with features use which Baton does not have; ignored as the real peers ignore
// them when the feature is off.
var ignoredTags = map[string]bool{"STAGING_REQ": true, "STAGING_RSP": true, "CHUNK_READY": true, "WATERMARK": true}

var (
	// ErrForeign: the first frame is none of the protocol's.
	ErrForeign = errors.New("sglang: foreign message")
	// ErrIgnored: a message of a feature that is off here.
	ErrIgnored = errors.New("sglang: message of a feature that is not in use")
	// ErrMalformed: the first frame is known, the rest is not as it must be.
	ErrMalformed = errors.New("sglang: malformed message")
)

// Endpoint is where a manager's PULL socket listens.
type Endpoint struct {
	IP   string // textual address, IPv6 without brackets
	Port int
}

// Addr is host:port for dialling.
func (e Endpoint) Addr() string {
	if strings.Contains(e.IP, ":") {
		return fmt.Sprintf("[%s]:%d", e.IP, e.Port)
	}
	return fmt.Sprintf("%s:%d", e.IP, e.Port)
}

// MemKind of a KV buffer at the decode side.
type MemKind string

const (
	DRAM MemKind = "DRAM" // host memory
	VRAM MemKind = "VRAM" // of the registration's GPU
)

// Registration is a decode manager's description of its memory, sent once to each prefill rank.
type Registration struct {
	Endpoint
	Agent    string // NIXL agent name
	Metadata []byte // NIXL agent metadata
	KV       []uint64
	Aux      []uint64
	State    [][]uint64
	GPU      int
	TPSize   int
	TPRank   int
	ItemLen  uint64 // bytes a page of KV buffer 0
	// Per state component, all optional.
	StateItemLens, StateDims, StateLayers [][]uint32
	StateLens                             [][]uint64
	StagingBase, StagingSize              uint64 // 0: no staging
	Slots                                 int    // page slots a KV buffer
	Kinds                                 []MemKind
	ItemLens                              []uint64
	Layers                                []uint32
	DCPSize, DCPRank                      int

	// Frames is how many came, guard included; it tells the release (see dialect.go).
	Frames int
}

// Metadata is a decode side's permission to write: one room's pages.
type Metadata struct {
	Room uint64
	Endpoint
	Agent    string
	Pages    []int32
	Aux      int // aux slot
	Required int // decode ranks that will send metadata for this room
	State    [][]int32
	Prefix   int // tokens that the decode side has already
	Dummy    bool
}

// Status tells the decode side how a room has ended at a prefill rank.
type Status struct {
	Room   uint64
	Status int // KVPoll: 0 failed, 4 success
	Rank   int // prefill_unique_rank
	Reason string
}

// Abort is the decode side's end of a room. Without an endpoint nobody waits for an ack; without
// a generation neither.
type Abort struct {
	Room uint64
	Endpoint
	Gen    uint64
	HasGen bool
}

// AbortAck answers an Abort: no write of that room is or will be outstanding.
type AbortAck struct {
	Room uint64
	Rank int
	Gen  uint64
}

// Encode is the message; the caller must not change slices of r before it is sent.
func (r *Registration) Encode() zmtp.Message {
	kinds := make([]string, len(r.Kinds))
	for i, k := range r.Kinds {
		kinds[i] = string(k)
	}
	staging, size := []byte{}, []byte{}
	if r.StagingBase != 0 || r.StagingSize != 0 {
		staging, size = pack([]uint64{r.StagingBase}), decimal(r.StagingSize)
	}
	return zmtp.Message{
		[]byte(tagGuard), []byte(registrationRoom), []byte(r.IP), decimal(uint64(r.Port)), []byte(r.Agent), r.Metadata,
		pack(r.KV), pack(r.Aux), packLists(r.State), decimal(uint64(r.GPU)), decimal(uint64(r.TPSize)), decimal(uint64(r.TPRank)),
		decimal(r.ItemLen), packLists(r.StateItemLens), packLists(r.StateDims), staging, size,
		decimal(uint64(r.Slots)), []byte(strings.Join(kinds, ",")), pack(r.ItemLens), packLists(r.StateLayers), pack(r.Layers),
		decimal(uint64(r.DCPSize)), decimal(uint64(r.DCPRank)), packLists(r.StateLens),
	}
}

// Encode is the message.
func (m *Metadata) Encode() zmtp.Message {
	dummy := uint64(0)
	if m.Dummy {
		dummy = 1
	}
	return zmtp.Message{
		[]byte(tagGuard), decimal(m.Room), []byte(m.IP), decimal(uint64(m.Port)), []byte(m.Agent), pack(m.Pages),
		decimal(uint64(m.Aux)), decimal(uint64(m.Required)), packLists(m.State), decimal(uint64(m.Prefix)), decimal(dummy),
	}
}

// Encode is the message.
func (s *Status) Encode() zmtp.Message {
	return zmtp.Message{[]byte(tagStatus), decimal(s.Room), decimal(uint64(s.Status)), decimal(uint64(s.Rank)), []byte(s.Reason)}
}

// Encode is the message, as short as what is set allows.
func (a *Abort) Encode() zmtp.Message {
	m := zmtp.Message{[]byte(tagAbort), decimal(a.Room)}
	if a.IP != "" {
		m = append(m, []byte(a.IP), decimal(uint64(a.Port)))
		if a.HasGen {
			m = append(m, decimal(a.Gen))
		}
	}
	return m
}

// Encode is the message.
func (a *AbortAck) Encode() zmtp.Message {
	return zmtp.Message{[]byte(tagAbortAck), decimal(a.Room), decimal(uint64(a.Rank)), decimal(a.Gen)}
}

func decimal(v uint64) []byte { return strconv.AppendUint(nil, v, 10) }

// DecodeMessage reads any message: *Registration, *Metadata, *Status, *Abort, *AbortAck, or an error that is
// ErrForeign, ErrIgnored or ErrMalformed. It is total and keeps no reference to m.
func DecodeMessage(m zmtp.Message) (any, error) {
	if len(m) == 0 {
		return nil, ErrForeign
	}
	f := frames{m: m}
	var out any
	switch tag := string(m[0]); {
	case tag == tagGuard && len(m) > 1 && string(m[1]) == registrationRoom:
		out = f.registration()
	case tag == tagGuard:
		out = f.metadata()
	case tag == tagStatus:
		out = f.status()
	case tag == tagAbort:
		out = f.abort()
	case tag == tagAbortAck:
		out = f.ack()
	case tag == tagBootstrap:
		return nil, fmt.Errorf("%w: %s (allocation policy prefill_complete)", ErrIgnored, tag)
	case ignoredTags[tag]:
		return nil, fmt.Errorf("%w: %s", ErrIgnored, tag)
	default:
		return nil, fmt.Errorf("%w: first frame %.40q", ErrForeign, tag)
	}
	if f.err != nil {
		return nil, fmt.Errorf("%w: %.12s: %w", ErrMalformed, m[0], f.err)
	}
	return out, nil
}

// frames reads the frames of a message by number; the first error stays.
type frames struct {
	m   zmtp.Message
	err error
}

func (f *frames) fail(i int, err error) {
	if f.err == nil {
		f.err = fmt.Errorf("frame %d: %w", i, err)
	}
}

// has reports an optional frame that is there and not empty.
func (f *frames) has(i int) bool { return i < len(f.m) && len(f.m[i]) > 0 }

// raw is frame i, which must be there.
func (f *frames) raw(i int) []byte {
	if i >= len(f.m) {
		f.fail(i, fmt.Errorf("missing, only %d came", len(f.m)))
		return nil
	}
	return f.m[i]
}

// text bounds what goes into logs and maps.
func (f *frames) text(i, limit int) string {
	b := f.raw(i)
	if len(b) > limit {
		f.fail(i, fmt.Errorf("text of %d bytes, limit %d", len(b), limit))
		return ""
	}
	return string(b)
}

// num is frame i as a decimal number of at most limit.
func (f *frames) num(i int, limit uint64) uint64 {
	b := f.raw(i)
	if len(b) > 20 || len(b) > 0 && (b[0] < '0' || b[0] > '9') {
		f.fail(i, fmt.Errorf("not a number: %.30q", b))
		return 0
	}
	v, err := strconv.ParseUint(string(b), 10, 64)
	if f.err == nil && (err != nil || v > limit) {
		f.fail(i, fmt.Errorf("not a number up to %d: %.30q", limit, b))
		return 0
	}
	return v
}

func (f *frames) int(i int) int { return int(f.num(i, math.MaxInt32)) }

func (f *frames) room(i int) uint64 { return f.num(i, math.MaxInt64) }

func (f *frames) endpoint(i int) Endpoint {
	e := Endpoint{IP: f.text(i, 64), Port: int(f.num(i+1, math.MaxUint16))}
	if _, err := netip.ParseAddr(e.IP); err != nil && f.err == nil {
		f.fail(i, fmt.Errorf("not an address: %.40q", e.IP))
	}
	if e.Port == 0 && f.err == nil {
		f.fail(i+1, errors.New("port 0"))
	}
	return e
}

// array and lists read optional packed frames.
func array[T number](f *frames, i int) []T {
	if !f.has(i) {
		return nil
	}
	v, err := unpack[T](f.m[i])
	if err != nil {
		f.fail(i, err)
	}
	return v
}

func lists[T number](f *frames, i int) [][]T {
	if !f.has(i) {
		return nil
	}
	v, err := unpackLists[T](f.m[i])
	if err != nil {
		f.fail(i, err)
	}
	return v
}

// maxBuffers bounds the KV and aux buffers of a registration.
const maxBuffers = 1 << 14

func (f *frames) registration() *Registration {
	r := &Registration{
		Frames: len(f.m), Endpoint: f.endpoint(2), Agent: f.text(4, 256), Metadata: append([]byte(nil), f.raw(5)...),
		KV: array[uint64](f, 6), Aux: array[uint64](f, 7), State: lists[uint64](f, 8),
		GPU: f.int(9), TPSize: f.int(10), TPRank: f.int(11), ItemLen: f.num(12, math.MaxInt64), DCPSize: 1,
		StateItemLens: lists[uint32](f, 13), StateDims: lists[uint32](f, 14), ItemLens: array[uint64](f, 19),
		StateLayers: lists[uint32](f, 20), Layers: array[uint32](f, 21), StateLens: lists[uint64](f, 24),
	}
	if r.Agent == "" {
		f.fail(4, errors.New("no agent name"))
	}
	if f.has(15) {
		if b := array[uint64](f, 15); len(b) == 1 {
			r.StagingBase = b[0]
		} else {
			f.fail(15, errors.New("staging address is not 8 bytes"))
		}
	}
	if f.has(16) {
		r.StagingSize = f.num(16, math.MaxInt64)
	}
	if f.has(17) {
		r.Slots = f.int(17)
	}
	if f.has(22) {
		r.DCPSize = f.int(22)
	}
	if f.has(23) {
		r.DCPRank = f.int(23)
	}
	f.kinds(r)
	if len(r.KV) > maxBuffers || len(r.Aux) > maxBuffers {
		f.fail(6, fmt.Errorf("%d KV and %d aux buffers, limit %d", len(r.KV), len(r.Aux), maxBuffers))
	}
	if len(r.ItemLens) == 0 {
		for range r.KV {
			r.ItemLens = append(r.ItemLens, r.ItemLen)
		}
	} else if len(r.ItemLens) != len(r.KV) {
		f.fail(19, fmt.Errorf("%d item lengths for %d KV buffers", len(r.ItemLens), len(r.KV)))
	}
	return r
}

// kinds reads frame 18; without it every buffer is VRAM.
func (f *frames) kinds(r *Registration) {
	if !f.has(18) {
		for range min(len(r.KV), maxBuffers) {
			r.Kinds = append(r.Kinds, VRAM)
		}
		return
	}
	if len(f.m[18]) > 5*maxBuffers {
		f.fail(18, errors.New("too long"))
		return
	}
	for s := range strings.SplitSeq(string(f.m[18]), ",") {
		if k := MemKind(s); k == DRAM || k == VRAM {
			r.Kinds = append(r.Kinds, k)
			continue
		}
		f.fail(18, fmt.Errorf("memory kind %.20q", s))
		return
	}
	if len(r.Kinds) != len(r.KV) {
		f.fail(18, fmt.Errorf("%d memory kinds for %d KV buffers", len(r.Kinds), len(r.KV)))
	}
}

func (f *frames) metadata() *Metadata {
	m := &Metadata{
		Room: f.room(1), Endpoint: f.endpoint(2), Agent: f.text(4, 256), Pages: array[int32](f, 5), Aux: f.int(6), Required: f.int(7),
		State: lists[int32](f, 8),
	}
	f.raw(5)
	if f.has(9) {
		m.Prefix = f.int(9)
	}
	switch {
	case f.has(10):
		m.Dummy = f.num(10, 1) == 1
	default:
		m.Dummy = len(m.Pages) == 0 && m.Prefix == 0
	}
	for _, p := range m.Pages {
		if p < 0 {
			f.fail(5, fmt.Errorf("page %d", p))
			break
		}
	}
	return m
}

// maxReason bounds the text of a failure that is kept.
const maxReason = 4096

func (f *frames) status() *Status {
	s := &Status{Room: f.room(1), Status: f.int(2), Rank: f.int(3)}
	if f.has(4) {
		s.Reason = strings.ToValidUTF8(string(f.m[4][:min(len(f.m[4]), maxReason)]), "?")
	}
	return s
}

func (f *frames) abort() *Abort {
	a := &Abort{Room: f.room(1)}
	if len(f.m) > 2 {
		a.Endpoint = f.endpoint(2)
	}
	if len(f.m) > 4 {
		a.Gen, a.HasGen = f.num(4, math.MaxUint64), true
	}
	return a
}

func (f *frames) ack() *AbortAck {
	return &AbortAck{Room: f.room(1), Rank: f.int(2), Gen: f.num(3, math.MaxUint64)}
}
