package transfertest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

// mutantEnv names the mutant that a child process runs the suite against.
const mutantEnv = "BATON_TRANSFERTEST_MUTANT"

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return mem.New(nil) })
}

// mutants are transports with one fault each, and the subtest that has to find it.
var mutants = []struct {
	name, found string
	make        func(m *mutant)
}{
	{"none", "", func(*mutant) {}},
	{"completes before it applies", "CompleteAfterApply", func(m *mutant) {
		m.post = func(p transfer.Peer, w transfer.Write) error {
			done := w.Done
			w.Done = func(error) {}
			err := p.Post(w)
			if err == nil {
				done(nil)
			}
			return err
		}
	}},
	{"notifies before it stores", "CompleteAfterApply", func(m *mutant) {
		m.post = func(p transfer.Peer, w transfer.Write) error {
			segs, done := w.Segments, w.Done
			w.Segments, w.Done = nil, func(error) {
				rest := transfer.Write{Grant: w.Grant, Key: w.Key, Segments: segs, Done: done}
				if err := p.Post(rest); err != nil {
					done(err)
				}
			}
			return p.Post(w)
		}
	}},
	{"completes twice", "ManySegments", func(m *mutant) {
		m.post = func(p transfer.Peer, w transfer.Write) error {
			done := w.Done
			w.Done = func(err error) { done(err); done(err) }
			return p.Post(w)
		}
	}},
	{"stores one byte more", "Scatter", func(m *mutant) { m.landed = func(b []byte) { b[len(b)-1]++ } }},
	{"loses the last segment", "Scatter", func(m *mutant) {
		m.post = func(p transfer.Peer, w transfer.Write) error {
			if n := len(w.Segments); n > 1 {
				w.Segments = w.Segments[:n-1]
			}
			return p.Post(w)
		}
	}},
	{"allows one byte more", "Refusals", func(m *mutant) {
		m.allow = func(g transfer.Grant, size uint64) transfer.Grant {
			g.Spans = append([]transfer.Span(nil), g.Spans...)
			for i, s := range g.Spans {
				if s.Off+s.Len < size {
					g.Spans[i].Len++
				}
			}
			return g
		}
	}},
	{"says that it fences", "RevokeWhileWriting", func(m *mutant) { m.revoke = func(transfer.Target, transfer.GrantID) bool { return true } }},
	{"does not fence", "RevokeUnknown", func(m *mutant) {
		m.revoke = func(t transfer.Target, id transfer.GrantID) bool { t.Revoke(id); return false }
	}},
	{"tells of a fence twice", "Sessions", func(m *mutant) { m.fenced = 2 }},
	{"loses a completion", "ManyWriters", func(m *mutant) {
		var n atomic.Int32
		m.post = func(p transfer.Peer, w transfer.Write) error {
			if done := w.Done; n.Add(1) == 100 {
				w.Done = func(err error) {
					if err != nil {
						done(err)
					}
				}
			}
			return p.Post(w)
		}
	}},
	{"hides why it refused", "Refusals", func(m *mutant) {
		m.post = func(p transfer.Peer, w transfer.Write) error {
			done := w.Done
			w.Done = func(err error) {
				if err != nil {
					err = errors.New("no")
				}
				done(err)
			}
			return p.Post(w)
		}
	}},
	{"changes the order", "GrantOrder", func(m *mutant) {
		held := make(map[transfer.GrantID]transfer.Write)
		m.post = func(p transfer.Peer, w transfer.Write) error {
			first, ok := held[w.Grant]
			if !ok {
				held[w.Grant] = w
				return nil
			}
			delete(held, w.Grant)
			if err := p.Post(w); err != nil {
				first.Done(err)
				return err
			}
			if err := p.Post(first); err != nil {
				first.Done(err)
			}
			return nil
		}
	}},
	{"leaves writes behind", "PeerClose", func(m *mutant) { m.lazyClose = true }},
	{"does what it refused", "FullQueue", func(m *mutant) {
		var first atomic.Bool
		m.post = func(p transfer.Peer, w transfer.Write) error {
			if first.CompareAndSwap(false, true) {
				w.Done = func(error) {}
				return errors.Join(transfer.ErrBusy, p.Post(w))
			}
			return p.Post(w)
		}
	}},
	{"dials after its context", "DialDead", func(m *mutant) { m.deaf = true }},
}

