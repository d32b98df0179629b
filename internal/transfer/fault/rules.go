package fault

import (
	"context"
	"encoding/binary"
	"errors"
	"hash/fnv"
	"sync"
	"syscall"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// ErrInjected is in the chain of every error that a rule made.
var ErrInjected = errors.New("fault: injected")

// injected is an error of a rule: its text is the rule's, and it also matches
// transfer.ErrPeerLost, as the failures that it plays do.
type injected struct{ text string }

func (e *injected) Error() string { return "fault: injected: " + e.text }
func (e *injected) Is(target error) bool {
	return target == ErrInjected || target == transfer.ErrPeerLost
}

// op is what a rule listens to.
type op string

const (
	opPost   op = "post"
	opDone   op = "done"
	opLanded op = "landed"
	opFenced op = "fenced"
	opRevoke op = "revoke"
	opDial   op = "dial"
)

// action is what a rule does.
type action string

const (
	actStall    action = "stall"
	actHold     action = "hold" // of done; "post ... hold-applied" is parsed into it
	actHalfway  action = "halfway"
	actDrop     action = "drop"
	actError    action = "error"
	actBusy     action = "busy"
	actCorrupt  action = "corrupt"
	actUnfenced action = "unfenced"
	actRate     action = "rate"
)

// rule is one line. It is constant after Parse except for the counters, which Rules.mu guards.
type rule struct {
	line int
	op   op
	kind string // "" for any

	room    uint64
	rooms   roomSel
	gen     uint32
	genSet  bool
	first   uint64 // nth: first <= n <= last; 0, 0 if not given
	last    uint64
	prob    float64 // < 0 if not given
	seed    uint64
	act     action
	gate    string        // until=
	hold    time.Duration // for=; 0 without a gate: for ever
	message string        // error="..."
	rate    float64       // bytes a second of rate=

	total   uint64
	perRoom map[room.Key]uint64
	free    time.Time // when the line of rate= has carried what was given to it
	tail    *turn     // of the last write given to it; nil: none
}

// roomSel says how room= was given.
type roomSel uint8

const (
	roomAny  roomSel = iota // not given: nth counts all calls
	roomEach                // room=*: nth counts each room's
	roomOne                 // room=N
)

// Rules is a parsed text and its counters. Safe for concurrent use; may be shared
// by several transports, which then count together.
type Rules struct {
	rules []*rule

	mu    sync.Mutex
	gates map[string]*gate
}

type gate struct {
	open    chan struct{} // closed by Release
	waiting chan struct{} // closed when the first is held
	isOpen  bool
	hasHeld bool
}

// gate finds or makes a gate. Under mu.
func (r *Rules) gate(name string) *gate {
	g := r.gates[name]
	if g == nil {
		g = &gate{open: make(chan struct{}), waiting: make(chan struct{})}
		r.gates[name] = g
	}
	return g
}

// Release opens a gate for what is held there and what comes later. Idempotent.
func (r *Rules) Release(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if g := r.gate(name); !g.isOpen {
		g.isOpen = true
		close(g.open)
	}
}

// Waiting is closed once something has been held at the gate.
func (r *Rules) Waiting(name string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gate(name).waiting
}

// arrive reports a hold at the gate and returns what opens it.
func (r *Rules) arrive(name string) <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	g := r.gate(name)
	if !g.hasHeld {
		g.hasHeld = true
		close(g.waiting)
	}
	return g.open
}

// matches reports whether the rule's selectors, apart from nth and prob, fit a call.
func (u *rule) matches(o op, kind string, k room.Key) bool {
	return u.op == o && (u.kind == "" || u.kind == kind) &&
		(u.rooms != roomOne || u.room == k.Room) && (!u.genSet || u.gen == k.Gen)
}

// byRoom: the rule has to know each room's calls. Others do not keep a map that grows.
func (u *rule) byRoom() bool { return u.rooms != roomAny || u.prob >= 0 }

// fires counts a call and decides. Under Rules.mu.
func (u *rule) fires(k room.Key) bool {
	u.total++
	n := u.total
	if u.byRoom() {
		u.perRoom[k]++
		n = u.perRoom[k]
	}
	if u.prob >= 0 && draw(u.seed, k, n) >= u.prob {
		return false
	}
	if u.rooms == roomAny {
		n = u.total // prob has counted by room all the same
	}
	return u.first == 0 || n >= u.first && n <= u.last
}

