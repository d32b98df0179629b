package shm

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestHandshakeIsBounded(t *testing.T) {
	p := listen(t, Config{Handshake: 50 * time.Millisecond, MaxHalfOpen: 2}, 4096)
	p.connect(t).dismissed("silent connection")
	slow := p.connect(t)
	_, _ = slow.uc.Write([]byte("BSH"))
	slow.dismissed("slow connection")
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if s := p.tr.Stats(); s.BadHandshakes != 2 {
		t.Fatalf("counted %+v", s)
	}
}

func TestBadHandshakesAreCounted(t *testing.T) {
	p := listen(t, Config{Handshake: patience, MaxConns: 1}, 4096)
	bad := p.connect(t)
	bad.send(message{kind: kindLeft, grant: 1}, "")
	bad.dismissed("no hello")
	old := p.connect(t)
	old.send(message{kind: kindHello, value: 1, code: version + 1}, "")
	if m := old.read(); m.kind != kindWelcome || status(m.code) != statusVersion {
		t.Fatalf("answer to another version: %+v", m)
	}
	unknown := p.connect(t)
	unknown.send(message{kind: kindHello, value: 33, code: version}, "")
	if m := unknown.read(); status(m.code) != statusSession {
		t.Fatalf("answer to an unknown session: %+v", m)
	}
	unknown.dismissed("unknown session")
	p.dial(t)
	if _, err := p.tr.Dial(context.Background(), p.tgt.Descriptor(), 1); !errors.Is(err, transfer.ErrSession) {
		t.Fatalf("second connection: %v", err)
	}
	look, err := net.Dial("unix", p.tgt.Descriptor().Addr)
	if err != nil {
		t.Fatal(err)
	}
	_ = look.Close() // somebody cleaning the directory: not counted
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if s := p.tr.Stats(); s.BadHandshakes != 2 || s.UnknownSessions != 2 {
		t.Fatalf("counted %+v", s)
	}
}

