package hub_test

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/fault"
	"github.com/baton-pd/baton/internal/transfer/hub"
	"github.com/baton-pd/baton/internal/transfer/mem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	pageBytes  = 1024
	chunkBytes = 4 * pageBytes
	patience   = 30 * time.Second // only ever waited out by a failing test
)

var print = session.Fingerprint{Engine: "test", ModelDigest: "m", KVLayout: "l", Attention: "a", ChunkTokens: 1}

// world is both sides of the hand-over in this process: real hubs, real session over
// loopback, the mem transport with faults.
type world struct {
	t         *testing.T
	rules     *fault.Rules
	senders   *hub.Senders
	receivers *hub.Receivers
	staging   *kv.Pool
	landing   *kv.Pool
	server    *session.Server
	client    *session.Client
	addr      string
	cut       func() // resets the session's connections
}

// options change the defaults of a world.
type options struct {
	rules    string
	pages    int
	staging  int  // pages of the prefill side; default: as many
	unfenced bool // Revoke alone is no fence
	bounds   time.Duration
	handler  func(*hub.Senders) session.ServerHandler // nil: the senders themselves
	wrap     func(transfer.Transport) transfer.Transport
	metrics  prometheus.Registerer // of the decode side
	over     transfer.Transport    // nil: mem; others get pools that processes can map
	ttl      time.Duration         // of tombstones; default a minute
	src, dst kv.Shards             // of both engines; zero: chunks are blocks
	cache    int                   // pages of the decode side's prefix cache
	observe  room.Observer         // of the prefill side's rooms
}

func newWorld(t *testing.T, o options) *world {
	t.Helper()
	if o.pages == 0 {
		o.pages = 64
	}
	if o.bounds == 0 {
		o.bounds = time.Minute
	}
	text := o.rules
	if o.unfenced {
		text += "\nrevoke unfenced"
	}
	ttl := cmp.Or(o.ttl, time.Minute)
	w := &world{t: t, rules: fault.MustParse(text)}
	log := slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	pool := func(name string, pages, cache int, s kv.Shards) *kv.Pool {
		size := pageBytes
		if s != (kv.Shards{}) {
			size = s.PageBytes()
		}
		p, err := kv.Open(kv.Config{Name: name, PageBytes: size, Pages: pages, Plain: o.over == nil, Poison: true, PrefixPages: cache, Log: log})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	w.staging, w.landing = pool("staging", cmp.Or(o.staging, o.pages), 0, o.src), pool("landing", o.pages, o.cache, o.dst)
	if o.over == nil {
		o.over = mem.New(mem.NewRegistry())
	}
	tr := fault.Wrap(o.over, w.rules)
	if o.wrap != nil {
		tr = o.wrap(tr)
	}
	w.senders = hub.NewSenders(hub.SendersConfig{Staging: w.staging, Shards: o.src, BootstrapTimeout: o.bounds, WaitingTimeout: o.bounds,
		TransferTimeout: o.bounds, ParkTimeout: o.bounds, TombstoneTTL: ttl, Observe: o.observe, Log: log})
	var err error
	w.receivers, err = hub.NewReceivers(hub.ReceiversConfig{Pool: w.landing, Shards: o.dst, Transports: []transfer.Transport{tr}, BootstrapTimeout: o.bounds,
		WaitingTimeout: o.bounds, TransferTimeout: o.bounds, TombstoneTTL: ttl, Log: log, Registerer: o.metrics})
	if err != nil {
		t.Fatal(err)
	}
	var handler session.ServerHandler = w.senders
	if o.handler != nil {
		handler = o.handler(w.senders)
	}
	w.server = session.NewServer(session.ServerConfig{Identity: session.Identity{WorkerID: "P", Epoch: 1, Fingerprint: print, Shards: o.src},
		Connect: func(ctx context.Context, s transfer.SessionID, offers []transfer.Descriptor) (transfer.Peer, error) {
			return tr.Dial(ctx, offers[0], s)
		}, Handler: handler, Log: log})
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c := &cutter{Listener: l}
	w.addr, w.cut = l.Addr().String(), c.cut
	served := make(chan error, 1)
	go func() { served <- w.server.Serve(c) }()
	w.client = session.NewClient(session.ClientConfig{Identity: session.Identity{WorkerID: "D", Epoch: 2, Fingerprint: print, Shards: o.dst},
		Offer: w.receivers.Offer, Handler: w.receivers, Log: log})
	w.receivers.Start(w.client)
	t.Cleanup(func() {
		for _, f := range []func() error{w.client.Close, w.server.Close, w.receivers.Close, func() error { w.senders.Close(); return nil }} {
			if err := f(); err != nil {
				t.Errorf("close: %v", err)
			}
		}
		<-served
		for _, p := range []*kv.Pool{w.staging, w.landing} {
			if s := p.Stats(); p.CheckFree() != 0 || !s.Idle() || s.Misuses != 0 || s.PoisonHits != 0 {
				t.Errorf("pool is not idle at the end: %+v", s)
			}
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return w
}

func chunks(n int) []int {
	c := make([]int, n)
	for i := range c {
		c[i] = chunkBytes
	}
	return c
}

func (w *world) send(id uint64, n int) transfer.Sending {
	w.t.Helper()
	return w.sendSizes(id, time.Minute, chunks(n)...)
}

func (w *world) sendSizes(id uint64, limit time.Duration, sizes ...int) transfer.Sending {
	w.t.Helper()
	s, err := w.senders.Open(transfer.OpenSender{Key: room.Key{Room: id}, Deadline: time.Now().Add(limit), Chunks: sizes, Digest: id})
	if err != nil {
		w.t.Fatal(err)
	}
	return s
}

func (w *world) receive(id uint64, n int) transfer.Receiving {
	w.t.Helper()
	return w.receiveSizes(id, time.Minute, chunks(n)...)
}

func (w *world) receiveSizes(id uint64, limit time.Duration, sizes ...int) transfer.Receiving {
	w.t.Helper()
	r, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: id}, Addr: w.addr, Deadline: time.Now().Add(limit), Chunks: sizes, Digest: id})
	if err != nil {
		w.t.Fatal(err)
	}
	return r
}

// chunk fills chunk i with a pattern of the room and sends it.
func (w *world) chunk(s transfer.Sending, id uint64, i int) {
	w.t.Helper()
	w.fill(s, id, i)
	s.Send(i)
}

// fill takes the buffer of chunk i and fills it.
func (w *world) fill(s transfer.Sending, id uint64, i int) {
	w.t.Helper()
	b, err := s.Buffer(w.t.Context(), i)
	if err != nil {
		w.t.Fatalf("buffer of chunk %d: %v", i, err)
	}
	for _, part := range b {
		for k := range part {
			part[k] = byte(id) + byte(i)
		}
	}
}

// await fails the test when c is not closed (or given) in time.
func await[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s did not come", what)
		return v
	}
}

