package zmtp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/setup"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const patience = 30 * time.Second

// pull is a Pull whose messages come on a channel.
func pull(t *testing.T, addr string, l Limits) (*Pull, chan Message) {
	t.Helper()
	ch := make(chan Message, 1<<12)
	p, err := Listen(addr, l, func(_ net.Addr, m Message) { ch <- m })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p, ch
}

func push(t *testing.T, addr string, c PushConfig) *Push {
	t.Helper()
	p := Dial(addr, c)
	t.Cleanup(func() { p.Close(0) })
	return p
}

func take(t *testing.T, ch chan Message) Message {
	t.Helper()
	select {
	case m := <-ch:
		return m
	case <-time.After(patience):
		t.Fatal("no message came")
		return nil
	}
}

func down(t *testing.T, p *Push) error {
	t.Helper()
	select {
	case <-p.Down():
		return p.Err()
	case <-time.After(patience):
		t.Fatal("the Push did not go down")
		return nil
	}
}

// dialRaw is a plain connection to a Pull.
func dialRaw(t *testing.T, p *Pull) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", p.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

// shaken is a plain connection that has said hello as a PUSH socket.
func shaken(t *testing.T, p *Pull) net.Conn {
	t.Helper()
	c := dialRaw(t, p)
	if err := handshake(c, &reader{r: bufio.NewReader(c)}, "PUSH", "PULL"); err != nil {
		t.Fatal(err)
	}
	return c
}

// gone waits until the other side has ended c.
func gone(t *testing.T, c net.Conn) {
	t.Helper()
	if _, err := io.Copy(io.Discard, c); err != nil && strings.Contains(err.Error(), "timeout") {
		t.Fatal("the connection was not ended")
	}
}

// samples have every form of a frame's header.
func samples() []Message {
	return []Message{{[]byte("a")}, {{}}, {[]byte("a"), {}, []byte("b")}, {bytes.Repeat([]byte("x"), 255)}, {bytes.Repeat([]byte("y"), 256), []byte("z")}, {bytes.Repeat([]byte("w"), 3<<20)}}
}

func sameMessage(t *testing.T, got, want Message) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d frames, want %d", len(got), len(want))
	}
	for i := range want {
		if !bytes.Equal(got[i], want[i]) {
			t.Fatalf("frame %d has %d bytes, want %d", i, len(got[i]), len(want[i]))
		}
	}
}

func TestPushPull(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{})
	s := push(t, p.Addr().String(), PushConfig{})
	for _, m := range samples() {
		if err := s.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	for _, m := range samples() {
		sameMessage(t, take(t, ch), m)
	}
	s.Close(0)
	if err := s.Send(Message{nil}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// TestLinger: what was queued leaves before the end.
func TestLinger(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{})
	s := Dial(p.Addr().String(), PushConfig{})
	for i := range 100 {
		_ = s.Send(Message{{byte(i)}})
	}
	s.Close(patience)
	for i := range 100 {
		if m := take(t, ch); m[0][0] != byte(i) {
			t.Fatalf("message %d is %v", i, m)
		}
	}
}

// TestSilentConnections: those that say nothing do not keep others out, and end.
func TestSilentConnections(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{Handshake: 200 * time.Millisecond, MaxHalfOpen: 4})
	var silent []net.Conn
	for range 3 {
		silent = append(silent, dialRaw(t, p))
	}
	s := push(t, p.Addr().String(), PushConfig{})
	_ = s.Send(Message{[]byte("x")})
	take(t, ch)
	for _, c := range silent {
		gone(t, c)
	}
	if st := p.Stats(); st.BadHandshakes != 3 {
		t.Errorf("%+v", st)
	}
}

// TestTooManyHalfOpen: the fifth of four is refused at once.
func TestTooManyHalfOpen(t *testing.T) {
	p, _ := pull(t, "127.0.0.1:0", Limits{MaxHalfOpen: 4, Handshake: patience})
	for range 4 {
		dialRaw(t, p)
	}
	gone(t, dialRaw(t, p))
	if st := p.Stats(); st.Refused != 1 {
		t.Errorf("%+v", st)
	}
}

