package room

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

var seed = flag.Uint64("seed", 0, "seed of the random walks; 0: a new one")

// walk is one machine with a record of what it has said, to hold against the promises.
type walk struct {
	side      Side
	at        machine
	chunks    int
	trail     []traced
	begun     []int // writes allowed and not settled (sender)
	applied   int   // chunks settled or landed without error
	landed    int
	owed      bool // an abort is not answered yet (sender)
	granted   bool // a grant left (receiver)
	terminals int
	forgets   int
	frees     int
}

// traced is a step as it is printed when a promise was broken.
type traced struct {
	e  Event
	to Node
	fx Effects
}

func (s traced) String() string {
	return fmt.Sprintf("\n%v %d %v -> %v %v", s.e.Kind, s.e.Chunk, s.e.Last, s.to, s.fx)
}

func newWalk(side Side, chunks int) *walk {
	w := &walk{side: side, chunks: chunks, at: NewSender(chunks)}
	if side == SideReceiver {
		w.at = NewReceiver(chunks)
	}
	return w
}

// step applies e and checks every promise that can be seen from outside.
func (w *walk) step(e Event) error {
	was := w.at
	next, fx := was.step(e)
	w.at = next
	w.trail = append(w.trail, traced{e, next.Node(), fx})
	fail := func(format string, args ...any) error {
		return fmt.Errorf("%v, %d chunks: "+format+"\n%v", append(append([]any{w.side, w.chunks}, args...), w.trail)...)
	}
	before, after := was.Node(), next.Node()
	if before.State.Terminal() && (after.State != before.State || next.Cause() != was.Cause()) {
		return fail("a terminal state or its cause changed")
	}
	if (after.State == StateFailed) != (next.Cause() != nil) {
		return fail("state %v with cause %v", after, next.Cause())
	}
	if fx.Has(FxTerminal) != (after.State.Terminal() && !before.State.Terminal()) {
		return fail("terminal at the wrong time")
	}
	w.terminals += int(fx & FxTerminal / FxTerminal)
	w.forgets += int(fx & FxForget / FxForget)
	w.frees += int(fx & FxFreeTransfer / FxFreeTransfer)
	if w.terminals > 1 || w.forgets > 1 || w.frees > 1 {
		return fail("%d terminals, %d forgets, %d frees", w.terminals, w.forgets, w.frees)
	}
	if w.forgets == 1 && after.Drain != DrainGone {
		return fail("forgotten, yet %v", after)
	}
	var err error
	if w.side == SideSender {
		err = w.checkSender(e, before, after, fx)
	} else {
		err = w.checkReceiver(e, before, after, fx)
	}
	if err != nil {
		return fail("%w", err)
	}
	return nil
}

func (w *walk) checkSender(e Event, before, after Node, fx Effects) error {
	if fx.Has(FxWrite) {
		if e.Kind != EvBegin || before.State.Terminal() || before.State == StateBootstrapping || after.State != StateTransferring {
			return fmt.Errorf("write allowed in %v", before)
		}
		w.begun = append(w.begun, e.Chunk)
	} else if e.Kind == EvBegin && !fx.Has(FxSkip) {
		return fmt.Errorf("a worker got no answer")
	}
	if (e.Kind == EvSettle || e.Kind == EvSettleError) && !fx.Has(FxStale) {
		i := slices.Index(w.begun, e.Chunk)
		if i < 0 {
			return fmt.Errorf("settle of chunk %d was believed", e.Chunk)
		}
		w.begun = slices.Delete(w.begun, i, i+1)
		if e.Kind == EvSettle {
			w.applied++
		}
	}
	if n := w.at.count(); n != len(w.begun) {
		return fmt.Errorf("%d writes are outstanding, it says %d", len(w.begun), n)
	}
	if after.State == StateSuccess && w.applied != w.chunks {
		return fmt.Errorf("success with %d of %d chunks", w.applied, w.chunks)
	}
	switch {
	case fx.Has(FxSendAck) && len(w.begun) > 0:
		return fmt.Errorf("ack with %d writes outstanding", len(w.begun))
	case fx.Has(FxSendAck) && e.Kind != EvAbort && !w.owed:
		return fmt.Errorf("ack that nobody waits for")
	case fx.Has(FxForget) && len(w.begun) > 0:
		return fmt.Errorf("forgotten with writes outstanding")
	}
	switch e.Kind {
	case EvAbort:
		w.owed = true
	case EvPeerLost:
		w.owed = false
	}
	if fx.Has(FxSendAck) {
		w.owed = false
	}
	if w.owed && len(w.begun) == 0 {
		return fmt.Errorf("an abort is not acked though nothing is outstanding")
	}
	return nil
}

