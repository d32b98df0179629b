package sglang

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// serveBootstrap serves Baton's bootstrap server on port (0: any) and returns the port and what stops it.
func serveBootstrap(t testing.TB, b *Bootstrap, port int) (int, func()) {
	t.Helper()
	l, err := net.Listen("tcp", loopback(port))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: b.Handler()}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	stop := func() { _ = s.Close(); <-done }
	t.Cleanup(stop)
	return l.Addr().(*net.TCPAddr).Port, stop
}

// newPrefill is a prefill manager over memory of layout l, registered at a bootstrap server of its own.
func newPrefill(t testing.TB, l Layout, change func(*PrefillConfig)) (*Prefill, *Memory, int) {
	t.Helper()
	m, err := OpenMemory(l)
	if err != nil {
		t.Fatal(err)
	}
	c := PrefillConfig{Memory: m, NIXL: nixlConfig(), Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&c)
	}
	p, err := NewPrefill(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if s := p.Registry().Stats(); s.Rooms() != 0 || s.Outstanding != 0 {
			t.Errorf("rooms left: %+v", s)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	b := NewBootstrap()
	if err := b.Register(p.Route()); err != nil {
		t.Fatal(err)
	}
	port, _ := serveBootstrap(t, b, 0)
	return p, m, port
}

// fill gives pages and an aux row bytes that tell where they are.
func (m *Memory) fill(pages []int, row int, seed byte) {
	for b := range m.Buffers {
		for _, page := range pages {
			for i := range m.KV(b, page) {
				m.KV(b, page)[i] = seed + byte(7*b) + byte(13*page) + byte(i>>4)
			}
		}
	}
	for b := range m.AuxItemLens {
		for i := range m.Aux(b, row) {
			m.Aux(b, row)[i] = seed + byte(b) + byte(i)
		}
	}
}

func openSend(t testing.TB, p *Prefill, o OpenSend) *Sending {
	t.Helper()
	if o.Deadline.IsZero() {
		o.Deadline = time.Now().Add(patience)
	}
	s, err := p.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// receiver opens a room at a real decode and sends its metadata.
func (p *peer) receiver(id uint64, pages []int, aux int) {
	p.t.Helper()
	p.do("receiver", kw{"room": id})
	p.do("metadata", kw{"room": id, "pages": pages, "aux_index": aux})
}

func granted(t testing.TB, s *Sending) {
	t.Helper()
	select {
	case <-s.Granted():
	case <-time.After(patience):
		t.Fatal("no metadata came")
	}
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
}

// landed compares a real decode's pages with what was sent.
func landed(t testing.TB, d *peer, dst []int, auxDst int, m *Memory, src []int, row int) {
	t.Helper()
	got := d.do("crc", kw{"pages": dst, "aux": auxDst})
	kv, aux := m.crcs(src, row)
	if !reflect.DeepEqual(kv, got.CRC) || !reflect.DeepEqual(aux, got.Aux) {
		t.Fatalf("the peer's pages %v differ from %v:\n%v %v\n%v %v", dst, src, got.CRC, got.Aux, kv, aux)
	}
}

// causeCode of an error.
func causeCode(err error) room.Code {
	var c *room.Cause
	if errors.As(err, &c) {
		return c.Code
	}
	return ""
}

// prefillPair is a Baton prefill and a real decode.
type prefillPair struct {
	p *Prefill
	m *Memory
	d *peer
}

func (x *prefillPair) run(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) {
		defer x.d.under(t)()
		f(t)
	})
}

// TestPrefillToSGLang: rooms to the real decode, one after the other on the same managers.
func TestPrefillToSGLang(t *testing.T) {
	t.Parallel()
	peerFiles(t)
	p, m, port := newPrefill(t, peerLayout(), func(c *PrefillConfig) { c.ParkTimeout, c.TombstoneTTL = time.Second, 300*time.Millisecond })
	d := startPeer(t, "decode", port, "--deferred")
	x := &prefillPair{p: p, m: m, d: d}

	x.run(t, "chunked and scattered", x.chunkedAndScattered)
	x.run(t, "metadata first, and a prefix", x.metadataFirstAndAPrefix)
	x.run(t, "metadata whose request never comes", x.metadataWhoseRequestNeverComes)
	x.run(t, "cancelled here", x.cancelledHere)
	x.run(t, "aborted by the decode", x.abortedByTheDecode)
	x.run(t, "aborted before its request", x.abortedBeforeItsRequest)
	x.run(t, "ack only after drain", x.ackOnlyAfterDrain)
	x.run(t, "a failure is told only after drain", x.aFailureIsToldOnlyAfterDrain)
	x.run(t, "a room's number again", x.aRoomNumberAgain)
	x.run(t, "foreign and malformed messages", x.foreignAndMalformedMessages)
	if s := p.Registry().Stats(); s.Undrained != 0 {
		t.Errorf("undrained rooms: %+v", s)
	}
}

