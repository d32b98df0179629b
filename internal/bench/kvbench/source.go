package kvbench

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Work says what is measured of one transport.
type Work struct {
	Blocks []int // bytes of a block
	Rooms  int   // concurrent rooms, >= 1
	Rounds int   // repetitions, medians are reported
	// Size of the pool in bytes: what a round writes, rounded down to whole blocks in each room.
	Size int
	// Huge is how the pools of both processes come by huge pages.
	Huge kv.HugePages
	// Latencies is how many single blocks are timed for each size; 0: none.
	Latencies int
}

// limits of one write, so that several are under way and no transport's own are met.
const (
	maxWriteBytes    = 8 << 20
	maxWriteSegments = 2048
	writesUnderWay   = 4 // in each room
)

// source drives one target process.
type source struct {
	peer  transfer.Peer
	pool  *kv.Pool
	bytes []byte
	enc   *json.Encoder
	lines *bufio.Scanner
	name  string
}

// Measure dials the target process behind in and out (see [ServeTarget]) and measures w.
// A row whose bytes were wrong is returned with Verified false, and no error.
func Measure(ctx context.Context, tr transfer.Transport, name string, w Work, in io.Writer, out io.Reader) ([]Row, error) {
	s, err := open(ctx, tr, name, w, in, out)
	if err != nil {
		return nil, err
	}
	defer s.close()
	var rows []Row
	for _, b := range w.Blocks {
		row, err := s.block(ctx, w, b)
		if err != nil {
			return rows, fmt.Errorf("kvbench: %s, blocks of %d bytes: %w", name, b, err)
		}
		rows = append(rows, row)
	}
	return rows, nil
}

// pool maps w.Size bytes, rounded down to pages of 4 KiB.
func (w *Work) pool(name string) (*kv.Pool, error) {
	const page = 4096
	return kv.Open(kv.Config{Name: name, PageBytes: page, Pages: w.Size / page, Huge: w.Huge})
}

// open maps the source's memory and dials the target behind in and out.
func open(ctx context.Context, tr transfer.Transport, name string, w Work, in io.Writer, out io.Reader) (*source, error) {
	pool, err := w.pool("bench source")
	if err != nil {
		return nil, err
	}
	s := &source{pool: pool, name: name, enc: json.NewEncoder(in), lines: bufio.NewScanner(out)}
	s.bytes, _ = pool.Memory()
	for i := 0; i < len(s.bytes); i += 4096 {
		s.bytes[i] = 0xff // every page is there before the first write, as at the target
	}
	s.lines.Buffer(nil, 64<<20)
	first, err := s.read()
	if err == nil {
		if s.peer, err = tr.Dial(ctx, first.Descriptor, benchSession); err != nil {
			err = fmt.Errorf("kvbench: dial %s: %w", name, err)
		}
	}
	if err != nil {
		_ = pool.Close()
		return nil, err
	}
	return s, nil
}

func (s *source) close() {
	_ = s.peer.Close() // before the memory goes
	_ = s.pool.Close()
}

func (s *source) read() (answer, error) {
	if !s.lines.Scan() {
		return answer{}, errors.Join(errors.New("kvbench: the target process ended; its output says why"), s.lines.Err())
	}
	var a answer
	if err := json.Unmarshal(s.lines.Bytes(), &a); err != nil {
		return a, fmt.Errorf("kvbench: answer %q: %w", s.lines.Text(), err)
	}
	if a.Err != "" {
		return a, errors.New("kvbench: target: " + a.Err)
	}
	return a, nil
}

func (s *source) ask(q question) (answer, error) {
	if err := s.enc.Encode(q); err != nil {
		return answer{}, err
	}
	return s.read()
}

