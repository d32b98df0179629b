package kvbench

import (
	"bytes"
	"context"
	"encoding/xml"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"
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
		err := ServeTarget(to, w, questions, say)
		_ = say.Close()
		ended <- err
	}()
	s, err := Open(t.Context(), from, to.Kind(), w, ask, answers)
	if err != nil {
		t.Fatal(err)
	}
	rows, err := run(t, w, s)
	if err := s.Close(); err != nil {
		t.Error(err)
	}
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

func TestFair(t *testing.T) {
	tr := tcp.New(tcp.Config{})
	questions, ask := io.Pipe()
	answers, say := io.Pipe()
	ended := make(chan error, 1)
	go func() {
		ended <- ServeTarget(tr, Work{Size: 16 << 20}, questions, say)
		_ = say.Close()
	}()
	row, err := Fair(t.Context(), tr, "tcp", Work{Size: 16 << 20}, ask, answers)
	_ = ask.Close()
	if terr := <-ended; err != nil || terr != nil {
		t.Fatal(err, terr)
	}
	if row.Beside == 0 || row.AloneP50US <= 0 || row.BesideP50US <= 0 || row.BesideMaxUS < row.BesideP99US {
		t.Errorf("%+v", row)
	}
}

func TestMemcpy(t *testing.T) {
	w := Work{Blocks: []int{4096, 65536}, Rooms: 1, Rounds: 1, Size: 1 << 20}
	m, err := Memcpy(w)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	rows, err := run(t, w, m)
	if err != nil || len(rows) != 2 || !rows[0].Verified || rows[0].GBPerS <= 0 {
		t.Error(rows, err)
	}
}

// TestSVG: well-formed, with each transport and each block size, and names escaped.
func TestSVG(t *testing.T) {
	rows := []Row{
		{Transport: "tcp", BlockBytes: 4096, GBPerS: 1, MinGBPS: 0.5, MaxGBPS: 1.5},
		{Transport: "tcp", BlockBytes: 1 << 20, GBPerS: 4, MinGBPS: 3, MaxGBPS: 5},
		{Transport: "a<b", BlockBytes: 4096, GBPerS: 2, MinGBPS: 2, MaxGBPS: 2},
	}
	var b bytes.Buffer
	if err := SVG(&b, rows); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{">tcp<", ">a&lt;b<", ">4 KiB<", ">1 MiB<"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in the picture", want)
		}
	}
	points := regexp.MustCompile(`<circle cx="[0-9]+\.[0-9]" cy="[0-9]+\.[0-9]" `).FindAllString(b.String(), -1)
	if len(points) != len(rows) || strings.Contains(b.String(), "%!") {
		t.Errorf("the picture has %d points, want %d: %s", len(points), len(rows), b.String())
	}
	d := xml.NewDecoder(&b)
	for {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if err := SVG(io.Discard, nil); err == nil {
		t.Error("a picture of nothing")
	}
}

// TestLinesAreToldApart: no two of many lines look alike, and their names stand apart and above the axis.
func TestLinesAreToldApart(t *testing.T) {
	var rows []Row
	for i := range 12 {
		rows = append(rows, Row{Transport: string(rune('a' + i)), BlockBytes: 4096, GBPerS: 1, MinGBPS: 1, MaxGBPS: 10},
			Row{Transport: string(rune('a' + i)), BlockBytes: 8192, GBPerS: 0.1, MinGBPS: 0.1, MaxGBPS: 0.1})
	}
	var b bytes.Buffer
	if err := SVG(&b, rows); err != nil {
		t.Fatal(err)
	}
	looks := map[string]bool{}
	var at []float64
	for _, m := range regexp.MustCompile(`fill="none" (stroke="[^"]+" stroke-width="2"[^/]*)/><text x="[0-9.]+" y="([0-9.]+)"`).FindAllStringSubmatch(b.String(), -1) {
		looks[m[1]] = true
		y, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			t.Fatal(err)
		}
		at = append(at, y)
	}
	slices.Sort(at)
	if len(looks) != 12 || len(at) != 12 {
		t.Fatalf("%d different lines and %d names, want 12", len(looks), len(at))
	}
	for i := 1; i < len(at); i++ {
		if at[i]-at[i-1] < 13 {
			t.Errorf("names at %v and %v", at[i-1], at[i])
		}
	}
	if at[11] > plotH-bottom {
		t.Errorf("the lowest name at %v is below the axis at %d", at[11], plotH-bottom)
	}
}

// named is a transport that is told of the pool, as nixl is.
type named struct {
	transfer.Transport
	bytes, page int
}

func (n *named) UsePool(m transfer.Memory, page int) { n.bytes, n.page = len(m.Bytes), page }

// TestPoolIsNamed: a transport that can send from registered memory without a copy is told of it, as in workers.
func TestPoolIsNamed(t *testing.T) {
	tr := &named{Transport: mem.New(mem.NewRegistry())}
	if _, err := measure(t, tr, tr, Work{Blocks: []int{4096}, Rooms: 1, Rounds: 1, Size: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if tr.bytes != 1<<20 || tr.page != 4096 {
		t.Errorf("told of %d bytes in pages of %d", tr.bytes, tr.page)
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

func TestRatios(t *testing.T) {
	rows := []Row{
		{Transport: "tcp", BlockBytes: 4096, GBPerS: 3, P50US: 10},
		{Transport: "nixl tcp spin", BlockBytes: 4096, GBPerS: 1, P50US: 40},
		{Transport: "nixl tcp sleep", BlockBytes: 4096, GBPerS: 1.5, P50US: 700},
		{Transport: "nixl tcp spin", BlockBytes: 65536, GBPerS: 9, P50US: 1},
	}
	got := Ratios(rows, "tcp", func(n string) bool { return n != "tcp" })
	want := Ratio{"tcp", 4096, 2, 0.25, "nixl tcp sleep", "nixl tcp spin"}
	if len(got) != 1 || got[0] != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := Ratios(rows[:1], "tcp", func(n string) bool { return n != "tcp" }); len(got) != 0 {
		t.Errorf("%+v without a rival", got)
	}
	var text bytes.Buffer
	if err := RatioTable(&text, []Ratio{want, {"shm", 4096, 0.5, 0, "memcpy", ""}}); err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^tcp +4 KiB +2\.00 +nixl tcp sleep +0\.25 +nixl tcp spin\nshm +4 KiB +0\.50 +memcpy *$`).MatchString(text.String()) {
		t.Errorf("the table is\n%s", text.String())
	}
}
