package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

// farewellTimeout is how long an end that we decided may take to reach the peer
// before the stream is cut.
const farewellTimeout = 500 * time.Millisecond

// link is the part that both ends of a session have in common: the goroutine that
// owns the send side, the one that receives and calls the handler, and the
// watch over acks and silence.
//
// It ends once, by the first call of fail. Then down is closed, nothing more
// is accepted or handled, and run returns as soon as the stream has ended too.
type link struct {
	wire wire
	t    Tuning
	m    *metrics
	log  *slog.Logger
	side room.Side // ours
	peer string    // for causes: host:port
	// handle takes every message but acks and pings, on run's goroutine. An error ends
	// the session: a *room.Cause as it is, others as CodeProtocol.
	handle func(b body) error
	// farewell, if not nil, is the last use of the send side, after an end that is
	// not abrupt.
	farewell func(seq uint64, c *room.Cause)
	// cut, if not nil, breaks the stream so that blocked calls return. Where it is
	// nil the owner breaks it when down is closed (a gRPC handler by returning).
	cut func()

	wake     chan struct{} // cap 1: there may be something to send
	rearm    chan struct{} // cap 1: the next deadline may be earlier
	down     chan struct{} // closed by fail
	received chan struct{} // closed when the stream gives no more

	mu     sync.Mutex // guards what follows; never held across I/O or handlers
	ledger *ledger
	cause  *room.Cause // set once, before down is closed
	abrupt bool        // no farewell: the peer does not listen
}

func newLink(w wire, t Tuning, m *metrics, log *slog.Logger, side room.Side, peer string) *link {
	return &link{
		wire: w, t: t, m: m, log: log, side: side, peer: peer, ledger: newLedger(t, time.Now()),
		wake: make(chan struct{}, 1), rearm: make(chan struct{}, 1), down: make(chan struct{}), received: make(chan struct{}),
	}
}

// run works until the session has ended and returns its cause. The caller's
// goroutine is the one that receives and handles.
func (l *link) run() *room.Cause {
	var wg sync.WaitGroup
	wg.Go(l.sendLoop)
	wg.Go(l.watch)
	l.receiveLoop()
	close(l.received)
	wg.Wait()
	return l.Cause()
}

// push hands a message over to the send side. It never blocks.
func (l *link) push(b body) error {
	now, size := time.Now(), proto.Size(b)
	l.mu.Lock()
	if l.cause != nil {
		err := fmt.Errorf("%w: %w", ErrDown, l.cause)
		l.mu.Unlock()
		return err
	}
	_, waiting := l.ledger.oldest()
	err := l.ledger.push(b, size, now)
	l.mu.Unlock()
	if err != nil {
		c := l.lost(room.CodeCapacity, err.Error())
		l.fail(c, true)
		return fmt.Errorf("%w: %w", ErrDown, c)
	}
	poke(l.wake)
	if !waiting {
		poke(l.rearm)
	}
	return nil
}

// fail ends the link with its first cause. abrupt: the peer does not listen any more.
func (l *link) fail(c *room.Cause, abrupt bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.cause != nil {
		return
	}
	l.cause, l.abrupt = c, abrupt
	close(l.down)
}

// Cause of the end; nil while the link lives.
func (l *link) Cause() *room.Cause {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.cause
}

// lost is a cause for the end of the session, found here.
func (l *link) lost(code room.Code, detail string) *room.Cause {
	return &room.Cause{Code: code, Side: l.side, Phase: phaseSession, Peer: l.peer, Detail: detail, Retryable: code != room.CodeProtocol}
}

// phaseSession is the Phase of causes found here.
const phaseSession = "session"

// sendLoop owns the send side of the stream.
func (l *link) sendLoop() {
	for {
		select {
		case <-l.down:
			l.leave()
			return
		default:
		}
		l.mu.Lock()
		seq, b, ok := l.ledger.next()
		l.mu.Unlock()
		if !ok {
			select {
			case <-l.wake:
			case <-l.down:
			}
			continue
		}
		if err := l.wire.send(seq, b); err != nil {
			if !errors.Is(err, io.EOF) { // EOF: the stream has ended, and receiving tells why
				l.fail(l.lost(room.CodePeerLost, fmt.Sprintf("sending a message (%s) failed: %s", kindOf(b), reason(err))), true)
			}
			<-l.down
			return
		}
		l.m.message("sent", b)
	}
}

// leave says the last word, if there is one to say.
func (l *link) leave() {
	l.mu.Lock()
	c, abrupt, seq := l.cause, l.abrupt, l.ledger.lastSent+1
	l.mu.Unlock()
	if l.farewell != nil && !abrupt {
		l.farewell(seq, c)
	}
}

