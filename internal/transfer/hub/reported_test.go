package hub_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
)

// Kinds of faults that others reported (docs/reported.md), on both hubs with a real session.

// leaky is a transport whose Revoke ends nothing, as shm's while a writer is inside: only the sender's word
// that it has drained protects the pages. applied hears of each write that was stored.
type leaky struct {
	transfer.Transport
	applied chan transfer.GrantID
}

func newLeaky() (wrap func(transfer.Transport) transfer.Transport, applied chan transfer.GrantID) {
	applied = make(chan transfer.GrantID, 64)
	return func(t transfer.Transport) transfer.Transport { return leaky{t, applied} }, applied
}

func (l leaky) Caps() transfer.Caps { return transfer.Caps{NeedsDrain: true} }

func (l leaky) Listen(m transfer.Memory, s transfer.Sink) (transfer.Target, error) {
	t, err := l.Transport.Listen(m, leakySink{s, l.applied})
	return leakyTarget{t}, err
}

type leakyTarget struct{ transfer.Target }

func (leakyTarget) Revoke(transfer.GrantID) bool { return false }

type leakySink struct {
	transfer.Sink
	applied chan transfer.GrantID
}

func (s leakySink) Landed(g transfer.GrantID, note []byte) {
	s.Sink.Landed(g, note)
	s.applied <- g
}

func gone() *room.Cause { return &room.Cause{Code: room.CodeClientGone, Detail: "test"} }

// holds checks that chunk i of r is v all over.
func holds(t *testing.T, r transfer.Receiving, i int, v byte) {
	t.Helper()
	for _, part := range r.Chunk(i) {
		if !bytes.Equal(part, bytes.Repeat([]byte{v}, len(part))) {
			t.Fatalf("chunk %d does not hold %#x alone", i, v)
		}
	}
}

// stalled opens room 1 with 32 of 64 pages and stops its one write half way, under rule until=resume.
func stalled(t *testing.T, w *world, grants <-chan tapped, limit time.Duration) (transfer.Receiving, transfer.Sending) {
	t.Helper()
	a, s := w.receiveSizes(1, limit, 32*pageBytes), w.sendSizes(1, time.Minute, 32*pageBytes)
	await(t, "grant", s.Granted())
	if g := await(t, "grant", grants).grant; len(g.Pages) != 32 || g.Pages[0] != 0 || g.Pages[31] != 31 {
		t.Fatalf("room 1 has pages %v, want the first 32", g.Pages)
	}
	w.chunk(s, 1, 0)
	await(t, "write in the middle", w.rules.Waiting("resume"))
	return a, s
}