func (x *prefillPair) chunkedAndScattered(t *testing.T) {
	src, dst := []int{3, 9, 4, 60, 10}, []int{20, 63, 22, 40, 0}
	x.m.fill(src, 2, 11)
	s := openSend(t, x.p, OpenSend{Room: 4242, Chunks: []int{3, 0, 2}, Row: 2})
	defer s.Release()
	x.d.receiver(4242, dst, 7)
	granted(t, s)
	if !s.Send(0, src[:3]) || !s.Send(1, nil) {
		t.Fatal(s.Err())
	}
	if x.d.do("poll", kw{"room": 4242}).Poll == "Success" {
		t.Fatal("success before the last chunk")
	}
	s.Send(2, src[3:])
	if err := ended(t, s.Done(), s.Err); err != nil {
		t.Fatal(err)
	}
	x.d.wait(4242, "Success")
	landed(t, x.d, dst, 7, x.m, src, 2)
	x.d.do("clear", kw{"room": 4242})
}

func (x *prefillPair) metadataFirstAndAPrefix(t *testing.T) {
	src := []int{1, 2, 3, 4}
	x.m.fill(src, 0, 77)
	x.d.do("receiver", kw{"room": 5})
	x.d.do("metadata", kw{"room": 5, "pages": []int{50, 51}, "aux_index": 1, "prefix": 2})
	eventually(t, "the metadata are parked", func() bool { x.p.mu.Lock(); defer x.p.mu.Unlock(); return len(x.p.parked) == 1 })
	s := openSend(t, x.p, OpenSend{Room: 5, Chunks: []int{3, 1}, Row: 0})
	defer s.Release()
	granted(t, s)
	s.Send(0, src[:3])
	s.Send(1, src[3:])
	if err := ended(t, s.Done(), s.Err); err != nil || s.Prefix() != 2 {
		t.Fatal(err, s.Prefix())
	}
	x.d.wait(5, "Success")
	landed(t, x.d, []int{50, 51}, 1, x.m, src[2:], 0)
}

func (x *prefillPair) metadataWhoseRequestNeverComes(t *testing.T) {
	x.d.receiver(6, []int{1}, 1)
	x.d.wait(6, "Failed")
	if msg := x.d.do("failure", kw{"room": 6}).Msg; !strings.Contains(msg, "got no request for this room") {
		t.Fatal(msg)
	}
	eventually(t, "the metadata are dropped", func() bool { x.p.mu.Lock(); defer x.p.mu.Unlock(); return len(x.p.parked) == 0 })
}

func (x *prefillPair) cancelledHere(t *testing.T) {
	for i, at := range []string{"before metadata", "granted", "between chunks"} {
		id := uint64(100 + i)
		s := openSend(t, x.p, OpenSend{Room: id, Chunks: []int{1, 1}, Row: 0})
		if at != "before metadata" {
			x.d.receiver(id, []int{1, 2}, 1)
			granted(t, s)
		}
		if at == "between chunks" {
			s.Send(0, []int{1})
		}
		s.Cancel(&room.Cause{Code: room.CodeEngine, Detail: "the engine broke " + at})
		if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeEngine {
			t.Fatal(err)
		}
		if s.Send(1, []int{1}) {
			t.Fatal("a chunk was sent in a failed room")
		}
		if at == "before metadata" {
			x.d.receiver(id, []int{1, 2}, 1)
		}
		x.d.wait(id, "Failed")
		x.d.do("abort", kw{"room": id}) // what its scheduler does with a failed room
		if msg := x.d.do("failure", kw{"room": id}).Msg; !strings.Contains(msg, "the engine broke "+at) {
			t.Fatal(msg)
		}
		eventually(t, "the decode's abort is acked: "+at, func() bool { return x.d.do("abort_safe", kw{"room": id}).Safe })
		s.Release()
	}
}

func (x *prefillPair) abortedByTheDecode(t *testing.T) {
	for i, at := range []string{"granted", "between chunks", "after success"} {
		id := uint64(200 + i)
		s := openSend(t, x.p, OpenSend{Room: id, Chunks: []int{1, 1}, Row: 0})
		x.d.receiver(id, []int{1, 2}, 1)
		granted(t, s)
		if at != "granted" {
			s.Send(0, []int{1})
		}
		if at == "after success" {
			s.Send(1, []int{2})
			x.d.wait(id, "Success")
		}
		x.d.do("abort", kw{"room": id})
		err := ended(t, s.Done(), s.Err)
		if want := at != "after success"; (causeCode(err) == room.CodeAborted) != want {
			t.Fatal(at, err)
		}
		if at != "after success" {
			eventually(t, "ack: "+at, func() bool { return x.d.do("abort_safe", kw{"room": id}).Safe })
		}
		s.Release()
	}
}

func (x *prefillPair) abortedBeforeItsRequest(t *testing.T) {
	x.d.receiver(210, []int{1, 2}, 1)
	x.d.do("abort", kw{"room": 210})
	eventually(t, "ack", func() bool { return x.d.do("abort_safe", kw{"room": 210}).Safe })
	s := openSend(t, x.p, OpenSend{Room: 210, Chunks: []int{1}, Row: 0})
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeAborted || s.Send(0, []int{1}) {
		t.Fatal("the room was not born failed", err)
	}
	s.Release()
}

