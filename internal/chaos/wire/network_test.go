package wire

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// rig is a network with a server on host "b" that dialers on host "a" reach.
type rig struct {
	t    *testing.T
	set  func(from, to string, w Weather)
	dial func() (net.Conn, error)
	l    net.Listener
}

// onEach runs test on the switch and on the proxies.
func onEach(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Run("switch", func(t *testing.T) { test(t, switchRig(t)) })
	t.Run("proxies", func(t *testing.T) { test(t, proxyRig(t)) })
}

func openSwitch(t *testing.T) *Switch {
	t.Helper()
	s, err := OpenSwitch(1, "a", "b")
	if errors.Is(err, os.ErrPermission) {
		t.Skipf("network namespaces are needed: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func switchRig(t *testing.T) *rig {
	s := openSwitch(t)
	r := &rig{t: t, set: s.Set}
	err := s.Host("b").Do(func() (err error) {
		r.l, err = net.Listen("tcp", s.Host("b").Addr()+":8998")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.l.Close() })
	r.dial = func() (c net.Conn, err error) {
		err = s.Host("a").Do(func() error {
			c, err = net.DialTimeout("tcp", r.l.Addr().String(), time.Second)
			return err
		})
		return c, err
	}
	return r
}

func proxyRig(t *testing.T) *rig {
	p := NewProxies(1)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := p.Via("b", l.Addr().String(), "a")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close(); _ = p.Close() })
	return &rig{t: t, set: p.Set, l: l, dial: func() (net.Conn, error) { return net.DialTimeout("tcp", addr, time.Second) }}
}

// pair connects a to b.
func (r *rig) pair() (a, b net.Conn) {
	r.t.Helper()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := r.l.Accept()
		if err == nil {
			accepted <- c
		}
		close(accepted)
	}()
	a, err := r.dial()
	if err != nil {
		r.t.Fatal(err)
	}
	b = <-accepted
	r.t.Cleanup(func() { _ = a.Close(); _ = b.Close() })
	return a, b
}

// send writes a pattern at one end and reads n bytes at the other.
func send(from, to net.Conn, n int) (sent, got []byte, err error) {
	sent, got = make([]byte, n), make([]byte, n)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range sent {
		sent[i] = byte(rng.Uint32())
	}
	wrote := make(chan error, 1)
	go func() { _, err := from.Write(sent); wrote <- err }()
	_ = to.SetReadDeadline(time.Now().Add(20 * time.Second))
	_, err = io.ReadFull(to, got)
	return sent, got, errors.Join(err, <-wrote)
}

// silent reports whether nothing arrives at c for d.
func silent(c net.Conn, d time.Duration) bool {
	_ = c.SetReadDeadline(time.Now().Add(d))
	n, err := c.Read(make([]byte, 1))
	return n == 0 && errors.Is(err, os.ErrDeadlineExceeded)
}

func TestBadWeatherLosesNoByte(t *testing.T) {
	for name, w := range map[string]Weather{
		"fair": {}, "losses": {Drop: .02}, "late": {Delay: 2 * time.Millisecond, Jitter: 3 * time.Millisecond},
		"out of order and doubled": {Reorder: .1, Duplicate: .1},
	} {
		t.Run(name, func(t *testing.T) {
			onEach(t, func(t *testing.T, r *rig) {
				a, b := r.pair()
				r.set("a", "b", w)
				r.set("b", "a", w)
				sent, got, err := send(a, b, 1<<20)
				if err != nil || sha256.Sum256(sent) != sha256.Sum256(got) {
					t.Errorf("%v; what arrived is what was sent: %v", err, bytes.Equal(sent, got))
				}
			})
		})
	}
}

