package kvbench

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Session and the first grant of a benchmark; its rooms have the following ones.
const (
	benchSession = transfer.SessionID(77)
	firstGrant   = transfer.GrantID(1)
)

// question goes to the target process, one JSON object a line; an answer comes back.
type question struct {
	Op    string `json:"op"` // "grant", "verify", "latency", "cpu"
	Rooms int    `json:"rooms,omitempty"`
	Block int    `json:"block,omitempty"`
	Seed  uint64 `json:"seed,omitempty"`
}

type answer struct {
	Descriptor transfer.Descriptor `json:"descriptor,omitzero"` // the first line only
	Err        string              `json:"err,omitempty"`
	Wrong      int                 `json:"wrong"` // blocks that are not what they must be
	Latencies  []int64             `json:"latencies,omitempty"`
	CPU        float64             `json:"cpu"`
}

// clockSink takes the one-way time of each notification that carries one.
type clockSink struct {
	mu  sync.Mutex
	got []int64
}

func (s *clockSink) Landed(_ transfer.GrantID, notify []byte) {
	if len(notify) < 8 {
		return
	}
	d := now() - int64(binary.LittleEndian.Uint64(notify))
	s.mu.Lock()
	s.got = append(s.got, d)
	s.mu.Unlock()
}

func (s *clockSink) Fenced(transfer.SessionID) {}

func (s *clockSink) take() []int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.got
	s.got = nil
	slices.Sort(out)
	return out
}

// target is the other process.
type target struct {
	bytes []byte
	sink  *clockSink
	t     transfer.Target
	rooms int
}

// ServeTarget registers the memory of w with tr and answers questions from in until it ends.
// It is the whole life of the target process.
func ServeTarget(tr transfer.Transport, w Work, in io.Reader, out io.Writer) (err error) {
	pool, err := w.pool("bench")
	if err != nil {
		return err
	}
	defer func() { _ = pool.Close() }()
	bytes, fd := pool.Memory()
	for i := 0; i < len(bytes); i += 4096 {
		bytes[i] = 0xff // every page is there before the first write
	}
	tg := &target{bytes: bytes, sink: &clockSink{}}
	if tg.t, err = tr.Listen(transfer.Memory{Bytes: bytes, FD: fd}, tg.sink); err != nil {
		return err
	}
	defer func() {
		if cerr := tg.t.Close(); err == nil {
			err = cerr
		}
	}()
	if err := tg.t.OpenSession(benchSession); err != nil {
		return err
	}
	enc := json.NewEncoder(out)
	if err := enc.Encode(answer{Descriptor: tg.t.Descriptor()}); err != nil {
		return err
	}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		var q question
		if err := json.Unmarshal(lines.Bytes(), &q); err != nil {
			return fmt.Errorf("kvbench: question %q: %w", lines.Text(), err)
		}
		if err := enc.Encode(tg.answer(q)); err != nil {
			return err
		}
	}
	return lines.Err()
}

func (tg *target) answer(q question) answer {
	a := answer{CPU: cpu()}
	switch q.Op {
	case "grant":
		if err := tg.grant(q.Rooms, q.Block); err != nil {
			a.Err = err.Error()
		}
	case "verify":
		per := q.Block
		for i, at := range places(len(tg.bytes)/per, q.Rooms) {
			if wrong(tg.bytes[at*per:(at+1)*per], q.Seed, i) {
				a.Wrong++
			}
		}
	case "latency":
		a.Latencies = tg.sink.take()
	case "cpu":
	default:
		a.Err = "unknown question " + q.Op
	}
	return a
}

// grant gives each of rooms its part of the memory, and takes back what was given before.
func (tg *target) grant(rooms, block int) error {
	for r := range tg.rooms {
		tg.t.Revoke(firstGrant + transfer.GrantID(r))
	}
	tg.rooms = 0
	part := uint64(len(tg.bytes)/block/rooms) * uint64(block)
	for r := range rooms {
		err := tg.t.Allow(transfer.Grant{
			ID: firstGrant + transfer.GrantID(r), Key: room.Key{Room: uint64(r)}, Session: benchSession,
			Spans: []transfer.Span{{Off: uint64(r) * part, Len: part}},
		})
		if err != nil {
			return err
		}
		tg.rooms++
	}
	return nil
}
