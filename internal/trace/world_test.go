package trace

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// world drives one prefill and one decode registry, the production ones, over a network of
// its own, and tapes both with one synthetic clock.
type world struct {
	t     *testing.T
	clock int64
	p, d  *tape
	rooms []*pairOfRooms
	byKey map[room.Key]*pairOfRooms
}

// tape is what one worker records.
type tape struct {
	w       *world
	reg     *room.Registry
	header  Header
	records []Record
}

const (
	tick    = int64(time.Millisecond) // between two records
	settled = int64(time.Hour)        // deadline of a room, after it was opened
)

func newWorld(t *testing.T) *world {
	w := &world{t: t, clock: 1_000_000_000, byKey: map[room.Key]*pairOfRooms{}}
	mk := func(side room.Side, name string, pid int) *tape {
		tp := &tape{w: w, header: Header{Version: Version, Worker: name, Side: side.String(), PID: pid, Mono: w.clock, Wall: 1, Boot: "boot", Tombstone: int64(time.Minute), Beat: int64(beat)}}
		tp.reg = room.NewRegistry(room.Config{Side: side, Observe: tp, Execute: w.execute, Log: slog.New(slog.DiscardHandler)})
		t.Cleanup(tp.reg.Close)
		return tp
	}
	w.p, w.d = mk(room.SideSender, "p:1", 11), mk(room.SideReceiver, "d:1", 12)
	return w
}

func (tp *tape) add(e entry) {
	tp.w.clock += tick
	e.mono, e.wall = tp.w.clock, tp.w.clock/1000
	if e.kind == kindOpen {
		e.deadline += e.mono
	}
	tp.records = append(tp.records, e.record())
}

func (tp *tape) Opened(r *room.Room, chunks int) {
	tp.add(entry{kind: kindOpen, key: r.Key(), instance: r.Instance(), chunks: chunks, deadline: settled})
}

func (tp *tape) Stepped(r *room.Room, s room.Stepped) {
	tp.add(entry{key: r.Key(), instance: r.Instance(), step: s})
}

func (tp *tape) Forgotten(r *room.Room) {
	tp.add(entry{kind: kindForget, key: r.Key(), instance: r.Instance()})
}

// end closes the trace.
func (tp *tape) end() {
	tp.w.clock += tick
	tp.records = append(tp.records, Record{Mono: tp.w.clock, Wall: 1, Kind: kindEnd})
}

// lines is the file.
func lines(h Header, records []Record) []byte {
	var b bytes.Buffer
	put := func(v any) {
		j, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		b.Write(append(j, '\n'))
	}
	put(h)
	for _, r := range records {
		put(r)
	}
	return b.Bytes()
}

func (tp *tape) bytes() []byte { return lines(tp.header, tp.records) }

// pairOfRooms is one key and what is on its way.
type pairOfRooms struct {
	key    room.Key
	chunks int
	s, r   *room.Room
	ready  bool // the receiver has asked for its grant
	toP    []room.EventKind
	toD    []room.EventKind
	begun  int
	writes []int // on their way
	landed map[int]bool
	relS   bool
	relR   bool
}

// execute puts messages on their way; it runs under the room's lock.
func (w *world) execute(r *room.Room, _ room.Event, fx room.Effects) []room.Event {
	p := w.byKey[r.Key()]
	for _, m := range []struct {
		fx   room.Effects
		to   *[]room.EventKind
		kind room.EventKind
	}{
		{room.FxSendGrant, &p.toP, room.EvGrant},
		{room.FxSendAbort, &p.toP, room.EvAbort},
		{room.FxSendAck, &p.toD, room.EvAck},
		{room.FxSendFailed, &p.toD, room.EvRemoteFailed},
	} {
		if fx.Has(m.fx) {
			*m.to = append(*m.to, m.kind)
		}
	}
	return nil
}

