package transfertest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// landing is one call of Sink.Landed.
type landing struct {
	grant  transfer.GrantID
	notify string
}

// sink records what a target tells.
type sink struct {
	// gate, if set, runs inside Landed before the call is recorded. Set before Listen.
	gate func(transfer.GrantID, []byte)

	mu      sync.Mutex
	landed  []landing
	fenced  map[transfer.SessionID]int
	revoked map[transfer.GrantID]int
	changed chan struct{} // closed and replaced on every change
}

func (s *sink) Landed(g transfer.GrantID, notify []byte) {
	if s.gate != nil {
		s.gate(g, notify)
	}
	s.change(func() { s.landed = append(s.landed, landing{g, string(notify)}) })
}

func (s *sink) Fenced(id transfer.SessionID) { s.change(func() { s.fenced[id]++ }) }

// Revoked makes the sink a transfer.RevokeSink.
func (s *sink) Revoked(g transfer.GrantID) { s.change(func() { s.revoked[g]++ }) }

func (s *sink) change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	close(s.changed)
	s.changed = make(chan struct{})
}

// await waits until ok, called under mu, is true.
func (s *sink) await(t *testing.T, what string, ok func() bool) {
	t.Helper()
	late := time.After(patience)
	for {
		s.mu.Lock()
		yes, changed := ok(), s.changed
		s.mu.Unlock()
		if yes {
			return
		}
		select {
		case <-changed:
		case <-late:
			t.Fatalf("never came: %s", what)
		}
	}
}

func (s *sink) landedOf(g transfer.GrantID) (n int) {
	for _, l := range s.landed {
		if l.grant == g {
			n++
		}
	}
	return n
}

// landings is a copy of what landed under g so far.
func (s *sink) landings(g transfer.GrantID) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ns []string
	for _, l := range s.landed {
		if l.grant == g {
			ns = append(ns, l.notify)
		}
	}
	return ns
}

func (s *sink) fencedOf(id transfer.SessionID) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fenced[id]
}

// outcome is the end of one accepted write.
type outcome struct {
	name  string
	calls atomic.Int32
	ended chan struct{} // closed by the first Done
	err   error         // after ended
}

func (o *outcome) done(err error) {
	if o.calls.Add(1) == 1 {
		o.err = err
		close(o.ended)
	}
}

// wait returns what Done was told.
func (o *outcome) wait(t *testing.T) error {
	t.Helper()
	select {
	case <-o.ended:
		return o.err
	case <-time.After(patience):
		t.Fatalf("never came: Done of %s", o.name)
		return nil
	}
}

// rig is one target with its memory and the peers that write to it. Its cleanup closes
// everything and checks what holds for every test: each accepted write was Done
// exactly once and each opened session was Fenced exactly once.
type rig struct {
	t      *testing.T
	o      Options
	rng    *rand.Rand
	bytes  *rand.ChaCha8
	mem    []byte
	sink   *sink
	target transfer.Target
	source transfer.Transport

	mu       sync.Mutex
	outcomes []*outcome
	peers    []transfer.Peer
	sessions []transfer.SessionID
	fenced   map[transfer.GrantID]bool // Revoke has returned true
	last     uint64                    // grants and sessions
	tick     chan struct{}             // closed and replaced on every Done

	targetGone bool // the test has closed the target
}

// newRig makes a target over n bytes of random content. gate may be nil.
func newRig(t *testing.T, o Options, n int, gate func(transfer.GrantID, []byte)) *rig {
	t.Helper()
	seed := rand.Uint64()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("seed %d", seed)
		}
	})
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	r := &rig{
		t: t, o: o, rng: rand.New(rand.NewPCG(seed, 1)), bytes: rand.NewChaCha8(key), last: seed >> 16, tick: make(chan struct{}), fenced: make(map[transfer.GrantID]bool),
		sink: &sink{gate: gate, fenced: make(map[transfer.SessionID]int), revoked: make(map[transfer.GrantID]int), changed: make(chan struct{})},
	}
	m := r.memory(n)
	r.mem = m.Bytes
	r.fill(r.mem)
	target, source := o.New(t)
	r.source = source
	tgt, err := target.Listen(m, r.sink)
	if err != nil {
		t.Fatalf("listen: %v", err)
	}
	r.target = tgt
	t.Cleanup(r.close)
	return r
}

