package model

import (
	"context"
	"fmt"

	"github.com/baton-pd/baton/internal/model/explore"
	"github.com/baton-pd/baton/internal/room"
)

// World is a scenario as a transition system. Not safe for concurrent use.
type World struct {
	sc        *Scenario
	lives     uint8
	symmetric bool
	fault     Fault
	stepS     func(room.Sender, room.Event) (room.Sender, room.Effects)
	stepR     func(room.Receiver, room.Event) (room.Receiver, room.Effects)

	scratch run // of steps.add: a state is large, and one step is taken at a time
	probedS map[room.Sender]error
	probedR map[room.Receiver]error
}

var _ explore.System[State] = (*World)(nil)

// NewWorld is sc with the production machines.
func NewWorld(sc *Scenario) *World {
	return &World{
		sc: sc, lives: uint8(sc.Rooms + sc.Reuse), symmetric: sc.Rooms == 2 && sc.Reuse == 0,
		stepS: room.Sender.Step, stepR: room.Receiver.Step,
		probedS: make(map[room.Sender]error), probedR: make(map[room.Receiver]error),
	}
}

// SetFault breaks the shells in one place.
func (w *World) SetFault(f Fault) { w.fault = f }

// SetTables runs other tables than the production ones; nil leaves that side's.
func (w *World) SetTables(sender, receiver *room.Table) {
	if sender != nil {
		w.stepS = sender.Sender
	}
	if receiver != nil {
		w.stepR = receiver.Receiver
	}
}

// Explore searches the whole world of sc.
func Explore(ctx context.Context, sc *Scenario, lim explore.Limits) *explore.Result {
	return explore.Run[State](ctx, NewWorld(sc), lim)
}

// Init implements [explore.System].
func (w *World) Init() []State {
	s := State{left: w.sc.budgets}
	for i := range w.lives {
		s.send[i].m = room.NewSender(w.sc.Chunks)
		s.recv[i].m = room.NewReceiver(w.sc.Chunks)
	}
	return []State{s}
}

// keyOf is the room.Key of a life, as a number below lives.
func (w *World) keyOf(i uint8) uint8 {
	if int(i) < w.sc.Rooms || w.sc.ReuseGeneration {
		return i
	}
	return i - uint8(w.sc.Rooms)
}

// prompt of a life: equal prompts have equal KV.
func (w *World) prompt(i uint8) uint8 {
	if w.sc.OtherPrompt || int(i) < w.sc.Rooms {
		return i
	}
	return i - uint8(w.sc.Rooms)
}

func (w *World) name(i uint8) string {
	n := fmt.Sprintf("room %d", w.roomOf(i)+1)
	if int(i) >= w.sc.Rooms {
		if w.sc.ReuseGeneration {
			return n + "#1"
		}
		return n + " again"
	}
	return n
}

// roomOf is the room id of a life, without its generation.
func (w *World) roomOf(i uint8) uint8 { return i % uint8(w.sc.Rooms) }

// op names a step; its number is the upper part of [explore.Step.Act].
type op uint8

// Fairness classes: everything in one class is done by one kind of actor that goes on as long
// as it has work. 0: the environment.
const (
	fairRequest  uint8 = iota + 1 // a request reaches a worker
	fairOwner                     // a scheduler sends the next chunk
	fairRelease                   // a scheduler lets go of an ended room
	fairBoot                      // a bootstrap goroutine
	fairActions                   // the actions goroutine
	fairStore                     // the transport moves bytes
	fairSettle                    // the transport reports a completion
	fairDeliver                   // the network delivers
	fairEnd                       // the end of a session is noticed
	fairFence                     // a transport reports a fence
	fairDeadline                  // clocks run
	fairPark                      // the timer of a parked grant
)

// run is one step being taken: a state that may be changed, and the first broken invariant.
type run struct {
	w *World
	State
	err     error
	errDown bool // a send on the session says that it has ended
}

// steps collects the steps enabled in one state.
type steps struct {
	w    *World
	from *State
	out  []explore.Step[State]
}

// add takes do on a copy of the state.
func (x *steps) add(o op, a, b, fair uint8, do func(r *run)) {
	r := &x.w.scratch
	r.w, r.State, r.err, r.errDown = x.w, *x.from, nil, false
	do(r)
	x.out = append(x.out, explore.Step[State]{To: r.State, Act: uint32(o)<<16 | uint32(a)<<8 | uint32(b), Fair: fair, Err: r.err})
}

// spend is add for a fault with a budget.
func (x *steps) spend(bud budget, o op, a, b uint8, do func(r *run)) {
	if x.from.left[bud] == 0 {
		return
	}
	x.add(o, a, b, 0, func(r *run) {
		r.left[bud]--
		do(r)
	})
}

// Next implements [explore.System].
func (w *World) Next(s State, out []explore.Step[State]) []explore.Step[State] {
	x := &steps{w, &s, out}
	for i := range w.lives {
		x.requests(i)
		if s.send[i].at == open {
			x.senderOwner(i)
		}
		x.writes(i)
		if s.recv[i].at != unborn && s.recv[i].at != died {
			x.receiverOwner(i)
			x.bootstrap(i)
			x.actions(i)
		}
	}
	x.network()
	x.sessions()
	x.crashes()
	return x.out
}

// Done implements [explore.System]: every room has ended on both sides and nothing is left
// under way.
func (w *World) Done(s State) bool {
	for i := range w.lives {
		x, y := &s.send[i], &s.recv[i]
		if !x.at.over() || !y.at.over() || s.parked[i].grant != 0 && !s.parked[i].stuck {
			return false
		}
		for _, p := range x.w {
			if p.unsettled() {
				return false
			}
		}
		if y.at != died && y.at != refused && (y.boot != bootOver || y.nacts > 0 || y.leave) {
			return false
		}
	}
	for i := range s.nsess {
		if s.sess[i].unfinished() {
			return false
		}
	}
	return s.nnet == 0
}

// unfinished: something about the session is still to be handled.
func (x session) unfinished() bool {
	return x.lossy && !x.cut || x.cut && (!x.downS || !x.downR) || x.closing || (x.closed || x.gone) && !x.fenced || x.downS && !x.gone
}