// TestBadPeers: each ends its own connection, nothing else.
func TestBadPeers(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{Frame: 1 << 20, Message: 2 << 20, Frames: 8})
	old := greeting()
	old[10] = 1
	curve := greeting()
	copy(curve[12:32], "CURVE\x00")
	for name, hello := range map[string][]byte{
		"http": []byte("GET / HTTP/1.1\r\nHost: x\r\nAccept: everything, whatever it is, with a long line\r\n\r\n"), "version 1": old, "curve": curve,
		"a PUB socket": append(greeting(), ready("PUB")...), "no READY": append(greeting(), appendFrame(nil, 0, []byte("x"))...),
		"empty READY": append(greeting(), appendFrame(nil, flagCommand, []byte("\x05READY"))...),
		"cut READY":   append(greeting(), appendFrame(nil, flagCommand, []byte("\x05READY\x0bSocket"))...),
	} {
		c := dialRaw(t, p)
		if _, err := c.Write(hello); err != nil {
			t.Fatal(name, err)
		}
		gone(t, c)
	}
	if st := p.Stats(); st.BadHandshakes != 7 {
		t.Errorf("%+v", st)
	}
	many := []byte{}
	for range 9 {
		many = appendFrame(many, flagMore, []byte("x"))
	}
	for name, bad := range map[string][]byte{
		"2^62 bytes": {flagLong, 0x40, 0, 0, 0, 0, 0, 0, 0}, "negative": {flagLong, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, "flags": {0x80, 0},
		"command in a message": append(appendFrame(nil, flagMore, []byte("x")), appendFrame(nil, flagCommand, []byte("\x04PING"))...), "many": many,
	} {
		c := shaken(t, p)
		if _, err := c.Write(bad); err != nil {
			t.Fatal(name, err)
		}
		gone(t, c)
	}
	cut := shaken(t, p)
	_, _ = cut.Write([]byte{0, 10, 'x'})
	_ = cut.Close()
	s := push(t, p.Addr().String(), PushConfig{})
	_ = s.Send(Message{[]byte("still here")})
	sameMessage(t, take(t, ch), Message{[]byte("still here")})
	if st := p.Stats(); st.Broken < 5 {
		t.Errorf("%+v", st)
	}
}

// TestPing: a ZMTP 3.1 heartbeat is answered by both sockets.
func TestPing(t *testing.T) {
	p, _ := pull(t, "127.0.0.1:0", Limits{})
	want := appendFrame(nil, flagCommand, []byte("\x04PONGctx"))
	ask := appendFrame(nil, flagCommand, []byte("\x04PING\x00\x0actx"))
	check := func(c net.Conn) {
		if _, err := c.Write(ask); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, len(want))
		if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%q, %v", got, err)
		}
	}
	check(shaken(t, p))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	push(t, l.Addr().String(), PushConfig{})
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	if err := handshake(c, &reader{r: bufio.NewReader(c)}, "PULL", "PUSH"); err != nil {
		t.Fatal(err)
	}
	check(c)
}

// TestLoss: a Push tells that its connection is lost, or was never made, and takes nothing more.
func TestLoss(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{})
	told := make(chan error, 1)
	s := push(t, p.Addr().String(), PushConfig{Down: func(err error) { told <- err }})
	_ = s.Send(Message{[]byte("x")})
	take(t, ch)
	addr := p.Addr().String()
	_ = p.Close()
	if err := down(t, s); err == nil || s.Send(Message{nil}) == nil {
		t.Error("the loss was not told", err)
	}
	select {
	case <-told:
	case <-time.After(patience):
		t.Error("Down was not called")
	}
	if err := down(t, push(t, addr, PushConfig{})); err == nil {
		t.Error("connected to nobody")
	}
}

// TestStoppedReader: a receiver that takes nothing makes Send fail, not block, and then the connection.
func TestStoppedReader(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := push(t, l.Addr().String(), PushConfig{Queue: 10, Write: 500 * time.Millisecond})
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := handshake(c, &reader{r: bufio.NewReader(c)}, "PULL", "PUSH"); err != nil {
		t.Fatal(err)
	}
	full := false
	for start := time.Now(); !full && time.Since(start) < patience; {
		err := s.Send(Message{make([]byte, 1<<20)})
		full = errors.Is(err, ErrFull)
		if err != nil && !full {
			t.Fatal(err)
		}
	}
	if !full {
		t.Fatal("the queue never fills")
	}
	if err := down(t, s); err == nil || !strings.Contains(err.Error(), "send") {
		t.Error(err)
	}
}

