package edge

import (
	"math/rand/v2"
	"testing"
	"time"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func TestBucket(t *testing.T) {
	b := NewBucket(60, t0) // one a second
	for i := range 60 {
		if w := b.Take(t0); w != 0 {
			t.Fatalf("token %d: wait %v", i, w)
		}
	}
	if w := b.Take(t0); w != time.Second {
		t.Fatalf("an empty bucket says %v", w)
	}
	if w := b.Take(t0.Add(400 * time.Millisecond)); w != 600*time.Millisecond {
		t.Fatalf("after 0.4 s it says %v", w)
	}
	if w := b.Take(t0.Add(time.Second)); w != 0 {
		t.Fatalf("after 1 s it says %v", w)
	}
	if w := b.Take(t0.Add(time.Second)); w != time.Second {
		t.Fatalf("and then %v", w)
	}
	if w := b.Take(t0.Add(-time.Hour)); w != time.Second { // a clock that goes back gives nothing
		t.Fatalf("in the past %v", w)
	}
	b.fill(t0.Add(24 * time.Hour))
	if b.level != 60 {
		t.Fatalf("after a day it holds %v", b.level)
	}
	var none Bucket
	for range 1000 {
		if none.Take(t0) != 0 {
			t.Fatal("a bucket without a limit says no")
		}
	}
}

func TestBucketResize(t *testing.T) {
	b := NewBucket(10, t0)
	for range 7 {
		b.Take(t0)
	}
	b.Resize(100, t0)
	if b.level != 3 {
		t.Fatalf("a larger bucket holds %v; a change must not fill it", b.level)
	}
	b.Resize(2, t0)
	if b.level != 2 {
		t.Fatalf("a smaller bucket holds %v", b.level)
	}
	b.Resize(0, t0)
	if b.Take(t0) != 0 || b.Take(t0) != 0 || b.Take(t0) != 0 {
		t.Fatal("without a limit it says no")
	}
	b.Resize(5, t0)
	if b.level != 5 {
		t.Fatalf("a new limit begins with %v", b.level)
	}
}

// Whatever the pace, in any time span no more pass than the rate gives and the bucket holds; and who waits as told is let in.
func TestBucketKeepsItsRate(t *testing.T) {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 1))
	for range 50 {
		per := 1 + r.IntN(600)
		b, now := NewBucket(per, t0), t0
		var passed []time.Time
		for range 2000 {
			now = now.Add(time.Duration(r.Int64N(int64(2 * time.Minute / time.Duration(per)))))
			wait := b.Take(now)
			if wait > 0 && r.IntN(3) == 0 {
				if now = now.Add(wait); b.Take(now) != 0 {
					t.Fatalf("seed %d: told to wait %v, and then again", seed, wait)
				}
				wait = 0
			}
			if wait == 0 {
				passed = append(passed, now)
			}
		}
		for i := 0; i < len(passed); i += 17 {
			for j := i; j < len(passed); j += 13 {
				most := float64(per) + passed[j].Sub(passed[i]).Minutes()*float64(per) + 0.01
				if n := float64(j - i + 1); n > most {
					t.Fatalf("seed %d: %v in %v at %d a minute", seed, n, passed[j].Sub(passed[i]), per)
				}
			}
		}
	}
}