func (x *prefillPair) ackOnlyAfterDrain(t *testing.T) {
	id := uint64(220)
	s := openSend(t, x.p, OpenSend{Room: id, Chunks: []int{2}, Row: 0})
	x.d.receiver(id, []int{30, 31}, 1)
	granted(t, s)
	pid := s.a.way.agent.Pid()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.Send(0, []int{1, 2})
	x.d.do("abort", kw{"room": id})
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeAborted {
		t.Fatal(err)
	}
	s.Release()
	<-time.After(300 * time.Millisecond) // an ack that is sent too early would be there
	if s.Drained() || x.d.do("abort_safe", kw{"room": id}).Safe {
		t.Fatal("acked while a write was outstanding")
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	eventually(t, "ack", func() bool { return x.d.do("abort_safe", kw{"room": id}).Safe })
	if !s.Drained() {
		t.Fatal("acked before it had drained")
	}
	before := x.d.do("crc", kw{"pages": []int{30, 31}})
	<-time.After(200 * time.Millisecond)
	if after := x.d.do("crc", kw{"pages": []int{30, 31}}); !reflect.DeepEqual(before.CRC, after.CRC) {
		t.Fatal("written after the ack")
	}
}

func (x *prefillPair) aFailureIsToldOnlyAfterDrain(t *testing.T) {
	id := uint64(230)
	s := openSend(t, x.p, OpenSend{Room: id, Chunks: []int{1, 1}, Row: 0})
	defer s.Release()
	x.d.receiver(id, []int{32, 33}, 1)
	granted(t, s)
	pid := s.a.way.agent.Pid()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	s.Send(0, []int{1})
	s.Cancel(&room.Cause{Code: room.CodeEngine, Detail: "the engine broke"})
	<-time.After(300 * time.Millisecond) // what is told too early would be there
	if got := x.d.do("poll", kw{"room": id}).Poll; got != "WaitingForInput" || s.State() != room.StateFailed {
		t.Fatalf("the decode is told that its pages are free while a write is outstanding: %s, %v", got, s.State())
	}
	if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	x.d.wait(id, "Failed")
	if !s.Drained() {
		t.Fatal("told before it had drained")
	}
}

func (x *prefillPair) aRoomNumberAgain(t *testing.T) {
	for range 3 {
		s := openSend(t, x.p, OpenSend{Room: 300, Chunks: []int{1}, Row: 3})
		if _, err := x.p.Open(OpenSend{Room: 300, Chunks: []int{1}, Deadline: time.Now().Add(time.Minute)}); causeCode(err) != room.CodeDuplicate {
			t.Fatal(err)
		}
		x.d.receiver(300, []int{9}, 2)
		granted(t, s)
		s.Send(0, []int{9})
		x.d.wait(300, "Success")
		x.d.do("clear", kw{"room": 300})
		s.Release()
		eventually(t, "the tombstone is gone", func() bool {
			_, ended := x.p.reg.Ended(room.Key{Room: 300})
			return !ended && x.p.reg.Get(room.Key{Room: 300}) == nil
		})
	}
}

func (x *prefillPair) foreignAndMalformedMessages(t *testing.T) {
	before := x.p.Stats()
	push := zmtp.Dial(loopback(x.p.pull.Addr().Port), zmtp.PushConfig{})
	for _, msg := range []zmtp.Message{{[]byte("HELLO")}, {[]byte(tagGuard)}, {[]byte(tagGuard), []byte("None"), []byte("x")}, {[]byte(tagGuard), []byte("12"), []byte("127.0.0.1"), []byte("x")},
		{[]byte(tagAbort)}, {[]byte(tagAbort), []byte("x")}, {[]byte(tagStatus), []byte("1"), []byte("4"), []byte("0"), nil}, {nil}} {
		if err := push.Send(msg); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "they are counted", func() bool { s := x.p.Stats(); return s.Foreign+s.Malformed == before.Foreign+before.Malformed+8 })
	push.Close(0)
	// The real decode gets some too, and lives.
	at := Endpoint{IP: "127.0.0.1", Port: x.d.hello.RankPort}
	push = zmtp.Dial(at.Addr(), zmtp.PushConfig{})
	for _, msg := range []zmtp.Message{{[]byte("HELLO")}, {[]byte(tagAbortAck)}, {[]byte(tagAbortAck), []byte("1"), []byte("0"), []byte("7")}} {
		_ = push.Send(msg)
	}
	s := openSend(t, x.p, OpenSend{Room: 400, Chunks: []int{1}, Row: 3})
	defer s.Release()
	x.d.receiver(400, []int{9}, 2)
	granted(t, s)
	s.Send(0, []int{9})
	x.d.wait(400, "Success")
	push.Close(0)
}
