package admission

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// always takes without needing anything.
func always() bool { return true }

// rig is a queue of few places that are all taken, so that whoever comes waits.
type rig struct {
	t     *testing.T
	q     *Queue
	wg    sync.WaitGroup
	mu    sync.Mutex
	order []string // of those that got a place
	errs  map[string]error
}

func newRig(t *testing.T, c Config) *rig {
	if c.MaxInflight == 0 {
		c.MaxInflight = 1
	}
	if c.Aging == 0 {
		c.Aging = time.Second
	}
	g := &rig{t: t, q: New(c), errs: map[string]error{}}
	for range c.MaxInflight {
		if err := g.q.Acquire(t.Context(), Ticket{}, always); err != nil {
			t.Fatal(err)
		}
	}
	return g
}

// come has a request wait in a goroutine of its own, and returns when it does.
func (g *rig) come(ctx context.Context, name string, tk Ticket, try func() bool) {
	g.wg.Go(func() {
		err := g.q.Acquire(ctx, tk, try)
		g.mu.Lock()
		defer g.mu.Unlock()
		if err != nil {
			g.errs[name] = err
		} else {
			g.order = append(g.order, name)
		}
	})
	synctest.Wait()
}

// next frees one place and returns who took it.
func (g *rig) next() string {
	g.t.Helper()
	n := len(g.order)
	g.q.Release()
	synctest.Wait()
	if len(g.order) != n+1 {
		g.t.Fatalf("one place was freed, and %v got one", g.order[n:])
	}
	return g.order[n]
}

func (g *rig) stats(waiting, inflight int) {
	g.t.Helper()
	if s := g.q.Stats(); s.Waiting != waiting || s.Inflight != inflight {
		g.t.Errorf("%+v; want %d waiting, %d in flight", s, waiting, inflight)
	}
}

// A key that floods does not keep another's single requests waiting for more than one of its own.
func TestFairBetweenKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 200})
		for i := range 100 {
			g.come(t.Context(), "flood", Ticket{Key: "f", Cost: 1 + float64(i%3)}, always)
		}
		got := map[string]int{}
		for range 20 {
			g.come(t.Context(), "single", Ticket{Key: "s"}, always)
			got[g.next()]++
			got[g.next()]++
		}
		// The flood's requests cost twice as much on the average, but the single one is never more than one ahead of its share.
		if got["single"] != 20 {
			t.Errorf("%v", got)
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// Keys that always wait get costs in proportion to their weights.
func TestShares(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 1000})
		keys := map[string]Ticket{
			"light": {Key: "light", Cost: 1}, "heavy": {Key: "heavy", Cost: 5}, "double": {Key: "double", Cost: 2, Weight: 2},
		}
		for name, tk := range keys {
			for range 300 {
				g.come(t.Context(), name, tk, always)
			}
		}
		work := map[string]float64{}
		for range 300 {
			name := g.next()
			work[name] += keys[name].Cost / max(keys[name].Weight, 1)
		}
		for a := range work {
			for b := range work {
				if work[a]-work[b] > 5+1 {
					t.Errorf("work by weight: %v", work)
				}
			}
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// A key that waits with one large request at a time pays for each.
func TestComingBackIsNoTrick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 1000})
		for range 200 {
			g.come(t.Context(), "b", Ticket{Key: "b"}, always)
		}
		a := 0
		for range 100 {
			if g.q.fair.keys["a"] == nil || g.q.fair.keys["a"].waiting == 0 {
				g.come(t.Context(), "a", Ticket{Key: "a", Cost: 9}, always)
			}
			if g.next() == "a" {
				a++
			}
		}
		if a < 9 || a > 11 {
			t.Errorf("a got %d of 100; a tenth is fair", a)
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
		if n := len(g.q.fair.keys); n != 0 {
			t.Errorf("%d keys are remembered by an empty queue", n)
		}
	})
}

