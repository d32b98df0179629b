package legacy

import "fmt"

// words is one act for people, without its thread.
func (m *machine) words(a act) string {
	switch a.thread {
	case worker:
		return m.workerWords(a)
	case control:
		return m.controlWords(a)
	case scheduler:
		return m.schedulerWords(a)
	default:
		return "300 s pass: bootstrap timeout, " + m.updated(a, failed)
	}
}

func (m *machine) chunk(a act) string {
	s := fmt.Sprintf("c%d", a.chunk)
	if r := m.number(a.req); r != "" {
		s += " of" + r
	}
	if n := m.v.requests[a.req].chunks; n > 1 && a.chunk+1 == n {
		s += " (last)"
	}
	return s
}

// updated is an update_status with the numbers that explain it.
func (m *machine) updated(a act, want status) string {
	switch {
	case a.note == halfway:
		return fmt.Sprintf("update_status(%v) reads %v, nothing is written yet", want, a.old)
	case a.note == ignored || a.old == a.now && (a.old == absent || a.old.terminal() && want != a.old):
		return fmt.Sprintf("writes %v: %v stays", want, named(a.old))
	case want == failed || a.old == absent:
		return fmt.Sprintf("status := %v", a.now)
	case m.unlocked:
		return fmt.Sprintf("writes %v over %v, from what it read before", a.now, a.old)
	default:
		return fmt.Sprintf("writes %v: max(%d,%d)=%d", want, a.old.poll(), want.poll(), a.now.poll())
	}
}

func named(s status) string {
	if s == absent {
		return "a room without a status"
	}
	return s.String()
}

// bang marks bytes stored after the ack.
func bang(a act) string {
	if a.note == late {
		return " AFTER THE ACK"
	}
	return ""
}

func (m *machine) workerWords(a act) string {
	c := m.chunk(a)
	switch a.at {
	case idle:
		return m.takeWords(a, c)
	case atMark:
		return m.updated(a, transferring)
	case atList:
		switch a.note {
		case putBack:
			return "no staging memory: " + c + " back to the end of the queue"
		case noInfo:
			return "snapshots the destinations: the information is gone"
		}
		return "snapshots the destinations"
	case atWrite:
		return "starts the long write of " + c + bang(a)
	case atWritten:
		return "write of " + c + " completes" + bang(a)
	case atReport:
		if a.chunk+1 == m.v.requests[a.req].chunks {
			return m.updated(a, success)
		}
		return m.updated(a, transferring)
	case atForget:
		if a.note == ignored {
			return "keeps the transfer information, the status is not Success"
		}
		return "drops the transfer information"
	case atForce:
		return "skip path: " + m.updated(a, failed)
	case atBroken:
		return "exception: " + m.updated(a, failed)
	case atBegin:
		if a.note == skipped {
			return fmt.Sprintf("begin %s: skip (%v)", c, a.now)
		}
		return "begin " + c + ": write"
	case atSettle:
		if a.note == acks {
			return "settle " + c + ": drained, ABORT_ACK goes out"
		}
		return "settle " + c
	}
	return fmt.Sprintf("point %d", a.at)
}

func (m *machine) takeWords(a act, c string) string {
	switch {
	case a.note == putBack:
		return "takes " + c + ", no staging memory: back to the end of the queue"
	case a.note == skipped:
		return fmt.Sprintf("takes %s, guard: %v, skipped", c, named(a.old))
	case a.note == noInfo:
		return "takes " + c + ", no transfer information: skipped"
	case m.p.production:
		return "takes " + c
	default:
		return "takes " + c + ", guard passes"
	}
}

func (m *machine) controlWords(a act) string {
	r := m.number(a.req)
	switch a.at {
	case idle:
		switch a.note {
		case receivedInfo:
			return "transfer information" + r + " arrives"
		case dies:
			return "ABORT" + r + " arrives: assertion, the thread is dead"
		}
		return "ABORT" + r + " arrives"
	case atCheck:
		switch {
		case a.note == ignored && a.old == absent:
			return "room unknown: Failed is not written"
		case a.note == ignored:
			return "room is Success: ignored"
		}
		return "room known, not Success"
	case atFail:
		return m.updated(a, failed)
	case atDrop:
		return "transfer information dropped"
	case atAck:
		return "sends ABORT_ACK" + r
	case atStore:
		return "keeps the transfer information" + r
	case atReady:
		return m.updated(a, waiting)
	case atUnpark:
		return "forgets a parked grant" + r
	case atFind:
		return "looks the room up"
	case atAbort:
		if a.note == acks {
			return "event abort: nothing outstanding, ABORT_ACK goes out"
		}
		return "event abort: the ack is owed until the write is over"
	case atGrant:
		switch a.note {
		case noInfo:
			return "no room for the grant yet"
		case ignored:
			return "the grant is refused: the room has ended"
		}
		return "event grant" + r
	case atPark:
		return "parks the grant"
	case atRecheck:
		if a.note == ignored {
			return "looks again: no room for the parked grant"
		}
		return "looks again: event grant" + r
	}
	return fmt.Sprintf("point %d", a.at)
}

func (m *machine) schedulerWords(a act) string {
	r := m.number(a.req)
	switch a.at {
	case idle:
		if a.note == handed {
			return "hands over " + m.chunk(a)
		}
		return fmt.Sprintf("polls%s: %v", r, named(a.old))
	case atCreate:
		if m.p.production {
			return fmt.Sprintf("opens the room%s: %v", r, a.now)
		}
		return "creates the sender" + r + ", " + m.updated(a, bootstrapping)
	case atCancel:
		if m.p.production {
			return "event cancel" + r
		}
		return "cancels" + r + ", " + m.updated(a, failed)
	case atTell:
		if a.now == failed {
			return "tells the client" + r + ": failed"
		}
		return "tells the client" + r + ": success"
	case atClear:
		if m.p.production {
			return "releases the room" + r
		}
		return "clears the room" + r
	case atDeliver:
		if a.note == ignored {
			return "no grant is parked"
		}
		return "the parked grant is delivered: event grant"
	}
	return fmt.Sprintf("point %d", a.at)
}
