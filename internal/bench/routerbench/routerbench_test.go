package routerbench

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/router"
)

// TestMain is also the two processes that the bench starts: fakes, and a router with the flags of baton's.
func TestMain(m *testing.M) {
	role := ""
	if len(os.Args) > 1 {
		role = os.Args[1]
	}
	var err error
	switch role {
	case "fakes":
		err = ServeFakes(context.Background(), os.Stdin, os.Stdout)
	case "router":
		err = serveRouter(os.Args[2:])
	default:
		goleak.VerifyTestMain(m)
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type list []string

func (l *list) String() string     { return strings.Join(*l, " ") }
func (l *list) Set(v string) error { *l = append(*l, v); return nil }

func serveRouter(args []string) error {
	var prefills, decodes list
	f := flag.NewFlagSet("router", flag.ContinueOnError)
	listen := f.String("listen", "", "")
	f.String("log-level", "", "")
	policy := f.String("policy", "", "")
	most := f.Int("max-inflight", 0, "")
	f.Var(&prefills, "prefill", "")
	f.Var(&decodes, "decode", "")
	if err := f.Parse(args); err != nil {
		return err
	}
	c := router.Config{Policy: *policy, MaxInflight: *most}
	for _, p := range prefills {
		url, port, _ := strings.Cut(p, ",")
		n, err := strconv.Atoi(port)
		if err != nil {
			return err
		}
		c.Prefills = append(c.Prefills, router.Backend{URL: url, BootstrapPort: n})
	}
	for _, d := range decodes {
		c.Decodes = append(c.Decodes, router.Backend{URL: d})
	}
	r, err := router.New(c)
	if err != nil {
		return err
	}
	defer r.Close()
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	srv := &http.Server{Handler: r.Handler()}
	context.AfterFunc(ctx, func() { _ = srv.Close() })
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

func startFakes(t *testing.T) *Fakes {
	t.Helper()
	f, err := StartFakes(os.Args[0], os.Stderr, "fakes")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.Stop)
	return f
}

// TestShort is the bench with few requests and no peers.
func TestShort(t *testing.T) {
	f := startFakes(t)
	baton, err := StartBaton(t.Context(), os.Args[0], "baton", f, os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(baton.Stop)
	works := []string{WorkWhole, WorkStream, WorkGaps, WorkOpen}
	var log bytes.Buffer
	rows, err := Measure(t.Context(), Config{
		Works: works, Conns: []int{1, 8}, Rounds: 2, Duration: 100 * time.Millisecond, Warmup: 10 * time.Millisecond, Tokens: 8,
		GapConns: []int{1, 2}, Pace: time.Millisecond, Open: 50, OpenPace: 100 * time.Millisecond, Log: &log,
	}, f, []*Target{baton})
	if err != nil {
		t.Fatal(err)
	}
	has := func(work, target string, conns int, metric string) {
		t.Helper()
		r, ok := find(rows, Row{Work: work, Conns: conns}, target, metric)
		if !ok || r.Rounds != 2 || r.Min > r.Value || r.Value > r.Max {
			t.Errorf("%s %s c=%d %s: %+v, %v", work, target, conns, metric, r, ok)
		}
		if slices.Contains([]string{MetricRate, MetricP50, MetricP99, MetricRSS, MetricDelayP50, MetricStreamRSS}, metric) && r.Min <= 0 {
			t.Errorf("%s %s c=%d %s: %+v, want more than 0", work, target, conns, metric, r)
		}
	}
	for _, work := range works[:2] {
		for _, c := range []int{1, 8} {
			for _, m := range []string{MetricRate, MetricP50, MetricP99, MetricCPU, MetricCPUFakes, MetricCPULoad, MetricRSS} {
				has(work, "baton", c, m)
			}
		}
		has(work, Direct, 1, MetricRate)
	}
	for _, target := range []string{Direct, "baton"} {
		for _, m := range []string{MetricDelayP50, MetricDelayP99, MetricGapP50, MetricGapP99, MetricGapMean, MetricJitterP50, MetricJitterP99} {
			has(WorkGaps, target, 1, m)
			has(WorkGaps, target, 2, m)
		}
	}
	has(WorkOpen, "baton", 50, MetricStreamRSS)
	var out bytes.Buffer
	if err := errors.Join(Table(&out, rows), Ratios(&out, rows, "baton"), JSON(&out, rows)); err != nil {
		t.Fatal(err)
	}
	Added(&out, rows)
	for _, want := range []string{"requests/s (spread)", "added p50 at c=1, stream, baton", "RSS with open streams", `"metric": "CPU router"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("%q is not in:\n%s", want, &out)
		}
	}
}

// TestAddedGaps: what is printed is the difference to direct's, with the same number of streams, and direct's spread.
func TestAddedGaps(t *testing.T) {
	row := func(target, metric string, conns int, v, least, most float64) Row {
		return Row{Work: WorkGaps, Target: target, Conns: conns, Metric: metric, Unit: "ms", Value: v, Min: least, Max: most, Rounds: 3}
	}
	var out bytes.Buffer
	err := AddedGaps(&out, []Row{
		row(Direct, MetricGapP99, 16, 20.1, 20.05, 20.175), row(Direct, MetricJitterP50, 16, 0.02, 0.02, 0.02), row("baton", MetricGapP99, 16, 20.35, 20.2, 20.4),
		row("baton", MetricJitterP50, 16, 0.09, 0.08, 0.1), row(Direct, MetricGapP99, 64, 21, 20, 22), row("baton", MetricGapP99, 64, 20.5, 20, 21),
	})
	var lines []string
	for line := range strings.Lines(out.String()) {
		lines = append(lines, strings.Join(strings.Fields(line), " "))
	}
	if want := []string{"gaps streams target added ms spread of direct, ms", "gap p99 16 baton +0.250 0.125", "gap p99 64 baton -0.500 2.000"}; err != nil || !slices.Equal(lines, want) {
		t.Errorf("%v, %q; want %q", err, lines, want)
	}
}

// TestPacedInOrder: a fake that is late sends what is due first, first.
func TestPacedInOrder(t *testing.T) {
	f := &fakes{}
	for _, due := range []int64{30, 10, 20, 10, 40} {
		c := &conn{role: &served{due: due}}
		f.later(c, c.role.(*served))
	}
	var got []int64
	for _, c := range f.paced {
		got = append(got, c.role.(*served).due)
	}
	if want := []int64{10, 10, 20, 30, 40}; !slices.Equal(got, want) {
		t.Errorf("due %v, want %v", got, want)
	}
}

// TestGaps: the gaps between arrivals are those of the clock's steps, whatever is late, and all are counted.
func TestGaps(t *testing.T) {
	f := startFakes(t)
	const pace = 2 * time.Millisecond
	if err := f.set(t.Context(), pace, gapTokens); err != nil {
		t.Fatal(err)
	}
	g, err := run(loadConfig{addr: f.Decodes[0], conns: 3, stream: true, tokens: gapTokens, times: true, length: time.Second, least: 3}, func(bool) {})
	if err != nil {
		t.Fatal(err)
	}
	if n := len(g.latencies) * (gapTokens - 1); len(g.gaps) < n-3*gapTokens || len(g.jitter) != len(g.gaps) || len(g.delays) < len(g.gaps) {
		t.Errorf("%d gaps, %d changes, %d delays in %d answers", len(g.gaps), len(g.jitter), len(g.delays), len(g.latencies))
	}
	// A late token makes one gap longer and the next shorter; only the first and last of a stream can move the mean.
	if m := time.Duration(mean(g.gaps)); m < pace/2 {
		t.Errorf("a mean gap of %v at a pace of %v", m, pace)
	}
	if q := time.Duration(quantile(g.gaps, 0.99)); q < pace {
		t.Errorf("a gap p99 of %v at a pace of %v", q, pace)
	}
}

// TestAnswersAreChecked: a run fails when answers are not what they must be, and says how.
func TestAnswersAreChecked(t *testing.T) {
	f := startFakes(t)
	if err := f.set(t.Context(), 0, 8); err != nil {
		t.Fatal(err)
	}
	serve := func(answer string) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = c.Read(make([]byte, 4096))
				_, _ = c.Write([]byte(answer))
				_ = c.(*net.TCPConn).CloseWrite()
				_, _ = c.Read(make([]byte, 1))
				_ = c.Close()
			}
		}()
		t.Cleanup(func() {
			_ = l.Close()
			<-ended
		})
		return l.Addr().String()
	}
	token := "data: @1\n\n"
	chunked := func(body string) string { return streamHead + fmt.Sprintf("%x\r\n%s\r\n", len(body), body) + lastChunk }
	for name, c := range map[string]struct{ addr, want string }{
		"status":    {serve("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"), "503 No"},
		"tokens":    {serve(chunked(token + "data: " + `"finish_reason":"length"` + "\n\ndata: [DONE]\n\n")), "an answer of 1 tokens, want 8"},
		"no finish": {serve(chunked(strings.Repeat(token, 8) + "data: [DONE]\n\n")), "without finish"},
		"no end":    {serve(chunked(strings.Repeat(token, 8) + `"finish_reason":"length"` + "\n\n")), "without its end"},
		"cut":       {serve(streamHead + "ff\r\n" + token), "broke in the middle"},
		"no length": {serve("HTTP/1.1 200 OK\r\n\r\nbody"), "no length"},
		"chunk":     {serve(streamHead + "xyz\r\n"), "chunk size"},
	} {
		_, err := run(loadConfig{addr: c.addr, conns: 1, stream: true, tokens: 8, length: 20 * time.Millisecond, least: 1}, func(bool) {})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if g, err := run(loadConfig{addr: f.Decodes[1], conns: 2, stream: true, tokens: 8, length: time.Millisecond, least: 100}, func(bool) {}); err != nil || len(g.latencies) < 100 {
		t.Errorf("sound answers: %v", err)
	}
}

// TestPieces: requests and answers are read the same however they are cut.
func TestPieces(t *testing.T) {
	request := "POST /generate?x=1 HTTP/1.1\r\nHost: h\r\ncOnTent-length: 5\r\n\r\nabcde"
	for n := range len(request) {
		if _, _, got := parseRequest([]byte(request[:n])); got != 0 {
			t.Errorf("%d bytes are said to be whole", n)
		}
	}
	if path, body, n := parseRequest([]byte(request + "POST")); path != "/generate?x=1" || string(body) != "abcde" || n != len(request) {
		t.Errorf("%q %q %d", path, body, n)
	}
	for _, bad := range []string{"GET\r\n\r\n", "GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", "GET / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"} {
		if _, _, n := parseRequest([]byte(bad)); n != -1 {
			t.Errorf("%q: %d", bad, n)
		}
	}
	want := "data: @1\n\ndata: [DONE]\n\n"
	answer := streamHead + "a\r\ndata: @1\n\n\r\ne\r\ndata: [DONE]\n\n\r\n" + lastChunk
	for step := 1; step < len(answer); step++ {
		a := &asker{}
		done := false
		for n := 0; n < len(answer) && !done; {
			n = min(n+step, len(answer))
			in := []byte(answer[:n])
			if a.head == 0 {
				if err := a.readHead(in); err != nil {
					t.Fatal(err)
				}
			}
			if a.head > 0 {
				var err error
				if done, err = a.readBody(in); err != nil {
					t.Fatal(err)
				}
			}
			if done && n < len(answer) {
				t.Errorf("steps of %d: done %d bytes early", step, len(answer)-n)
			}
		}
		if !done || string(a.body) != want {
			t.Errorf("steps of %d: %v %q", step, done, a.body)
		}
	}
}

// TestUsage: this process's CPU and memory as /proc tells them agree with what it did.
func TestUsage(t *testing.T) {
	held, err := syscall.Mmap(-1, 0, 64<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(held)
	before, err := usageOf(0)
	if err != nil {
		t.Fatal(err)
	}
	var spent syscall.Rusage
	for used := int64(0); used < int64(200*time.Millisecond); { // of CPU, not of time
		for i := range held {
			held[i] ^= byte(i)
		}
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &spent); err != nil {
			t.Fatal(err)
		}
		used = spent.Utime.Nano() + spent.Stime.Nano() - int64(before.cpu*1e9)
	}
	after, err := usageOf(0)
	if err != nil || after.cpu-before.cpu < 0.1 || after.rss-before.rss < 60<<20 {
		t.Errorf("from %+v to %+v, %v", before, after, err)
	}
}
