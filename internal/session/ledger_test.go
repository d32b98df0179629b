package session

import (
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	pb "github.com/baton-pd/baton/proto/baton/v1"
)

var t0 = time.Unix(1_000_000, 0)

func at(seconds float64) time.Time { return t0.Add(time.Duration(seconds * float64(time.Second))) }

func testLedger() *ledger { return newLedger(Tuning{}.withDefaults(), t0) }

// mustNext checks number and kind of the next message to send.
func mustNext(t *testing.T, g *ledger, seq uint64, kind string) body {
	t.Helper()
	s, b, ok := g.next()
	if !ok || s != seq || kindOf(b) != kind {
		t.Fatalf("next is %d %s %v, want %d %s", s, kindOf(b), ok, seq, kind)
	}
	return b
}

func TestLedgerNumbersAndAcks(t *testing.T) {
	g := testLedger()
	for range 3 {
		if err := g.push(&pb.Abort{}, 10, t0); err != nil {
			t.Fatal(err)
		}
	}
	mustNext(t, g, 2, "abort")
	if err := g.receive(2, t0); err != nil {
		t.Fatal(err)
	}
	g.done()
	if b := mustNext(t, g, 3, "ack").(*pb.Ack); b.GetSeq() != 2 {
		t.Errorf("ack of %d, want 2", b.GetSeq())
	}
	mustNext(t, g, 4, "abort")
	mustNext(t, g, 5, "abort")
	if _, b, ok := g.next(); ok || g.queuedBytes != 0 {
		t.Errorf("after the last message: %v, %d bytes", b, g.queuedBytes)
	}
	observed := 0
	for _, step := range []struct {
		ack  uint64
		left int
		bad  bool
	}{{0, 3, true}, {1, 3, false}, {2, 2, false}, {2, 2, false}, {1, 2, true}, {6, 2, true}, {3, 2, false}, {5, 0, false}} {
		if err := g.ack(step.ack, func(time.Time) { observed++ }); (err != nil) != step.bad || len(g.sent) != step.left {
			t.Errorf("ack of %d: %v, %d left, want %+v", step.ack, err, len(g.sent), step)
		}
	}
	if observed != 3 {
		t.Errorf("%d messages observed as acked, want 3", observed)
	}
	for _, seq := range []uint64{0, 2, 4, 1 << 63} {
		if err := g.receive(seq, t0); err == nil {
			t.Errorf("number %d was accepted where 3 was due", seq)
		}
	}
}

func TestLedgerAcksAreNotAcked(t *testing.T) {
	g := testLedger()
	if err := g.receive(2, t0); err != nil { // an ack of the peer: receive without done
		t.Fatal(err)
	}
	if _, b, ok := g.next(); ok {
		t.Errorf("an ack was answered with %v", b)
	}
}

// TestLedgerDeadlines checks defaults: keepalive 2 s + 3 s, acks 5 s.
func TestLedgerDeadlines(t *testing.T) {
	g := testLedger()
	expect := func(now float64, wantLate string, wantPing bool, wantNext float64) {
		t.Helper()
		late, ping, next := g.check(at(now))
		if (late == "") != (wantLate == "") || !strings.Contains(late, wantLate) || ping != wantPing || (late == "" && !next.Equal(at(wantNext))) {
			t.Errorf("at %vs: late %q, ping %v, next in %v; want %q, %v, %vs", now, late, ping, next.Sub(t0), wantLate, wantPing, wantNext)
		}
	}
	push := func(b body, now float64) {
		t.Helper()
		if err := g.push(b, 1, at(now)); err != nil {
			t.Fatal(err)
		}
	}
	expect(0, "", false, 2)
	expect(1.9, "", false, 2)
	expect(2, "", true, 5)
	push(&pb.Ping{}, 2)
	expect(2.1, "", false, 5)
	push(&pb.Abort{}, 2.5) // due later than the ping's ack
	expect(2.5, "", false, 5)
	mustNext(t, g, 2, "ping")
	if err := g.receive(2, at(3)); err != nil {
		t.Fatal(err)
	}
	if err := g.ack(2, func(time.Time) {}); err != nil {
		t.Fatal(err)
	}
	expect(3, "", false, 5)  // heard at 3
	expect(5, "", true, 7.5) // the abort is due before the new ping
	push(&pb.Ping{}, 5)
	expect(7.4, "", false, 7.5)
	expect(7.5, "not handled a message (abort) for 5s", false, 0)
	mustNext(t, g, 3, "abort")
	if err := g.ack(3, func(time.Time) {}); err != nil {
		t.Fatal(err)
	}
	expect(7.9, "", false, 8)
	expect(8, "not answered a ping for 3s and was last heard 5s ago", false, 0)
}

