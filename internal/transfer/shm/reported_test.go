package shm

import (
	"bytes"
	"errors"
	"testing"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Kinds of faults that others reported (docs/reported.md), on shared memory.

const page = 4096

// A writer stores the last byte and dies before it has said so: nothing has landed.
func TestReportedK2EarlyCompletion(t *testing.T) {
	t.Run("dies between the last byte and its word", func(t *testing.T) {
		p := listen(t, Config{}, page)
		p.allow(t, 1, transfer.Span{Off: 0, Len: page})
		r := p.raw(t)
		at := r.enter(1)
		copy(r.maps.mem, bytes.Repeat([]byte{0xaa}, page))
		r.maps.ctl.leave(at)
		r.roundTrip() // its connection works
		r.end()
		if s := recv(t, p.sink.fenced, "Fenced"); s != 1 {
			t.Fatalf("fenced %d", s)
		}
		none(t, p.sink.landed, "landed without a word of the writer")
	})
}

func TestReportedK3Identity(t *testing.T) {
	// As tcp's: four writers for slot 23, of which one counts. A is over and B, the same room in its next life, has
	// the slot and its data when A's slow writer, still inside, goes on.
	t.Run("four writers for slot 23", func(t *testing.T) {
		const slot = 23 * page
		p := listen(t, Config{}, 64*page)
		for s := range transfer.SessionID(3) {
			if err := p.tgt.OpenSession(s + 2); err != nil {
				t.Fatal(err)
			}
		}
		keyA, keyB := room.Key{Room: 5, Gen: 1}, room.Key{Room: 5, Gen: 2}
		allow := func(s transfer.SessionID, id transfer.GrantID, k room.Key) {
			if err := p.tgt.Allow(transfer.Grant{ID: id, Key: k, Session: s, Spans: []transfer.Span{{Off: slot, Len: page}}}); err != nil {
				t.Fatal(err)
			}
		}
		var peers []transfer.Peer
		for s := range transfer.SessionID(4) {
			peer, err := p.tr.Dial(t.Context(), p.tgt.Descriptor(), s+1)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = peer.Close() })
			peers = append(peers, peer)
		}
		write := func(i int, g transfer.GrantID, k room.Key, v byte) error {
			w := transfer.Write{Grant: g, Key: k, Segments: []transfer.Segment{{Off: slot, Src: bytes.Repeat([]byte{v}, page)}}, Notify: []byte{v}}
			return recv(t, post(t, peers[i], w), "verdict")
		}
		allow(1, 10, keyA)
		for i := 1; i < 4; i++ {
			if err := write(i, 10, keyA, 0xaa); !errors.Is(err, transfer.ErrGrant) {
				t.Errorf("writer %d, which was not asked: %v", i, err)
			}
		}
		slow := p.raw(t) // a second connection of session 1
		at, ok := slow.maps.ctl.find(10, keyA)
		if !ok {
			t.Fatal("A's writer does not find its grant")
		}
		if p.tgt.Revoke(10) {
			t.Fatal("fenced while the slow writer is inside")
		}
		none(t, p.sink.revoked, "the slot is free")
		copy(slow.maps.mem[slot:], bytes.Repeat([]byte{0xaa}, page)) // so the slot is not B's yet
		slow.maps.ctl.leave(at)
		slow.send(message{kind: kindLeft, grant: 10}, "")
		if g := recv(t, p.sink.revoked, "Revoked"); g != 10 {
			t.Fatalf("revoked %d", g)
		}
		allow(2, 11, keyB)
		if err := write(1, 11, keyB, 0xbb); err != nil {
			t.Fatalf("B's writer: %v", err)
		}
		for _, late := range []struct {
			i   int
			g   transfer.GrantID
			key room.Key
		}{{0, 10, keyA}, {0, 11, keyA}, {0, 11, keyB}, {1, 11, keyA}, {2, 11, keyB}, {3, 10, room.Key{}}} {
			if err := write(late.i, late.g, late.key, 0xaa); !errors.Is(err, transfer.ErrGrant) {
				t.Errorf("writer %d under grant %d as room %v: %v", late.i, late.g, late.key, err)
			}
		}
		if slow.maps.ctl.enter(at) {
			t.Error("the slow writer entered its old place again")
		}
		slow.send(message{kind: kindDone, value: 1, grant: 11, notify: true, notifyN: 1}, "a")
		if m := slow.read(); m.code != verdictGrant {
			t.Errorf("A's completion under B's grant: %+v", m)
		}
		if !bytes.Equal(p.mem[slot:slot+page], bytes.Repeat([]byte{0xbb}, page)) {
			t.Error("B's slot does not hold B's bytes alone")
		}
		if n := recv(t, p.sink.landed, "notification"); n != "\xbb" || len(p.sink.landed) != 0 {
			t.Errorf("landed %q and %d more", n, len(p.sink.landed))
		}
	})
}
