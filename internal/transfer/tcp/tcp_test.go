package tcp

import (
	"bytes"
	"context"
	"errors"
	"runtime"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

func TestSplitWriteLandsOnceAndExactly(t *testing.T) {
	p := listen(t, Config{FrameBytes: 4096}, 1<<20)
	p.allow(t, 5, transfer.Span{Off: 0, Len: 1 << 19}, transfer.Span{Off: 1 << 19, Len: 1 << 19})
	peer := p.dial(t)
	want := make([]byte, len(p.mem))
	var segs []transfer.Segment
	for i, n := range []int{1, 0, 9000, 4096, 0, 3, 70000} {
		src := bytes.Repeat([]byte{byte(i + 1)}, n)
		off := uint64(i) * 100000
		copy(want[off:], src)
		segs = append(segs, transfer.Segment{Off: off, Src: src})
	}
	done := post(t, peer, transfer.Write{Grant: 5, Key: testKey, Segments: segs, Notify: []byte("all")})
	if err := recv(t, done, "verdict"); err != nil {
		t.Fatal(err)
	}
	if got := recv(t, p.sink.landed, "notification"); got != "all" {
		t.Fatalf("landed %q", got)
	}
	if !bytes.Equal(p.mem, want) {
		t.Fatal("memory differs")
	}
	if len(p.sink.landed) != 0 || len(done) != 0 {
		t.Fatal("a split write ended more than once")
	}
}

// A long write must not hold up another room on the same connection: the shorter one, posted
// second, lands first although the long one is half sent.
func TestLongWriteSharesTheConnection(t *testing.T) {
	p := listen(t, Config{FrameBytes: 4096}, 64<<20)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 60 << 20})
	p.allow(t, 2, transfer.Span{Off: 60 << 20, Len: 2 * quickBytes})
	peer := p.dial(t)
	long := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Notify: []byte("long"),
		Segments: []transfer.Segment{{Off: 0, Src: make([]byte, 60<<20)}}})
	short := post(t, peer, transfer.Write{Grant: 2, Key: testKey, Notify: []byte("short"),
		Segments: []transfer.Segment{{Off: 60 << 20, Src: make([]byte, 2*quickBytes)}}})
	if err := recv(t, short, "short write"); err != nil {
		t.Fatal(err)
	}
	if err := recv(t, long, "long write"); err != nil {
		t.Fatal(err)
	}
	if a, b := recv(t, p.sink.landed, "first"), recv(t, p.sink.landed, "second"); a != "short" || b != "long" {
		t.Fatalf("landed %q, then %q", a, b)
	}
}

// The fence: half of a write is applied, the grant is revoked, the rest arrives.
func TestRevokeInTheMiddleOfAWrite(t *testing.T) {
	p := listen(t, Config{}, 8192)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	p.allow(t, 2, transfer.Span{Off: 4096, Len: 4096})
	r := p.raw(t).session()
	first := bytes.Repeat([]byte{1}, 1000)
	frame := openFrame(header{seq: 1, grant: 1, key: testKey}, []transfer.Span{{Off: 0, Len: 4096}}, "a", first)
	// A second room's write behind it tells that the first 1000 bytes are applied.
	other := openFrame(header{seq: 2, grant: 2, key: testKey}, []transfer.Span{{Off: 4096, Len: 1}}, "b", []byte{9})
	r.send(append(frame, other...))
	if a := r.answer(); a != (answer{seq: 2, code: codeOK}) {
		t.Fatalf("answer %+v", a)
	}
	if !bytes.Equal(p.mem[:1000], first) {
		t.Fatal("first bytes are not applied")
	}
	if !p.tgt.Revoke(1) {
		t.Fatal("tcp must fence")
	}
	clear(p.mem[:4096]) // the page has a new owner
	r.send(dataFrame(1, bytes.Repeat([]byte{2}, 96)))
	if a := r.answer(); a != (answer{seq: 1, code: codeGrant}) {
		t.Fatalf("answer %+v", a)
	}
	r.send(dataFrame(1, bytes.Repeat([]byte{3}, 3000)))
	r.send(openFrame(header{seq: 3, grant: 2, key: testKey}, []transfer.Span{{Off: 4097, Len: 1}}, "c", []byte{8}))
	if a := r.answer(); a != (answer{seq: 3, code: codeOK}) {
		t.Fatalf("answer %+v", a)
	}
	if !bytes.Equal(p.mem[:4096], make([]byte, 4096)) {
		t.Fatal("bytes were stored after the revoke")
	}
	if b, c := recv(t, p.sink.landed, "b"), recv(t, p.sink.landed, "c"); b != "b" || c != "c" {
		t.Fatalf("landed %q and %q", b, c)
	}
}