// TestNoDescriptorsLeft: a target that can open nothing more says so, and lets the next one in when it can.
func TestNoDescriptorsLeft(t *testing.T) {
	p := listen(t, Config{Handshake: patience}, 4096)
	before := descriptors(t)
	r := p.connect(t)
	for late := time.Now().Add(patience); descriptors(t) < before+2; runtime.Gosched() { // its socket, and the target's
		if time.Now().After(late) {
			t.Fatal("the connection was not accepted")
		}
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	restore := func() { _ = unix.Setrlimit(unix.RLIMIT_NOFILE, &old) }
	defer restore()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	r.send(message{kind: kindHello, value: 1, code: version}, "")
	m := r.read()
	restore()
	if m.kind != kindWelcome || !errors.Is(m.refusal(), unix.EMFILE) {
		t.Errorf("answer of a target without descriptors: %+v (%v), want one that says so", m, m.refusal())
	}
	r.dismissed("a source that can not be let in")
	p.dial(t)
	if s := p.tr.Stats(); s.BadHandshakes != 0 || s.UnknownSessions != 0 {
		t.Errorf("the source is blamed: %+v", s)
	}
}

// descriptors is how many this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

func TestHalfOpenConnectionsAreBounded(t *testing.T) {
	p := listen(t, Config{Handshake: patience, MaxHalfOpen: 2}, 4096)
	a, b := p.connect(t), p.connect(t)
	c := p.connect(t) // accepted in order: finds both places taken
	c.dismissed("third half-open connection")
	if got := p.tr.Stats().HalfOpenRefused; got != 1 {
		t.Fatalf("%d refused", got)
	}
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	a.dismissed("Close")
	b.dismissed("Close")
}

// fakeTarget accepts one source and answers its hello with reply and descriptors.
func fakeTarget(t *testing.T, reply []byte, fds []int, then func(*net.UnixConn)) transfer.Descriptor {
	t.Helper()
	path := filepath.Join(socketDir(t), "fake")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	t.Cleanup(func() {
		_ = ln.Close()
		<-ended
	})
	go func() {
		defer close(ended)
		uc, err := ln.AcceptUnix()
		if err != nil {
			return
		}
		defer uc.Close()
		_, _ = io.ReadFull(uc, make([]byte, messageLen))
		var oob []byte
		if len(fds) > 0 {
			oob = unix.UnixRights(fds...)
		}
		_, _, _ = uc.WriteMsgUnix(reply, oob, nil)
		if then != nil {
			then(uc)
		}
		_, _ = io.Copy(io.Discard, uc)
	}()
	boot, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	return transfer.Descriptor{Kind: "shm", Addr: path, Host: boot, Size: 4096}
}

func welcome(size uint64) []byte {
	m := message{kind: kindWelcome, code: uint32(statusOK), value: size}
	return m.append(nil)
}

func TestDialRefusesABrokenTarget(t *testing.T) {
	m := memory(t, 4096)
	small := memory(t, 100)
	ctl, ctlFD, err := newControl()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(ctlFD)
	defer unix.Munmap(ctl.b)
	other := memory(t, controlSize) // zeros: not a control area
	before := transfertest.TakeFootprint(t)
	done := message{kind: kindDone, value: 1}
	for name, tc := range map[string]struct {
		reply []byte
		fds   []int
	}{
		"closes at once":        {nil, nil},
		"half an answer":        {welcome(4096)[:10], nil},
		"noise":                 {bytes.Repeat([]byte{7}, messageLen), nil},
		"another message":       {done.append(nil), []int{m.FD, ctlFD}},
		"no descriptors":        {welcome(4096), nil},
		"one descriptor":        {welcome(4096), []int{m.FD}},
		"three descriptors":     {welcome(4096), []int{m.FD, ctlFD, ctlFD}},
		"many descriptors":      {welcome(4096), []int{m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD, m.FD}},
		"another size":          {welcome(8192), []int{m.FD, ctlFD}},
		"memory too small":      {welcome(4096), []int{small.FD, ctlFD}},
		"control too small":     {welcome(4096), []int{m.FD, m.FD}},
		"control without magic": {welcome(4096), []int{m.FD, other.FD}},
	} {
		t.Run(name, func(t *testing.T) {
			then := func(*net.UnixConn) {}
			if len(tc.reply) < messageLen {
				then = func(uc *net.UnixConn) { _ = uc.CloseWrite() }
			}
			d := fakeTarget(t, tc.reply, tc.fds, then)
			if peer, err := New(Config{}).Dial(context.Background(), d, 1); err == nil {
				_ = peer.Close()
				t.Fatal("connected")
			}
		})
	}
	before.Await(t)
	boot, _ := bootID()
	for name, d := range map[string]transfer.Descriptor{
		"kind": {Kind: "tcp", Host: boot}, "machine": {Kind: "shm", Host: "x"}, "path": {Kind: "shm", Host: boot, Addr: "/nonexistent/socket"},
	} {
		if _, err := New(Config{}).Dial(context.Background(), d, 1); err == nil {
			t.Errorf("%s: connected", name)
		}
	}
}

func TestPeerRefusesWrongAnswers(t *testing.T) {
	answer := func(ms ...message) []byte {
		var b []byte
		for _, m := range ms {
			b = m.append(b)
		}
		return b
	}
	for name, reply := range map[string][]byte{
		"garbage":        bytes.Repeat([]byte{0xab}, messageLen),
		"unknown write":  answer(message{kind: kindAnswer, value: 5}),
		"unknown code":   answer(message{kind: kindAnswer, value: 1, code: 9}),
		"not an answer":  answer(message{kind: kindLeft, grant: 1}),
		"answered twice": answer(message{kind: kindAnswer, value: 1, code: verdictGrant}, message{kind: kindAnswer, value: 1}),
	} {
		t.Run(name, func(t *testing.T) {
			m := memory(t, 4096)
			ctl, fd, err := newControl()
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			defer unix.Munmap(ctl.b)
			newTable(ctl).put(1, testKey, nil)
			ctl.asleep().Store(1) // so that the completion is told on the socket
			d := fakeTarget(t, welcome(4096), []int{m.FD, fd}, func(uc *net.UnixConn) {
				_, _ = io.ReadFull(uc, make([]byte, messageLen)) // the wake after the completion
				_, _ = uc.Write(reply)
			})
			tr := New(Config{})
			peer, err := tr.Dial(context.Background(), d, 1)
			if err != nil {
				t.Fatal(err)
			}
			v := post(t, peer, transfer.Write{Grant: 1, Key: testKey})
			recv(t, peer.Down(), "down")
			if err := peer.Err(); !errors.Is(err, transfer.ErrPeerLost) {
				t.Errorf("ended with %v", err)
			}
			if err := recv(t, v, "verdict"); err == nil {
				t.Error("a wrong answer completed a write")
			}
			if got := tr.Stats().ProtocolErrors; got != 1 {
				t.Errorf("%d protocol errors counted", got)
			}
			_ = peer.Close()
		})
	}
}