// libzmq runs a Python program with the real library, which the peer's environment has; its lines come on the channel.
func libzmq(t *testing.T, program string, args ...string) (stdin io.WriteCloser, lines chan string) {
	t.Helper()
	cache, err := setup.DefaultDir()
	python := filepath.Join(cache, "sglang-peer-0.5.23", "bin", "python")
	if err == nil {
		err = exec.Command(python, "-c", "import zmq").Run()
	}
	if err != nil {
		skip := t.Skipf
		if os.Getenv("BATON_NEED_PEER") != "" {
			skip = t.Fatalf
		}
		skip("needs pyzmq in the environment of the SGLang peer (make testdeps): %v", err)
	}
	cmd := exec.Command(python, append([]string{"-u", "-c", program}, args...)...)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines = make(chan string, 1<<12)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for s := bufio.NewScanner(out); s.Scan(); {
			lines <- s.Text()
		}
	}()
	t.Cleanup(func() { _ = in.Close(); _ = cmd.Process.Kill(); <-read; _ = cmd.Wait() })
	return in, lines
}

func line(t *testing.T, ch chan string) string {
	t.Helper()
	select {
	case s := <-ch:
		return s
	case <-time.After(patience):
		t.Fatal("the Python program says nothing")
		return ""
	}
}

// TestLibzmq: both directions with the real library, in every form of a frame; its reconnect to a Pull that came back; its
// receive limit and stop, which our Push survives.
func TestLibzmq(t *testing.T) {
	p, ch := pull(t, "127.0.0.1:0", Limits{})
	addr := p.Addr().String()
	in, _ := libzmq(t, `
import sys, zmq
s = zmq.Context().socket(zmq.PUSH); s.setsockopt(zmq.LINGER, 0); s.connect("tcp://" + sys.argv[1])
for line in sys.stdin: s.send_multipart([b"a" * int(n) for n in line.split()])
`, addr)
	say := func(sizes ...int) {
		fmt.Fprintln(in, strings.Trim(fmt.Sprint(sizes), "[]"))
	}
	check := func(ch chan Message, sizes ...int) {
		t.Helper()
		m := take(t, ch)
		for i, n := range sizes {
			if len(m) != len(sizes) || len(m[i]) != n {
				t.Fatalf("%d frames, frame %d has %d bytes, want %d", len(m), i, len(m[i]), n)
			}
		}
	}
	for _, sizes := range [][]int{{0}, {1, 0, 255}, {256, 65536}, {4 << 20, 3}} {
		say(sizes...)
		check(ch, sizes...)
	}
	_ = p.Close()
	q, ch2 := pull(t, addr, Limits{})
	for tries := 0; len(ch2) == 0 && tries < 100; tries++ { // those into the gap are lost, as the wire says
		say(7)
		<-time.After(50 * time.Millisecond)
	}
	check(ch2, 7)
	_ = q.Close()

	_, lines := libzmq(t, `
import zmq
s = zmq.Context().socket(zmq.PULL); s.setsockopt(zmq.RCVHWM, 10); print(s.bind_to_random_port("tcp://127.0.0.1"))
while True: print(*[len(f) for f in s.recv_multipart()])
`)
	out := push(t, "127.0.0.1:"+line(t, lines), PushConfig{})
	for _, sizes := range [][]int{{0}, {1, 0, 255}, {256, 65536}, {4 << 20, 3}} {
		var m Message
		for _, n := range sizes {
			m = append(m, make([]byte, n))
		}
		if err := out.Send(m); err != nil {
			t.Fatal(err)
		}
		if got, want := line(t, lines), strings.Trim(fmt.Sprint(sizes), "[]"); got != want {
			t.Fatalf("%q, want %q", got, want)
		}
	}
	for range 1000 { // more than its limit: it reads them all in the end
		_ = out.Send(Message{make([]byte, 100)})
	}
	for range 1000 {
		if line(t, lines) != "100" {
			t.Fatal("another message")
		}
	}
}

// FuzzReader: any stream ends in messages within the limits or an error, and what was read can be written again.
func FuzzReader(f *testing.F) {
	for _, m := range samples()[:5] {
		f.Add(appendMessage(nil, m))
	}
	f.Add(appendFrame(nil, flagCommand, []byte("\x04PING\x00\x0actx")))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := &reader{r: bufio.NewReader(bytes.NewReader(b)), l: Limits{Frame: 1 << 12, Message: 1 << 13, Frames: 4}}
		for {
			m, err := r.next(func(cmd []byte) error { _, _ = pong(cmd); return nil })
			if err != nil {
				break
			}
			again := &reader{r: bufio.NewReader(bytes.NewReader(appendMessage(nil, m))), l: r.l}
			n, err := again.next(nil)
			if err != nil {
				t.Fatal(err)
			}
			sameMessage(t, n, m)
		}
		_, _ = property(b, "Socket-Type")
		if len(b) >= greetingLen {
			_ = checkGreeting(b[:greetingLen])
		}
	})
}
