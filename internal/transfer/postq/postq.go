// Package postq is the send queue of one transport peer: bounded, fair between
// grants, and exact about settling. Each posted write is settled once, either by
// the answer of the destination or by the end of the queue, and never while the
// sending goroutine still reads its segments.
//
// # Roles
//
// Any goroutine calls [Queue.Post]. One goroutine, the sender, calls [Queue.Next],
// hands out a piece of the item's payload and gives the item back with
// [Queue.Return] or [Queue.Refuse]; after Next has said false it calls
// [Queue.Drain]. One goroutine, the receiver of answers, calls [Queue.Settle].
//
// # Order
//
// Writes of one grant go out in the order they were posted, one after the other.
// Grants take turns, one piece each, so a long write delays another room by a
// piece, not by its whole length.
package postq

import (
	"errors"
	"sync"

	"github.com/baton-pd/baton/internal/transfer"
)

// Config bounds a queue.
type Config struct {
	// Limit is how many writes may be posted and not yet settled. At least 1.
	Limit int
	// Open is how many writes may be begun and not yet wholly handed out. At least 1.
	Open int
	// Segments is how many segments a write may have.
	Segments int
}

// ErrEarly: the destination said that a write is complete before all of it was sent.
var ErrEarly = errors.New("completion before the last byte was sent")

// Item is one posted write on its way. Its exported fields belong to the sender
// between Next and Return.
type Item struct {
	transfer.Write
	// Seq numbers the items in the order of their first piece, from 1; 0 until then.
	Seq uint64
	// Total is the payload in bytes, Sent how much of it was handed out.
	Total, Sent uint64
	// Seg and Off are the next byte to send: Segments[Seg].Src[Off].
	Seg, Off int
	// Slot is free for the transport.
	Slot int

	// Under Queue.mu.
	busy     bool  // between Next and Return
	sent     bool  // wholly handed out
	answered bool  // Settle came while busy or unsent; err is its verdict
	err      error // meaningful if answered
}

// lane is the writes of one grant; it exists while it has any. Under Queue.mu.
type lane struct {
	grant transfer.GrantID
	items []*Item // items[0] is being sent; the rest wait
	head  int     // index of the first live entry of items
}

// Queue is the send queue. Make it with New.
type Queue struct {
	cfg Config

	mu     sync.Mutex
	wake   sync.Cond
	err    error // set once by Fail
	count  int   // posted and not settled
	open   int   // begun and not wholly handed out
	seq    uint64
	lanes  map[transfer.GrantID]*lane
	ring   []*lane // lanes with something to send, in turn; the busy one is not in it
	flight map[uint64]*Item

	freeItems []*Item
	freeLanes []*lane
}

// New makes an empty queue.
func New(c Config) *Queue {
	q := &Queue{
		cfg:    c,
		lanes:  make(map[transfer.GrantID]*lane),
		flight: make(map[uint64]*Item),
	}
	q.wake.L = &q.mu
	return q
}

// Post queues w, or says why not; see transfer.Peer. It takes the queue's lock for a
// moment and never waits for the peer.
func (q *Queue) Post(w transfer.Write) error {
	if len(w.Segments) > q.cfg.Segments || len(w.Notify) > transfer.MaxNotify {
		return transfer.ErrTooLarge
	}
	var total uint64
	for i := range w.Segments {
		total += uint64(len(w.Segments[i].Src))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return q.err
	}
	if q.count >= q.cfg.Limit {
		return transfer.ErrBusy
	}
	q.count++
	it := q.newItem()
	it.Write, it.Total = w, total
	l := q.lanes[w.Grant]
	if l == nil {
		l = q.newLane(w.Grant)
		q.lanes[w.Grant] = l
		q.ring = append(q.ring, l)
		q.wake.Signal()
	}
	l.items = append(l.items, it)
	return nil
}

// Next waits for an item with something to send and hands it to the sender. False:
// the queue has failed; call Drain.
func (q *Queue) Next() (*Item, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if q.err != nil {
			return nil, false
		}
		if it := q.take(); it != nil {
			return it, true
		}
		q.wake.Wait()
	}
}

// take removes the first lane in turn that may send from the ring.
func (q *Queue) take() *Item {
	for i, l := range q.ring {
		it := l.items[l.head]
		if it.Seq == 0 {
			if q.open >= q.cfg.Open {
				continue // others are begun and in the ring, they go first
			}
			q.seq++
			it.Seq = q.seq
			q.open++
			q.flight[it.Seq] = it
		}
		copy(q.ring[i:], q.ring[i+1:])
		q.ring[len(q.ring)-1] = nil
		q.ring = q.ring[:len(q.ring)-1]
		it.busy = true
		return it
	}
	return nil
}

