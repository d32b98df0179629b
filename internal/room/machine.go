package room

// Sender is the prefill side's machine: a pure value, comparable with ==. Its
// counters obey 0 <= settled <= begun <= total, and everything else follows from
// the table in table.go.
type Sender struct {
	state State
	drain Drain
	// total chunks, at least 1; begun of them were allowed to be written; settled
	// of those are over, applied or not.
	total, begun, settled int32
	cause                 *Cause // first reason; nil unless state is Failed
}

// NewSender is a room that waits for its grant. chunks >= 1.
func NewSender(chunks int) Sender {
	return Sender{state: StateBootstrapping, total: int32(chunks)}
}

// State is the room's state.
func (s Sender) State() State { return s.state }

// Node is the state with what it still waits for.
func (s Sender) Node() Node { return Node{s.state, s.drain} }

// Cause is the first reason of a failed room, else nil. Shared; never write to it.
func (s Sender) Cause() *Cause { return s.cause }

// Outstanding is the number of writes begun and not settled.
func (s Sender) Outstanding() int { return int(s.begun - s.settled) }

// Begun is the number of chunks whose write was allowed.
func (s Sender) Begun() int { return int(s.begun) }

// Chunks is the number of chunks of the room.
func (s Sender) Chunks() int { return int(s.total) }

// Step applies e. It is total and pure.
func (s Sender) Step(e Event) (Sender, Effects) { return s.by(senderIndex, e) }

// by applies e as the table of ix says.
func (s Sender) by(ix *index, e Event) (Sender, Effects) {
	var row *Row
	rows := ix.rows(s.state, s.drain, e.Kind)
	for i := range rows {
		if s.holds(rows[i].When, &e) {
			row = &rows[i]
			break
		}
	}
	if row == nil {
		return s, FxStale
	}
	if row.Counts {
		if e.Kind == EvBegin {
			s.begun++
		} else {
			s.settled++
		}
	}
	if row.Code != "" {
		s.cause = row.causeOf(&e)
	}
	s.state, s.drain = row.To.State, row.To.Drain
	return s, row.Effects
}

func (s *Sender) holds(g Guard, e *Event) bool {
	switch g {
	case WhenAlways:
		return true
	case WhenNext:
		return e.Chunk == int(s.begun) && s.begun < s.total
	case WhenUnknown:
		return s.begun == s.settled || e.Chunk < 0 || e.Chunk >= int(s.begun)
	case WhenAll:
		return s.settled+1 == s.total
	case WhenOnly:
		return s.begun-s.settled == 1
	case WhenIdle:
		return s.begun == s.settled
	default: // WhenLastNext is the receiver's
		return false
	}
}

// Receiver is the decode side's machine: a pure value, comparable with ==.
// 0 <= landed <= total.
type Receiver struct {
	state State
	drain Drain
	// total chunks, at least 1; the first landed of them are applied and delivered.
	total, landed int32
	cause         *Cause // first reason; nil unless state is Failed
}

// NewReceiver is a room that has no pages yet. chunks >= 1.
func NewReceiver(chunks int) Receiver {
	return Receiver{state: StateBootstrapping, total: int32(chunks)}
}

// State is the room's state.
func (r Receiver) State() State { return r.state }

// Node is the state with what it still waits for.
func (r Receiver) Node() Node { return Node{r.state, r.drain} }

// Cause is the first reason of a failed room, else nil. Shared; never write to it.
func (r Receiver) Cause() *Cause { return r.cause }

// Landed is the number of chunks applied and delivered.
func (r Receiver) Landed() int { return int(r.landed) }

// Chunks is the number of chunks of the room.
func (r Receiver) Chunks() int { return int(r.total) }

// Step applies e. It is total and pure.
func (r Receiver) Step(e Event) (Receiver, Effects) { return r.by(receiverIndex, e) }

// by applies e as the table of ix says.
func (r Receiver) by(ix *index, e Event) (Receiver, Effects) {
	var row *Row
	rows := ix.rows(r.state, r.drain, e.Kind)
	for i := range rows {
		if r.holds(rows[i].When, &e) {
			row = &rows[i]
			break
		}
	}
	if row == nil {
		return r, FxStale
	}
	if row.Counts {
		r.landed++
	}
	if row.Code != "" {
		r.cause = row.causeOf(&e)
	}
	r.state, r.drain = row.To.State, row.To.Drain
	return r, row.Effects
}

