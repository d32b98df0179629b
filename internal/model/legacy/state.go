package legacy

import (
	"fmt"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// thread is who takes a step.
type thread uint8

const (
	worker thread = iota
	control
	scheduler
	world // time passes
)

var threadNames = [...]string{"worker", "bootstrap", "scheduler", "time"}

// String survives unknown values.
func (t thread) String() string {
	if int(t) < len(threadNames) {
		return threadNames[t]
	}
	return fmt.Sprintf("thread(%d)", uint8(t))
}

// Fault is a set of what an execution can be counted for.
type Fault uint8

const (
	// Pinned: a request never ends.
	Pinned Fault = 1 << iota
	// WrittenAfterAck: bytes were stored in pages whose ABORT_ACK had been sent.
	WrittenAfterAck
	// WrongSuccess: a request ended as success after its room had failed, or without all its chunks.
	WrongSuccess
	// LostCause: a failed request was told no reason, or not the first one.
	LostCause
)

// Faults lists each alone, in the order of every table.
func Faults() []Fault { return []Fault{Pinned, WrittenAfterAck, WrongSuccess, LostCause} }

// String is the key used in JSON.
func (f Fault) String() string {
	switch f {
	case Pinned:
		return "pinned"
	case WrittenAfterAck:
		return "written_after_ack"
	case WrongSuccess:
		return "wrong_success"
	case LostCause:
		return "lost_cause"
	default:
		return fmt.Sprintf("fault(%d)", uint8(f))
	}
}

// Names lists the faults of a set.
func (f Fault) Names() []string {
	var names []string
	for _, g := range Faults() {
		if f&g != 0 {
			names = append(names, g.String())
		}
	}
	return names
}

// phase of a request at the scheduler.
type phase uint8

const (
	unborn   phase = iota // no sender yet
	booting               // sender made, waits for the status to leave Bootstrapping
	sending               // hands chunks to the worker
	inflight              // every chunk handed over; waits for Failed or Success
	telling               // a terminal status was seen
	over                  // told and cleared
)

// life is one request.
type life struct {
	phase phase
	sent  uint8 // chunks handed over
	// stored has a bit for every chunk that is wholly in this request's own pages.
	stored uint8
	// acked: ABORT_ACK was sent, so its pages may belong to somebody else.
	acked bool
	// ended is what the client was told: absent, failed or success.
	ended status
	// first is why its room failed first, cause what the client was told.
	first, cause reason
	// cancelled: its own user's cancel has happened.
	cancelled bool

	// Only under the production policy: the machine, and what the registry and the hub keep beside it.
	snd       room.Sender
	open      bool // in the registry
	gone      bool // forgotten: an ended tombstone
	tombstone bool // aborted before it was opened
	parked    bool // its grant waits for it
}

// blame notes why the room failed, or must fail. The first reason before the scheduler has seen
// an end is the truth that the client must be told.
func (l *life) blame(why reason) {
	if l.phase < telling && l.first == noReason {
		l.first = why
	}
}

// hand is what a thread is in the middle of.
type hand struct {
	at         point // idle between chunks, frames and requests
	req, chunk uint8
	seen       status // what an unlocked update has read, or a poll
	dst        uint8  // worker: 1 + request whose pages were snapshotted
	why        reason // scheduler: the failure record that it took when it cleared the room
	conn       uint8  // control: where the frame came from
	twice      bool   // control: no room was found when the abort looked for it
}

// State is everything three threads can see or be in. It is a value, comparable with ==.
type State struct {
	rooms  [maxRequests]status // what update_status keeps
	infos  [maxRequests]uint8  // 1 + request whose pages the room's transfer information names; 0 none
	record [maxRequests]reason // failure records
	lives  [maxRequests]life
	hands  [3]hand
	heard  [maxConns]uint8 // frames taken from each connection
	queue  [maxQueue]uint8 // request<<4 | chunk, oldest first
	queued uint8
	// deferred: the one deferral of the variant has happened. dead: the bootstrap thread has ended.
	deferred, dead bool
	faults         Fault
}

// push puts a chunk at the end of the worker's queue.
func (s *State) push(req, chunk uint8) {
	s.queue[s.queued] = req<<4 | chunk
	s.queued++
}

// pop takes the oldest chunk.
func (s *State) pop() (req, chunk uint8) {
	c := s.queue[0]
	copy(s.queue[:], s.queue[1:])
	s.queue[maxQueue-1] = 0
	s.queued--
	return c >> 4, c & 15
}

// key appends every field; the production machine is told by what it shows of itself.
func (s *State) key(out []byte) []byte {
	for i := range s.rooms {
		l := &s.lives[i]
		out = append(out, byte(s.rooms[i]), s.infos[i], byte(s.record[i]), byte(l.phase), l.sent, l.stored,
			byte(l.ended), byte(l.first), byte(l.cause),
			flags(l.acked, l.cancelled, l.open, l.gone, l.tombstone, l.parked))
		n := l.snd.Node()
		out = append(out, byte(n.State), byte(n.Drain), byte(l.snd.Begun()), byte(l.snd.Outstanding()), byte(reasonOf(l.snd.Cause())))
	}
	for _, h := range s.hands {
		out = append(out, byte(h.at), h.req, h.chunk, byte(h.seen), h.dst, byte(h.why), h.conn, flags(h.twice))
	}
	out = append(out, s.heard[:]...)
	out = append(out, s.queue[:]...)
	return append(out, s.queued, flags(s.deferred, s.dead), byte(s.faults))
}

func flags(set ...bool) (b byte) {
	for i, f := range set {
		if f {
			b |= 1 << i
		}
	}
	return b
}

// show is the state on one line: rooms, then clients.
func (m *machine) show(s *State) string { return m.showRooms(s) + "; " + m.showClients(s) }

// showRooms tells every room id, and whose pages were acked.
func (m *machine) showRooms(s *State) string {
	var parts []string
	for i, rq := range m.v.requests {
		r := uint8(i)
		own := m.p.production || !m.sharedBefore(r)
		if !own || m.p.production && s.lives[r].phase == unborn && rq.after {
			continue
		}
		part := m.roomOf(s, r)
		if len(m.v.requests) > 1 && (m.p.production || m.v.requests[len(m.v.requests)-1].room > 0) {
			part = fmt.Sprintf("r%d %s", r, part)
		}
		parts = append(parts, part)
	}
	for i := range m.v.requests {
		if s.lives[i].acked {
			parts = append(parts, "acked"+m.number(uint8(i)))
		}
	}
	return strings.Join(parts, ", ")
}

// sharedBefore: an earlier request has the same room id.
func (m *machine) sharedBefore(r uint8) bool {
	for i := range r {
		if m.v.requests[i].room == m.v.requests[r].room {
			return true
		}
	}
	return false
}

// showClients tells what each client knows, and the gauge of requests in the scheduler.
func (m *machine) showClients(s *State) string {
	var parts []string
	gauge := 0
	for i := range m.v.requests {
		l := &s.lives[i]
		if l.ended == absent && l.phase != unborn {
			gauge++
		}
		what := "waits"
		switch {
		case l.ended == failed:
			what = fmt.Sprintf("error: %v", l.cause)
		case l.ended == success:
			what = "success"
		case l.phase == unborn && m.v.requests[i].after:
			continue
		}
		if len(m.v.requests) > 1 {
			what = fmt.Sprintf("r%d %s", i, what)
		}
		parts = append(parts, what)
	}
	return fmt.Sprintf("%s; gauge %d", strings.Join(parts, ", "), gauge)
}

// number names a request where there are several.
func (m *machine) number(r uint8) string {
	if len(m.v.requests) < 2 {
		return ""
	}
	return fmt.Sprintf(" r%d", r)
}

// roomOf is the state of request r's room in the words of its policy.
func (m *machine) roomOf(s *State, r uint8) string {
	l := &s.lives[r]
	if m.p.production {
		switch {
		case l.gone:
			return "forgotten"
		case l.open:
			return l.snd.Node().String()
		case l.tombstone:
			return "none, abort remembered"
		case l.parked:
			return "none, grant parked"
		default:
			return "none"
		}
	}
	id := m.v.requests[r].room
	info := "info"
	if s.infos[id] == 0 {
		info = "no info"
	}
	if s.rooms[id] == absent {
		return "no status, " + info
	}
	return fmt.Sprintf("%v %d, %s", s.rooms[id], s.rooms[id].poll(), info)
}
