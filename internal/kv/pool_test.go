package kv

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// clock is moved by hand.
type clock struct{ now time.Time }

func newClock() *clock { return &clock{time.Unix(1000, 0)} }

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// open makes a pool and checks at the end of the test that its accounting adds up and
// that nothing was misused.
func open(t *testing.T, c Config) *Pool {
	t.Helper()
	if c.PageBytes == 0 {
		c.PageBytes = 64
	}
	if c.Name == "" {
		c.Name = "test"
	}
	p, err := Open(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		balanced(t, p)
		if err := p.Close(); err != nil && !errors.Is(err, ErrHeld) {
			t.Error(err)
		}
	})
	return p
}

func balanced(t *testing.T, p *Pool) Stats {
	t.Helper()
	s := p.Stats()
	if s.Free+s.Request+s.Granted+s.Quarantine+s.Cached != s.Total || min(s.Free, s.Request, s.Granted, s.Quarantine, s.Shared) < 0 || s.Shared > s.Cached {
		t.Errorf("accounting does not add up: %+v", s)
	}
	return s
}

func alloc(t *testing.T, p *Pool, n int) *Lease {
	t.Helper()
	l, err := p.Alloc(n, "room 1", time.Time{})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestConfig(t *testing.T) {
	for _, c := range []Config{{Pages: 1}, {PageBytes: 1}, {PageBytes: -1, Pages: 1}, {PageBytes: 1, Pages: -1}, {PageBytes: 1, Pages: 1 << 33}, {PageBytes: 1 << 40, Pages: 1 << 30}} {
		if p, err := Open(c); err == nil {
			t.Errorf("%+v was opened: %v", c, p)
		}
	}
}

// TestMemory: pages are disjoint, cover the mapping, and are zero at first; both kinds.
func TestMemory(t *testing.T) {
	for _, plain := range []bool{false, true} {
		p := open(t, Config{PageBytes: 100, Pages: 50, Plain: plain})
		mem, fd := p.Memory()
		if len(mem) != 5000 || (fd == -1) != plain {
			t.Fatalf("plain %v: %d bytes, fd %d", plain, len(mem), fd)
		}
		if !bytes.Equal(mem, make([]byte, 5000)) {
			t.Error("memory is not zero")
		}
		for id := range PageID(50) {
			page := p.Page(id)
			if len(page) != 100 || cap(page) != 100 {
				t.Fatalf("page %d: len %d cap %d", id, len(page), cap(page))
			}
			for i := range page {
				page[i] += byte(id) + 1
			}
		}
		for i, b := range mem {
			if b != byte(i/100)+1 {
				t.Fatalf("byte %d is %d", i, b)
			}
		}
	}
}

// TestOwners walks every order in which the two owners can let go.
func TestOwners(t *testing.T) {
	type counts struct{ free, request, granted, quarantine int }
	grant := func(l *Lease) { l.Grant() }
	request := func(l *Lease) { l.ReleaseRequest() }
	drained := func(l *Lease) { l.ReleaseTransfer(ProofDrained) }
	fenced := func(l *Lease) { l.ReleaseTransfer(ProofFenced) }
	for _, c := range []struct {
		name  string
		acts  []func(*Lease)
		after []counts
		freed [3]uint64 // never granted, drained, fenced
	}{
		{"never granted", []func(*Lease){request}, []counts{{8, 0, 0, 0}}, [3]uint64{3, 0, 0}},
		{"transfer first", []func(*Lease){grant, drained, request}, []counts{{5, 0, 3, 0}, {5, 3, 0, 0}, {8, 0, 0, 0}}, [3]uint64{0, 3, 0}},
		{"request first", []func(*Lease){grant, request, fenced}, []counts{{5, 0, 3, 0}, {5, 0, 0, 3}, {8, 0, 0, 0}}, [3]uint64{0, 0, 3}},
		{"everything twice", []func(*Lease){grant, grant, request, request, fenced, drained, request},
			[]counts{{5, 0, 3, 0}, {5, 0, 3, 0}, {5, 0, 0, 3}, {5, 0, 0, 3}, {8, 0, 0, 0}, {8, 0, 0, 0}, {8, 0, 0, 0}}, [3]uint64{0, 0, 3}},
		{"release of a transfer that never was", []func(*Lease){drained, request}, []counts{{5, 3, 0, 0}, {8, 0, 0, 0}}, [3]uint64{3, 0, 0}},
	} {
		p := open(t, Config{Pages: 8})
		l := alloc(t, p, 3)
		for i, act := range c.acts {
			act(l)
			s := balanced(t, p)
			if got := (counts{s.Free, s.Request, s.Granted, s.Quarantine}); got != c.after[i] {
				t.Errorf("%s, act %d: %+v, want %+v", c.name, i, got, c.after[i])
			}
		}
		s := p.Stats()
		if got := [3]uint64{s.FreedNeverGranted, s.FreedDrained, s.FreedFenced}; got != c.freed || !s.Idle() || s.Misuses != 0 {
			t.Errorf("%s: freed by proof %v, want %v; %+v", c.name, got, c.freed, s)
		}
	}
}

// TestStaleReleaseIsHarmless: releases of an old lease never touch the next owner of its pages.
func TestStaleReleaseIsHarmless(t *testing.T) {
	p := open(t, Config{Pages: 3})
	old := alloc(t, p, 3)
	old.Grant()
	old.ReleaseTransfer(ProofDrained)
	old.ReleaseRequest()
	next := alloc(t, p, 3)
	next.Grant()
	old.ReleaseRequest()
	old.ReleaseTransfer(ProofFenced)
	if s := balanced(t, p); s.Granted != 3 || s.DoubleReleases != 2 {
		t.Errorf("%+v", s)
	}
	next.ReleaseRequest()
	old.ReleaseTransfer(ProofFenced)
	if s := balanced(t, p); s.Quarantine != 3 {
		t.Errorf("%+v", s)
	}
	next.ReleaseTransfer(ProofFenced)
}

func TestMisuse(t *testing.T) {
	var log bytes.Buffer
	p := open(t, Config{Pages: 4, Log: slog.New(slog.NewTextHandler(&log, nil))})
	l := alloc(t, p, 2)
	l.Grant()
	l.ReleaseTransfer(0) // no proof
	l.ReleaseTransfer(9)
	if s := balanced(t, p); s.Granted != 2 || s.Misuses != 2 {
		t.Errorf("without proof: %+v", s)
	}
	l.ReleaseTransfer(ProofDrained)
	if l.Grant() {
		t.Error("second grant after the transfer has let go")
	}
	l.ReleaseRequest()
	if l.Grant() {
		t.Error("grant of a lease that is gone")
	}
	if s := balanced(t, p); !s.Idle() || s.Misuses != 4 {
		t.Errorf("grants: %+v", s)
	}
	if n := strings.Count(log.String(), "invariant broken"); n != 4 {
		t.Errorf("%d log lines:\n%s", n, &log)
	}
}

func TestAllocLimits(t *testing.T) {
	p := open(t, Config{Pages: 4})
	for _, n := range []int{-1, 5} {
		if _, err := p.Alloc(n, "x", time.Time{}); !errors.Is(err, ErrNeverFits) {
			t.Errorf("Alloc(%d): %v", n, err)
		}
	}
	empty := alloc(t, p, 0)
	a := alloc(t, p, 3)
	if _, err := p.Alloc(2, "room 9", time.Time{}); !errors.Is(err, ErrExhausted) || !strings.Contains(err.Error(), "room 9") {
		t.Errorf("Alloc(2) of 1: %v", err)
	}
	if s := balanced(t, p); s.Free != 1 || s.Leases != 2 || s.Exhausted != 1 || s.Allocs != 2 {
		t.Errorf("a failed Alloc changed something: %+v", s)
	}
	empty.Grant()
	empty.ReleaseRequest()
	if s := p.Stats(); s.Leases != 2 {
		t.Errorf("an empty lease in quarantine is not live: %+v", s)
	}
	empty.ReleaseTransfer(ProofDrained)
	a.ReleaseRequest()
	if s := p.Stats(); !s.Idle() {
		t.Errorf("%+v", s)
	}
}

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestFreed(t *testing.T) {
	p := open(t, Config{Pages: 4})
	l := alloc(t, p, 4)
	l.Grant()
	a, b := p.Freed(), p.Freed()
	l.ReleaseRequest()
	if closed(a) {
		t.Error("pages in quarantine woke a waiter")
	}
	l.ReleaseTransfer(ProofDrained)
	if !closed(a) || !closed(b) {
		t.Error("not all waiters woke")
	}
	c := p.Freed()
	if closed(c) {
		t.Error("a new channel is closed before anything returned")
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if !closed(c) || !closed(p.Freed()) {
		t.Error("Close does not wake waiters")
	}
	if _, err := p.Alloc(1, "x", time.Time{}); !errors.Is(err, ErrClosed) {
		t.Errorf("Alloc after Close: %v", err)
	}
}

// TestWaitersAllGetPages has more demand than pages; everybody waits for Freed.
func TestWaitersAllGetPages(t *testing.T) {
	p := open(t, Config{Pages: 8, Poison: true})
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			for round := range 20 {
				l := waitAlloc(p, 1+(i+round)%8)
				for _, id := range l.Pages() {
					page := p.Page(id)
					for k := range page {
						page[k] = byte(i) // the race detector sees a page with two holders
					}
				}
				if round%2 == 0 {
					l.Grant()
				}
				l.ReleaseRequest()
				l.ReleaseTransfer(ProofFenced)
			}
		})
	}
	wg.Wait()
	if s := balanced(t, p); !s.Idle() || s.Allocs != 24*20 || s.PoisonHits != 0 || s.Misuses != 0 {
		t.Errorf("%+v", s)
	}
}

