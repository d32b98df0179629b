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
// At most one item is out at a time, and whoever has it has the sender's turn. A poster
// gets it from [Queue.PostNow] while nothing else is to be sent, and so saves a small
// write the way to another goroutine; it gives the item back, or on with [Queue.Hand].
//
// With Config.Beside a poster also gets its small write while items of other grants are out or wait. They are
// then at work at once, so a small write does not wait for the thread that has a long one, wherever the
// kernel has left that.
//
// # Order
//
// Writes of one grant go out in the order they were posted, one after the other.
// Grants take turns, one piece each, so a long write delays another room by a
// piece, not by its whole length. Writes with little left go first, so that many long ones
// do not add up, but no more than [maxAhead] in a row while a long one waits.
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
	// Beside lets small writes out beside the one item that has the turn, or may have it.
	Beside bool
}

const (
	// smallBytes or less left of a write lets it go first.
	smallBytes = 64 << 10
	// maxAhead pieces of small writes at most go before one of a long write.
	maxAhead = 8
)

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
	busy     bool  // out: between Next or PostNow and Return or Refuse
	beside   bool  // out without the turn
	sent     bool  // wholly handed out
	answered bool  // Settle came while busy or unsent; err is its verdict
	err      error // meaningful if answered
}

// lane is the writes of one grant; it exists while one of them is not settled. Under Queue.mu.
type lane struct {
	grant transfer.GrantID
	items []*Item // not wholly handed out: items[head] is being sent; the rest wait
	head  int     // index of the first live entry of items
	count int     // posted and not settled, >= len(items)-head
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
	out    bool    // an item is out; its holder has the sender's turn
	beside int     // items that are out without the turn
	handed *Item   // out, and on its way from a poster to the sender
	ahead  int     // small pieces that went before a waiting long write, in a row
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
	_, err := q.PostNow(w, 0)
	return err
}

// PostNow is Post. If w has at most most bytes and nothing else is to be sent, nor any write of its grant is out, it also hands
// w's item to the caller, who then has the sender's turn and soon calls Return, Refuse or Hand. With Config.Beside it
// does so, without the turn, also if only writes of other grants are to be sent or out; the caller must not Hand it.
func (q *Queue) PostNow(w transfer.Write, most uint64) (*Item, error) {
	if len(w.Segments) > q.cfg.Segments || len(w.Notify) > transfer.MaxNotify {
		return nil, transfer.ErrTooLarge
	}
	var total uint64
	for i := range w.Segments {
		total += uint64(len(w.Segments[i].Src))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.err != nil {
		return nil, q.err
	}
	if q.count >= q.cfg.Limit {
		return nil, transfer.ErrBusy
	}
	q.count++
	it := q.newItem()
	it.Write, it.Total = w, total
	l := q.lanes[w.Grant]
	if l == nil {
		l = q.newLane(w.Grant)
		q.lanes[w.Grant] = l
	}
	first := len(l.items) == 0
	if first { // else it is in the ring, or its first item is out
		q.ring = append(q.ring, l)
	}
	l.items = append(l.items, it)
	l.count++
	if total <= most && most > 0 && q.open < q.cfg.Open {
		switch {
		case !q.out && first && len(q.ring) == 1: // w's
			q.out, q.ahead = true, 0
			return q.take(0), nil
		case first && q.cfg.Beside:
			q.beside++
			it.beside = true
			return q.take(len(q.ring) - 1), nil
		}
	}
	q.rouse()
	return nil, nil
}

// Holds reports whether a write of grant g is posted and not settled.
func (q *Queue) Holds(g transfer.GrantID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.lanes[g] != nil
}

// rouse wakes the sender if there is something for it to do. Under mu.
func (q *Queue) rouse() {
	if q.handed != nil || !q.out && (len(q.ring) > 0 || q.err != nil) {
		q.wake.Signal()
	}
}

// Next waits for an item with something to send and hands it to the sender. False:
// the queue has failed and no item is out; call Drain.
func (q *Queue) Next() (*Item, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if it := q.handed; it != nil {
			q.handed = nil
			return it, true
		}
		if !q.out {
			if q.err != nil {
				if q.beside == 0 {
					return nil, false
				}
			} else if at, long := q.choose(); at >= 0 {
				if q.ahead++; long || at == 0 {
					q.ahead = 0
				}
				q.out = true
				return q.take(at), true
			}
		}
		q.wake.Wait()
	}
}

// Hand gives an item that PostNow has handed out, and the turn, to the sender: Next
// returns it as it is.
func (q *Queue) Hand(it *Item) {
	q.mu.Lock()
	q.handed = it
	q.rouse()
	q.mu.Unlock()
}

// take removes lane at from the ring and puts its item out.
func (q *Queue) take(at int) *Item {
	l := q.ring[at]
	it := l.items[l.head]
	if it.Seq == 0 {
		q.seq++
		it.Seq = q.seq
		q.open++
		q.flight[it.Seq] = it
	}
	copy(q.ring[at:], q.ring[at+1:])
	q.ring[len(q.ring)-1] = nil
	q.ring = q.ring[:len(q.ring)-1]
	it.busy = true
	return it
}

// choose finds the lane whose turn it is: the first with little left, or the first at all if
// enough of those went ahead. -1: none may send. long: it has much left.
func (q *Queue) choose() (at int, long bool) {
	first := -1
	for i, l := range q.ring {
		it := l.items[l.head]
		if it.Seq == 0 && q.open >= q.cfg.Open {
			continue // others are begun and in the ring, they go first
		}
		if it.Total-it.Sent <= smallBytes {
			return i, false
		}
		if first < 0 {
			first = i
		}
		if q.ahead >= maxAhead {
			break
		}
	}
	return first, true
}

// Waits reports whether all that was posted is sent and some of it is not settled: the next thing that
// happens is an answer, or a post.
func (q *Queue) Waits() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.count > 0 && !q.out && q.beside == 0 && len(q.ring) == 0
}

// Alone reports whether nothing but the item that is out, and what is posted behind it under its grant, has bytes to send.
func (q *Queue) Alone() bool {
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
	q.back(it)
	l := q.lanes[it.Grant]
	if !sent {
		early := it.answered && it.err == nil
		q.ring = append(q.ring, l)
		q.rouse()
		q.mu.Unlock()
		if early {
			return ErrEarly
		}
		return nil
	}
	it.sent = true
	q.pop(l)
	q.rouse()
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

// Refuse settles an item that is out with err; nothing more of it is sent.
func (q *Queue) Refuse(it *Item, err error) {
	q.mu.Lock()
	q.back(it)
	q.pop(q.lanes[it.Grant])
	q.rouse()
	done := q.settle(it)
	q.mu.Unlock()
	done(err)
}

// back notes that it is not out any more.
func (q *Queue) back(it *Item) {
	it.busy = false
	if it.beside {
		it.beside = false
		q.beside--
	} else {
		q.out = false
	}
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

// pop takes the head item off its lane and puts the lane in turn.
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
	l.items, l.head = l.items[:0], 0
}

// settle forgets it and returns its Done, to be called without the lock.
func (q *Queue) settle(it *Item) func(error) {
	done := it.Done
	delete(q.flight, it.Seq)
	q.count--
	l := q.lanes[it.Grant]
	if l.count--; l.count == 0 {
		delete(q.lanes, l.grant)
		q.freeLanes = append(q.freeLanes, l)
	}
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
