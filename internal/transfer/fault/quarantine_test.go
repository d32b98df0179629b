package fault_test

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/fault"
	"github.com/baton-pd/baton/internal/transfer/mem"
)

// These tests put pool, transport and faults together the way the decode side does, and
// play the reported faults of that border.

// decode is a decode worker's memory side: 64 pages of 4 KiB.
type decode struct {
	*pair
	pool  *kv.Pool
	grant transfer.GrantID
}

const decodePage = 4096

func openDecode(t *testing.T, text string) *decode {
	t.Helper()
	pool, err := kv.Open(kv.Config{Name: "decode", PageBytes: decodePage, Pages: 64, Poison: true})
	if err != nil {
		t.Fatal(err)
	}
	rules, err := fault.Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	d := &decode{pool: pool, grant: 100, pair: &pair{
		t: t, rules: rules, tr: fault.Wrap(mem.New(nil), rules),
		sink: &sink{make(chan string, 64), make(chan transfer.SessionID, 64), make(chan transfer.GrantID, 64)},
	}}
	m, fd := pool.Memory()
	d.mem = m
	if d.target, err = d.tr.Listen(transfer.Memory{Bytes: m, FD: fd}, d.sink); err != nil {
		t.Fatal(err)
	}
	if err := d.target.OpenSession(session); err != nil {
		t.Fatal(err)
	}
	if d.peer, err = d.tr.Dial(t.Context(), d.target.Descriptor(), session); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.close()
		if n := pool.CheckFree(); n != 0 || !pool.Stats().Idle() || pool.Stats().Misuses != 0 {
			t.Errorf("not the idle baseline: %d free pages were written to, %+v", n, pool.Stats())
		}
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// admit takes pages for a room and offers them to the writer.
func (d *decode) admit(roomID uint64, pages int) (*kv.Lease, transfer.Grant) {
	d.t.Helper()
	l, err := d.pool.Alloc(pages, "room", time.Unix(1000, 0))
	if err != nil {
		d.t.Fatal(err)
	}
	d.grant++
	g := transfer.Grant{ID: d.grant, Key: room.Key{Room: roomID}, Session: session}
	spans, err := kv.Spans(decodePage, []int{pages * decodePage}, l.Pages())
	if err != nil {
		d.t.Fatal(err)
	}
	for _, r := range spans[0] {
		g.Spans = append(g.Spans, transfer.Span(r))
	}
	if !l.Grant() {
		d.t.Fatal("a fresh lease refuses a grant")
	}
	if err := d.target.Allow(g); err != nil {
		d.t.Fatal(err)
	}
	return l, g
}

// send writes v over all of g.
func (d *decode) send(g transfer.Grant, v byte) <-chan error {
	d.t.Helper()
	w := transfer.Write{Grant: g.ID, Key: g.Key, Notify: []byte{v}}
	for _, s := range g.Spans {
		w.Segments = append(w.Segments, transfer.Segment{Off: s.Off, Src: bytes.Repeat([]byte{v}, int(s.Len))})
	}
	done := make(chan error, 2)
	w.Done = func(err error) { done <- err }
	if err := d.peer.Post(w); err != nil {
		d.t.Fatal(err)
	}
	return done
}

func (d *decode) keeps(l *kv.Lease, v byte) {
	d.t.Helper()
	for _, id := range l.Pages() {
		if !bytes.Equal(d.pool.Page(id), bytes.Repeat([]byte{v}, decodePage)) {
			d.t.Fatalf("page %d does not hold %d alone", id, v)
		}
	}
}

// TestLateWriteAfterFencedAbort (K1): A's write stalls half way, A is aborted and its
// pages go to B. When A's write goes on it is refused, and B keeps its bytes.
func TestLateWriteAfterFencedAbort(t *testing.T) {
	d := openDecode(t, "post room=1 nth=1 halfway until=resume")
	la, ga := d.admit(1, 32)
	wa := d.send(ga, 0xaa)
	get(t, "A half way", d.rules.Waiting("resume"))

	la.ReleaseRequest() // the abort
	if s := d.pool.Stats(); s.Quarantine != 32 {
		t.Fatalf("pages of an aborted room with a writer: %+v", s)
	}
	if _, err := d.pool.Alloc(40, "B", time.Time{}); !errors.Is(err, kv.ErrExhausted) {
		t.Fatalf("B was admitted over a writer: %v", err)
	}
	if !d.target.Revoke(ga.ID) {
		t.Fatal("mem must fence")
	}
	la.ReleaseTransfer(kv.ProofFenced)

	lb, gb := d.admit(2, 40)
	ok(t, d.send(gb, 0xbb))
	d.rules.Release("resume")
	if err := get(t, "the end of A's write", wa); !errors.Is(err, transfer.ErrGrant) {
		t.Errorf("A's late write: %v, want %v", err, transfer.ErrGrant)
	}
	d.keeps(lb, 0xbb)
	lb.ReleaseTransfer(kv.ProofDrained)
	lb.ReleaseRequest()
}

// TestLateWriteWithoutFence (K1): the transport cannot fence. Neither the abort nor
// the deadline frees A's pages, only the word that the writer is out.
func TestLateWriteWithoutFence(t *testing.T) {
	d := openDecode(t, "post room=1 nth=1 halfway until=resume\nrevoke room=1 unfenced until=drained")
	la, ga := d.admit(1, 32)
	wa := d.send(ga, 0xaa)
	get(t, "A half way", d.rules.Waiting("resume"))
	la.ReleaseRequest()
	if d.target.Revoke(ga.ID) {
		t.Fatal("the rule says unfenced")
	}
	freed := d.pool.Freed()
	if ls := d.pool.Expired(time.Unix(2000, 0)); len(ls) != 1 || ls[0] != la {
		t.Fatalf("expired: %v", ls)
	}
	if _, err := d.pool.Alloc(40, "B", time.Time{}); !errors.Is(err, kv.ErrExhausted) {
		t.Fatalf("a timeout was taken for proof: %v", err)
	}
	idle(t, "woken without a page", freed)

	d.rules.Release("resume")
	if err := get(t, "the end of A's write", wa); err == nil {
		t.Error("A's write completed after the revoke")
	}
	d.rules.Release("drained")
	if g := get(t, "Revoked", d.sink.revoked); g != ga.ID {
		t.Fatalf("revoked %d", g)
	}
	la.ReleaseTransfer(kv.ProofDrained)
	get(t, "Freed", freed)
	lb, gb := d.admit(2, 40)
	ok(t, d.send(gb, 0xbb))
	d.keeps(lb, 0xbb)
	lb.ReleaseRequest()
	lb.ReleaseTransfer(kv.ProofDrained)
}

// TestStalledApplyIsNotComplete (K2): as long as the destination has not applied and
// noticed the write, it is in progress for the sender.
func TestStalledApplyIsNotComplete(t *testing.T) {
	d := openDecode(t, "landed room=1 stall until=apply")
	l, g := d.admit(1, 64)
	w := d.send(g, 0xcc)
	get(t, "the stalled destination", d.rules.Waiting("apply"))
	idle(t, "complete while the destination stands still", w)
	d.rules.Release("apply")
	ok(t, w)
	d.keeps(l, 0xcc)
	l.ReleaseTransfer(kv.ProofDrained)
	l.ReleaseRequest()
}

// TestPeerDeathEndsTheHold (K6): D aborts, then P dies without an ack. The fence brings
// the pages back, and a writer with the old grant gets nowhere.
func TestPeerDeathEndsTheHold(t *testing.T) {
	d := openDecode(t, "revoke unfenced\npost nth=1 stall")
	l, g := d.admit(1, 10)
	w := d.send(g, 0xdd)
	l.ReleaseRequest()
	d.target.Revoke(g.ID)
	if s := d.pool.Stats(); s.Quarantine != 10 {
		t.Fatalf("%+v", s)
	}
	if err := d.peer.Close(); err != nil { // P is gone
		t.Fatal(err)
	}
	if s := get(t, "Fenced", d.sink.fenced); s != session {
		t.Fatalf("fenced %d", s)
	}
	if err := get(t, "the end of the write", w); err == nil {
		t.Error("a write of a dead peer completed")
	}
	l.ReleaseTransfer(kv.ProofFenced)
	if s := d.pool.Stats(); !s.Idle() {
		t.Fatalf("%+v", s)
	}
	if p, err := d.tr.Dial(t.Context(), d.target.Descriptor(), session); err == nil {
		_ = p.Close()
		t.Error("the dead session let a writer in")
	}
}
