package kvbench

import (
	"context"
	"io"
	"testing"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// measure runs source and target in one process.
func measure(t *testing.T, to, from transfer.Transport, w Work) ([]Row, error) {
	t.Helper()
	questions, ask := io.Pipe()
	answers, say := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		err := ServeTarget(to, w.Size, questions, say)
		_ = say.Close()
		ended <- err
	}()
	rows, err := Measure(t.Context(), from, to.Kind(), w, ask, answers)
	_ = ask.Close()
	if terr := <-ended; terr != nil {
		t.Errorf("target: %v", terr)
	}
	return rows, err
}

func TestMeasure(t *testing.T) {
	w := Work{Blocks: []int{4096, 12288, 1 << 20}, Rooms: 3, Rounds: 2, Size: 8 << 20, Latencies: 20}
	reg := mem.NewRegistry()
	for _, tr := range []transfer.Transport{mem.New(reg), tcp.New(tcp.Config{})} {
		rows, err := measure(t, tr, tr, w)
		if err != nil {
			t.Fatal(err)
		}
		if len(rows) != len(w.Blocks) {
			t.Fatalf("%d rows", len(rows))
		}
		for _, r := range rows {
			if !r.Verified || r.GBPerS <= 0 || r.P50US <= 0 || r.P50US > r.P99US || r.MinGBPS > r.GBPerS || r.GBPerS > r.MaxGBPS {
				t.Errorf("%+v", r)
			}
		}
	}
}

// damaged flips a bit of each write's first byte on its way.
type damaged struct{ transfer.Transport }

type damagedPeer struct{ transfer.Peer }

func (d damaged) Dial(ctx context.Context, desc transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	p, err := d.Transport.Dial(ctx, desc, s)
	return damagedPeer{p}, err
}

func (d damagedPeer) Post(w transfer.Write) error {
	b := append([]byte(nil), w.Segments[0].Src...)
	b[0] ^= 1
	w.Segments = append([]transfer.Segment{{Off: w.Segments[0].Off, Src: b}}, w.Segments[1:]...)
	return d.Peer.Post(w)
}

func TestWrongBytesAreFound(t *testing.T) {
	tr := mem.New(mem.NewRegistry())
	rows, err := measure(t, tr, damaged{tr}, Work{Blocks: []int{4096}, Rooms: 1, Rounds: 1, Size: 1 << 20})
	if err != nil {
		t.Fatal(err)
	}
	if rows[0].Verified {
		t.Error("damaged bytes passed for verified")
	}
}

func TestPlacesArePermutedWithinTheirRoom(t *testing.T) {
	const n, rooms = 103, 4
	to := places(n, rooms)
	if len(to) != 100 {
		t.Fatalf("%d places", len(to))
	}
	seen := map[int]bool{}
	moved := 0
	for i, at := range to {
		if at/25 != i/25 || seen[at] {
			t.Fatalf("block %d goes to %d", i, at)
		}
		seen[at] = true
		if at != i {
			moved++
		}
	}
	if moved < 50 {
		t.Errorf("only %d blocks are scattered", moved)
	}
}