// key makes a pair that is not opened.
func (w *world) key(k room.Key, chunks int) *pairOfRooms {
	p := &pairOfRooms{key: k, chunks: chunks, landed: map[int]bool{}}
	w.byKey[k], w.rooms = p, append(w.rooms, p)
	return p
}

// open opens p on the sides that are asked for and not open.
func (w *world) open(p *pairOfRooms, s, r bool) {
	open := func(tp *tape) *room.Room {
		rm, err := tp.reg.Open(p.key, time.Now().Add(time.Hour), p.chunks, nil)
		if err != nil {
			w.t.Fatal(err)
		}
		return rm
	}
	if s && p.s == nil {
		p.s = open(w.p)
	}
	if r && p.r == nil {
		p.r = open(w.d)
	}
}

func (w *world) both(id uint64, chunks int) *pairOfRooms {
	p := w.key(room.Key{Room: id}, chunks)
	w.open(p, true, true)
	return p
}

// deliver takes the first message for a side.
func (w *world) deliver(p *pairOfRooms, toP bool) {
	q, r := &p.toD, p.r
	if toP {
		q, r = &p.toP, p.s
	}
	k := (*q)[0]
	*q = (*q)[1:]
	switch {
	case r != nil:
		r.Apply(room.Event{Kind: k})
	case k == room.EvAbort: // before its room: remembered, and acked at once
		w.p.reg.Abort(p.key, &room.Cause{Code: room.CodeAborted})
		p.toD = append(p.toD, room.EvAck)
	}
}

// begin allows the next chunk and sends it.
func (p *pairOfRooms) begin() {
	if p.s.Apply(room.Event{Kind: room.EvBegin, Chunk: p.begun}).Has(room.FxWrite) {
		p.writes = append(p.writes, p.begun)
	}
	p.begun++
}

// land lands the first write that has not; settle ends the first write.
func (p *pairOfRooms) land() {
	for _, c := range p.writes {
		if !p.landed[c] {
			p.landed[c] = true
			p.r.Apply(room.Event{Kind: room.EvLanded, Chunk: c, Last: c == p.chunks-1})
			return
		}
	}
}

func (p *pairOfRooms) settle(kind room.EventKind) {
	c := p.writes[0]
	p.writes = p.writes[1:]
	p.s.Apply(room.Event{Kind: kind, Chunk: c})
}

// whole is a hand-over without a fault.
func (w *world) whole(id uint64, chunks int) *pairOfRooms {
	p := w.both(id, chunks)
	p.r.Apply(room.Event{Kind: room.EvGranted})
	w.deliver(p, true)
	for range chunks {
		p.begin()
		p.land()
		p.settle(room.EvSettle)
	}
	p.s.Apply(room.Event{Kind: room.EvRelease})
	p.r.Apply(room.Event{Kind: room.EvRelease})
	return p
}

// aborted is one that the decode side ends while a write is under way.
func (w *world) aborted(id uint64) *pairOfRooms {
	p := w.both(id, 3)
	p.r.Apply(room.Event{Kind: room.EvGranted})
	w.deliver(p, true)
	p.begin()
	p.land()
	p.settle(room.EvSettle)
	p.begin()
	p.r.Apply(room.Event{Kind: room.EvCancel, Cause: &room.Cause{Code: room.CodeClientGone}})
	w.deliver(p, true)
	p.begin() // skipped
	p.settle(room.EvSettleError)
	w.deliver(p, false) // the ack
	p.s.Apply(room.Event{Kind: room.EvRelease})
	p.r.Apply(room.Event{Kind: room.EvRelease})
	return p
}