// Idle reports whether nothing waits to be sent, so that the sender may flush.
func (q *Queue) Idle() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.ring) == 0
}

// Answered is the destination's verdict on an item it has refused before the sender
// had handed out everything; nil if there is none. The sender then calls Refuse.
func (q *Queue) Answered(it *Item) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if it.answered {
		return it.err
	}
	return nil
}

// Return gives an item back after a piece. sent: that was the last one; the item waits
// for Settle. From here on the sender must not touch the item or its segments.
func (q *Queue) Return(it *Item, sent bool) error {
	q.mu.Lock()
	it.busy = false
	l := q.lanes[it.Grant]
	if !sent {
		early := it.answered && it.err == nil
		q.ring = append(q.ring, l)
		q.mu.Unlock()
		if early {
			return ErrEarly
		}
		return nil
	}
	it.sent = true
	q.pop(l)
	if !it.answered {
		q.mu.Unlock()
		return nil
	}
	err := it.err
	done := q.settle(it)
	q.mu.Unlock()
	done(err)
	return nil
}

// Refuse settles an item that Next has handed out with err; nothing more of it is sent.
func (q *Queue) Refuse(it *Item, err error) {
	q.mu.Lock()
	it.busy = false
	q.pop(q.lanes[it.Grant])
	done := q.settle(it)
	q.mu.Unlock()
	done(err)
}

// Settle ends the item seq with the destination's verdict. False: there is no such
// item, or it has a verdict already; the peer broke the protocol.
func (q *Queue) Settle(seq uint64, err error) bool {
	q.mu.Lock()
	it := q.flight[seq]
	if it == nil || it.answered {
		q.mu.Unlock()
		return false
	}
	if it.busy || !it.sent {
		ok := it.busy || err != nil
		it.answered, it.err = ok, err
		q.mu.Unlock()
		return ok
	}
	done := q.settle(it)
	q.mu.Unlock()
	done(err)
	return true
}

// Fail ends the queue: posts get err, Next returns false. The first error stays.
func (q *Queue) Fail(err error) {
	q.mu.Lock()
	if q.err == nil {
		q.err = err
	}
	q.mu.Unlock()
	q.wake.Broadcast()
}

// Drain settles every item that is left with err. Only after Fail, by the sender.
func (q *Queue) Drain(err error) {
	q.mu.Lock()
	var left []func(error)
	for _, it := range q.flight {
		if it.sent { // the others are in their lanes
			left = append(left, it.Done)
		}
	}
	for _, l := range q.lanes {
		for _, it := range l.items[l.head:] {
			left = append(left, it.Done)
		}
	}
	q.count, q.open, q.ring = 0, 0, nil
	clear(q.lanes)
	clear(q.flight)
	q.freeItems, q.freeLanes = nil, nil
	q.mu.Unlock()
	for _, done := range left {
		done(err)
	}
}

// pop takes the head item off its lane and puts the lane in turn or away.
func (q *Queue) pop(l *lane) {
	q.open--
	l.items[l.head] = nil
	l.head++
	if l.head < len(l.items) {
		if l.head >= 64 { // keep a lane that never empties from growing
			n := copy(l.items, l.items[l.head:])
			clear(l.items[n:])
			l.items, l.head = l.items[:n], 0
		}
		q.ring = append(q.ring, l)
		return
	}
	delete(q.lanes, l.grant)
	l.items, l.head = l.items[:0], 0
	q.freeLanes = append(q.freeLanes, l)
}

// settle forgets it and returns its Done, to be called without the lock.
func (q *Queue) settle(it *Item) func(error) {
	done := it.Done
	delete(q.flight, it.Seq)
	q.count--
	*it = Item{}
	q.freeItems = append(q.freeItems, it)
	return done
}

func (q *Queue) newItem() *Item {
	if n := len(q.freeItems); n > 0 {
		it := q.freeItems[n-1]
		q.freeItems = q.freeItems[:n-1]
		return it
	}
	return &Item{}
}

func (q *Queue) newLane(g transfer.GrantID) *lane {
	if n := len(q.freeLanes); n > 0 {
		l := q.freeLanes[n-1]
		q.freeLanes = q.freeLanes[:n-1]
		l.grant = g
		return l
	}
	return &lane{grant: g}
}