// stored waits until byte at is no longer 0, looking under the grant's lock.
func (p *pair) stored(t *testing.T, id transfer.GrantID, at int) {
	t.Helper()
	tg := p.tgt.(*target)
	var g *guard
	for _, c := range tg.Conns() {
		if live := tg.Live(c.sess, id); live != nil {
			g = &live.Own
		}
	}
	if g == nil {
		t.Fatalf("grant %d is not live in a session that has a connection", id)
	}
	end := time.Now().Add(patience)
	for {
		g.mu.Lock()
		there := p.mem[at] != 0
		g.mu.Unlock()
		if there {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("byte %d was not stored within %v", at, patience)
		}
		runtime.Gosched()
	}
}

// The same when the target waits for the socket in the middle of a frame, ready to read
// straight into the page.
func TestRevokeWhileWaitingForPayload(t *testing.T) {
	p := listen(t, Config{}, 8192)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	r := p.raw(t).session()
	frame := openFrame(header{seq: 1, grant: 1, key: testKey}, []transfer.Span{{Off: 0, Len: 4096}}, "a", bytes.Repeat([]byte{1}, 4096))
	r.send(frame[:len(frame)-3000])
	p.stored(t, 1, 1095)
	if !p.tgt.Revoke(1) {
		t.Fatal("tcp must fence")
	}
	clear(p.mem)
	r.send(frame[len(frame)-3000:])
	if a := r.answer(); a != (answer{seq: 1, code: codeGrant}) {
		t.Fatalf("answer %+v", a)
	}
	if !bytes.Equal(p.mem, make([]byte, 8192)) {
		t.Fatal("bytes were stored after the revoke")
	}
	p.works(t, 2)
}

// Revokes race with the bytes of many writes; no byte may appear after the revoke.
func TestRevokeRacesWithPayload(t *testing.T) {
	const block = 4 << 20
	p := listen(t, Config{FrameBytes: 256 << 10}, block)
	peer := p.dial(t)
	src := bytes.Repeat([]byte{0xff}, block)
	zero := make([]byte, block)
	cut := 0
	for i := range 40 {
		id := transfer.GrantID(i + 1)
		p.allow(t, id, transfer.Span{Off: 0, Len: block})
		done := post(t, peer, transfer.Write{Grant: id, Key: testKey, Segments: []transfer.Segment{{Src: src}}, Notify: []byte("x")})
		p.stored(t, id, i*(block/80))
		p.tgt.Revoke(id)
		clear(p.mem)
		err := recv(t, done, "verdict")
		if errors.Is(err, transfer.ErrGrant) {
			cut++
		} else if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		if !bytes.Equal(p.mem, zero) {
			t.Fatalf("round %d: a byte was stored after the revoke", i)
		}
	}
	if cut == 0 {
		t.Error("no revoke hit a write: the test shows nothing")
	}
	select {
	case <-peer.Down():
		t.Fatalf("the connection ended: %v", peer.Err())
	default:
	}
}

func TestRefusals(t *testing.T) {
	p := listen(t, Config{}, 8192)
	p.allow(t, 1, transfer.Span{Off: 1024, Len: 1024}, transfer.Span{Off: 2048, Len: 1024})
	if err := p.tgt.OpenSession(2); err != nil {
		t.Fatal(err)
	}
	if err := p.tgt.Allow(transfer.Grant{ID: 9, Key: testKey, Session: 2, Spans: []transfer.Span{{Off: 0, Len: 8192}}}); err != nil {
		t.Fatal(err)
	}
	peer := p.dial(t)
	b := bytes.Repeat([]byte{7}, 1024)
	seg := func(off uint64, n int) transfer.Segment { return transfer.Segment{Off: off, Src: b[:n]} }
	for name, tc := range map[string]struct {
		w    transfer.Write
		want error
	}{
		"unknown grant":         {transfer.Write{Grant: 8, Key: testKey, Segments: []transfer.Segment{seg(1024, 8)}}, transfer.ErrGrant},
		"other session's grant": {transfer.Write{Grant: 9, Key: testKey, Segments: []transfer.Segment{seg(1024, 8)}}, transfer.ErrGrant},
		"other room":            {transfer.Write{Grant: 1, Key: room.Key{Room: 78, Gen: 3}, Segments: []transfer.Segment{seg(1024, 8)}}, transfer.ErrGrant},
		"other generation":      {transfer.Write{Grant: 1, Key: room.Key{Room: 77, Gen: 2}, Segments: []transfer.Segment{seg(1024, 8)}}, transfer.ErrGrant},
		"notification only":     {transfer.Write{Grant: 8, Key: testKey, Notify: []byte("n")}, transfer.ErrGrant},
		"before the span":       {transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{seg(1024, 8), seg(1023, 8)}}, transfer.ErrBounds},
		"behind the span":       {transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{seg(1024, 8), seg(3065, 8)}}, transfer.ErrBounds},
		"across two spans":      {transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{seg(1024, 8), seg(2044, 8)}}, transfer.ErrBounds},
		"offset wraps":          {transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{seg(1024, 8), seg(1<<64-4, 8)}}, transfer.ErrBounds},
	} {
		if err := recv(t, post(t, peer, tc.w), name); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	if !bytes.Equal(p.mem, make([]byte, 8192)) {
		t.Error("a refused write stored bytes")
	}
	if len(p.sink.landed) != 0 {
		t.Errorf("a refused write was announced: %q", <-p.sink.landed)
	}
	if s := p.tr.Stats(); s.GrantRefused != 5 || s.BoundsRefused != 4 || s.ProtocolErrors != 0 {
		t.Errorf("counted %+v", s)
	}
	ok := transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{seg(1024, 1024), seg(2048, 1024)}, Notify: []byte("fine")}
	if err := recv(t, post(t, peer, ok), "good write"); err != nil {
		t.Fatalf("good write after refusals: %v", err)
	}
}