func TestReportedK1PageReuse(t *testing.T) {
	const rule = "post room=1 nth=1 halfway until=resume"
	start := func(t *testing.T, wrap func(transfer.Transport) transfer.Transport) (*world, <-chan tapped) {
		grants := make(chan tapped, 8)
		return newWorld(t, options{rules: rule, pages: 64, staging: 128, wrap: wrap,
			handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }}), grants
	}
	// The report: pool of 64, A has 32 and its write is stalled half way, A is aborted, B needs 40, A goes on.
	t.Run("B waits for the drained writer", func(t *testing.T) {
		wrap, applied := newLeaky()
		w, grants := start(t, wrap)
		a, s := stalled(t, w, grants, time.Minute)
		a.Cancel(gone())
		a.Release()
		b, sb := w.receiveSizes(2, time.Minute, 40*pageBytes), w.sendSizes(2, time.Minute, 40*pageBytes)
		await(t, "abort at the sender", s.Done())
		eventually(t, "B asks for pages", func() bool { return w.landing.Stats().Exhausted > 0 })
		if st := w.landing.Stats(); st.Quarantine != 32 || b.State() != room.StateBootstrapping {
			t.Fatalf("B is %v, pages %+v", b.State(), st)
		}
		w.rules.Release("resume")
		if g := await(t, "A's late write", applied); g == 0 {
			t.Fatal("no grant")
		}
		s.Release()
		await(t, "grant of B", sb.Granted())
		if st := w.landing.Stats(); st.FreedDrained != 32 || st.FreedFenced != 0 {
			t.Errorf("A's pages did not return by its sender's ack: %+v", st)
		}
		w.chunk(sb, 2, 0)
		await(t, "end of B", b.Done())
		holds(t, b, 0, 2)
		b.Release()
		sb.Release()
		w.drained()
	})
	t.Run("B has the pages after the fence", func(t *testing.T) {
		w, grants := start(t, nil)
		a, s := stalled(t, w, grants, time.Minute)
		a.Cancel(gone())
		a.Release()
		b, sb := w.receiveSizes(2, time.Minute, 40*pageBytes), w.sendSizes(2, time.Minute, 40*pageBytes)
		await(t, "grant of B", sb.Granted())
		w.chunk(sb, 2, 0)
		await(t, "end of B", b.Done())
		w.rules.Release("resume")
		s.Release()
		sb.Release()
		eventually(t, "the end of A's write", func() bool { return w.staging.Stats().Idle() })
		holds(t, b, 0, 2)
		b.Release()
		w.drained()
	})
	// Time is no proof: A ends by its deadline, and so does B, which waits for A's pages.
	t.Run("a deadline frees nothing", func(t *testing.T) {
		t.Parallel()
		wrap, applied := newLeaky()
		w, grants := start(t, wrap)
		a, s := stalled(t, w, grants, 3*time.Second) // time enough to be stalled before
		await(t, "A's deadline", a.Done())
		failed(t, "A", a.State(), a.Err(), room.CodeDeadline)
		a.Release()
		b := w.receiveSizes(2, 300*time.Millisecond, 40*pageBytes)
		await(t, "B's deadline", b.Done())
		failed(t, "B", b.State(), b.Err(), room.CodeDeadline)
		b.Release()
		if st := w.landing.Stats(); st.Quarantine != 32 || st.FreedDrained+st.FreedFenced != 0 {
			t.Fatalf("pages with a writer came back: %+v", st)
		}
		w.rules.Release("resume")
		await(t, "A's late write", applied)
		s.Release()
		w.drained()
	})
	// The other end of a write: what is still read must not be filled for another room.
	t.Run("source pages", func(t *testing.T) {
		w := newWorld(t, options{rules: rule, staging: 4})
		a, s := w.receive(1, 1), w.send(1, 1)
		b, sb := w.receive(2, 1), w.send(2, 1)
		await(t, "grant", s.Granted())
		await(t, "grant of B", sb.Granted())
		w.chunk(s, 1, 0)
		await(t, "write in the middle", w.rules.Waiting("resume"))
		s.Cancel(gone())
		s.Release()
		filled := make(chan [][]byte)
		go func() {
			parts, err := sb.Buffer(t.Context(), 0)
			if err != nil {
				t.Errorf("B's buffer: %v", err)
			}
			filled <- parts
		}()
		eventually(t, "B asks for staging", func() bool { return w.staging.Stats().Exhausted > 0 })
		select {
		case <-filled:
			t.Fatal("B fills memory that A's write still reads")
		default:
		}
		w.rules.Release("resume")
		for _, part := range await(t, "B's buffer", filled) {
			copy(part, bytes.Repeat([]byte{2}, len(part)))
		}
		sb.Send(0)
		await(t, "end of B", b.Done())
		holds(t, b, 0, 2)
		await(t, "end of A", a.Done())
		for _, r := range []interface{ Release() }{a, b, sb} {
			r.Release()
		}
		w.drained()
	})
}