func (r *Receiver) holds(g Guard, e *Event) bool {
	switch g {
	case WhenAlways:
		return true
	case WhenNext:
		return e.Chunk == int(r.landed) && r.landed+1 < r.total && !e.Last
	case WhenLastNext:
		return e.Chunk == int(r.landed) && r.landed+1 == r.total && e.Last
	default: // the others are the sender's
		return false
	}
}

// Node is a state together with what it still waits for: one line of the table.
type Node struct {
	State State
	Drain Drain
}

// String is "state" or "state/drain".
func (n Node) String() string {
	if n.Drain == DrainLive {
		return n.State.String()
	}
	return n.State.String() + "/" + n.Drain.String()
}

// Guard picks between the rows of one (node, event) pair by the room's counters.
// Rows are tried in order; the last one of a pair is always unguarded.
type Guard uint8

const (
	// WhenAlways holds.
	WhenAlways Guard = iota
	// WhenNext: the chunk is the one that must come next (receiver: and not the last).
	WhenNext
	// WhenLastNext (receiver): the chunk comes next, is the last, and is called so.
	WhenLastNext
	// WhenUnknown (sender): the settled write was never begun, or none is outstanding.
	WhenUnknown
	// WhenAll (sender): with this one, every chunk of the room has settled.
	WhenAll
	// WhenOnly (sender): the settled write was the only one outstanding.
	WhenOnly
	// WhenIdle (sender): no write is outstanding.
	WhenIdle
)

// String is how the guard reads in the printed table.
func (g Guard) String() string {
	switch g {
	case WhenAlways:
		return "always"
	case WhenNext:
		return "next chunk"
	case WhenLastNext:
		return "last chunk"
	case WhenUnknown:
		return "no such write"
	case WhenAll:
		return "all settled"
	case WhenOnly:
		return "only write"
	case WhenIdle:
		return "none outstanding"
	default:
		return "guard(?)"
	}
}

// Row is one line of a transition table.
type Row struct {
	From    Node
	Event   EventKind
	When    Guard
	To      Node
	Effects Effects
	// Code is the cause of a room that fails by this row; "" for the others. An
	// event that brings its own cause keeps that.
	Code Code
	// Counts: the chunk counter of the event goes up.
	Counts bool
	// Reason says why it must be so.
	Reason string

	cause *Cause // default, made once so that equal machines compare equal
}

// causeOf is the event's cause or the row's default, which has side and phase.
func (r *Row) causeOf(e *Event) *Cause {
	if e.Cause != nil {
		return e.Cause
	}
	return r.cause
}

// SenderTable is a copy of the sender's table, in the order of table.go.
func SenderTable() []Row { return append([]Row(nil), senderRows...) }

// ReceiverTable is a copy of the receiver's table.
func ReceiverTable() []Row { return append([]Row(nil), receiverRows...) }

// Table is a transition table other than the production one: package model runs wrong
// ones to see that its checks find them. Nothing else needs it. Immutable.
type Table struct{ ix *index }

// NewTable copies rows, which must be in the form of [SenderTable] for [SideSender], of
// [ReceiverTable] for [SideReceiver]: rows of one (node, event) pair together, tried in order.
func NewTable(side Side, rows []Row) *Table {
	return &Table{ix: newIndex(side, append([]Row(nil), rows...))}
}

// Sender is [Sender.Step] by this table.
func (t *Table) Sender(s Sender, e Event) (Sender, Effects) { return s.by(t.ix, e) }

// Receiver is [Receiver.Step] by this table.
func (t *Table) Receiver(r Receiver, e Event) (Receiver, Effects) { return r.by(t.ix, e) }

// index finds rows by number. States and drains outside the table have no rows.
type index [StateSuccess + 1][numDrains][numEvents][]Row

func newIndex(side Side, rows []Row) *index {
	ix := new(index)
	for i := range rows {
		r := &rows[i]
		if r.Code != "" {
			r.cause = &Cause{Code: r.Code, Side: side, Phase: r.From.State.String(), Detail: r.Reason}
		}
		// Rows of one pair stand together, so a pair is a slice of the table.
		cell := &ix[r.From.State][r.From.Drain][r.Event]
		if len(*cell) == 0 {
			*cell = rows[i : i+1]
		} else {
			*cell = (*cell)[:len(*cell)+1]
		}
	}
	return ix
}

// rows of one pair, tried in order; none if the pair is outside the table.
func (ix *index) rows(s State, d Drain, k EventKind) []Row {
	if s > StateSuccess || d >= numDrains || k >= numEvents {
		return nil
	}
	return ix[s][d][k]
}
