package room

import (
	"log/slog"
	"sync"
	"testing"
	"time"
)

// witness keeps what it is told, by instance.
type witness struct {
	t      *testing.T
	mu     sync.Mutex
	opened map[uint64]int // chunks
	steps  map[uint64][]Stepped
	forgot map[uint64]int // after how many steps
}

func newWitness(t *testing.T) *witness {
	return &witness{t: t, opened: map[uint64]int{}, steps: map[uint64][]Stepped{}, forgot: map[uint64]int{}}
}

func (w *witness) Opened(r *Room, chunks int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, twice := w.opened[r.Instance()]; twice {
		w.t.Errorf("instance %d opened twice", r.Instance())
	}
	w.opened[r.Instance()] = chunks
}

func (w *witness) Stepped(r *Room, s Stepped) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if s.To != (Node{r.State(), r.Drain()}) || s.Cause != r.Cause() {
		w.t.Errorf("told %v, others read %v/%v", s.To, r.State(), r.Drain())
	}
	w.steps[r.Instance()] = append(w.steps[r.Instance()], s)
}

func (w *witness) Forgotten(r *Room) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, twice := w.forgot[r.Instance()]; twice {
		w.t.Errorf("instance %d forgotten twice", r.Instance())
	}
	w.forgot[r.Instance()] = len(w.steps[r.Instance()])
}

// TestObserver: many goroutines, and every room's events are told once each, in order, each
// from the node where the last one ended, with the effects that were executed.
func TestObserver(t *testing.T) {
	const rooms = 200
	w := newWitness(t)
	executed := map[Key]Effects{}
	var mu sync.Mutex
	g := NewRegistry(Config{Side: SideReceiver, Observe: w, Log: slog.New(slog.DiscardHandler), Execute: func(r *Room, _ Event, fx Effects) []Event {
		mu.Lock()
		defer mu.Unlock()
		executed[r.Key()] |= fx
		return nil
	}})
	defer g.Close()
	var wg sync.WaitGroup
	for i := range rooms {
		r, err := g.Open(Key{Room: uint64(i)}, time.Now().Add(time.Minute), 2, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, list := range [][]Event{
			{{Kind: EvGranted}, {Kind: EvLanded}, {Kind: EvLanded, Chunk: 1, Last: true}},
			{{Kind: EvRemoteFailed}, {Kind: EvAck}, {Kind: EvFenced}},
			{{Kind: EvDeadline}, {Kind: EvRelease}},
		} {
			wg.Go(func() {
				for _, e := range list {
					r.Apply(e)
				}
			})
		}
	}
	wg.Wait()
	g.Range(func(r *Room) bool { r.Apply(Event{Kind: EvFenced}); return true })
	if len(w.opened) != rooms || len(w.forgot) != rooms {
		t.Fatalf("%d opened, %d forgotten of %d", len(w.opened), len(w.forgot), rooms)
	}
	for i := range uint64(rooms) {
		at, m := boot, NewReceiver(w.opened[i+1])
		var told Effects
		for n, s := range w.steps[i+1] {
			var fx Effects
			m, fx = m.Step(s.Event)
			if s.Seq != uint32(n+1) || s.From != at || s.To != m.Node() || s.Effects != fx || s.Landed != m.Landed() || s.Withheld != 0 {
				t.Fatalf("instance %d, step %d: %+v, from %v", i+1, n+1, s, at)
			}
			at, told = s.To, told|fx
		}
		if got := executed[Key{Room: i}]; got != told {
			t.Errorf("instance %d: told %v, executed %v", i+1, told, got)
		}
		if n := w.forgot[i+1]; n == 0 || !w.steps[i+1][n-1].Effects.Has(FxForget) {
			t.Errorf("instance %d was forgotten after %d steps", i+1, n)
		}
	}
}

// TestObserverSeesWhatIsWithheld: the ack of an abort that came before its room was sent then.
func TestObserverSeesWhatIsWithheld(t *testing.T) {
	w := newWitness(t)
	g := NewRegistry(Config{Side: SideSender, Observe: w, Log: slog.New(slog.DiscardHandler)})
	defer g.Close()
	g.Abort(Key{Room: 1}, &Cause{Code: CodeAborted})
	r, err := g.Open(Key{Room: 1}, time.Now().Add(time.Minute), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Apply(Event{Kind: EvRelease})
	s := w.steps[1]
	if len(s) != 2 || s[0].Effects != FxTerminal || s[0].Withheld != FxSendAck || s[0].Cause.Code != CodeAborted || w.forgot[1] != 2 {
		t.Errorf("%+v, forgotten after %d", s, w.forgot[1])
	}
}