// Of one key the highest priority goes first; a low one that has waited long enough goes before high ones that came later.
func TestPriorityAndAging(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 100, Aging: time.Second})
		g.come(t.Context(), "low", Ticket{Priority: -1}, always)
		g.come(t.Context(), "first", Ticket{}, always)
		g.come(t.Context(), "second", Ticket{}, always)
		g.come(t.Context(), "high", Ticket{Priority: 3}, always)
		if a, b, c := g.next(), g.next(), g.next(); a != "high" || b != "first" || c != "second" {
			t.Errorf("%s, %s, %s", a, b, c)
		}
		// An endless row of urgent ones, one a second: low goes when it is four seconds older, that is
		// the difference of priorities.
		for i := range 20 {
			<-time.After(time.Second)
			g.come(t.Context(), fmt.Sprint("urgent ", i), Ticket{Priority: 3}, always)
			if g.next() == "low" {
				if i != 3 && i != 4 {
					t.Errorf("low went after %d urgent ones", i)
				}
				break
			} else if i == 19 {
				t.Error("low starved")
			}
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// Priority takes no other key's share, whatever it is.
func TestPriorityIsPaidBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 500})
		for range 200 {
			g.come(t.Context(), "modest", Ticket{Key: "m"}, always)
			g.come(t.Context(), "pushy", Ticket{Key: "p", Priority: 10}, always)
		}
		got := map[string]int{}
		for range 200 {
			got[g.next()]++
		}
		if got["modest"] < 90 || got["pushy"] < 100 {
			t.Errorf("%v; want ten steps of priority to be worth ten requests in all", got)
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// A class whose workers are busy keeps nobody else waiting, of its own key or of another.
func TestNoHeadOfLineBlocking(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxInflight: 8, MaxWaiting: 100})
		for range 7 {
			g.q.Release()
		}
		var free atomic.Bool
		big := func() bool { return free.Load() }
		for _, key := range []string{"a", "a", "b"} {
			g.come(t.Context(), "big", Ticket{Key: key, Class: "big"}, big)
		}
		g.stats(3, 1)
		for _, key := range []string{"a", "b", "c"} {
			g.come(t.Context(), "small "+key, Ticket{Key: key, Class: "small"}, always)
		}
		g.stats(3, 4)
		if len(g.order) != 3 || g.order[0] != "small a" {
			t.Errorf("%v", g.order)
		}
		free.Store(true)
		g.q.Kick()
		synctest.Wait()
		g.stats(0, 7)
		g.wg.Wait()
	})
}

// Who leaves frees his place in the queue at once, and is not tried any more.
func TestLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 1})
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("gone")
		g.come(ctx, "leaves", Ticket{}, func() bool { t.Error("tried"); return false })
		g.come(t.Context(), "one too many", Ticket{}, always)
		var full *FullError
		if err := g.errs["one too many"]; !errors.As(err, &full) || full.Waiting != 1 || full.Inflight != 1 || full.RetryAfter != time.Second {
			t.Errorf("%v %+v", err, full)
		}
		cancel(gone)
		synctest.Wait()
		if g.errs["leaves"] != gone {
			t.Errorf("%v", g.errs["leaves"])
		}
		g.stats(0, 1)
		g.come(t.Context(), "next", Ticket{}, always)
		if got := g.next(); got != "next" {
			t.Error(got)
		}
		// One that wants another worker leaves, too.
		ctx, cancel = context.WithCancelCause(t.Context())
		g.come(ctx, "again", Ticket{Again: true}, func() bool { return false })
		g.stats(1, 1)
		cancel(gone)
		synctest.Wait()
		g.stats(0, 1)
		g.wg.Wait()
	})
}

// The limit is shared out: a newcomer takes the place of the last one of the key that has most.
func TestFullQueueSheds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 4})
		for i := range 4 {
			g.come(t.Context(), fmt.Sprint("flood ", i), Ticket{Key: "f"}, always)
		}
		g.come(t.Context(), "flood 4", Ticket{Key: "f"}, always)
		g.come(t.Context(), "other", Ticket{Key: "o"}, always)
		g.come(t.Context(), "urgent", Ticket{Key: "f", Priority: 5}, always)
		for name, refused := range map[string]bool{"flood 0": false, "flood 1": false, "flood 2": true, "flood 3": true, "flood 4": true, "other": false, "urgent": false} {
			if (g.errs[name] != nil) != refused {
				t.Errorf("%s: %v", name, g.errs[name])
			}
		}
		g.stats(4, 1)
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// Retry-After follows the rate at which requests end.
func TestRetryAfter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 20})
		for range 21 {
			g.come(t.Context(), "a", Ticket{Key: "a"}, always)
		}
		if e := g.q.Busy(); e.RetryAfter != time.Second {
			t.Errorf("without a rate: %v", e.RetryAfter)
		}
		for range 60 { // two a second
			<-time.After(500 * time.Millisecond)
			g.next()
			g.come(t.Context(), "a", Ticket{Key: "a"}, always)
		}
		if e := g.q.Busy(); e.RetryAfter < 9*time.Second || e.RetryAfter > 11*time.Second {
			t.Errorf("20 wait at two a second: %v", e.RetryAfter)
		}
		<-time.After(10 * time.Minute)
		if e := g.q.Busy(); e.RetryAfter != time.Minute {
			t.Errorf("nothing has ended for long: %v", e.RetryAfter)
		}
		for g.q.Stats().Waiting > 0 {
			g.next()
		}
		g.wg.Wait()
	})
}

