package tcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// works shows that the target still serves session 1.
func (p *pair) works(t *testing.T, id transfer.GrantID) {
	t.Helper()
	p.allow(t, id, transfer.Span{Off: 0, Len: 8})
	defer p.tgt.Revoke(id)
	peer := p.dial(t)
	w := transfer.Write{Grant: id, Key: testKey, Segments: []transfer.Segment{{Src: []byte("works")}}, Notify: []byte("works")}
	if err := recv(t, post(t, peer, w), "write after garbage"); err != nil {
		t.Fatalf("write after garbage: %v", err)
	}
}

func TestGarbageInsteadOfAHello(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.dial(t) // keeps the session alive
	var wrongVersion [helloLen]byte
	hello{session: 1}.encode(&wrongVersion)
	wrongVersion[8]++
	rnd := rand.New(rand.NewPCG(9, 9))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	n := uint64(0)
	for name, b := range map[string][]byte{
		"http": []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), "noise": noise, "zeros": make([]byte, 4096), "version": wrongVersion[:],
	} {
		r := p.raw(t)
		_, _ = r.nc.Write(b) // may fail: the target closes early
		r.closed(name)
		n++
	}
	one := p.raw(t)
	one.send([]byte{1})
	_ = one.nc.CloseWrite()
	one.closed("one byte")
	n++
	if got := p.tr.Stats().BadHandshakes; got != n {
		t.Fatalf("%d bad handshakes counted, want %d", got, n)
	}
	if st := p.raw(t).hello(12345); st != statusSession {
		t.Fatalf("unknown session: status %d", st)
	}
	if got := p.tr.Stats().UnknownSessions; got != 1 {
		t.Fatalf("%d unknown sessions counted", got)
	}
	p.works(t, 100)
}

func TestVersionIsNamed(t *testing.T) {
	p := listen(t, Config{}, 64)
	r := p.raw(t)
	var b [helloLen]byte
	hello{session: 1}.encode(&b)
	b[8]++
	r.send(b[:])
	var w [welcomeLen]byte
	if _, err := io.ReadFull(r.nc, w[:]); err != nil {
		t.Fatal(err)
	}
	if st, err := decodeWelcome(&w); err != nil || !errors.Is(st.err(), errVersion) {
		t.Fatalf("answer to another version: %v, %v", st, err)
	}
}

func TestSilentAndSlowConnectionsEnd(t *testing.T) {
	p := listen(t, Config{Handshake: 50 * time.Millisecond, MaxHalfOpen: 3}, 64)
	for range 3 {
		p.raw(t).closed("silent connection")
	}
	slow := p.raw(t)
	_, _ = slow.nc.Write([]byte("BATON"))
	slow.closed("slow connection")
	if got := p.tr.Stats().BadHandshakes; got != 4 {
		t.Fatalf("%d bad handshakes counted", got)
	}
}

func TestHalfOpenConnectionsAreBounded(t *testing.T) {
	p := listen(t, Config{Handshake: patience, MaxHalfOpen: 2}, 64)
	a, b := p.raw(t), p.raw(t)
	a.send([]byte("B"))
	b.send([]byte("B"))
	// Connections are accepted in order, so the third finds both places taken.
	nc, err := net.Dial("tcp", p.tgt.Descriptor().Addr)
	if err == nil {
		_ = nc.SetDeadline(time.Now().Add(patience))
		(&rawConn{t: t, nc: nc.(*net.TCPConn)}).closed("third half-open connection")
		_ = nc.Close()
	} else if !errors.Is(err, syscall.ECONNRESET) { // the refusal may be faster than Dial
		t.Fatal(err)
	}
	if got := p.tr.Stats().HalfOpenRefused; got != 1 {
		t.Fatalf("%d refused", got)
	}
	var h [helloLen]byte
	hello{session: 1}.encode(&h)
	a.send(h[1:]) // a is served all the same
	var w [welcomeLen]byte
	if _, err := io.ReadFull(a.nc, w[:]); err != nil {
		t.Fatal(err)
	}
	if st, err := decodeWelcome(&w); st != statusSession && (st != statusOK || err != nil) {
		t.Fatalf("status %d, %v", st, err)
	}
}

func TestConnectionsOfASessionAreBounded(t *testing.T) {
	p := listen(t, Config{MaxConns: 5}, 64)
	p.dial(t)
	p.dial(t)
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("sixth connection: %v", err)
	}
}