func waitAlloc(p *Pool, n int) *Lease {
	for {
		freed := p.Freed()
		l, err := p.Alloc(n, "waiter", time.Time{})
		if err == nil {
			return l
		}
		<-freed
	}
}

func TestExpired(t *testing.T) {
	p := open(t, Config{Pages: 8})
	c := newClock()
	if _, ok := p.NextExpiry(); ok {
		t.Error("an empty pool expects something")
	}
	at := func(label string, d time.Duration) *Lease {
		l, err := p.Alloc(1, label, c.now.Add(d))
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	b, a, gone, late := at("b", 2*time.Second), at("a", time.Second), at("gone", time.Second), at("late", time.Hour)
	forever := alloc(t, p, 1)
	gone.ReleaseRequest()
	if next, ok := p.NextExpiry(); !ok || !next.Equal(a.Deadline()) {
		t.Errorf("next is %v", next)
	}
	if ls := p.Expired(c.now); len(ls) != 0 {
		t.Errorf("%d expired too early", len(ls))
	}
	if ls := p.Expired(c.now.Add(2 * time.Second)); !slices.Equal(ls, []*Lease{a, b}) {
		t.Errorf("expired %v, want a, b", ls)
	}
	if ls := p.Expired(c.now.Add(2 * time.Second)); len(ls) != 0 {
		t.Errorf("%v expired twice", ls)
	}
	if s := balanced(t, p); s.Request != 4 || s.Expired != 2 {
		t.Errorf("Expired freed something: %+v", s)
	}
	a.Grant()
	a.ReleaseRequest() // expired and in quarantine: only proof brings it back
	if ls := p.Expired(c.now.Add(24 * time.Hour)); !slices.Equal(ls, []*Lease{late}) {
		t.Errorf("expired %v, want late", ls)
	}
	if s := balanced(t, p); s.Quarantine != 1 {
		t.Errorf("%+v", s)
	}
	a.ReleaseTransfer(ProofFenced)
	for _, l := range []*Lease{b, late, forever} {
		l.ReleaseRequest()
	}
	if s := p.Stats(); !s.Idle() {
		t.Errorf("%+v", s)
	}
}

// TestExpiryOrder compares the heap with sorting, with leases ending in between.
func TestExpiryOrder(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	c := newClock()
	p := open(t, Config{PageBytes: 1, Pages: 1000, Plain: true})
	var live []*Lease
	for range 500 {
		l, err := p.Alloc(rng.IntN(3), "x", c.now.Add(time.Duration(rng.IntN(1000))*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		live = append(live, l)
		if rng.IntN(3) == 0 {
			i := rng.IntN(len(live))
			live[i].ReleaseRequest()
			live = slices.Delete(live, i, i+1)
		}
	}
	slices.SortStableFunc(live, func(a, b *Lease) int { return a.deadline.Compare(b.deadline) })
	for at := time.Duration(0); at <= time.Second; at += 100 * time.Millisecond {
		now := c.now.Add(at)
		n, _ := slices.BinarySearchFunc(live, now.Add(1), func(l *Lease, t time.Time) int { return l.deadline.Compare(t) })
		got := p.Expired(now)
		if len(got) != n || !slices.IsSortedFunc(got, func(a, b *Lease) int { return a.deadline.Compare(b.deadline) }) {
			t.Fatalf("seed %d: %d expired at %v, want %d in order", seed, len(got), at, n)
		}
		for _, l := range live[:n] {
			if !slices.Contains(got, l) {
				t.Fatalf("seed %d: a lease is missing", seed)
			}
			l.ReleaseRequest()
		}
		live = live[n:]
	}
	if s := p.Stats(); !s.Idle() {
		t.Errorf("seed %d: %+v", seed, s)
	}
}

func TestQuarantineAge(t *testing.T) {
	c := newClock()
	p := open(t, Config{Pages: 4, Now: func() time.Time { return c.now }})
	a, b := alloc(t, p, 1), alloc(t, p, 1)
	a.Grant()
	b.Grant()
	if s := p.Stats(); s.OldestQuarantine != 0 {
		t.Errorf("age %v without quarantine", s.OldestQuarantine)
	}
	b.ReleaseRequest()
	c.now = c.now.Add(5 * time.Second)
	a.ReleaseRequest()
	c.now = c.now.Add(time.Second)
	if s := p.Stats(); s.OldestQuarantine != 6*time.Second {
		t.Errorf("age %v, want 6s", s.OldestQuarantine)
	}
	b.ReleaseTransfer(ProofFenced)
	if s := p.Stats(); s.OldestQuarantine != time.Second {
		t.Errorf("age %v, want 1s", s.OldestQuarantine)
	}
	a.ReleaseTransfer(ProofFenced)
}

// TestClose: nobody's memory is unmapped under his hands.
func TestClose(t *testing.T) {
	p := open(t, Config{Pages: 4})
	l := alloc(t, p, 2)
	l.Grant()
	l.ReleaseRequest()
	err := p.Close()
	if !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), "room 1: 2 pages held by quarantine") {
		t.Errorf("Close with quarantine: %v", err)
	}
	p.Page(l.Pages()[0])[0] = 1 // still mapped
	l.ReleaseTransfer(ProofFenced)
	if err := errors.Join(p.Close(), p.Close()); err != nil {
		t.Errorf("Close: %v", err)
	}
	if mem, fd := p.Memory(); mem != nil || fd != -1 {
		t.Errorf("memory after Close: %d bytes, fd %d", len(mem), fd)
	}
}

// TestPoison: a store into a page that nobody holds is found at the next Alloc.
func TestPoison(t *testing.T) {
	for _, pageBytes := range []int{64, 4096, 10_000} {
		var log bytes.Buffer
		p := open(t, Config{PageBytes: pageBytes, Pages: 4, Poison: true, Log: slog.New(slog.NewTextHandler(&log, nil))})
		l := alloc(t, p, 4)
		for _, id := range l.Pages() {
			clear(p.Page(id))
		}
		l.ReleaseRequest()
		if n := p.CheckFree(); n != 0 {
			t.Errorf("%d hits without a stray write:\n%s", n, &log)
		}
		late := p.Page(2)
		late[pageBytes-1] = 7
		l = alloc(t, p, 4)
		if s := p.Stats(); s.PoisonHits != 1 {
			t.Errorf("page of %d: %d hits, want 1", pageBytes, s.PoisonHits)
		}
		if want := fmt.Sprintf("page=2 offset=%d next_owner=\"room 1\"", pageBytes-1); !strings.Contains(log.String(), want) {
			t.Errorf("log has no %q:\n%s", want, &log)
		}
		l.ReleaseRequest()
		p.Page(0)[0] = 1
		if n := p.CheckFree(); n != 1 {
			t.Errorf("CheckFree: %d hits, want 1", n)
		}
		if n := p.CheckFree(); n != 0 {
			t.Errorf("CheckFree reports a hit twice")
		}
	}
}

// TestRandomAgainstModel runs random acts beside a model that knows one owner set for
// each page.
func TestRandomAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 0))
	const pages = 70
	p := open(t, Config{PageBytes: 8, Pages: pages, Plain: true, Poison: true, Log: quiet()})
	type hold struct {
		l                          *Lease
		request, transfer, granted bool
	}
	var owner [pages]*hold
	var all []*hold
	for step := range 20_000 {
		if rng.IntN(4) == 0 || len(all) == 0 {
			n := rng.IntN(20)
			l, err := p.Alloc(n, "x", time.Time{})
			free := 0
			for _, o := range owner {
				if o == nil {
					free++
				}
			}
			if (err == nil) != (n <= free) {
				t.Fatalf("seed %d step %d: Alloc(%d) of %d free: %v", seed, step, n, free, err)
			}
			if err != nil {
				continue
			}
			h := &hold{l: l, request: true}
			for _, id := range l.Pages() {
				if owner[id] != nil {
					t.Fatalf("seed %d step %d: page %d has two leases", seed, step, id)
				}
				owner[id] = h
			}
			all = append(all, h)
		} else {
			h := all[rng.IntN(len(all))] // also leases that ended long ago
			switch rng.IntN(3) {
			case 0:
				want := h.transfer || h.request && !h.granted
				if got := h.l.Grant(); got != want {
					t.Fatalf("seed %d step %d: Grant %v, want %v", seed, step, got, want)
				}
				h.transfer, h.granted = want, h.granted || want
			case 1:
				h.l.ReleaseRequest()
				h.request = false
			case 2:
				h.l.ReleaseTransfer(Proof(1 + rng.IntN(3)))
				h.transfer = false
			}
			if !h.request && !h.transfer {
				for _, id := range h.l.Pages() {
					if owner[id] == h {
						owner[id] = nil
					}
				}
			}
		}
		var want Stats
		for _, o := range owner {
			switch {
			case o == nil:
				want.Free++
			case o.request && o.transfer:
				want.Granted++
			case o.request:
				want.Request++
			default:
				want.Quarantine++
			}
		}
		s := p.Stats()
		if s.Free != want.Free || s.Request != want.Request || s.Granted != want.Granted || s.Quarantine != want.Quarantine {
			t.Fatalf("seed %d step %d: %+v, want %+v", seed, step, s, want)
		}
		if len(all) > 40 {
			all = all[rng.IntN(3):]
		}
	}
}