func TestLedgerOverflow(t *testing.T) {
	for _, tc := range []struct {
		size, fit int
	}{{1, maxQueued}, {maxMessage, maxQueuedBytes / maxMessage}} {
		g := testLedger()
		for i := range tc.fit {
			if err := g.push(&pb.Ping{}, tc.size, t0); err != nil {
				t.Fatalf("message %d of %d bytes: %v", i, tc.size, err)
			}
		}
		if err := g.push(&pb.Ping{}, tc.size, at(3)); err == nil || !strings.Contains(err.Error(), "3s") {
			t.Errorf("%d messages of %d bytes: %v", tc.fit+1, tc.size, err)
		}
	}
}

func TestBackoffGrowsWithinBounds(t *testing.T) {
	tune := Tuning{BackoffMin: 100 * time.Millisecond, BackoffMax: 2 * time.Second}.withDefaults()
	for n, full := range map[int]time.Duration{1: 100 * time.Millisecond, 2: 200 * time.Millisecond, 5: 1600 * time.Millisecond, 6: 2 * time.Second, 31: 2 * time.Second, 1 << 40: 2 * time.Second} {
		seen := make(map[time.Duration]bool)
		for range 200 {
			d := backoff(tune, n)
			if d < full/2 || d > full {
				t.Fatalf("pause after %d failures is %v, want %v to %v", n, d, full/2, full)
			}
			seen[d] = true
		}
		if len(seen) < 10 {
			t.Errorf("pauses after %d failures: %d different ones of 200, want jitter", n, len(seen))
		}
	}
	huge := Tuning{BackoffMin: 1 << 62, BackoffMax: 1 << 62}
	if d := backoff(huge, 31); d < 1<<61 {
		t.Errorf("huge bounds gave %v", d)
	}
}

func TestDefaults(t *testing.T) {
	got := Tuning{BackoffMin: time.Minute, AckTimeout: -1, HelloTimeout: 7}.withDefaults()
	want := Tuning{KeepaliveTime: 2 * time.Second, KeepaliveTimeout: 3 * time.Second, DialTimeout: 5 * time.Second, AckTimeout: 5 * time.Second,
		HelloTimeout: 7, BackoffMin: time.Minute, BackoffMax: time.Minute}
	if got != want {
		t.Errorf("defaults gave %+v, want %+v", got, want)
	}
}

// TestConnSetBound: connections above the bound are closed, and a closed one makes room.
func TestConnSetBound(t *testing.T) {
	s := newConnSet(2)
	var theirs []net.Conn
	add := func() *trackedConn {
		a, b := net.Pipe()
		theirs = append(theirs, b)
		c := s.add(a)
		if c == nil {
			_ = a.Close()
		}
		return c
	}
	first, second := add(), add()
	if first == nil || second == nil || add() != nil {
		t.Fatal("the bound of 2 does not hold")
	}
	_ = first.Close()
	_ = first.Close()
	third := add()
	if third == nil || len(s.conns) != 2 {
		t.Fatal("a closed connection made no room")
	}
	s.closeAll()
	for i, c := range theirs {
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Errorf("connection %d is open", i)
		}
	}
	if add() != nil {
		t.Error("a connection was let in after closeAll")
	}
	for _, c := range []*trackedConn{second, third} {
		_ = c.Close()
	}
	if len(s.conns) != 0 {
		t.Errorf("%d connections left", len(s.conns))
	}
}

// TestForget: addresses come from requests, so they must not pile up.
func TestForget(t *testing.T) {
	c := NewClient(ClientConfig{})
	for i := range 100 {
		c.leave(c.enter(fmt.Sprintf("h%d:1", i)))
	}
	busy := c.enter("busy:1")
	for _, p := range c.peers {
		p.touched = time.Now().Add(-2 * peerMemory)
	}
	c.leave(c.enter("new:1"))
	if len(c.peers) != 2 || c.peers["busy:1"] != busy {
		t.Errorf("%d addresses remembered, want those in use and the new one", len(c.peers))
	}
	c.leave(busy)
}
