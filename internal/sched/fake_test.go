package sched

import (
	"context"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// fakeHubs is both hubs in one memory: a room is one object with two ends. A chunk
// lands the moment it is sent, in memory of its own, unless hold says otherwise. Staging
// is bounded. It keeps count of everything, so that tests can compare with zero.
type fakeHubs struct {
	mu       sync.Mutex
	rooms    map[room.Key]*fakeRoom
	staging  int           // chunks that may be staged at a time
	freed    chan struct{} // closed and replaced when staging returns
	staged   int           // staging chunks out
	landing  int           // receivers not released
	openErr  error         // of either Open
	bufErr   error         // of Buffer
	noGrant  bool          // receivers never grant
	hold     bool          // chunks do not land until flow is called
	lag      time.Duration // by how much rooms have ended before who waits for it hears so
	corrupt  func(key room.Key, i int, b []byte)
	sent     []room.Key // order of Send
	waitings int        // Buffer calls that had to wait
	parted   []fakePart // every SendPart
}

func newFakeHubs() *fakeHubs {
	return &fakeHubs{rooms: map[room.Key]*fakeRoom{}, staging: 4, freed: make(chan struct{})}
}

// fakePart is one call of SendPart.
type fakePart struct {
	key   room.Key
	chunk int
	at    time.Time
}

type fakeRoom struct {
	h              *fakeHubs
	key            room.Key
	sizes          []int
	granted, done  chan struct{}
	landed         chan int
	state          room.State
	ended          time.Time
	cause          *room.Cause
	stage, dest    [][]byte
	parts          []byte // bytes of the chunk that is being sent in parts
	named          int    // how many of them
	sender, recver bool   // opened
	digest         [2]uint64
	held           []int // sent chunks that have not landed
	isGranted      bool
}

// get finds or makes a room; h.mu is held.
func (h *fakeHubs) get(k room.Key, sizes []int) *fakeRoom {
	r := h.rooms[k]
	if r == nil {
		r = &fakeRoom{h: h, key: k, sizes: sizes, granted: make(chan struct{}), done: make(chan struct{}), landed: make(chan int, len(sizes)),
			state: room.StateBootstrapping, stage: make([][]byte, len(sizes)), dest: make([][]byte, len(sizes))}
		h.rooms[k] = r
	}
	return r
}

func (h *fakeHubs) settle(r *fakeRoom) {
	if r.sender && r.recver && !h.noGrant && !r.isGranted && !r.state.Terminal() {
		r.isGranted = true
		r.state = room.StateWaitingForInput
		close(r.granted)
		if r.digest[0] != r.digest[1] {
			r.end(&room.Cause{Code: room.CodeMismatch, Detail: "prompts differ"})
		}
	}
}

// end makes r terminal; h.mu is held.
func (r *fakeRoom) end(c *room.Cause) {
	if r.state.Terminal() {
		return
	}
	r.state, r.cause, r.ended = room.StateSuccess, c, time.Now().Add(-r.h.lag)
	if c != nil {
		r.state = room.StateFailed
	}
	if !r.isGranted {
		r.isGranted = true
		close(r.granted)
	}
	close(r.landed)
	close(r.done)
}

type fakeSenders struct{ *fakeHubs }

func (s fakeSenders) Open(o transfer.OpenSender) (transfer.Sending, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.openErr != nil {
		return nil, s.openErr
	}
	r := s.get(o.Key, o.Chunks)
	if r.sender {
		return nil, &room.Cause{Code: room.CodeDuplicate, Detail: "room is in use"}
	}
	r.sender, r.digest[0] = true, o.Digest
	s.settle(r)
	return &fakeSending{r}, nil
}

type fakeReceivers struct{ *fakeHubs }

func (s fakeReceivers) Open(o transfer.OpenReceiver) (transfer.Receiving, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.openErr != nil {
		return nil, s.openErr
	}
	r := s.get(o.Key, o.Chunks)
	if r.recver {
		return nil, &room.Cause{Code: room.CodeDuplicate, Detail: "room is in use"}
	}
	r.recver, r.digest[1] = true, o.Digest
	s.landing++
	s.settle(r)
	return &fakeReceiving{fakeRoom: r}, nil
}

func (r *fakeRoom) Granted() <-chan struct{} { return r.granted }
func (r *fakeRoom) Done() <-chan struct{}    { return r.done }
func (r *fakeRoom) State() room.State {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	return r.state
}

func (r *fakeRoom) Ended() time.Time {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	return r.ended
}

func (r *fakeRoom) Err() error {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	if r.cause == nil {
		return nil
	}
	return r.cause
}

func (r *fakeRoom) Cancel(c *room.Cause) {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	r.end(c)
}

type fakeSending struct{ *fakeRoom }

func (s *fakeSending) Buffer(ctx context.Context, i int) ([][]byte, error) {
	h := s.h
	for first := true; ; first = false {
		h.mu.Lock()
		if s.state.Terminal() {
			defer h.mu.Unlock()
			return nil, s.cause
		}
		if h.bufErr != nil {
			defer h.mu.Unlock()
			return nil, h.bufErr
		}
		if h.staged < h.staging {
			h.staged++
			s.stage[i] = make([]byte, s.sizes[i])
			b := s.stage[i]
			h.mu.Unlock()
			return [][]byte{b[:len(b)/3], b[len(b)/3:]}, nil
		}
		if first {
			h.waitings++
		}
		freed := h.freed
		h.mu.Unlock()
		select {
		case <-freed:
		case <-s.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// unstage returns the staging of chunk i; h.mu is held.
func (s *fakeSending) unstage(i int) []byte {
	b := s.stage[i]
	if b == nil {
		return nil
	}
	s.stage[i] = nil
	s.h.staged--
	close(s.h.freed)
	s.h.freed = make(chan struct{})
	return b
}

func (s *fakeSending) Send(i int) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.h.sent = append(s.h.sent, s.key)
	if s.stage[i] == nil {
		panic("sent without a buffer")
	}
	if s.state.Terminal() {
		s.unstage(i)
		return
	}
	s.state = room.StateTransferring
	s.held = append(s.held, i)
	if !s.h.hold {
		s.land()
	}
}

// SendPart keeps the bytes as they are now. The last part panics if not every byte was named once or one has changed since.
func (s *fakeSending) SendPart(i int, bytes []transfer.Span, last bool) {
	s.h.mu.Lock()
	b := s.stage[i]
	if b == nil {
		panic("a part was sent without a buffer")
	}
	if s.parts == nil {
		s.parts, s.named = make([]byte, len(b)), 0
	}
	for _, r := range bytes {
		s.named += copy(s.parts[r.Off:r.Off+r.Len], b[r.Off:r.Off+r.Len])
	}
	s.h.parted = append(s.h.parted, fakePart{s.key, i, time.Now()})
	if !s.state.Terminal() {
		s.state = room.StateTransferring
	}
	if !last {
		s.h.mu.Unlock()
		return
	}
	if !s.state.Terminal() && (s.named != len(b) || string(s.parts) != string(b)) {
		panic("the parts are not the chunk")
	}
	s.parts = nil
	s.h.mu.Unlock()
	s.Send(i)
}

// land applies what was sent; h.mu is held.
func (s *fakeSending) land() {
	for _, i := range s.held {
		b := s.unstage(i)
		if s.state.Terminal() {
			continue
		}
		if s.h.corrupt != nil {
			s.h.corrupt(s.key, i, b)
		}
		s.dest[i] = b
		s.landed <- i
		if i == len(s.sizes)-1 {
			s.end(nil)
		}
	}
	s.held = nil
}

// flow lands one held chunk of room k.
func (h *fakeHubs) flow(k room.Key) {
	h.mu.Lock()
	defer h.mu.Unlock()
	(&fakeSending{h.rooms[k]}).land()
}

func (s *fakeSending) Drop(i int, c *room.Cause) {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.unstage(i)
	s.end(c)
}

func (s *fakeSending) Release() {
	s.h.mu.Lock()
	defer s.h.mu.Unlock()
	s.end(&room.Cause{Code: room.CodeAborted, Detail: "released"})
	for i := range s.stage {
		s.unstage(i)
	}
	s.sender = false
	s.drop()
}

// drop forgets a room that both ends have released; h.mu is held.
func (r *fakeRoom) drop() {
	if !r.sender && !r.recver {
		delete(r.h.rooms, r.key)
	}
}

type fakeReceiving struct {
	*fakeRoom
	released bool
}

func (r *fakeReceiving) Landed() <-chan int { return r.landed }

// Chunk panics after Release, and Release scribbles over the memory: use after release is found.
func (r *fakeReceiving) Chunk(i int) [][]byte {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	if r.released {
		panic("chunk of a released room")
	}
	b := r.dest[i]
	return [][]byte{b[:len(b)/2], b[len(b)/2:]}
}

func (r *fakeReceiving) Release() {
	r.h.mu.Lock()
	defer r.h.mu.Unlock()
	if r.released {
		panic("released twice")
	}
	r.released = true
	r.end(&room.Cause{Code: room.CodeAborted, Detail: "released"})
	for _, b := range r.dest {
		for i := range b {
			b[i] = 0xee
		}
	}
	r.h.landing--
	r.recver = false
	r.drop()
}