func TestCollector(t *testing.T) {
	c := newClock()
	p := open(t, Config{Name: "decode", Pages: 10, PageBytes: 64, Now: func() time.Time { return c.now }})
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(p.Collector())
	a, b, d := alloc(t, p, 1), alloc(t, p, 2), alloc(t, p, 3)
	b.Grant()
	d.Grant()
	d.ReleaseRequest()
	c.now = c.now.Add(4 * time.Second)
	want := map[string]float64{
		"pages{owner=free,pool=decode}": 4, "pages{owner=request,pool=decode}": 1,
		"pages{owner=granted,pool=decode}": 2, "pages{owner=quarantine,pool=decode}": 3,
		"quarantine_oldest_seconds{pool=decode}": 4, "leases{pool=decode}": 3, "leases_total{pool=decode}": 3,
		"pages_freed_total{pool=decode,proof=fenced}": 0,
	}
	check := func() {
		t.Helper()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := make(map[string]float64)
		for _, f := range families {
			for _, m := range f.GetMetric() {
				var ls []string
				for _, l := range m.GetLabel() {
					ls = append(ls, l.GetName()+"="+l.GetValue())
				}
				got[strings.TrimPrefix(f.GetName(), "baton_kv_")+"{"+strings.Join(ls, ",")+"}"] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
		for k, v := range want {
			if g, ok := got[k]; !ok || g != v {
				t.Errorf("%s is %v (there: %v), want %v", k, g, ok, v)
			}
		}
	}
	check()
	d.ReleaseTransfer(ProofFenced)
	want["pages_freed_total{pool=decode,proof=fenced}"] = 3
	want["pages{owner=free,pool=decode}"] = 7
	want["pages{owner=quarantine,pool=decode}"] = 0
	want["quarantine_oldest_seconds{pool=decode}"] = 0
	want["leases{pool=decode}"] = 2
	check()
	a.ReleaseRequest()
	b.ReleaseRequest()
	b.ReleaseTransfer(ProofDrained)
}
