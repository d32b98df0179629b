package mem

import (
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return New(nil) })
}

func TestConformance(t *testing.T) {
	transfertest.Run(t, transfertest.Options{
		New: func(*testing.T) (transfer.Transport, transfer.Transport) {
			r := NewRegistry()
			return New(r), New(r)
		},
		Caps: transfer.Caps{Fences: true},
	})
}

type sink struct{ fenced chan transfer.SessionID }

func (sink) Landed(transfer.GrantID, []byte) {}
func (s sink) Fenced(id transfer.SessionID)  { s.fenced <- id }

// TestLastConnectionFences: a session may have several connections; its writer is gone
// when the last of them is.
func TestLastConnectionFences(t *testing.T) {
	tr, s := New(nil), sink{make(chan transfer.SessionID, 4)}
	target, err := tr.Listen(transfer.Memory{Bytes: make([]byte, 8), FD: -1}, s)
	if err != nil {
		t.Fatal(err)
	}
	if err := target.OpenSession(5); err != nil {
		t.Fatal(err)
	}
	var peers []transfer.Peer
	for range 2 {
		p, err := tr.Dial(t.Context(), target.Descriptor(), 5)
		if err != nil {
			t.Fatal(err)
		}
		peers = append(peers, p)
	}
	if err := target.Allow(transfer.Grant{ID: 1, Session: 5, Spans: []transfer.Span{{Off: 0, Len: 8}}}); err != nil {
		t.Fatal(err)
	}
	if err := peers[0].Close(); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	w := transfer.Write{Grant: 1, Segments: []transfer.Segment{{Off: 0, Src: []byte{1}}}, Done: func(err error) { done <- err }}
	if err := peers[1].Post(w); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("write on the second connection: %v", err)
	}
	if len(s.fenced) != 0 {
		t.Error("fenced while a connection is open")
	}
	if err := peers[1].Close(); err != nil {
		t.Fatal(err)
	}
	if id := <-s.fenced; id != 5 {
		t.Errorf("fenced %d", id)
	}
	if err := target.Close(); err != nil {
		t.Fatal(err)
	}
	if len(s.fenced) != 0 {
		t.Error("fenced twice")
	}
}

// TestNetworksAreApart: a target is found on its own network only.
func TestNetworksAreApart(t *testing.T) {
	tr, s := New(nil), sink{make(chan transfer.SessionID, 4)}
	target, err := tr.Listen(transfer.Memory{Bytes: make([]byte, 8), FD: -1}, s)
	if err != nil {
		t.Fatal(err)
	}
	if !tr.Reachable(target.Descriptor()) || New(nil).Reachable(target.Descriptor()) {
		t.Error("reachable from the wrong network, or not from its own")
	}
	if err := target.Close(); err != nil {
		t.Fatal(err)
	}
	if tr.Reachable(target.Descriptor()) {
		t.Error("reachable after Close")
	}
}