func TestReportedK2EarlyCompletion(t *testing.T) {
	t.Run("the last chunk overtakes the first", func(t *testing.T) {
		w := newWorld(t, options{rules: "post room=1 nth=1 stall until=go"})
		r, s := w.receive(1, 2), w.send(1, 2)
		await(t, "grant", s.Granted())
		w.chunk(s, 1, 0)
		w.chunk(s, 1, 1)
		if i, ok := <-r.Landed(); ok {
			t.Errorf("chunk %d was delivered while chunk 0 is missing", i)
		}
		failed(t, "receiver", r.State(), r.Err(), room.CodeProtocol)
		await(t, "sender's end", s.Done())
		w.rules.Release("go")
		r.Release()
		s.Release()
		w.drained()
	})
	t.Run("the notification is lost", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, options{rules: "landed room=1 nth=2 drop"})
		r, s := w.receiveSizes(1, 3*time.Second, chunks(2)...), w.send(1, 2) // time enough for its first chunk
		await(t, "grant", s.Granted())
		w.chunk(s, 1, 0)
		w.chunk(s, 1, 1)
		if i := await(t, "chunk 0", r.Landed()); i != 0 {
			t.Errorf("chunk %d", i)
		}
		if i, ok := <-r.Landed(); ok {
			t.Errorf("chunk %d was delivered without its notification", i)
		}
		failed(t, "receiver", r.State(), r.Err(), room.CodeDeadline)
		r.Release()
		s.Release()
		w.drained()
	})
	// The bytes are there, but nobody has said so to the sender: neither has it succeeded, nor is its source free.
	t.Run("the completion is lost", func(t *testing.T) {
		w := newWorld(t, options{rules: "done room=1 nth=1 drop", staging: 4})
		r, s := w.receive(1, 1), w.send(1, 1)
		await(t, "grant", s.Granted())
		w.chunk(s, 1, 0)
		await(t, "receiver's end", r.Done())
		if r.State() != room.StateSuccess || s.State() != room.StateTransferring {
			t.Errorf("receiver %v, sender %v", r.State(), s.State())
		}
		s.Release()
		if st := w.staging.Stats(); st.Free != 0 {
			t.Errorf("the source of a write that may go on is free: %+v", st)
		}
		if err := w.client.Close(); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the source, after the connection's end", func() bool { return w.staging.Stats().Idle() })
		if s.State() != room.StateFailed {
			t.Errorf("sender %v", s.State())
		}
		r.Release()
		w.drained()
	})
}

// stranger is the session of another decode worker, which ends before the world does.
func (w *world) stranger() (*session.ClientSession, *sessiontest.ClientHandler) {
	w.t.Helper()
	h := sessiontest.NewClientHandler()
	c := session.NewClient(session.ClientConfig{Identity: session.Identity{WorkerID: "D2", Epoch: 3, Fingerprint: print}, Offer: w.receivers.Offer, Handler: h,
		Log: slog.New(slog.DiscardHandler)})
	sess, err := c.Get(patient(w.t), w.addr)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		if err := c.Close(); err != nil {
			w.t.Error(err)
		}
		w.receivers.Down(sess.ID(), w.addr, gone())
		w.receivers.Flush()
	})
	return sess, h
}