// watch looks at the ledger's deadlines, and after the end cuts a stream that lingers.
func (l *link) watch() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-l.rearm:
		case <-l.down:
			l.linger(timer)
			return
		}
		l.mu.Lock()
		now := time.Now()
		late, ping, next := l.ledger.check(now)
		l.mu.Unlock()
		if late != "" {
			l.fail(l.lost(room.CodePeerLost, late), true)
			continue
		}
		if ping {
			_ = l.push(&pb.Ping{}) // ErrDown: seen above
		}
		timer.Reset(next.Sub(now))
	}
}

func (l *link) linger(timer *time.Timer) {
	if l.cut == nil {
		return
	}
	l.mu.Lock()
	abrupt := l.abrupt
	l.mu.Unlock()
	if !abrupt {
		timer.Reset(farewellTimeout)
		select {
		case <-l.received:
		case <-timer.C:
		}
	}
	l.cut()
}

// receiveLoop takes messages until the stream ends. After fail it only drains.
func (l *link) receiveLoop() {
	for {
		seq, b, err := l.wire.recv()
		if err != nil {
			l.fail(l.streamEnd(err), true)
			return
		}
		if l.Cause() != nil {
			continue
		}
		if err := l.receive(seq, b); err != nil {
			var c *room.Cause
			if !errors.As(err, &c) {
				c = l.lost(room.CodeProtocol, "the peer broke the protocol: "+err.Error())
			}
			l.fail(c, false)
		}
	}
}

// receive handles one message.
func (l *link) receive(seq uint64, b body) error {
	l.m.message("received", b)
	l.mu.Lock()
	err := l.ledger.receive(seq, time.Now())
	l.mu.Unlock()
	if err != nil {
		return err
	}
	switch b := b.(type) {
	case nil:
		return fmt.Errorf("message %d has no body known here", seq)
	case *pb.Ack:
		l.mu.Lock()
		defer l.mu.Unlock()
		defer poke(l.rearm) // an answered ping: the next one has its time again
		return l.ledger.ack(b.GetSeq(), l.m.acked)
	case *pb.Ping:
	default:
		if err := l.guard(kindOf(b), func() error { return l.handle(b) }); err != nil {
			return err
		}
	}
	l.mu.Lock()
	l.ledger.done()
	l.mu.Unlock()
	poke(l.wake)
	return nil
}

// guard runs a handler. A panic becomes the end of this session instead of the process's.
func (l *link) guard(what string, f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			l.m.panics.Inc()
			l.log.Error("session handler panicked", "on", what, "peer", l.peer, "panic", p, "stack", string(debug.Stack()))
			err = l.lost(room.CodeInternal, fmt.Sprintf("the handler of a message (%s) panicked: %v", what, p))
		}
	}()
	return f()
}

// streamEnd is the cause of a stream that gives no more messages.
func (l *link) streamEnd(err error) *room.Cause {
	if c := causeInStatus(err); c != nil {
		return c
	}
	if errors.Is(err, io.EOF) {
		return l.lost(room.CodePeerLost, "it ended the stream without a reason")
	}
	if l.side == room.SideSender && status.Code(err) == codes.Canceled { // all that gRPC tells a server
		return l.lost(room.CodePeerLost, "its connection closed or broke")
	}
	return l.lost(room.CodePeerLost, "the stream broke: "+reason(err))
}

// reason is the text of a gRPC error without its decoration.
func reason(err error) string {
	s, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	m := s.Message()
	if q, ok := strings.CutPrefix(m, "connection error: desc = "); ok {
		if u, err := strconv.Unquote(q); err == nil {
			m = u
		}
	}
	m = strings.TrimPrefix(m, "transport: Error while dialing: ")
	return fmt.Sprintf("%s (%s)", m, s.Code())
}

// statusOf is the status that carries c as a detail to the client.
func statusOf(c *room.Cause) error {
	code := codes.Unavailable
	switch c.Code {
	case room.CodeProtocol:
		code = codes.InvalidArgument
	case room.CodeInternal:
		code = codes.Internal
	}
	s := status.New(code, clip(c.Error(), 1024))
	if d, err := s.WithDetails(fromCause(c)); err == nil {
		s = d
	}
	return s.Err()
}

// causeInStatus is the inverse; nil if there is none.
func causeInStatus(err error) *room.Cause {
	s, ok := status.FromError(err)
	if !ok {
		return nil
	}
	for _, d := range s.Details() {
		if c, ok := d.(*pb.Cause); ok {
			return toCause(c)
		}
	}
	return nil
}

// logDown writes the one line of a session's end.
func (l *link) logDown(own, peer Identity, id transfer.SessionID, c *room.Cause) {
	level := slog.LevelWarn
	if c.Code == room.CodeShutdown {
		level = slog.LevelInfo
	}
	l.log.Log(context.Background(), level, "session down", "side", l.side.String(), "session", uint64(id), "worker", own.WorkerID, "epoch", own.Epoch,
		"peer", peer.WorkerID, "peer_epoch", peer.Epoch, "addr", l.peer, "code", string(c.Code), "found_by", c.Side.String(), "cause", c.Detail)
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