// Complete means that Landed has returned at the destination.
func TestDoneWaitsForLanded(t *testing.T) {
	p := listen(t, Config{}, 64)
	inside, leave := make(chan string, 1), make(chan struct{})
	p.sink.gate = func(s string) { inside <- s; <-leave }
	p.allow(t, 1, transfer.Span{Off: 0, Len: 64})
	peer := p.dial(t)
	done := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Src: []byte("kv")}}, Notify: []byte("n")})
	recv(t, inside, "Landed")
	select {
	case err := <-done:
		t.Fatalf("done (%v) while Landed had not returned", err)
	default:
	}
	close(leave)
	if err := recv(t, done, "verdict"); err != nil {
		t.Fatal(err)
	}
}

func TestSessionEndsFenceOnce(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	peer := p.dial(t)
	p.tgt.CloseSession(1)
	if s := recv(t, p.sink.fenced, "fence"); s != 1 {
		t.Fatalf("fenced %d", s)
	}
	recv(t, peer.Down(), "peer down")
	if err := peer.Err(); !errors.Is(err, transfer.ErrPeerLost) {
		t.Fatalf("peer ended with %v", err)
	}
	if err := peer.Post(transfer.Write{Grant: 1, Key: testKey}); !errors.Is(err, transfer.ErrPeerLost) {
		t.Fatalf("post on a lost peer: %v", err)
	}
	if err := p.tgt.Allow(transfer.Grant{ID: 2, Session: 1}); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("allow in a closed session: %v", err)
	}
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("dial a closed session: %v", err)
	}

	// Never connected: fenced at close. Connection lost: fenced at once, not again at close.
	for _, s := range []transfer.SessionID{2, 3} {
		if err := p.tgt.OpenSession(s); err != nil {
			t.Fatal(err)
		}
	}
	p.tgt.CloseSession(2)
	if s := recv(t, p.sink.fenced, "fence"); s != 2 {
		t.Fatalf("fenced %d", s)
	}
	lost, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 3)
	if err != nil {
		t.Fatal(err)
	}
	if err := p.tgt.OpenSession(3); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("second open: %v", err)
	}
	if err := lost.Close(); err != nil {
		t.Fatal(err)
	}
	if s := recv(t, p.sink.fenced, "fence"); s != 3 {
		t.Fatalf("fenced %d", s)
	}
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 3); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("dial a fenced session: %v", err)
	}
	p.tgt.CloseSession(3)
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if len(p.sink.fenced) != 0 {
		t.Fatalf("session %d fenced twice", <-p.sink.fenced)
	}
	for what, err := range map[string]error{"open": p.tgt.OpenSession(4), "allow": p.tgt.Allow(transfer.Grant{ID: 3, Session: 1})} {
		if !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("%s after close: %v", what, err)
		}
	}
}

func TestAllowRefuses(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 64})
	for name, tc := range map[string]struct {
		g    transfer.Grant
		want error
	}{
		"id in use":         {transfer.Grant{ID: 1, Session: 1}, transfer.ErrGrant},
		"id 0":              {transfer.Grant{Session: 1}, transfer.ErrGrant},
		"unknown session":   {transfer.Grant{ID: 2, Session: 5}, transfer.ErrSession},
		"outside of memory": {transfer.Grant{ID: 2, Session: 1, Spans: []transfer.Span{{Off: 4090, Len: 7}}}, transfer.ErrBounds},
		"overlap":           {transfer.Grant{ID: 2, Session: 1, Spans: []transfer.Span{{Off: 0, Len: 7}, {Off: 6, Len: 7}}}, transfer.ErrBounds},
	} {
		if err := p.tgt.Allow(tc.g); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	if !p.tgt.Revoke(12345) {
		t.Error("revoke of an unknown grant must report fenced")
	}
}
