package tcp

import (
	"bytes"
	"net"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

// gated blocks the target in Landed of notifications that begin with '!' until release is called.
func gated(t *testing.T, p *pair) (inside chan string, release func()) {
	t.Helper()
	inside, gate := make(chan string, 8), make(chan struct{})
	open := false
	release = func() {
		if !open {
			open = true
			close(gate)
		}
	}
	t.Cleanup(release) // before the target is closed, which waits for its goroutines
	p.sink.gate = func(s string) {
		if s[0] == '!' {
			inside <- s
			<-gate
		}
	}
	return inside, release
}

// A short write arrives while the connection of long ones stands still, and the other way round: neither
// is behind the other in any queue.
func TestShortAndLongWritesDoNotWaitForEachOther(t *testing.T) {
	const long = 8 << 20
	sizes := map[string]int{"long": long, "short": 4096}
	for still, other := range map[string]string{"long": "short", "short": "long"} {
		t.Run(still+" stands still", func(t *testing.T) {
			p := listen(t, Config{}, 2*long)
			inside, release := gated(t, p)
			p.allow(t, 1, transfer.Span{Off: 0, Len: long})
			p.allow(t, 2, transfer.Span{Off: long, Len: long})
			peer := p.dial(t)
			a := post(t, peer, transfer.Write{Grant: 1, Key: testKey, Notify: []byte("!" + still),
				Segments: []transfer.Segment{{Src: bytes.Repeat([]byte{1}, sizes[still])}}})
			recv(t, inside, "the first write")
			b := post(t, peer, transfer.Write{Grant: 2, Key: testKey, Notify: []byte(other),
				Segments: []transfer.Segment{{Off: long, Src: bytes.Repeat([]byte{2}, sizes[other])}}})
			if err := recv(t, b, "the write beside it"); err != nil {
				t.Fatal(err)
			}
			p.is(t, "when it is done", long, sizes[other], 2)
			unsettled(t, "the first write", a)
			release()
			if err := recv(t, a, "the first write"); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// Writes of one grant are applied in the order of their posts whatever their lengths, although there
// are two connections; what comes when all before it are settled may go over either.
func TestOneGrantKeepsItsOrderOverBothConnections(t *testing.T) {
	const long = 2 << 20
	for name, first := range map[string]int{"long first": long, "short first": 100} {
		t.Run(name, func(t *testing.T) {
			p := listen(t, Config{}, long)
			inside, release := gated(t, p)
			p.allow(t, 1, transfer.Span{Off: 0, Len: long})
			peer := p.dial(t)
			write := func(note string, v byte, n int) <-chan error {
				return post(t, peer, transfer.Write{Grant: 1, Key: testKey, Notify: []byte(note),
					Segments: []transfer.Segment{{Src: bytes.Repeat([]byte{v}, n)}}})
			}
			verdicts := []<-chan error{write("!a", 1, first)}
			recv(t, inside, "the first write")
			for i, n := range []int{100, long, quickBytes, quickBytes + 1, 1} {
				verdicts = append(verdicts, write(string(rune('b'+i)), byte(2+i), n))
			}
			for _, v := range verdicts {
				unsettled(t, "a write while the first of its grant is not applied", v)
			}
			release()
			for _, v := range verdicts {
				if err := recv(t, v, "verdict"); err != nil {
					t.Fatal(err)
				}
			}
			for _, want := range []string{"!a", "b", "c", "d", "e", "f"} {
				if got := recv(t, p.sink.landed, "notification"); got != want {
					t.Fatalf("landed %q, want %q", got, want)
				}
			}
			p.is(t, "after all", 0, 1, 6)
			p.is(t, "after all", 1, quickBytes, 5)
			p.is(t, "after all", quickBytes+1, long-quickBytes-1, 3)
			for _, n := range []int{long, 1, long, quickBytes, 1} { // now one by one, over both in turn
				if err := recv(t, write("x", 9, n), "a later write"); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// The loss of either connection is the end of the peer, and so of the session: no grant stays open
// for half a writer.
func TestEitherConnectionsEndIsTheSessions(t *testing.T) {
	for name, of := range map[string]func(*peer) *net.TCPConn{
		"bulk":  func(p *peer) *net.TCPConn { return p.bulk.tcp },
		"quick": func(p *peer) *net.TCPConn { return p.quick.tcp },
	} {
		t.Run(name, func(t *testing.T) {
			p := listen(t, Config{}, 64)
			p.allow(t, 1, transfer.Span{Off: 0, Len: 64})
			pe := p.dial(t)
			_ = of(pe.(*peer)).CloseWrite()
			recv(t, pe.Down(), "the peer's end")
			if s := recv(t, p.sink.fenced, "fence"); s != 1 {
				t.Fatalf("session %d is fenced", s)
			}
		})
	}
}
