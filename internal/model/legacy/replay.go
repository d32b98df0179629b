package legacy

import (
	"context"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// Row is one line of a timeline.
type Row struct {
	// Number is the step's place among the twelve of the original fault; 0: it has none.
	Number int
	Line
	// Why says what the step means, where that is not plain from it.
	Why string
	// Bad: from here on something is wrong that the step has done.
	Bad bool
	// Begins and Completes mark the two ends of a write.
	Begins, Completes bool
	// Failed: after the step the room of the first request is failed.
	Failed bool
}

// Timeline is one complete execution.
type Timeline struct {
	Policy, Variant string
	Unlocked        bool
	Rows            []Row
	// Faults that the execution is counted for.
	Faults Fault
}

// story is the interleaving of the twelve steps: which thread goes on up to which point. The ack
// is in it, but has no number.
var story = []struct {
	number int
	thread thread
	at     point
}{
	{1, worker, idle}, {2, worker, atMark}, {3, worker, atList}, {4, worker, atWrite},
	{5, control, idle}, {6, control, atCheck}, {7, control, atFail}, {8, control, atDrop}, {0, control, atAck},
	{9, worker, atWritten}, {10, worker, atReport}, {11, worker, idle},
}

const lastNumber = 12

// Replay tells one execution. In the main variant it is the twelve steps, as far as the policy has
// them, unless update_status is unlocked; everywhere else a shortest counterexample, of the first fault
// of Faults that occurs; without one, an ordinary run. What is left after it is done scheduler first.
func Replay(ctx context.Context, p Policy, v Variant, unlocked bool) (*Timeline, error) {
	m := &machine{p: p, v: v, unlocked: unlocked}
	t := &Timeline{Policy: p.Name, Variant: v.Name, Unlocked: unlocked}
	s := m.start()
	scripted := v.Name == variants[0].Name && !unlocked
	if scripted {
		m.play(&s, t)
	} else {
		m.lead(ctx, &s, t)
	}
	for {
		st, ok := m.onward(&s)
		if !ok {
			break
		}
		t.add(m, 0, &s, st)
	}
	t.Faults = s.faults
	if m.pinned(&s) {
		t.Faults |= Pinned
		last := Row{Line: Line{Thread: scheduler.String(), Step: "polls for ever: neither Success nor Failed is ever written again",
			Room: m.showRooms(&s), Client: strings.ReplaceAll(m.showClients(&s), "waits", "hangs")}, Why: "and the queue has no deadline", Bad: true, Failed: m.failed(&s)}
		if scripted {
			last.Number = lastNumber
		}
		t.Rows = append(t.Rows, last)
	}
	return t, ctx.Err()
}

// add takes st and writes it down.
func (t *Timeline) add(m *machine, number int, s *State, st step) {
	why, bad := m.comment(s, st)
	wrote := st.act.thread == worker
	t.Rows = append(t.Rows, Row{Number: number, Line: m.line(st), Why: why, Bad: bad,
		Begins: wrote && st.act.at == atWrite, Completes: wrote && st.act.at == atWritten,
		Failed: m.failed(&st.to)})
	*s = st.to
}

// failed reports whether the room of request 0 is failed.
func (m *machine) failed(s *State) bool {
	if m.p.production {
		return s.lives[0].open && s.lives[0].snd.State() == room.StateFailed
	}
	return s.rooms[m.v.requests[0].room] == failed
}

// play follows the story. A policy's own step that the story does not have is taken on the way; a
// step of the story that the policy does not have is left out.
func (m *machine) play(s *State, t *Timeline) {
	for i, beat := range story {
		for {
			st, ok := m.stepOf(s, beat.thread)
			if !ok || m.later(st.act.at, i, beat.thread) {
				break
			}
			met := st.act.at == beat.at
			n := 0
			if met {
				n = beat.number
			}
			t.add(m, n, s, st)
			if met {
				break
			}
		}
	}
}

// later reports whether at is not where beat i of the story stands, but where a later one does.
func (m *machine) later(at point, i int, th thread) bool {
	if story[i].at == at {
		return false
	}
	for _, b := range story[i+1:] {
		if b.thread == th && b.at == at {
			return true
		}
	}
	return false
}

// stepOf is the first enabled step of a thread.
func (m *machine) stepOf(s *State, th thread) (step, bool) {
	for _, st := range m.next(s, nil) {
		if st.act.thread == th {
			return st, true
		}
	}
	return step{}, false
}

// onward is the next step of a run without surprises: the scheduler sees each end at once.
func (m *machine) onward(s *State) (step, bool) {
	for _, th := range []thread{scheduler, worker, control, world} {
		if st, ok := m.stepOf(s, th); ok {
			return st, true
		}
	}
	return step{}, false
}

// lead goes along the first counterexample there is; without one, to an ABORT in the middle of a write.
func (m *machine) lead(ctx context.Context, s *State, t *Timeline) {
	for _, f := range Faults() {
		path := m.path(ctx, f)
		if path == nil {
			continue
		}
		for _, k := range path {
			t.add(m, 0, s, m.next(s, nil)[k])
		}
		return
	}
	for s.hands[worker].at != atWritten {
		st, ok := m.onward(s)
		if !ok {
			return
		}
		t.add(m, 0, s, st)
	}
	for {
		st, ok := m.stepOf(s, control)
		if !ok {
			return
		}
		t.add(m, 0, s, st)
	}
}

// comment says what a step means and whether it does harm.
func (m *machine) comment(before *State, st step) (string, bool) {
	a := st.act
	halfDone := a.note == halfway
	switch {
	case a.note == late:
		return "bytes go into pages that the decode side may have given to another request", true
	case st.to.faults&^before.faults&WrongSuccess != 0:
		return "the room had failed, or a chunk of it was never stored", true
	case st.to.faults&^before.faults&LostCause != 0:
		return "not what the room failed of first", true
	case a.note == dies:
		return "nothing that the decode side says is heard any more, by any request", true
	case a.old == failed && a.now > failed && !halfDone && a.thread != control && !m.p.production:
		return "resurrected: Failed is forgotten", true
	case a.thread == control && a.at == atFail && a.now == failed && !halfDone:
		return "Failed is 0, the lowest number of all", false
	case a.thread == control && a.at == atDrop && before.rooms[m.v.requests[a.req].room] != absent:
		return "the chunks that are left would need it", false
	case a.thread == control && a.at == atAck && before.hands[worker].dst == a.req+1:
		return "the decode side gives the pages back, a write to them is under way", true
	case a.thread == worker && a.at == idle && a.note == noInfo && !m.p.dropFails:
		return "nobody writes a status for it", true
	case a.at == atAbort && a.note != acks && m.p.production:
		return "failed at once and for good; the ack waits for the write", false
	case a.at == atSettle && a.note == acks:
		return "drained: only now the ack is true", false
	case a.at == atBegin && a.note == skipped:
		return "a failed room writes nothing more", false
	}
	return "", false
}