// draw is a number in [0,1) that depends on nothing but its arguments.
func draw(seed uint64, k room.Key, nth uint64) float64 {
	h := fnv.New64a()
	var b [28]byte
	binary.LittleEndian.PutUint64(b[:], seed)
	binary.LittleEndian.PutUint64(b[8:], k.Room)
	binary.LittleEndian.PutUint32(b[16:], k.Gen)
	binary.LittleEndian.PutUint64(b[20:], nth)
	_, _ = h.Write(b[:]) // never fails
	x := h.Sum64()
	x ^= x >> 33 // FNV's high bits are weak on short input; finish as murmur3 does
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	x ^= x >> 33
	return float64(x>>11) / (1 << 53)
}

// verdict is what the rules say about one call.
type verdict struct {
	rule    *rule   // nil: nothing happens
	counted []*rule // to be undone if the call does not take place
	key     room.Key
}

// decide counts the call and finds the rule that acts.
func (r *Rules) decide(o op, kind string, k room.Key) verdict {
	v := verdict{key: k}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.rules {
		if !u.matches(o, kind, k) {
			continue
		}
		v.counted = append(v.counted, u)
		if u.fires(k) && v.rule == nil {
			v.rule = u
		}
	}
	return v
}

// undo takes a call back that the transport refused: a retry is the same call.
func (r *Rules) undo(vs ...verdict) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, v := range vs {
		for _, u := range v.counted {
			u.total--
			if u.byRoom() {
				u.perRoom[v.key]--
			}
		}
	}
}

func (v verdict) action() action {
	if v.rule == nil {
		return ""
	}
	return v.rule.act
}

func (v verdict) err() error { return &injected{v.rule.message} }

// turn is a write's place on a slow line.
type turn struct {
	due    time.Time       // when its last byte is through
	before <-chan struct{} // closed when the write ahead has left; nil: none
	left   chan struct{}   // closed when this one has
	peer   *peer

	// Writes of no bytes that leave with this one: with whether it was through. Under Rules.mu; none comes once gone.
	along []func(through bool)
	gone  bool
}

// join gives n bytes of p a place behind what the rule's line has to carry. Who has it calls leave.
func (r *Rules) join(u *rule, p *peer, n int) *turn {
	r.mu.Lock()
	defer r.mu.Unlock()
	if now := time.Now(); u.free.Before(now) {
		u.free = now
	}
	u.free = u.free.Add(time.Duration(float64(n) / u.rate * float64(time.Second)))
	t := &turn{due: u.free, left: make(chan struct{}), peer: p}
	if u.tail != nil {
		t.before = u.tail.left
	}
	u.tail = t
	return t
}

// joinAlong has f called as soon as the last write of the line, if it is p's and still there, has left: so on a line a write of no
// bytes is not behind the bytes ahead of it by as long as another goroutine takes to wake.
func (r *Rules) joinAlong(u *rule, p *peer, f func(through bool)) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if u.tail == nil || u.tail.gone || u.tail.peer != p {
		return false
	}
	u.tail.along = append(u.tail.along, f)
	return true
}

// leave makes way for the next, after what leaves along.
func (r *Rules) leave(t *turn, through bool) {
	for {
		r.mu.Lock()
		along := t.along
		t.along, t.gone = nil, len(along) == 0
		r.mu.Unlock()
		if len(along) == 0 {
			close(t.left)
			return
		}
		for _, f := range along {
			f(through)
		}
	}
}

// timerGrain is by how much Go's timers may be late on an idle machine: they count whole milliseconds, from when the last thread
// went to sleep. That would lengthen writes by what the process did before.
const timerGrain = 2 * time.Millisecond

// wait holds until the write is through (true), or one of the others is closed (false), which it may notice timerGrain later.
func (t *turn) wait(stop, down <-chan struct{}) bool {
	through := time.NewTimer(time.Until(t.due) - timerGrain)
	defer through.Stop()
	before := t.before
	for arrived := false; !arrived || before != nil; {
		select {
		case <-before: // nil: nobody
			before = nil
		case <-through.C:
			arrived = true
		case <-stop:
			return false
		case <-down:
			return false
		}
	}
	rest := syscall.NsecToTimespec(int64(min(max(time.Until(t.due), 0), timerGrain)))
	for syscall.Nanosleep(&rest, &rest) == syscall.EINTR { // rest is what is left
	}
	return true
}

// wait holds until the rule lets go (true), or one of the others is closed (false).
func (r *Rules) wait(u *rule, stop, down <-chan struct{}) bool {
	var open <-chan struct{}
	switch {
	case u.gate != "":
		open = r.arrive(u.gate)
	case u.hold > 0:
		ctx, cancel := context.WithTimeout(context.Background(), u.hold)
		defer cancel()
		open = ctx.Done()
	}
	select {
	case <-open: // nil: for ever
		return true
	case <-stop:
		return false
	case <-down:
		return false
	}
}