func TestReportedK3Identity(t *testing.T) {
	t.Run("a second decode worker claims the room", func(t *testing.T) {
		w := newWorld(t, options{})
		sess, h := w.stranger()
		r, s := w.receive(1, 2), w.send(1, 2)
		await(t, "grant", s.Granted())
		w.chunk(s, 1, 0)
		if err := sess.SendGrant(session.Grant{Key: room.Key{Room: 1}, ID: 99, Pages: []uint32{0, 1, 2, 3, 4, 5, 6, 7}, PageBytes: pageBytes, Chunks: chunks(2), Digest: 1}); err != nil {
			t.Fatal(err)
		}
		if e := h.Wait(patient(t), t, "failed", 1); e.Cause.Code != room.CodeDuplicate {
			t.Errorf("the claim was refused with %v", e.Cause)
		}
		if err := sess.SendAbort(room.Key{Room: 1}, 99, gone()); err != nil {
			t.Fatal(err)
		}
		h.Wait(patient(t), t, "abort_ack", 1)
		w.chunk(s, 1, 1)
		await(t, "receiver's end", r.Done())
		if r.Err() != nil || r.State() != room.StateSuccess {
			t.Errorf("the room of another: %v, %v", r.State(), r.Err())
		}
		holds(t, r, 0, 1)
		r.Release()
		s.Release()
		w.drained()
	})
	// Pages and grant have a new owner; a word about the old one changes nothing there.
	t.Run("word of the former room", func(t *testing.T) {
		reg := prometheus.NewRegistry()
		grants := make(chan tapped, 8)
		w := newWorld(t, options{pages: 4, metrics: reg, handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
		a, sa := w.receive(1, 1), w.send(1, 1)
		old := await(t, "grant", grants).grant
		a.Cancel(gone())
		a.Release()
		sa.Release()
		w.drained()
		b, sb := w.receive(2, 1), w.send(2, 1)
		await(t, "grant", sb.Granted())
		now := await(t, "grant", grants).grant
		if now.Pages[0] != old.Pages[0] {
			t.Fatalf("B has pages %v, A had %v: nothing is shown", now.Pages, old.Pages)
		}
		before := counted(t, reg, "baton_stray_messages_total")
		w.receivers.Landed(old.ID, hub.Note(room.Key{Room: 1}, 0, 1, b.Chunk(0)))
		if st := b.State(); st != room.StateWaitingForInput {
			t.Fatalf("B is %v", st)
		}
		// The ack of A's abort, for which nobody waits any more, may be counted meanwhile, too.
		if n := counted(t, reg, "baton_stray_messages_total"); n < before+1 {
			t.Error("the stray notification was not counted")
		}
		w.chunk(sb, 2, 0)
		await(t, "end of B", b.Done())
		holds(t, b, 0, 2)
		b.Release()
		sb.Release()
		w.drained()
	})
	// Under B's own grant: another room, another life, another chunk. B must not take it for its data.
	t.Run("foreign notes under the right grant", func(t *testing.T) {
		grants := make(chan tapped, 8)
		w := newWorld(t, options{handler: func(h *hub.Senders) session.ServerHandler { return tap{h, grants} }})
		for i, note := range []func(room.Key, [][]byte) []byte{
			func(_ room.Key, b [][]byte) []byte { return hub.Note(room.Key{Room: 77}, 0, 2, b) },
			func(k room.Key, b [][]byte) []byte { return hub.Note(room.Key{Room: k.Room, Gen: 1}, 0, 2, b) },
			func(k room.Key, b [][]byte) []byte { return hub.Note(k, 0, 1, b) },
			func(k room.Key, b [][]byte) []byte { return hub.Note(k, 0, 2, b[:1]) },
		} {
			key := room.Key{Room: uint64(10 + i)}
			r, s := w.receive(key.Room, 2), w.send(key.Room, 2)
			await(t, "grant", s.Granted())
			w.receivers.Landed(await(t, "grant", grants).grant.ID, note(key, r.Chunk(0)))
			failed(t, "receiver", r.State(), r.Err(), room.CodeTransferFailed)
			if i, ok := <-r.Landed(); ok {
				t.Errorf("note %d was taken for chunk %d", i, i)
			}
			r.Release()
			s.Release()
		}
		w.drained()
	})
}

// counted reads a counter of reg.
func counted(t *testing.T, reg *prometheus.Registry, name string) (sum float64) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue()
			}
			return sum
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// The decode side refuses a chunk; the prefill side learns of it, and why, although its write went well.
func TestReportedK4OneSidedEnd(t *testing.T) {
	t.Run("decode refuses the bytes", func(t *testing.T) {
		w := newWorld(t, options{rules: "landed room=1 nth=1 stall until=check"})
		r, s := w.receive(1, 2), w.send(1, 2)
		await(t, "grant", s.Granted())
		w.chunk(s, 1, 0)
		await(t, "landed", w.rules.Waiting("check"))
		r.Chunk(0)[0][5] ^= 1
		w.rules.Release("check")
		await(t, "sender's end", s.Done()) // told: its deadline would be another cause
		failed(t, "sender", s.State(), s.Err(), room.CodeAborted)
		if !strings.Contains(s.Err().Error(), "checksum of chunk 0") {
			t.Errorf("the sender does not know why: %v", s.Err())
		}
		r.Release()
		s.Release()
		w.drained()
	})
}

// A cancel and the last chunk cross: whichever is first, the end is one of the two, and stays.
func TestReportedK5CancelRace(t *testing.T) {
	t.Run("cancel meets the last chunk", func(t *testing.T) {
		w := newWorld(t, options{})
		ends := map[room.State]int{}
		for id := uint64(1); id <= 200; id++ {
			r, s := w.receive(id, 1), w.send(id, 1)
			await(t, "grant", s.Granted())
			w.fill(s, id, 0)
			var both sync.WaitGroup
			if id%4 != 0 { // else after the end
				both.Go(func() {
					if id%2 == 0 {
						await(t, "chunk", r.Landed())
					}
					r.Cancel(gone())
				})
			}
			s.Send(0)
			await(t, "receiver's end", r.Done())
			await(t, "sender's end", s.Done())
			both.Wait()
			first, cause := r.State(), r.Err()
			r.Cancel(&room.Cause{Code: room.CodeInternal, Detail: "later"})
			r.Cancel(&room.Cause{Code: room.CodeInternal, Detail: "and again"})
			if r.State() != first || !errors.Is(r.Err(), cause) || (first == room.StateSuccess) != (cause == nil) {
				t.Fatalf("room %d was %v (%v), is %v (%v)", id, first, cause, r.State(), r.Err())
			}
			if first == room.StateSuccess {
				holds(t, r, 0, byte(id))
			} else {
				failed(t, "receiver", first, cause, room.CodeClientGone)
			}
			ends[first]++
			r.Release()
			s.Release()
		}
		w.drained()
		if ends[room.StateSuccess] == 0 {
			t.Errorf("ends: %v", ends)
		}
		t.Logf("ends: %v", ends)
	})
	// The client has left while its request waited for pages: none are taken for it when they come.
	t.Run("gone before it has pages", func(t *testing.T) {
		w := newWorld(t, options{pages: 4})
		a, sa := w.receive(1, 1), w.send(1, 1)
		await(t, "grant", sa.Granted())
		b, sb := w.receive(2, 1), w.send(2, 1)
		eventually(t, "B waits", func() bool { return w.receivers.Waiting() == 1 })
		b.Cancel(gone())
		await(t, "B's sender", sb.Done())
		failed(t, "B's sender", sb.State(), sb.Err(), room.CodeAborted)
		b.Release()
		sb.Release()
		eventually(t, "B waits no more", func() bool { return w.receivers.Waiting() == 0 })
		took := w.landing.Stats().Allocs
		a.Cancel(gone())
		a.Release()
		sa.Release()
		w.drained()
		if n := w.landing.Stats().Allocs; n != took {
			t.Errorf("%d leases were taken for a client that is gone", n-took)
		}
	})
}

// The session ends while one room has pages and another waits for them.
func TestReportedK6ForgottenResource(t *testing.T) {
	t.Run("the peer dies before there are pages", func(t *testing.T) {
		w := newWorld(t, options{pages: 8, unfenced: true})
		a, sa := w.receive(1, 2), w.send(1, 2)
		await(t, "grant", sa.Granted())
		b, sb := w.receive(2, 1), w.send(2, 1)
		eventually(t, "B waits", func() bool { return w.receivers.Waiting() == 1 })
		w.cut()
		for _, r := range []transfer.Receiving{a, b} {
			await(t, "end", r.Done())
			failed(t, "receiver", r.State(), r.Err(), room.CodePeerLost)
			r.Release()
		}
		await(t, "A's sender", sa.Done())
		sa.Release()
		sb.Release() // never granted: nobody but its owner knows it
		w.drained()
		// A's pages may have reached B in the moment between its end and its leaving the queue.
		eventually(t, "idle pages", func() bool { return w.landing.Stats().Idle() && w.receivers.Waiting() == 0 })
		if rooms, grants := w.receivers.Indexed(); rooms+grants != 0 {
			t.Errorf("left: %d rooms, %d grants", rooms, grants)
		}
		if rooms, parked := w.senders.Indexed(); rooms+parked != 0 {
			t.Errorf("left at the prefill side: %d rooms, %d grants", rooms, parked)
		}
	})
}

// A request whose time was over before its room was opened: it ends at once, and asks nobody for anything.
func TestReportedK7Deadline(t *testing.T) {
	t.Run("over on arrival", func(t *testing.T) {
		w := newWorld(t, options{})
		first, s := w.receive(1, 1), w.send(1, 1) // the session is up
		await(t, "grant", s.Granted())
		r, late := w.receiveSizes(2, -time.Second, chunks(1)...), w.sendSizes(2, -time.Second, chunks(1)...)
		await(t, "receiver's end", r.Done())
		await(t, "sender's end", late.Done())
		failed(t, "receiver", r.State(), r.Err(), room.CodeDeadline)
		if c := room.CauseOf(late.Err()); c.Code != room.CodeDeadline && c.Code != room.CodeAborted { // its own, or the receiver's
			t.Errorf("sender ended with %v", c)
		}
		if n := w.landing.Stats().Allocs; n != 1 {
			t.Errorf("%d leases were taken", n)
		}
		alone := w.sendSizes(3, -time.Second, chunks(1)...) // nobody but its own clock can end it
		await(t, "its end", alone.Done())
		failed(t, "sender", alone.State(), alone.Err(), room.CodeDeadline)
		alone.Release()
		r.Release()
		late.Release()
		w.chunk(s, 1, 0)
		await(t, "the other's end", first.Done())
		if first.Err() != nil {
			t.Errorf("the other room: %v", first.Err())
		}
		first.Release()
		s.Release()
		w.drained()
	})
	t.Run("pool smaller than the prompt", func(t *testing.T) {
		w := newWorld(t, options{pages: 4})
		_, err := w.receivers.Open(transfer.OpenReceiver{Key: room.Key{Room: 1}, Addr: w.addr, Deadline: time.Now().Add(time.Minute), Chunks: chunks(2)})
		if !errors.Is(err, &room.Cause{Code: room.CodeCapacity}) {
			t.Fatalf("got %v, want capacity", err)
		}
	})
}

// One write fails, then nothing is wrong any more: the next room succeeds, at once and on the same session.
func TestReportedK10StickyBlame(t *testing.T) {
	t.Run("one failed write", func(t *testing.T) {
		w := newWorld(t, options{rules: `post nth=1 error="link down"`})
		for id := uint64(1); id <= 3; id++ {
			r, s := w.receive(id, 1), w.send(id, 1)
			await(t, "grant", s.Granted())
			w.chunk(s, id, 0)
			await(t, "receiver's end", r.Done())
			await(t, "sender's end", s.Done())
			if id > 1 {
				if r.Err() != nil || s.Err() != nil {
					t.Fatalf("room %d after the fault had healed: %v, %v", id, r.Err(), s.Err())
				}
			} else if c := room.CauseOf(r.Err()); c.Code != room.CodePeerLost || !c.Retryable || !strings.Contains(c.Detail, "link down") {
				t.Fatalf("the write that failed: %v", r.Err())
			}
			r.Release()
			s.Release()
		}
		w.drained()
	})
	// The news that a former session is fenced comes when the next one, to the same address, is in use.
	t.Run("late news of a former session", func(t *testing.T) {
		w := newWorld(t, options{rules: "revoke unfenced\nfenced nth=1 stall until=news"})
		a, sa := w.receive(1, 1), w.send(1, 1)
		await(t, "grant", sa.Granted())
		w.cut()
		await(t, "A's end", a.Done())
		failed(t, "A", a.State(), a.Err(), room.CodePeerLost)
		a.Release()
		sa.Release()
		await(t, "the fence", w.rules.Waiting("news"))
		b, sb := w.receive(2, 2), w.send(2, 2)
		await(t, "grant of B", sb.Granted())
		w.chunk(sb, 2, 0)
		await(t, "B's chunk", b.Landed())
		w.rules.Release("news")
		eventually(t, "A's pages", func() bool { return w.landing.Stats().FreedFenced == 4 })
		w.chunk(sb, 2, 1)
		await(t, "B's end", b.Done())
		if b.Err() != nil {
			t.Fatalf("B was blamed for A's session: %v", b.Err())
		}
		b.Release()
		sb.Release()
		w.drained()
	})
}

// cutter is a listener whose connections can be reset, as by the kernel of a killed process.
type cutter struct {
	net.Listener
	mu    sync.Mutex
	conns []net.Conn
}

func (c *cutter) Accept() (net.Conn, error) {
	conn, err := c.Listener.Accept()
	if err == nil {
		c.mu.Lock()
		c.conns = append(c.conns, conn)
		c.mu.Unlock()
	}
	return conn, err
}

func (c *cutter) cut() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
	}
	c.conns = nil
}

// patient is a context as long as the test may wait for an event.
func patient(t *testing.T) context.Context {
	ctx, stop := context.WithTimeout(t.Context(), patience)
	t.Cleanup(stop)
	return ctx
}