// TestSuiteFindsFaults runs the suite against each mutant in a process of its own: the
// named subtest must fail, and without a fault none may.
func TestSuiteFindsFaults(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range mutants {
		t.Run(strings.ReplaceAll(c.name, " ", "_"), func(t *testing.T) {
			names := c.found
			if names == "" { // control: every subtest that a mutant is tried on
				var all []string
				for _, m := range mutants[1:] {
					all = append(all, m.found)
				}
				names = strings.Join(all, "|")
			}
			cmd := exec.CommandContext(t.Context(), exe, "-test.timeout=2m", "-test.run=^TestMutant$/^("+names+")$")
			cmd.Env = append(os.Environ(), mutantEnv+"="+c.name)
			if c.found != "" { // some faults show only in something that never comes
				cmd.Env = append(cmd.Env, transfertest.PatienceEnv+"=2s")
			}
			out, err := cmd.CombinedOutput()
			if c.found == "" {
				if err != nil {
					t.Errorf("the suite fails without a fault: %v\n%s", err, out)
				}
				return
			}
			var exit *exec.ExitError
			if !errors.As(err, &exit) || !strings.Contains(string(out), "--- FAIL: TestMutant/"+c.found) {
				t.Errorf("%s did not find it: %v\n%s", c.found, err, out)
			}
		})
	}
}

// TestMutant is the child of TestSuiteFindsFaults.
func TestMutant(t *testing.T) {
	name := os.Getenv(mutantEnv)
	if name == "" {
		t.Skip("run by TestSuiteFindsFaults")
	}
	transfertest.Run(t, transfertest.Options{
		Caps: transfer.Caps{Fences: true},
		New: func(t *testing.T) (transfer.Transport, transfer.Transport) {
			for _, c := range mutants {
				if c.name == name {
					m := &mutant{Transport: mem.New(nil), fenced: 1}
					c.make(m)
					return m, m
				}
			}
			panic(fmt.Sprintf("no mutant %q", name))
		},
	})
}

// mutant is mem with hooks; those that are not set change nothing.
type mutant struct {
	transfer.Transport
	post      func(transfer.Peer, transfer.Write) error
	landed    func(mem []byte)
	allow     func(g transfer.Grant, size uint64) transfer.Grant
	revoke    func(transfer.Target, transfer.GrantID) bool
	fenced    int // how often Fenced is told
	lazyClose bool
	deaf      bool
}

func (m *mutant) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	if m.deaf {
		ctx = context.WithoutCancel(ctx)
	}
	p, err := m.Transport.Dial(ctx, d, s)
	if err != nil {
		return nil, err
	}
	return &mutantPeer{Peer: p, m: m}, nil
}

func (m *mutant) Listen(mm transfer.Memory, s transfer.Sink) (transfer.Target, error) {
	t, err := m.Transport.Listen(mm, &mutantSink{s, m, mm.Bytes})
	if err != nil {
		return nil, err
	}
	return &mutantTarget{t, m}, nil
}

type mutantPeer struct {
	transfer.Peer
	m      *mutant
	closes atomic.Int32
}

func (p *mutantPeer) Post(w transfer.Write) error {
	if p.m.post != nil {
		return p.m.post(p.Peer, w)
	}
	return p.Peer.Post(w)
}

func (p *mutantPeer) Close() error {
	if p.closes.Add(1) == 1 && p.m.lazyClose {
		return nil
	}
	return p.Peer.Close()
}

type mutantTarget struct {
	transfer.Target
	m *mutant
}

func (t *mutantTarget) Allow(g transfer.Grant) error {
	if t.m.allow != nil {
		g = t.m.allow(g, t.Descriptor().Size)
	}
	return t.Target.Allow(g)
}

func (t *mutantTarget) Revoke(id transfer.GrantID) bool {
	if t.m.revoke != nil {
		return t.m.revoke(t.Target, id)
	}
	return t.Target.Revoke(id)
}

type mutantSink struct {
	transfer.Sink
	m   *mutant
	mem []byte
}

func (s *mutantSink) Landed(g transfer.GrantID, notify []byte) {
	if s.m.landed != nil {
		s.m.landed(s.mem)
	}
	s.Sink.Landed(g, notify)
}

func (s *mutantSink) Fenced(id transfer.SessionID) {
	for range s.m.fenced {
		s.Sink.Fenced(id)
	}
}