// failed asserts that a room ended Failed with this cause.
func failed(t *testing.T, who string, state room.State, err error, code room.Code) {
	t.Helper()
	if state != room.StateFailed || !errors.Is(err, &room.Cause{Code: code}) {
		t.Errorf("%s: state %v, error %v; want failed with %s", who, state, err, code)
	}
}

// drained waits until no room is left on either side.
func (w *world) drained() {
	w.t.Helper()
	ctx, stop := context.WithTimeout(w.t.Context(), patience)
	defer stop()
	if err := w.senders.Drain(ctx); err != nil {
		w.t.Errorf("senders: %v", err)
	}
	if err := w.receivers.Drain(ctx); err != nil {
		w.t.Errorf("receivers: %v", err)
	}
	w.receivers.Flush() // the pages of a forgotten room return on the hub's goroutine
}

func TestHandOver(t *testing.T) {
	w := newWorld(t, options{})
	for id := uint64(1); id <= 20; id++ {
		n := int(id)%5 + 1
		r, s := w.receive(id, n), w.send(id, n)
		await(t, "grant", s.Granted())
		before := time.Now()
		if !s.Ended().IsZero() {
			t.Fatal("a room has ended when it began")
		}
		for i := range n {
			w.chunk(s, id, i)
			if got := await(t, "chunk", r.Landed()); got != i {
				t.Fatalf("chunk %d landed, want %d", got, i)
			}
			for _, part := range r.Chunk(i) {
				for _, b := range part {
					if b != byte(id)+byte(i) {
						t.Fatalf("room %d chunk %d holds byte %d", id, i, b)
					}
				}
			}
		}
		await(t, "sender's end", s.Done())
		await(t, "receiver's end", r.Done())
		if at := s.Ended(); at.Before(before) || at.After(time.Now()) {
			t.Fatalf("the sender has ended %v after its grant", at.Sub(before))
		}
		if s.Err() != nil || r.Err() != nil {
			t.Fatalf("room %d: %v, %v", id, s.Err(), r.Err())
		}
		s.Release()
		r.Release()
	}
	w.drained()
}

