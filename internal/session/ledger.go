package session

import (
	"fmt"
	"time"

	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// kindPing is kindOf a ping.
const kindPing = "ping"

// Bounds of what waits to be sent. Far above what a healthy peer leaves waiting; a
// peer that does not take its messages hits AckTimeout or these, whichever is first.
const (
	maxQueued      = 16384    // messages
	maxQueuedBytes = 64 << 20 // and their size on the wire
)

// ledger is the bookkeeping of one end of a session: numbers, the send queue, what waits
// for an ack, and when silence becomes suspicious. It is pure: no clock, no lock,
// no goroutine; link owns one under its mutex.
//
// The hello and its answer are number 1 of their directions and confirm each
// other, so a ledger starts after them.
type ledger struct {
	t Tuning

	queue       []pending // accepted, not yet handed to the stream
	queuedBytes int       // of queue
	sent        []pending // handed to the stream, not yet acked; seq rising
	lastSent    uint64    // number of the last message handed out by next
	acked       uint64    // <= lastSent; the peer has handled up to here

	lastReceived uint64    // number of the last message received
	handled      uint64    // <= lastReceived; ours to ack
	ackSent      uint64    // <= handled; the last ack handed out by next
	heard        time.Time // when the last message was received
	pinged       time.Time // when the unacked ping was queued; zero if there is none
}

// pending is a message on its way to being acked.
type pending struct {
	body body // nil in ledger.sent: only the times matter there
	kind string
	size int
	seq  uint64    // set by next
	at   time.Time // when it was accepted
}

func newLedger(t Tuning, now time.Time) *ledger {
	return &ledger{t: t, lastSent: 1, acked: 1, lastReceived: 1, handled: 1, ackSent: 1, heard: now}
}

// push accepts a message. An error means overflow: the session has to end.
func (g *ledger) push(b body, size int, now time.Time) error {
	if len(g.queue) >= maxQueued || g.queuedBytes+size > maxQueuedBytes {
		return fmt.Errorf("its send queue overflowed: %d messages of %d bytes were waiting, the oldest for %v",
			len(g.queue), g.queuedBytes, now.Sub(g.queue[0].at).Round(time.Millisecond))
	}
	g.queue = append(g.queue, pending{body: b, kind: kindOf(b), size: size, at: now})
	g.queuedBytes += size
	return nil
}

// next numbers the message to send now: a due ack, else the oldest of the queue.
func (g *ledger) next() (seq uint64, b body, ok bool) {
	if g.handled > g.ackSent {
		g.ackSent = g.handled
		g.lastSent++
		return g.lastSent, &pb.Ack{Seq: g.handled}, true
	}
	if len(g.queue) == 0 {
		return 0, nil, false
	}
	p := g.queue[0]
	g.queue[0] = pending{}
	g.queue = g.queue[1:]
	g.queuedBytes -= p.size
	g.lastSent++
	b, p.body, p.seq = p.body, nil, g.lastSent
	g.sent = append(g.sent, p)
	return p.seq, b, true
}

// receive checks the number of a message that has arrived.
func (g *ledger) receive(seq uint64, now time.Time) error {
	if want := g.lastReceived + 1; seq != want {
		return fmt.Errorf("message number %d came where %d was due", seq, want)
	}
	g.lastReceived = seq
	g.heard = now
	return nil
}

// done makes everything received so far due for an ack.
func (g *ledger) done() { g.handled = g.lastReceived }

// ack takes the peer's confirmation and calls observe for each message it covers.
func (g *ledger) ack(seq uint64, observe func(sent time.Time)) error {
	if seq < g.acked || seq > g.lastSent {
		return fmt.Errorf("ack of %d is not between %d and %d", seq, g.acked, g.lastSent)
	}
	g.acked = seq
	n := 0
	for n < len(g.sent) && g.sent[n].seq <= seq {
		if g.sent[n].kind == kindPing {
			g.pinged = time.Time{}
		}
		observe(g.sent[n].at)
		n++
	}
	g.sent = g.sent[n:]
	return nil
}

// oldest is the message that has waited longest for its ack, sent or not.
func (g *ledger) oldest() (pending, bool) {
	switch {
	case len(g.sent) > 0:
		return g.sent[0], true
	case len(g.queue) > 0:
		return g.queue[0], true
	default:
		return pending{}, false
	}
}

// check looks at the clock: late says what the peer owes for too long ("" if nothing),
// ping asks the caller to push a ping, and next is when to look again.
func (g *ledger) check(now time.Time) (late string, ping bool, next time.Time) {
	next = g.heard.Add(g.t.KeepaliveTime)
	if g.pinged.IsZero() && !now.Before(next) {
		ping, g.pinged = true, now
	}
	if !g.pinged.IsZero() {
		next = g.pinged.Add(g.t.KeepaliveTimeout)
		if !now.Before(next) {
			return fmt.Sprintf("it has not answered a ping for %v and was last heard %v ago; it is stopped, stuck or cut off",
				g.t.KeepaliveTimeout, now.Sub(g.heard).Round(time.Millisecond)), false, next
		}
	}
	if p, ok := g.oldest(); ok {
		due := p.at.Add(g.t.AckTimeout)
		if !now.Before(due) {
			return fmt.Sprintf("it has not handled a message (%s) for %v; it is stopped, stuck or cut off", p.kind, g.t.AckTimeout), false, next
		}
		next = earlier(next, due)
	}
	return "", ping, next
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}
