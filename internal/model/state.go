package model

import (
	"github.com/baton-pd/baton/internal/room"
)

// Bounds of the largest world. Indices in a state are bytes.
const (
	maxLives    = 3
	maxChunks   = 3
	maxPages    = 9
	maxSessions = 5
	maxNet      = 14
	maxActs     = 4
)

// State is one moment of the world: a value. Everything of the decode side that its
// process loses with its life is in recv, page and tombR; of the prefill side in send,
// parked and tombS.
type State struct {
	send   [maxLives]sending
	recv   [maxLives]receiving
	page   [maxPages]page
	sess   [maxSessions]session // sess[i] is session i+1
	net    [maxNet]message      // sorted by channel; in order within it unless the network reorders
	parked [maxLives]parked     // by key
	tombS  [maxLives]tomb       // by key, of the sender's registry
	tombR  [maxLives]tomb       // and the receiver's
	left   [numBudgets]uint8    // how often each fault may still strike
	nsess  uint8
	nnet   uint8
	acked  uint8 // bit g: the ack of grant g was sent; history, for the memory check
}

// where is what became of one side of a life.
type where uint8

const (
	unborn    where = iota // the request has not come
	open                   // in the registry
	forgotten              // terminal, drained, released: only a tombstone is left
	refused                // never came, or its key was in use
	died                   // with its process
)

func (w where) over() bool { return w >= forgotten }

// sending is one life on the prefill side: room and shell.
type sending struct {
	m                 room.Sender
	at                where
	sess, grant       uint8 // set by the grant, 0 before
	ackSess, ackGrant uint8 // who wants the ack
	next              uint8 // chunk that the owner sends next
	indexed           bool  // among its session's rooms
	released          bool
	w                 [maxChunks]phase
}

// phase is where the write of a chunk is.
type phase uint8

const (
	idle     phase = iota
	queued         // allowed by the room, nothing stored yet
	inside1        // drain: counted in, about to store the first half
	half           // the first half is stored
	inside2        // drain: counted in, about to store the rest
	stored         // every byte is stored, the notification is on its way
	landed         // the decode side has handled it, the completion is on its way
	broken         // refused or failed, the completion is on its way
	applied        // settled well
	lost           // settled with an error
	vanished       // its process died
)

// storing: bytes may still move, or the notification.
func (p phase) storing() bool { return p >= queued && p <= stored }

// unsettled: the room waits for its completion.
func (p phase) unsettled() bool { return p >= queued && p <= broken }

// receiving is one life on the decode side: room, shell and lease.
type receiving struct {
	m        room.Receiver
	at       where
	boot     boot
	sess     uint8 // set by bootstrap, 0 before
	pages    [maxChunks]uint8
	leased   bool // pages were allocated; pages says which
	request  bool // the request's hold on them
	transfer bool // the transfer's hold on them
	granted  bool // the grant was made; its id is the life's number + 1
	live     bool // the target takes writes under it
	byGrant  bool // in the hub's index of grants
	bySess   bool // in its session's index
	released bool // by its owner
	unwanted bool // the request has let go of its pages, or will when they come
	gone     bool // the shell's forget has run
	leave    bool // drain: the writer's "left" is on its way
	acts     [maxActs]action
	nacts    uint8
}

// boot is how far the bootstrap goroutine of a receiver is.
type boot uint8

const (
	bootDial  boot = iota // waits for a session
	bootPages             // waits for pages
	bootGrant             // has pages, is about to tell the room
	bootOver
)

// action is what the actions goroutine will do for a room: a set of bits.
type action uint8

const (
	actRevoke action = 1 << iota
	actFree
	actFenced // the proof of actFree is a fence, else drained
	actForget
)

// page is one page of the decode side's pool.
type page struct {
	owner   uint8 // number of the life that leases it + 1; 0: free
	content uint8
}

// content of a page: the bytes of one chunk of one prompt, half or all of it.
const (
	blank   = 0
	damaged = 255
)

func contentOf(prompt, chunk uint8, whole bool) uint8 {
	c := 1 + 2*(prompt*maxChunks+chunk)
	if whole {
		c++
	}
	return c
}

// session is one life of the pair of workers, with its data connection.
type session struct {
	up           bool
	cut          bool // nothing more gets through; each side will notice
	lossy        bool // a message was lost, which its ack's absence will reveal
	downS, downR bool // the end was handled on that side
	deadS, deadR bool // that side's process is dead
	closing      bool // decode: CloseSession is queued
	closed       bool // decode: the target has closed it
	gone         bool // prefill: the data connection is closed, nothing is stored any more
	fenced       bool // decode: Fenced was delivered
}

// message on the session's stream.
type message struct {
	kind  msgKind
	sess  uint8
	key   uint8
	grant uint8
	// about is the grant that the message is about, even where the wire does not say so; 0: none.
	// For the identity check alone.
	about uint8
}

type msgKind uint8

const (
	msgNone   msgKind = iota
	msgGrant          // decode to prefill
	msgAbort          // decode to prefill
	msgFailed         // prefill to decode
	msgAck            // prefill to decode
)

func (k msgKind) toSender() bool { return k == msgGrant || k == msgAbort }

func (k msgKind) String() string {
	switch k {
	case msgGrant:
		return "grant"
	case msgAbort:
		return "abort"
	case msgFailed:
		return "failed"
	case msgAck:
		return "ack"
	default:
		return "message(?)"
	}
}

// channel orders the network: one stream and direction after the other.
func (m message) channel() uint8 {
	c := m.sess << 1
	if m.kind.toSender() {
		c |= 1
	}
	return c
}

// parked is a grant that came before its request.
type parked struct {
	sess, grant uint8
	stuck       bool // only by a seeded fault: its timer will never come
}

// tomb is what a registry remembers of a key without a room.
type tomb uint8

const (
	tombNone tomb = iota
	tombEnded
	tombAborted // an abort came before its room
)

// budget is a fault that may strike so often.
type budget uint8

const (
	budAbort     budget = iota // an owner cancels its room
	budRelease                 // an owner lets go of a live room
	budDrop                    // the engine drops a chunk
	budError                   // a write fails
	budDamage                  // a store damages its bytes
	budAbsent                  // a request never reaches one worker
	budBreak                   // a session ends
	budDataBreak               // a data connection ends (fence only)
	budCrashS                  // the prefill process dies
	budCrashR                  // the decode process dies
	budLoss                    // a message is lost (datagram)
	budDup                     // a message is doubled (datagram)
	budExpiry                  // a tombstone expires
	numBudgets
)