// TestTwelveSteps drives the interleaving of the fault that Baton was born from on
// the real shells: the abort arrives while chunk 0 is being written, then the write completes,
// then the last chunk is sent. On a transport that fences and on one that must drain.
func TestTwelveSteps(t *testing.T) {
	for name, unfenced := range map[string]bool{"fences": false, "drains": true} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options{rules: "post room=7 nth=1 halfway until=go", unfenced: unfenced})
			r, s := w.receive(7, 2), w.send(7, 2)
			await(t, "grant", s.Granted())                         // 1-3: the worker knows the destinations
			w.chunk(s, 7, 0)                                       // 4: the long write of c0 begins ...
			await(t, "write in the middle", w.rules.Waiting("go")) // ... and is in the middle
			r.Cancel(&room.Cause{Code: room.CodeClientGone, Side: room.SideReceiver, Detail: "test"})
			await(t, "sender's end", s.Done()) // 5-8: ABORT arrived
			failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
			if st := w.landing.Stats(); unfenced && st.Free == st.Total {
				t.Error("the pages are free while a write is outstanding and nothing fences it")
			}
			r.Release()
			if st := w.landing.Stats(); unfenced && st.Quarantine == 0 {
				t.Errorf("pages are not in quarantine: %+v", st)
			}
			w.rules.Release("go") // 9, 10: the write goes on and completes
			b, err := s.Buffer(t.Context(), 1)
			if err == nil {
				t.Errorf("a buffer of %d parts for a room that has ended", len(b))
			}
			s.Send(1) // 11: the last chunk
			s.Release()
			w.drained() // 12: both sides ended, acked, drained
			failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
			failed(t, "receiver", r.State(), r.Err(), room.CodeClientGone)
			if st := w.landing.Stats(); !st.Idle() {
				t.Errorf("landing pages after the ack: %+v", st)
			} else if unfenced && st.FreedDrained == 0 {
				t.Errorf("the pages returned without the drain ack: %+v", st)
			}
		})
	}
}

// TestAbortBeforeSender is the rarer variant: the abort arrives before the sender exists.
func TestAbortBeforeSender(t *testing.T) {
	w := newWorld(t, options{unfenced: true})
	r := w.receive(9, 2)
	await(t, "grant sent", r.Granted())
	r.Cancel(&room.Cause{Code: room.CodeClientGone, Side: room.SideReceiver, Detail: "test"})
	r.Release()
	ctx, stop := context.WithTimeout(t.Context(), patience)
	defer stop()
	if err := w.receivers.Drain(ctx); err != nil { // needs the ack of a room that P never had
		t.Fatal(err)
	}
	s := w.send(9, 2)
	await(t, "sender's end", s.Done())
	failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
	s.Send(0)
	s.Release()
	w.drained()
}

func TestSenderFailureReachesReceiver(t *testing.T) {
	for name, fail := range map[string]func(s transfer.Sending){
		"drop":    func(s transfer.Sending) { s.Drop(0, &room.Cause{Code: room.CodeEngine, Detail: "test"}) },
		"cancel":  func(s transfer.Sending) { s.Cancel(&room.Cause{Code: room.CodeEngine, Detail: "test"}) },
		"release": func(s transfer.Sending) { s.Release() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, options{unfenced: true})
			r, s := w.receive(3, 2), w.send(3, 2)
			await(t, "grant", s.Granted())
			fail(s)
			await(t, "receiver's end", r.Done())
			want := room.CodeEngine
			if name == "release" {
				want = room.CodeAborted
			}
			failed(t, "receiver", r.State(), r.Err(), want)
			s.Release()
			r.Release()
			w.drained()
		})
	}
}

func TestFailureBeforeGrantIsTold(t *testing.T) {
	w := newWorld(t, options{})
	s := w.send(4, 1)
	s.Cancel(&room.Cause{Code: room.CodeEngine, Detail: "test"})
	s.Release() // forgotten: only the ended tombstone knows
	r := w.receive(4, 1)
	await(t, "receiver's end", r.Done())
	failed(t, "receiver", r.State(), r.Err(), room.CodeEngine)
	r.Release()
	w.drained()
}