func TestBrokenFramesEndOnlyTheirConnection(t *testing.T) {
	p := listen(t, Config{}, 4096)
	p.dial(t)
	p.allow(t, 1, transfer.Span{Off: 0, Len: 4096})
	h := header{seq: 1, grant: 1, key: testKey}
	table := []transfer.Span{{Off: 0, Len: 8}}
	wrongSum := openFrame(h, table, "", make([]byte, 8))
	putEntry(wrongSum[headerLen:], 0, 9)
	overflow := openFrame(h, []transfer.Span{{Len: 8}, {Len: 0}}, "", make([]byte, 8))
	putEntry(overflow[headerLen+entryLen:], 0, 1<<64-1)
	half := openFrame(h, table, "", []byte("half"))
	abandon := make([]byte, headerLen)
	(&header{kind: kindAbandon, seq: 1}).encode(abandon)
	cases := map[string][]byte{
		"noise":                       bytes.Repeat([]byte{0x5a}, 200),
		"zeros":                       make([]byte, headerLen),
		"first write is not number 1": openFrame(header{seq: 2, grant: 1, key: testKey}, table, "", make([]byte, 8)),
		"number used twice":           append(bytes.Clone(half), half...),
		"data of no write":            dataFrame(1, []byte("x")),
		"data beyond the write":       append(bytes.Clone(half), dataFrame(1, []byte("12345"))...),
		"abandon of a live write":     append(bytes.Clone(half), abandon...),
		"abandon of no write":         abandon,
		"table too short":             wrongSum,
		"table overflows":             overflow,
	}
	var many []byte
	for i := range maxOpen + 1 {
		many = append(many, openFrame(header{seq: uint64(i + 1), grant: 1, key: testKey}, table, "", []byte("x"))...)
	}
	cases["too many open writes"] = many
	for name, b := range cases {
		t.Run(name, func(t *testing.T) {
			before := p.tr.Stats().ProtocolErrors
			r := p.raw(t).session()
			_, _ = r.nc.Write(b)
			r.closed(name)
			if got := p.tr.Stats().ProtocolErrors; got != before+1 {
				t.Fatalf("%d protocol errors counted, want %d", got, before+1)
			}
		})
	}
	p.works(t, 100)
	if got := len(p.sink.landed); got != 1 {
		t.Fatalf("%d notifications, want that of the good write only", got)
	}
}

// Mutated streams of good frames: the target must close or go on, never die, and never
// store outside the grant.
func TestMutatedStreams(t *testing.T) {
	p := listen(t, Config{}, 16384)
	p.dial(t)
	p.allow(t, 1, transfer.Span{Off: 4096, Len: 4096})
	good := openFrame(header{seq: 1, grant: 1, key: testKey}, []transfer.Span{{Off: 4096, Len: 50}, {Off: 5000, Len: 50}}, "note", make([]byte, 60))
	good = append(good, dataFrame(1, make([]byte, 40))...)
	good = append(good, openFrame(header{seq: 2, grant: 1, key: testKey}, []transfer.Span{{Off: 8000, Len: 192}}, "", bytes.Repeat([]byte{1}, 192))...)
	seed := uint64(20240607)
	rnd := rand.New(rand.NewPCG(seed, 0))
	for i := range 400 {
		b := bytes.Clone(good)
		for range 1 + rnd.IntN(3) {
			b[rnd.IntN(len(b))] = byte(rnd.Uint32())
		}
		if rnd.IntN(4) == 0 {
			b = b[:rnd.IntN(len(b))]
		}
		r := p.raw(t).session()
		_, _ = r.nc.Write(b)
		_ = r.nc.CloseWrite()
		r.closed("mutated stream")
		if !bytes.Equal(p.mem[:4096], make([]byte, 4096)) || !bytes.Equal(p.mem[8192:], make([]byte, 8192)) {
			t.Fatalf("seed %d, stream %d: stored outside the grant", seed, i)
		}
		_ = r.nc.Close()
	}
	p.works2(t)
}

// works2 is works for a memory whose first page must stay empty.
func (p *pair) works2(t *testing.T) {
	t.Helper()
	peer := p.dial(t)
	w := transfer.Write{Grant: 1, Key: testKey, Segments: []transfer.Segment{{Off: 4096, Src: []byte("works")}}}
	if err := recv(t, post(t, peer, w), "write after garbage"); err != nil {
		t.Fatalf("write after garbage: %v", err)
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // takes connections in its backlog, never answers
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d := transfer.Descriptor{Kind: "tcp", Addr: ln.Addr().String()}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	if _, err := New(Config{}).Dial(ctx, d, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("dial with an ending context: %v", err)
	}
	if _, err := New(Config{Handshake: 30 * time.Millisecond}).Dial(context.Background(), d, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("dial with the default bound: %v", err)
	}
	ctx, cancel = context.WithCancel(context.Background())
	cancel()
	if _, err := New(Config{}).Dial(ctx, d, 1); !errors.Is(err, context.Canceled) {
		t.Fatalf("dial with a cancelled context: %v", err)
	}
}