// block measures one block size.
func (s *source) block(ctx context.Context, w Work, block int) (Row, error) {
	row := Row{Transport: s.name, BlockBytes: block, Rooms: w.Rooms, Rounds: w.Rounds, Verified: true}
	to := places(len(s.bytes)/block, w.Rooms)
	n := len(to)
	if n == 0 {
		return row, fmt.Errorf("%d rooms do not fit into %d bytes", w.Rooms, len(s.bytes))
	}
	if _, err := s.ask(question{Op: "grant", Rooms: w.Rooms, Block: block}); err != nil {
		return row, err
	}
	var rates []float64
	var cpuSum, gb float64
	for round := range w.Rounds + 1 { // the first warms up
		seed := uint64(round+1)*1_000_003 + uint64(block)
		for i := range n {
			fill(s.bytes[i*block:(i+1)*block], seed, i)
		}
		before, err := s.ask(question{Op: "cpu"})
		if err != nil {
			return row, err
		}
		own, began := cpu(), now()
		if err := s.write(ctx, w.Rooms, block, to); err != nil {
			return row, err
		}
		took := float64(now()-began) / 1e9
		own = cpu() - own
		after, err := s.ask(question{Op: "verify", Rooms: w.Rooms, Block: block, Seed: seed})
		if err != nil {
			return row, err
		}
		row.Verified = row.Verified && after.Wrong == 0
		if round == 0 {
			continue
		}
		size := float64(n) * float64(block) / 1e9
		rates = append(rates, size/took)
		cpuSum, gb = cpuSum+own+after.CPU-before.CPU, gb+size
	}
	slices.Sort(rates)
	row.GBPerS, row.MinGBPS, row.MaxGBPS = rates[len(rates)/2], rates[0], rates[len(rates)-1]
	row.CPUPerGB = cpuSum / gb
	return row, s.latency(ctx, w, block, to, &row)
}

// write writes every block once, the rooms side by side.
func (s *source) write(ctx context.Context, rooms, block int, to []int) error {
	per := len(to) / rooms
	each := max(1, min(maxWriteSegments, maxWriteBytes/block))
	next := make([]int, rooms) // blocks posted of each room
	done := make(chan posted, rooms*writesUnderWay)
	under := 0
	post := func(r int) error {
		if next[r] == per {
			return nil
		}
		k := min(each, per-next[r])
		segs := make([]transfer.Segment, k)
		for j := range segs {
			i := r*per + next[r] + j
			segs[j] = transfer.Segment{Off: uint64(to[i]) * uint64(block), Src: s.bytes[i*block : (i+1)*block]}
		}
		next[r] += k
		err := s.peer.Post(transfer.Write{
			Grant: firstGrant + transfer.GrantID(r), Key: room.Key{Room: uint64(r)}, Segments: segs,
			Notify: []byte{1}, Done: func(err error) { done <- posted{r, err} },
		})
		if err == nil {
			under++
		}
		return err
	}
	var first error
	for range writesUnderWay {
		for r := range rooms {
			first = errors.Join(first, post(r))
		}
	}
	for under > 0 {
		select {
		case p := <-done:
			under--
			if first = errors.Join(first, p.err); first == nil {
				first = post(p.room)
			}
		case <-ctx.Done():
			return ctx.Err() // Close of the peer waits for the writes
		}
	}
	return first
}

// posted is the end of one write.
type posted struct {
	room int
	err  error
}

// latency times single blocks, one after the other.
func (s *source) latency(ctx context.Context, w Work, block int, to []int, row *Row) error {
	if w.Latencies == 0 {
		return nil
	}
	got, err := s.singles(ctx, w.Latencies, 0, block, to[:len(to)/w.Rooms])
	if err != nil {
		return err
	}
	row.P50US, row.P99US = quantile(got, 0.5), quantile(got, 0.99)
	return nil
}

// quantile of sorted nanoseconds, in microseconds.
func quantile(sorted []int64, q float64) float64 {
	return float64(sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]) / 1e3
}

// singles writes n single blocks of a room, each when the one before it is done, and
// returns their one-way times, sorted.
func (s *source) singles(ctx context.Context, n, rm, block int, to []int) ([]int64, error) {
	if _, err := s.ask(question{Op: "latency"}); err != nil { // forget older ones
		return nil, err
	}
	done := make(chan error, 1)
	note := make([]byte, 8)
	base := rm * len(to)
	for k := range n {
		i := k % len(to)
		seg := []transfer.Segment{{Off: uint64(to[i]) * uint64(block), Src: s.bytes[(base+i)*block : (base+i+1)*block]}}
		binary.LittleEndian.PutUint64(note, uint64(now()))
		err := s.peer.Post(transfer.Write{
			Grant: firstGrant + transfer.GrantID(rm), Key: room.Key{Room: uint64(rm)},
			Segments: seg, Notify: note, Done: func(err error) { done <- err },
		})
		if err != nil {
			return nil, err
		}
		select {
		case err = <-done:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if err != nil {
			return nil, err
		}
	}
	a, err := s.ask(question{Op: "latency"})
	if err == nil && len(a.Latencies) != n {
		err = fmt.Errorf("%d of %d notifications arrived", len(a.Latencies), n)
	}
	return a.Latencies, err
}
