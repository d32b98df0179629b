package record

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

var zero = time.Unix(1000, 0)

func at(ms int) time.Time { return zero.Add(time.Duration(ms) * time.Millisecond) }

// TestWay follows one request that is tried twice.
func TestWay(t *testing.T) {
	j := NewJournal(4, 4)
	e := j.Begin(at(0), "/v1/chat/completions", "10.0.0.1")
	phase := func(want string) {
		t.Helper()
		if r := e.Snapshot(); r.Phase() != want {
			t.Fatalf("phase %q, want %q: %+v", r.Phase(), want, r)
		}
	}
	phase("routing")
	e.Parsed("rid", "m", true, 1, 1)
	e.Wait()
	phase("queued")
	e.Waited(5 * time.Millisecond)
	e.Try(at(5), Attempt{Room: 7, Rooms: 1, Prefill: "p0", Decode: "d0"})
	phase("waiting")
	e.Tried(at(20), &Cause{Code: "peer_lost", Side: "decode", Worker: "d0"})
	phase("routing")
	e.Wait()
	e.Waited(time.Millisecond)
	e.Try(at(21), Attempt{Room: 8, Rooms: 1, Prefill: "p0", Decode: "d1"})
	e.PrefillDone(at(25), 8)
	e.Token(at(30))
	e.Token(at(31)) // only the first counts
	e.Count(3)
	phase("streaming")
	e.Usage(10, 3)
	e.Tried(at(40), nil)
	if j.Live() != 1 {
		t.Fatalf("%d live requests", j.Live())
	}
	e.End(at(41), at(30), 200, OK, nil)
	e.End(at(50), time.Time{}, 500, Failed, nil) // too late
	phase("ended")
	r := e.Snapshot()
	if r.Queue != 6*time.Millisecond || r.FirstToken() != 30*time.Millisecond || r.FirstByte != 30*time.Millisecond || r.End != 41*time.Millisecond ||
		r.Events != 3 || r.Tokens != 3 || r.PromptTokens != 10 || r.Status != 200 || r.Outcome != OK || r.Cause != nil || len(r.Attempts) != 2 {
		t.Errorf("got %+v", r)
	}
	a, b := r.Attempts[0], r.Attempts[1]
	if a.Cause == nil || a.End != 20*time.Millisecond || a.PrefillEnd != Never || b.PrefillEnd != 25*time.Millisecond || b.End != 40*time.Millisecond || b.Cause != nil {
		t.Errorf("attempts %+v, %+v", a, b)
	}
	if j.Live() != 0 {
		t.Errorf("%d live requests at the end", j.Live())
	}
}

// TestNilEntry: requests without a record cost no conditions elsewhere.
func TestNilEntry(t *testing.T) {
	var e *Entry
	e.Parsed("", "", false, 1, 1)
	e.SetKey("k")
	e.Named("id")
	e.Wait()
	e.Waited(1)
	e.Try(at(0), Attempt{})
	e.PrefillDone(at(0), 1)
	e.Token(at(0))
	e.Count(1)
	e.Usage(1, 1)
	e.Tried(at(0), nil)
	e.End(at(0), at(0), 200, OK, nil)
	if r := e.Snapshot(); r.ID != 0 || e.ID() != 0 {
		t.Errorf("nil has record %+v", r)
	}
}

// TestJournalAgainstModel compares the journal with plain lists over random requests.
func TestJournalAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	for range 50 {
		recent, failures := rnd.IntN(4), rnd.IntN(4)
		j := NewJournal(recent, failures)
		var live []*Entry
		var ended, failed []uint64 // ids, oldest first
		for step := range 60 {
			if rnd.IntN(2) == 0 {
				live = append(live, j.Begin(at(step), "/", ""))
			} else if len(live) > 0 {
				i := rnd.IntN(len(live))
				e := live[i]
				live = append(live[:i], live[i+1:]...)
				outcome := []string{OK, Failed, StreamError, Refused}[rnd.IntN(4)]
				e.End(at(step), time.Time{}, 200, outcome, nil)
				ended = append(ended, e.ID())
				if outcome == Failed || outcome == StreamError {
					failed = append(failed, e.ID())
				}
			}
			want := map[uint64]bool{}
			for _, e := range live {
				want[e.ID()] = true
			}
			for _, id := range ended[max(0, len(ended)-recent):] {
				want[id] = true
			}
			for _, id := range failed[max(0, len(failed)-failures):] {
				want[id] = true
			}
			got := j.Latest(1000)
			if len(got) != len(want) || j.Live() != len(live) {
				t.Fatalf("seed %d, step %d: %d records, want %d; %d live, want %d", seed, step, len(got), len(want), j.Live(), len(live))
			}
			for i, r := range got {
				if !want[r.ID] || i > 0 && got[i-1].ID >= r.ID {
					t.Fatalf("seed %d, step %d: record %d is not wanted or out of order", seed, step, r.ID)
				}
			}
			if few := j.Latest(2); len(few) != min(2, len(want)) || len(live) >= 2 && (few[0].ID != live[0].ID() || few[1].ID != live[1].ID()) {
				t.Fatalf("seed %d, step %d: the first two are %+v", seed, step, few)
			}
		}
	}
}

// TestConcurrent: writers, readers and ends at the same time (for the race detector), and nothing stays live.
func TestConcurrent(t *testing.T) {
	j := NewJournal(8, 2)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range 200 {
				e := j.Begin(at(i), "/", "")
				e.Try(at(i), Attempt{Room: uint64(i)})
				e.Count(i)
				e.Token(at(i))
				_ = j.Latest(20)
				e.End(at(i), at(i), 200, OK, nil)
				e.PrefillDone(at(i+1), uint64(i)) // comes late
			}
		})
	}
	wg.Wait()
	if n := j.Live(); n != 0 {
		t.Errorf("%d requests are live", n)
	}
	if n := len(j.Latest(100)); n != 8 {
		t.Errorf("%d records are kept, want 8", n)
	}
}

// BenchmarkRequest is what one recorded request costs a router.
func BenchmarkRequest(b *testing.B) {
	j := NewJournal(256, 64)
	b.ReportAllocs()
	for b.Loop() {
		e := j.Begin(zero, "/v1/chat/completions", "10.0.0.1")
		e.Parsed("rid", "m", true, 1, 1)
		e.Wait()
		e.Waited(0)
		e.Try(zero, Attempt{Room: 7, Rooms: 1, Prefill: "p0", Decode: "d0"})
		for i := range 10 {
			e.Count(i)
		}
		e.Token(zero)
		e.PrefillDone(zero, 7)
		e.Usage(10, 10)
		e.Tried(zero, nil)
		e.End(zero, zero, 200, OK, nil)
	}
}