// act does one random thing that can happen now.
func (w *world) act(p *pairOfRooms, rng *rand.Rand) {
	var can []func()
	may := func(ok bool, times int, f func()) {
		for range times {
			if ok {
				can = append(can, f)
			}
		}
	}
	may(p.s == nil, 3, func() { w.open(p, true, false) })
	may(p.r == nil, 3, func() { w.open(p, false, true) })
	// A grant that comes before its room is parked, so it stays in the queue.
	may(len(p.toP) > 0 && (p.s != nil || p.toP[0] != room.EvGrant), 6, func() { w.deliver(p, true) })
	may(len(p.toD) > 0 && p.r != nil, 6, func() { w.deliver(p, false) })
	if p.r != nil {
		may(!p.ready, 6, func() { p.ready = true; p.r.Apply(room.Event{Kind: room.EvGranted}) })
		may(len(p.landed) < len(p.writes)+p.begun && len(p.writes) > 0, 6, p.land)
		may(p.r.State().Terminal() && !p.relR, 4, func() { p.relR = true; p.r.Apply(room.Event{Kind: room.EvRelease}) })
		may(rng.IntN(12) == 0, 1, func() { p.r.Apply(room.Event{Kind: oneOf(rng, room.EvCancel, room.EvDeadline, room.EvPeerLost)}) })
	}
	if p.s != nil {
		may(p.begun < p.chunks && p.s.State() != room.StateBootstrapping, 6, p.begin)
		may(len(p.writes) > 0 && p.landed[first(p.writes)], 6, func() { p.settle(room.EvSettle) })
		may(len(p.writes) > 0 && rng.IntN(12) == 0, 1, func() { p.settle(room.EvSettleError) })
		may(p.s.State().Terminal() && !p.relS, 4, func() { p.relS = true; p.s.Apply(room.Event{Kind: room.EvRelease}) })
		may(rng.IntN(12) == 0, 1, func() {
			p.s.Apply(room.Event{Kind: oneOf(rng, room.EvCancel, room.EvDeadline, room.EvPeerLost, room.EvDrop), Chunk: min(p.begun, p.chunks-1)})
		})
	}
	if len(can) > 0 {
		can[rng.IntN(len(can))]()
	}
}

func first(q []int) int {
	if len(q) == 0 {
		return -1
	}
	return q[0]
}

func oneOf(rng *rand.Rand, kinds ...room.EventKind) room.EventKind {
	return kinds[rng.IntN(len(kinds))]
}

// finish ends what act has left.
func (w *world) finish(p *pairOfRooms) {
	w.open(p, true, true)
	for range 8 {
		for len(p.toP) > 0 {
			w.deliver(p, true)
		}
		for len(p.writes) > 0 {
			p.settle(room.EvSettleError)
		}
		for len(p.toD) > 0 {
			w.deliver(p, false)
		}
		p.s.Apply(room.Event{Kind: room.EvRelease})
		p.r.Apply(room.Event{Kind: room.EvRelease})
	}
	if p.r.Drain().Pending() {
		p.r.Apply(room.Event{Kind: room.EvFenced})
	}
}

// randomWorld is n rooms with every kind of end, interleaved.
func randomWorld(t *testing.T, seed uint64, n int) *world {
	w := newWorld(t)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range n {
		w.key(room.Key{Room: uint64(i + 1), Gen: uint32(i % 2)}, 1+rng.IntN(4))
	}
	for range 40 * n {
		w.act(w.rooms[rng.IntN(n)], rng)
	}
	for _, p := range w.rooms {
		w.finish(p)
	}
	w.p.end()
	w.d.end()
	return w
}

// check runs Check on files named p and d.
func check(t *testing.T, p, d []byte) *Report {
	t.Helper()
	var src []Source
	for name, b := range map[string][]byte{"p": p, "d": d} {
		if b != nil {
			src = append(src, Source{name, bytes.NewReader(b)})
		}
	}
	if len(src) == 2 && src[0].Name == "d" { // always in one order
		src[0], src[1] = src[1], src[0]
	}
	rep, err := Check(Options{}, src...)
	if err != nil {
		t.Fatal(err)
	}
	return rep
}

func (r *Report) text() string {
	var b strings.Builder
	_ = r.Print(&b, -1)
	return b.String()
}

// broken is a reader that fails.
type broken struct{}

func (broken) Read([]byte) (int, error) { return 0, fmt.Errorf("disk: %w", io.ErrUnexpectedEOF) }