func (r *rig) memory(n int) transfer.Memory {
	if r.o.Memory != nil {
		return r.o.Memory(r.t, n)
	}
	p, err := kv.Open(kv.Config{Name: "conformance", PageBytes: 4096, Pages: (n + 4095) / 4096})
	if err != nil {
		r.t.Fatalf("open memory: %v", err)
	}
	r.t.Cleanup(func() {
		if err := p.Close(); err != nil {
			r.t.Errorf("close memory: %v", err)
		}
	})
	b, fd := p.Memory()
	return transfer.Memory{Bytes: b, FD: fd}
}

func (r *rig) fill(b []byte) { _, _ = r.bytes.Read(b) } // never fails

// random is n fresh random bytes.
func (r *rig) random(n int) []byte {
	b := make([]byte, n)
	r.fill(b)
	return b
}

// within runs f and fails the test if it does not return in time.
func (r *rig) within(what string, f func()) {
	r.t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
		r.t.Fatalf("did not return: %s", what)
	}
}

func (r *rig) close() {
	for _, p := range r.peers {
		r.within("Peer.Close", func() {
			if err := p.Close(); err != nil {
				r.t.Errorf("close peer: %v", err)
			}
		})
	}
	for _, o := range r.outcomes {
		o.wait(r.t)
	}
	if !r.targetGone {
		for _, s := range r.sessions {
			r.target.CloseSession(s)
		}
		for _, s := range r.sessions {
			r.awaitFenced(s)
		}
		r.closeTarget()
	}
	for _, o := range r.outcomes {
		if n := o.calls.Load(); n != 1 {
			r.t.Errorf("%s: Done called %d times", o.name, n)
		}
	}
	for g, n := range r.sink.revoked { // also for grants that CloseSession revoked
		if n > 1 || r.o.Caps.Fences || r.fenced[g] {
			r.t.Errorf("grant %d: Revoked called %d times, fenced at once: %v", g, n, r.fenced[g])
		}
	}
	for _, s := range r.sessions {
		n := r.sink.fencedOf(s)
		if n > 1 || n == 0 && (r.o.Caps.Fences || !r.targetGone) {
			r.t.Errorf("session %d: Fenced called %d times", s, n)
		}
	}
}

func (r *rig) closeTarget() {
	r.t.Helper()
	r.within("Target.Close", func() {
		if err := r.target.Close(); err != nil {
			r.t.Errorf("close target: %v", err)
		}
	})
}

func (r *rig) awaitFenced(s transfer.SessionID) {
	r.t.Helper()
	r.sink.await(r.t, fmt.Sprintf("Fenced of session %d", s), func() bool { return r.sink.fenced[s] > 0 })
}

// revoke revokes g and returns whether it was fenced at once. A fencing transport must say so.
func (r *rig) revoke(g transfer.GrantID) (fenced bool) {
	r.t.Helper()
	r.within("Revoke", func() { fenced = r.target.Revoke(g) })
	if r.o.Caps.Fences && !fenced {
		r.t.Error("Revoke of a fencing transport is not fenced")
	}
	if fenced {
		r.fenced[g] = true
	}
	return fenced
}

// awaitRevoked waits for the word that a live writer has left grant g.
func (r *rig) awaitRevoked(g transfer.GrantID) {
	r.t.Helper()
	r.sink.await(r.t, fmt.Sprintf("Revoked of grant %d", g), func() bool { return r.sink.revoked[g] > 0 })
}

func (r *rig) next() uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last++
	return r.last
}