// One that holds a place already goes first and takes no other.
func TestAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := newRig(t, Config{MaxWaiting: 0})
		var free atomic.Bool
		g.come(t.Context(), "again", Ticket{Again: true}, func() bool { return free.Load() })
		g.stats(1, 1)
		free.Store(true)
		g.q.Kick()
		synctest.Wait()
		g.stats(0, 1)
		if len(g.order) != 1 {
			t.Errorf("%v %v", g.order, g.errs)
		}
		g.wg.Wait()
	})
}

// Random requests, workers and leavers: no place is lost or given twice, everybody ends, nothing is left.
func TestRandom(t *testing.T) {
	for seed := range uint64(30) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 9))
			q := New(Config{MaxInflight: 5, MaxWaiting: 12, Aging: time.Second})
			var slots [3]atomic.Int64 // of the classes' workers
			for i := range slots {
				slots[i].Store(2)
			}
			var wg sync.WaitGroup
			var most, inflight, got, refused, left atomic.Int64
			for i := range 300 {
				class, d, patience := rng.IntN(3), time.Duration(rng.IntN(900))*time.Millisecond, time.Duration(rng.IntN(4000))*time.Millisecond
				tk := Ticket{Key: fmt.Sprint(rng.IntN(4)), Class: fmt.Sprint(class), Priority: rng.IntN(3), Cost: float64(rng.IntN(4)), Again: i%17 == 0}
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(t.Context(), patience)
					defer cancel()
					taken := false
					err := q.Acquire(ctx, tk, func() bool {
						if slots[class].Load() > 0 {
							slots[class].Add(-1) // tries are one at a time
							taken = true
						}
						return taken
					})
					var full *FullError
					switch {
					case errors.As(err, &full):
						refused.Add(1)
						return
					case err != nil:
						left.Add(1)
						if taken {
							t.Errorf("seed %d: left with a worker", seed)
						}
						return
					case !taken:
						t.Errorf("seed %d: a place without a worker", seed)
						return
					}
					got.Add(1)
					if !tk.Again {
						for n := inflight.Add(1); n > most.Load(); {
							most.Store(n)
						}
					}
					<-time.After(d)
					slots[class].Add(1)
					q.Kick()
					if !tk.Again {
						inflight.Add(-1)
						q.Release()
					}
				})
				<-time.After(time.Duration(rng.IntN(120)) * time.Millisecond)
			}
			wg.Wait()
			if s := q.Stats(); s != (Stats{}) || most.Load() > 5 || got.Load() == 0 || q.hopeful.Load() != 0 || len(q.fair.keys)+len(q.fair.active) != 0 {
				t.Errorf("seed %d: left %+v, at most %d at a time, %d got one, %d keys", seed, s, most.Load(), got.Load(), len(q.fair.keys))
			}
			t.Logf("seed %d: %d got a place, %d were refused, %d left", seed, got.Load(), refused.Load(), left.Load())
		})
	}
}

// A release or kick between a try and the waiting is not lost. Real goroutines, so that the race is real.
func TestNoLostWakeup(t *testing.T) {
	q := New(Config{MaxInflight: 64, MaxWaiting: 64})
	var worker atomic.Int64
	worker.Store(1)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 2000 {
				err := q.Acquire(context.Background(), Ticket{}, func() bool {
					if worker.Load() == 0 {
						return false
					}
					worker.Add(-1)
					return true
				})
				if err != nil {
					t.Error(err)
					return
				}
				worker.Add(1)
				q.Kick()
				q.Release()
			}
		})
	}
	wg.Wait()
}

// A kick that comes while the try is under way, after the try has looked, is not lost either.
func TestKickDuringTry(t *testing.T) {
	q := New(Config{MaxInflight: 1})
	for range 50 {
		var kicks sync.WaitGroup
		looked := false
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		err := q.Acquire(ctx, Ticket{Again: true}, func() bool {
			if looked {
				return true
			}
			looked = true
			started := make(chan struct{})
			kicks.Go(func() {
				close(started)
				q.Kick()
			})
			<-started
			for range 1000 { // enough for the other to get to the lock, or past it
				runtime.Gosched()
			}
			return false
		})
		cancel()
		if kicks.Wait(); err != nil {
			t.Fatal(err)
		}
	}
}

func BenchmarkAcquire(b *testing.B) {
	q := New(Config{MaxInflight: 64, MaxWaiting: 64})
	for b.Loop() {
		if err := q.Acquire(context.Background(), Ticket{Key: "k"}, always); err != nil {
			b.Fatal(err)
		}
		q.Release()
	}
}

func BenchmarkPassWith1000Keys(b *testing.B) {
	q := New(Config{MaxInflight: 1, MaxWaiting: 2000})
	for i := range 1000 {
		q.fair.push(&waiter{Ticket: Ticket{Key: fmt.Sprint(i)}, try: always, done: make(chan struct{})}, 0)
	}
	for b.Loop() {
		w := q.fair.next(nil)
		q.fair.served(w)
		q.fair.push(w, 0)
	}
}
