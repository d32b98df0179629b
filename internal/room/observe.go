package room

// Observer sees the life of every room of a registry: Opened once, then each event in
// order, Forgotten once. It is called under the room's lock, after the step is published
// and before its effects are executed, so that what follows from a step at another worker
// comes later on a common clock. It must not block, nor call the registry; different rooms
// call it at the same time. What it is given is read-only.
//
// Events may still come after Forgotten, from whoever holds the room; they change nothing.
type Observer interface {
	// Opened: the room exists from now on, in its first state.
	Opened(r *Room, chunks int)
	// Stepped: one event was applied.
	Stepped(r *Room, s Stepped)
	// Forgotten: the registry is about to drop the room and to remember its key.
	Forgotten(r *Room)
}

// Stepped is one event of a room as its [Observer] sees it.
type Stepped struct {
	// Seq counts the room's events from 1, without a gap.
	Seq   uint32
	Event Event
	// From and To are what other goroutines could read before and after.
	From, To Node
	// Effects will be executed; Withheld were asked for by the step and will not be,
	// because the room's abort was acked before the room was opened.
	Effects, Withheld Effects
	// Begun and Settled are the sender's counters, Landed the receiver's.
	Begun, Settled, Landed int
	// Cause is the room's published first cause; nil unless it has failed.
	Cause *Cause
}

// Instance tells apart all rooms of a registry, also those of one key: the first is 1,
// and no number is left out. For observers, under the room's lock.
func (r *Room) Instance() uint64 { return r.instance }

// stepped tells the observer; before is the published word as it was.
func (r *Room) stepped(e Event, before uint64, fx, withheld Effects) {
	r.observed++
	r.reg.observe.Stepped(r, Stepped{
		Seq: r.observed, Event: e,
		From:    Node{State(before & 0xff), Drain(before >> 8 & 0xff)},
		To:      Node{r.State(), r.Drain()},
		Effects: fx, Withheld: withheld,
		Begun: int(r.snd.begun), Settled: int(r.snd.settled), Landed: int(r.rcv.landed),
		Cause: r.Cause(),
	})
}