// open opens a fresh session without a connection.
func (r *rig) open() transfer.SessionID {
	r.t.Helper()
	s := transfer.SessionID(r.next())
	if err := r.target.OpenSession(s); err != nil {
		r.t.Fatalf("open session: %v", err)
	}
	r.sessions = append(r.sessions, s)
	return s
}

// dial connects to a fresh session.
func (r *rig) dial() (transfer.Peer, transfer.SessionID) {
	r.t.Helper()
	s := r.open()
	ctx, cancel := context.WithTimeout(r.t.Context(), patience)
	defer cancel()
	p, err := r.source.Dial(ctx, r.target.Descriptor(), s)
	if err != nil {
		r.t.Fatalf("dial: %v", err)
	}
	r.peers = append(r.peers, p)
	return p, s
}

// allow makes a fresh grant live.
func (r *rig) allow(s transfer.SessionID, spans ...transfer.Span) transfer.Grant {
	r.t.Helper()
	id := r.next()
	g := transfer.Grant{ID: transfer.GrantID(id), Key: room.Key{Room: id, Gen: 7}, Session: s, Spans: spans}
	if err := r.target.Allow(g); err != nil {
		r.t.Fatalf("allow: %v", err)
	}
	return g
}

// offer posts w once. The outcome is nil exactly if Post refused.
func (r *rig) offer(p transfer.Peer, name string, w transfer.Write) (*outcome, error) {
	o := &outcome{name: name, ended: make(chan struct{})}
	w.Done = func(err error) {
		o.done(err)
		r.mu.Lock()
		defer r.mu.Unlock()
		close(r.tick)
		r.tick = make(chan struct{})
	}
	if err := p.Post(w); err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.outcomes = append(r.outcomes, o)
	r.mu.Unlock()
	return o, nil
}

// ticker is closed at the next Done; get it before Post.
func (r *rig) ticker() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.tick
}

// post posts w, again after some Done as long as the queue is full. Errors other than
// ErrBusy come as an outcome, so that it does not matter where a transport refuses.
func (r *rig) post(p transfer.Peer, name string, w transfer.Write) *outcome {
	late := time.After(patience)
	for {
		tick := r.ticker()
		o, err := r.offer(p, name, w)
		if err == nil {
			return o
		}
		if !errors.Is(err, transfer.ErrBusy) {
			o = &outcome{name: name, ended: make(chan struct{})}
			o.done(err)
			return o
		}
		select {
		case <-tick:
		case <-late:
			o = &outcome{name: name, ended: make(chan struct{})}
			o.done(fmt.Errorf("%s: still busy after %v", name, patience))
			return o
		}
	}
}

// write makes a Write under g.
func write(g transfer.Grant, notify string, segs ...transfer.Segment) transfer.Write {
	w := transfer.Write{Grant: g.ID, Key: g.Key, Segments: segs}
	if notify != "" {
		w.Notify = []byte(notify)
	}
	return w
}

// must posts w and wants it applied.
func (r *rig) must(p transfer.Peer, name string, w transfer.Write) {
	r.t.Helper()
	if err := r.post(p, name, w).wait(r.t); err != nil {
		r.t.Fatalf("%s: %v", name, err)
	}
}

// same fails if the memory is not as want says.
func (r *rig) same(when string, want []byte) {
	r.t.Helper()
	if bytes.Equal(r.mem, want) {
		return
	}
	bad := 0
	first := -1
	for i := range want {
		if r.mem[i] != want[i] {
			bad++
			if first < 0 {
				first = i
			}
		}
	}
	r.t.Fatalf("%s: %d bytes differ, the first at %d", when, bad, first)
}

// snapshot copies the memory.
func (r *rig) snapshot() []byte { return slices.Clone(r.mem) }

// whole is a span over all memory.
func (r *rig) whole() transfer.Span { return transfer.Span{Off: 0, Len: uint64(len(r.mem))} }