func TestSwitchReallyReorders(t *testing.T) {
	s := openSwitch(t)
	listen := func(host string) (c net.PacketConn) {
		if err := s.Host(host).Do(func() (err error) {
			c, err = net.ListenPacket("udp4", s.Host(host).Addr()+":0")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		return c
	}
	const packets = 40 // few enough to fit the receiving socket
	a, b := listen("a"), listen("b")
	s.Set("a", "b", Weather{Reorder: .5})
	for i := range packets {
		if _, err := a.WriteTo([]byte{byte(i)}, b.LocalAddr()); err != nil {
			t.Fatal(err)
		}
	}
	_ = b.SetReadDeadline(time.Now().Add(10 * time.Second))
	overtaken, last := 0, -1
	seen := map[byte]bool{}
	for range packets {
		var one [1]byte
		if _, _, err := b.ReadFrom(one[:]); err != nil {
			t.Fatalf("after %d packets: %v; %+v", len(seen), err, s.Counts())
		}
		seen[one[0]] = true
		if int(one[0]) < last {
			overtaken++
		}
		last = max(last, int(one[0]))
	}
	if c := s.Counts(); len(seen) != packets || overtaken < 5 || c.Reordered < 5 || c.Overflowed != 0 {
		t.Errorf("%d packets of 40 came, %d were overtaken; counts %+v", len(seen), overtaken, c)
	}
}

func TestPartitionHeals(t *testing.T) {
	onEach(t, func(t *testing.T, r *rig) {
		a, b := r.pair()
		if _, _, err := send(a, b, 10); err != nil {
			t.Fatal(err)
		}
		r.set("a", "b", Weather{Drop: 1})
		r.set("b", "a", Weather{Drop: 1})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if !silent(b, 300*time.Millisecond) {
			t.Error("a byte went through a partition")
		}
		r.set("a", "b", Weather{})
		r.set("b", "a", Weather{})
		_ = b.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := b.Read(make([]byte, 1)); n != 1 {
			t.Errorf("after the partition the byte did not come: %v", err)
		}
	})
}

func TestHalfOpen(t *testing.T) {
	onEach(t, func(t *testing.T, r *rig) {
		a, b := r.pair()
		r.set("b", "a", Weather{Drop: 1}) // also the acks, which TCP sends again
		if _, err := b.Write([]byte("lost")); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		_ = b.SetReadDeadline(time.Now().Add(5 * time.Second))
		if n, err := b.Read(make([]byte, 1)); n != 1 {
			t.Errorf("the open direction is closed: %v", err)
		}
		if !silent(a, 300*time.Millisecond) {
			t.Error("the closed direction is open")
		}
	})
}

func TestDamageReachesTheProgram(t *testing.T) {
	onEach(t, func(t *testing.T, r *rig) {
		a, b := r.pair()
		r.set("a", "b", Weather{Corrupt: 1})
		sent, got, err := send(a, b, 100)
		if err != nil || bytes.Equal(sent, got) {
			t.Errorf("%v; undamaged: %v", err, bytes.Equal(sent, got))
		}
	})
}

func TestResetBreaksBothEnds(t *testing.T) {
	onEach(t, func(t *testing.T, r *rig) {
		a, b := r.pair()
		if _, _, err := send(a, b, 10); err != nil {
			t.Fatal(err)
		}
		r.set("a", "b", Weather{Reset: 1})
		if _, err := a.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		for name, c := range map[string]net.Conn{"sender": a, "receiver": b} {
			_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the %s got %v, want a reset", name, err)
			}
		}
	})
}

func TestProcessesRunOnTheirHost(t *testing.T) {
	s := openSwitch(t)
	var out bytes.Buffer
	cmd := exec.CommandContext(t.Context(), "cat", "/proc/self/net/fib_trie")
	cmd.Stdout = &out
	if err := s.Host("b").Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil || !bytes.Contains(out.Bytes(), []byte(s.Host("b").Addr())) {
		t.Errorf("%v; the process does not see its host's address", err)
	}
	here, err := os.ReadFile("/proc/self/net/fib_trie")
	if err != nil || bytes.Contains(here, []byte(s.Host("b").Addr())) {
		t.Errorf("%v; this process sees the address of a host: it is on it", err)
	}
}

func TestClosedNetworkIsSilent(t *testing.T) {
	s, err := OpenSwitch(1, "a", "b")
	if errors.Is(err, os.ErrPermission) {
		t.Skipf("network namespaces are needed: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	p := NewProxies(1)
	addr, err := p.Via("b", "127.0.0.1:1", "a")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), time.Second)
	defer stop()
	if c, err := new(net.Dialer).DialContext(ctx, "tcp", addr); err == nil {
		_ = c.Close()
		t.Error("a closed proxy accepts")
	}
	if _, err := p.Via("b", "127.0.0.1:1"); err == nil {
		t.Error("closed proxies take another port")
	}
}
