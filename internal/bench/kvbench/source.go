package kvbench

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

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
	// Patience bounds the time that a run waits for two cores that are apart to come together, and repeats rounds
	// during which they parted. Where the process may use another number of cores it is not used.
	Patience time.Duration
}

// limits of one write, so that several are under way and no transport's own are met.
const (
	maxWriteBytes    = 8 << 20
	maxWriteSegments = 2048
	writesUnderWay   = 4 // in each room
)

// Source is a transport's own side of a measurement; it drives one target process. It is a [System].
type Source struct {
	peer    transfer.Peer
	pool    *kv.Pool
	bytes   []byte
	enc     *json.Encoder
	lines   *bufio.Scanner
	name    string
	rooms   int
	granted int   // block size that the target's grants are for; 0: none
	to      []int // places of granted's blocks
}

// pool maps w.Size bytes, rounded down to pages of 4 KiB.
func (w *Work) pool(name string) (*kv.Pool, error) {
	const page = 4096
	return kv.Open(kv.Config{Name: name, PageBytes: page, Pages: w.Size / page, Huge: w.Huge})
}

// Open maps the source's memory, w.Size bytes, and dials the target process behind in and out (see [ServeTarget]).
func Open(ctx context.Context, tr transfer.Transport, name string, w Work, in io.Writer, out io.Reader) (*Source, error) {
	pool, err := w.pool("bench source")
	if err != nil {
		return nil, err
	}
	s := &Source{pool: pool, name: name, rooms: w.Rooms, enc: json.NewEncoder(in), lines: bufio.NewScanner(out)}
	s.bytes, _ = pool.Memory()
	for i := 0; i < len(s.bytes); i += 4096 {
		s.bytes[i] = 0xff // every page is there before the first write, as at the target
	}
	s.lines.Buffer(nil, 64<<20)
	first, err := s.read()
	if u, ok := tr.(interface{ UsePool(transfer.Memory, int) }); ok { // as workers do; otherwise each byte is copied once more
		b, fd := pool.Memory()
		u.UsePool(transfer.Memory{Bytes: b, FD: fd}, pool.PageBytes())
	}
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

// Name implements [System].
func (s *Source) Name() string { return s.name }

// Close implements [System].
func (s *Source) Close() error {
	return errors.Join(s.peer.Close(), s.pool.Close()) // the memory goes last
}

func (s *Source) read() (answer, error) {
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

func (s *Source) ask(q question) (answer, error) {
	if err := s.enc.Encode(q); err != nil {
		return answer{}, err
	}
	return s.read()
}

// grant has the target grant the rooms their parts for blocks of this size, and works out where they go.
func (s *Source) grant(rooms, block int) error {
	if s.granted == block {
		return nil
	}
	s.granted = 0
	if s.to = places(len(s.bytes)/block, rooms); len(s.to) == 0 {
		return fmt.Errorf("%d rooms do not fit into %d bytes", rooms, len(s.bytes))
	}
	if _, err := s.ask(question{Op: "grant", Rooms: rooms, Block: block}); err != nil {
		return err
	}
	s.granted = block
	return nil
}

// Round implements [System].
func (s *Source) Round(ctx context.Context, block int, seed uint64) (Round, error) {
	if err := s.grant(s.rooms, block); err != nil {
		return Round{}, err
	}
	for i := range s.to {
		fill(s.bytes[i*block:(i+1)*block], seed, i)
	}
	before, err := s.ask(question{Op: "cpu"})
	if err != nil {
		return Round{}, err
	}
	own, began := cpu(), now()
	if err := s.write(ctx, s.rooms, block, s.to); err != nil {
		return Round{}, err
	}
	took := float64(now()-began) / 1e9
	own = cpu() - own
	after, err := s.ask(question{Op: "verify", Rooms: s.rooms, Block: block, Seed: seed})
	return Round{
		Rooms: s.rooms, Bytes: int64(len(s.to)) * int64(block), Seconds: took, CPU: own + after.CPU - before.CPU, Verified: after.Wrong == 0,
	}, err
}

// write writes every block once, the rooms side by side.
func (s *Source) write(ctx context.Context, rooms, block int, to []int) error {
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

// Singles implements [System]; the blocks are those of the first room.
func (s *Source) Singles(ctx context.Context, block, n int) ([]int64, error) {
	if err := s.grant(s.rooms, block); err != nil || n == 0 {
		return nil, err
	}
	return s.singles(ctx, n, 0, block, s.to[:len(s.to)/s.rooms])
}

// singles writes n single blocks of a room, each when the one before it is done, and
// returns their one-way times, sorted.
func (s *Source) singles(ctx context.Context, n, rm, block int, to []int) ([]int64, error) {
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