func (w *walk) checkReceiver(e Event, before, after Node, fx Effects) error {
	if fx.Has(FxSendGrant) {
		if w.granted || before != boot {
			return fmt.Errorf("granted twice, or in %v", before)
		}
		w.granted = true
	} else if e.Kind == EvGranted && !fx.Has(FxSkip) {
		return fmt.Errorf("the pages' owner got no answer")
	}
	if fx.Has(FxLanded) {
		if before.State.Terminal() || e.Chunk != w.landed {
			return fmt.Errorf("chunk %d delivered in %v after %d others", e.Chunk, before, w.landed)
		}
		w.landed++
	}
	switch {
	case (after.State == StateSuccess) != (w.landed == w.chunks):
		return fmt.Errorf("%v with %d of %d chunks", after, w.landed, w.chunks)
	case fx.Has(FxFreeTransfer) && (!w.granted || after.State != StateSuccess && e.Kind != EvAck && e.Kind != EvFenced):
		return fmt.Errorf("pages freed by %v", e.Kind)
	case fx.Has(FxForget) && w.granted && w.frees == 0:
		return fmt.Errorf("forgotten while the transfer holds pages")
	case fx.Has(FxSendAbort) && e.Kind == EvPeerLost:
		return fmt.Errorf("abort sent into a lost session")
	case fx.Has(FxTerminal) && after.State == StateFailed && e.Kind != EvPeerLost && e.Kind != EvFenced && !fx.Has(FxSendAbort):
		return fmt.Errorf("the sender is not told of %v", e.Kind)
	case fx.Has(FxTerminal) && w.granted && !fx.Has(FxRevoke):
		return fmt.Errorf("the grant outlives the room")
	}
	return nil
}

// finish is the good will that is left after chaos: whatever happened, these end it.
func (w *walk) finish() error {
	for len(w.begun) > 0 {
		if err := w.step(Event{Kind: EvSettleError, Chunk: w.begun[0]}); err != nil {
			return err
		}
	}
	for _, k := range []EventKind{EvDeadline, EvFenced, EvRelease} {
		if err := w.step(Event{Kind: k}); err != nil {
			return err
		}
	}
	if n := w.at.Node(); n.Drain != DrainGone || w.terminals != 1 || w.forgets != 1 || (w.granted != (w.frees == 1)) {
		return fmt.Errorf("left over: %v, %+v", n, w)
	}
	return nil
}

// decode makes events of bytes so that most of them make progress.
func (w *walk) decode(b byte) Event {
	e := Event{Kind: EventKind(b%uint8(numEvents-1)) + 1, Chunk: int(b / 60)}
	if b >= 128 { // the event that comes next if all goes well
		switch w.side {
		case SideSender:
			s := w.at.(Sender)
			switch {
			case s.State() == StateBootstrapping:
				return Event{Kind: EvGrant}
			case b&1 == 0 || len(w.begun) == 0:
				return Event{Kind: EvBegin, Chunk: s.Begun()}
			default:
				return Event{Kind: EvSettle, Chunk: w.begun[int(b>>1)%len(w.begun)]}
			}
		default:
			if w.at.Node() == boot {
				return Event{Kind: EvGranted}
			}
			return Event{Kind: EvLanded, Chunk: w.landed, Last: w.landed == w.chunks-1}
		}
	}
	if e.Kind == EvLanded {
		e.Last = b&1 == 0
	}
	return e
}

func checkWalk(side Side, chunks int, events []byte) error {
	w := newWalk(side, chunks)
	for _, b := range events {
		e := w.decode(b)
		// A transport settles each write once; that is its contract, not the machine's to check.
		if (e.Kind == EvSettle || e.Kind == EvSettleError) && e.Chunk < w.chunks && !slices.Contains(w.begun, e.Chunk) {
			continue
		}
		if err := w.step(e); err != nil {
			return err
		}
	}
	return w.finish()
}

// TestRandomWalks is the fuzz target on random input: -seed repeats a run.
func TestRandomWalks(t *testing.T) {
	s := *seed
	if s == 0 {
		s = rand.Uint64()
	}
	rng := rand.New(rand.NewPCG(s, 0))
	ended := make(map[State]int)
	for range 20000 {
		side, chunks := Side(1+rng.IntN(2)), 1+rng.IntN(4)
		events := make([]byte, rng.IntN(30))
		for i := range events {
			events[i] = byte(rng.UintN(256))
			if rng.IntN(4) > 0 {
				events[i] |= 128
			}
		}
		if err := checkWalk(side, chunks, events); err != nil {
			t.Fatalf("seed %d, events %v: %v", s, events, err)
		}
		w := newWalk(side, chunks)
		for _, b := range events {
			_ = w.step(w.decode(b))
		}
		ended[w.at.Node().State]++
	}
	// The walks must have been everywhere, or they prove little.
	for st := StateFailed; st <= StateSuccess; st++ {
		if ended[st] < 100 {
			t.Errorf("seed %d: only %d walks stopped in %v", s, ended[st], st)
		}
	}
}

func FuzzWalk(f *testing.F) {
	f.Add(uint8(1), uint8(2), []byte{128, 128, 129, 128, 129})
	f.Add(uint8(2), uint8(2), []byte{128, 128, 5, 128})
	f.Add(uint8(1), uint8(3), []byte{128, 128, 128, 5, 129, 14})
	f.Fuzz(func(t *testing.T, side, chunks uint8, events []byte) {
		if err := checkWalk(1+Side(side%2), 1+int(chunks%8), events[:min(len(events), 200)]); err != nil {
			t.Fatal(err)
		}
	})
}