func TestMismatchNamesBothPrompts(t *testing.T) {
	w := newWorld(t, options{})
	s, err := w.senders.Open(transfer.OpenSender{Key: room.Key{Room: 5}, Deadline: time.Now().Add(time.Minute), Chunks: chunks(1), Digest: 1})
	if err != nil {
		t.Fatal(err)
	}
	r := w.receive(5, 1)
	await(t, "receiver's end", r.Done())
	await(t, "sender's end", s.Done())
	failed(t, "receiver", r.State(), r.Err(), room.CodeMismatch)
	failed(t, "sender", s.State(), s.Err(), room.CodeMismatch)
	s.Release()
	r.Release()
	w.drained()
}

func TestSessionLossEndsEveryRoom(t *testing.T) {
	w := newWorld(t, options{unfenced: true})
	var rs []transfer.Receiving
	var ss []transfer.Sending
	for id := uint64(1); id <= 8; id++ {
		rs, ss = append(rs, w.receive(id, 2)), append(ss, w.send(id, 2))
	}
	for i, s := range ss {
		await(t, "grant", s.Granted())
		if i%2 == 0 {
			w.chunk(s, uint64(i+1), 0)
		}
	}
	if err := w.client.Close(); err != nil {
		t.Fatal(err)
	}
	for i := range rs {
		await(t, "receiver's end", rs[i].Done())
		await(t, "sender's end", ss[i].Done())
		failed(t, "receiver", rs[i].State(), rs[i].Err(), room.CodePeerLost)
		failed(t, "sender", ss[i].State(), ss[i].Err(), room.CodePeerLost)
		rs[i].Release()
		ss[i].Release()
	}
	w.drained()
}

func TestLostChecksumFailsTheRoom(t *testing.T) {
	w := newWorld(t, options{rules: "landed room=6 nth=1 stall until=check"})
	r, s := w.receive(6, 1), w.send(6, 1)
	await(t, "grant", s.Granted())
	w.chunk(s, 6, 0)
	await(t, "landed", w.rules.Waiting("check"))
	mem, _ := w.landing.Memory()
	mem[17] ^= 1 // damage on the way
	w.rules.Release("check")
	await(t, "receiver's end", r.Done())
	failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
	r.Release()
	s.Release()
	w.drained()
}

func TestDeadlinesEndEveryWait(t *testing.T) {
	t.Parallel()
	w := newWorld(t, options{bounds: 1500 * time.Millisecond, rules: "post room=3 nth=1 stall"}) // enough for the grant of room 3
	s := w.send(1, 1)                                                                            // nobody ever grants
	await(t, "sender's end", s.Done())
	failed(t, "sender without a grant", s.State(), s.Err(), room.CodeDeadline)
	s.Release()
	r := w.receive(2, 1) // no request at the prefill side: the parked grant expires, or the receiver's bound
	await(t, "receiver's end", r.Done())
	failed(t, "receiver without a sender", r.State(), r.Err(), room.CodeDeadline)
	r.Release()
	r3, s3 := w.receive(3, 1), w.send(3, 1) // a write that never completes
	await(t, "grant", s3.Granted())
	w.chunk(s3, 3, 0)
	await(t, "receiver's end", r3.Done())
	await(t, "sender's end", s3.Done())
	if r3.State() != room.StateFailed || s3.State() != room.StateFailed {
		t.Errorf("states %v and %v", r3.State(), s3.State())
	}
	r3.Release()
	s3.Release()
}

func TestPoolSmallerThanPrompt(t *testing.T) {
	w := newWorld(t, options{pages: 4})
	_, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 1}, Addr: w.addr, Deadline: time.Now().Add(time.Minute), Chunks: chunks(2)})
	if !errors.Is(err, &room.Cause{Code: room.CodeCapacity}) {
		t.Fatalf("got %v, want capacity", err)
	}
}

// TestBufferAfterRelease: staging that was taken while the room was being released is not kept by
// a room that nobody will release again.
func TestBufferAfterRelease(t *testing.T) {
	w := newWorld(t, options{})
	s := w.send(11, 2)
	lease, err := w.staging.Alloc(4, "late", time.Now().Add(time.Minute))
	if err != nil {
		t.Fatal(err)
	}
	s.Release()
	if hub.KeepBuffer(s, 0, lease) {
		t.Error("a released room kept a buffer")
	}
	lease.ReleaseRequest() // the pool must be idle at the end, and would not be
	w.drained()
}
