package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/meter"
	"github.com/baton-pd/baton/internal/transfer/tcp"
	"github.com/baton-pd/baton/internal/worker"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a prefill and a decode worker in this process.
type pair struct {
	prefill, decode *worker.Worker
	pAddr, dAddr    string
	bootPort        string
	cfg             sim.Config
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func startPair(t *testing.T, cfg sim.Config, tp func() transfer.Transport) *pair {
	t.Helper()
	return startTwo(t, cfg, cfg, tp)
}

// startTwo starts two workers of different ranks. Changes are to the decode worker.
func startTwo(t *testing.T, prefill, decode sim.Config, tp func() transfer.Transport, changes ...func(*worker.Config)) *pair {
	t.Helper()
	cfg := prefill
	p := &pair{cfg: cfg.WithDefaults()}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	start := func(role string, cfg sim.Config) (*worker.Worker, string) {
		eng, err := sim.Open(cfg)
		if err != nil {
			t.Fatal(err)
		}
		l, reg := listen(t), prometheus.NewRegistry()
		c := worker.Config{ID: role, Engine: eng, HTTP: l, Transports: []transfer.Transport{meter.New(reg).Wrap(tp())}, Metrics: reg, PoolBytes: 1 << 20, PageBytes: 4096,
			PoisonPool: true, MaxQueue: 64, MaxRunning: 8, Timeouts: worker.DefaultTimeouts(), Log: log.With("role", role), AllowLocal: true}
		var w *worker.Worker
		if role == "prefill" {
			bl := listen(t)
			_, p.bootPort, _ = net.SplitHostPort(bl.Addr().String())
			w, err = worker.NewPrefill(c, bl)
		} else {
			for _, change := range changes {
				change(&c)
			}
			w, err = worker.NewDecode(c)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			ctx, stop := context.WithTimeout(context.Background(), 30*time.Second)
			defer stop()
			if err := w.Close(ctx); err != nil {
				t.Errorf("close %s: %v", role, err)
			}
		})
		return w, "http://" + l.Addr().String()
	}
	p.prefill, p.pAddr = start("prefill", prefill)
	p.decode, p.dAddr = start("decode", decode)
	return p
}

// generate sends one request to both workers, as a router does, and returns the
// decode side's tokens.
func (p *pair) generate(room int, prompt []engine.Token, maxTokens int) ([]engine.Token, error) {
	return p.generateUntil(context.Background(), room, prompt, maxTokens)
}

// generateUntil is generate whose client leaves when ctx ends.
func (p *pair) generateUntil(ctx context.Context, room int, prompt []engine.Token, maxTokens int) ([]engine.Token, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	body, err := json.Marshal(map[string]any{
		"input_ids": prompt, "bootstrap_host": "127.0.0.1", "bootstrap_port": json.Number(p.bootPort), "bootstrap_room": room,
		"sampling_params": map[string]any{"max_new_tokens": maxTokens, "temperature": 0},
	})
	if err != nil {
		return nil, err
	}
	post := func(url string) ([]byte, error) {
		req, err := http.NewRequestWithContext(ctx, "POST", url+"/generate", strings.NewReader(string(body)))
		if err != nil {
			return nil, err
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			return nil, err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		if err == nil && res.StatusCode != 200 {
			err = fmt.Errorf("%s: %s", res.Status, b)
		}
		return b, err
	}
	prefilled := make(chan error, 1)
	go func() { _, err := post(p.pAddr); prefilled <- err }()
	b, err := post(p.dAddr)
	if err != nil {
		stop() // as a router does
	}
	if perr := <-prefilled; err == nil {
		err = perr
	}
	if err != nil {
		return nil, err
	}
	var out struct {
		OutputIDs []engine.Token `json:"output_ids"`
	}
	return out.OutputIDs, json.Unmarshal(b, &out)
}

func TestPairAnswers(t *testing.T) {
	for name, tp := range map[string]func() func() transfer.Transport{
		"mem": func() func() transfer.Transport {
			net := mem.NewRegistry()
			return func() transfer.Transport { return mem.New(net) }
		},
		"tcp": func() func() transfer.Transport {
			return func() transfer.Transport { return tcp.New(tcp.Config{Listen: "127.0.0.1:0"}) }
		},
	} {
		t.Run(name, func(t *testing.T) {
			defer http.DefaultClient.CloseIdleConnections()
			p := startPair(t, sim.Config{ChunkTokens: 16}, tp())
			p.answers(t)
		})
	}
}

// answers asks 24 requests at once; all must be right, and afterwards nothing may be held.
func (p *pair) answers(t *testing.T) {
	t.Helper()
	var wg sync.WaitGroup
	for i := range 24 {
		wg.Go(func() {
			prompt := make([]engine.Token, 1+i*7)
			for j := range prompt {
				prompt[j] = engine.Token(3 + (i*31+j*7)%250)
			}
			got, err := p.generate(1000+i, prompt, 12)
			if err != nil {
				t.Errorf("request %d: %v", i, err)
				return
			}
			want := sim.Expected(p.cfg, prompt, 12)
			if fmt.Sprint(got) != fmt.Sprint(want) {
				t.Errorf("request %d: got %v, want %v", i, got, want)
			}
		})
	}
	wg.Wait()
	p.idle(t)
}

// idle checks that nothing is held, once no room is left.
func (p *pair) idle(t *testing.T) {
	t.Helper()
	http.DefaultClient.CloseIdleConnections()
	ctx, stop := context.WithTimeout(context.Background(), 30*time.Second)
	defer stop()
	if err := p.decode.Registry.Drain(ctx); err != nil {
		t.Error(err)
	}
	if err := p.prefill.Registry.Drain(ctx); err != nil {
		t.Error(err)
	}
	for _, w := range []*worker.Worker{p.prefill, p.decode} {
		// The pages of a room that is gone return a moment later, on the hub's goroutine.
		for freed := w.Pool.Freed(); !w.Pool.Stats().Idle() && ctx.Err() == nil; freed = w.Pool.Freed() {
			select {
			case <-freed:
			case <-ctx.Done():
			}
		}
		if s := w.Pool.Stats(); !s.Idle() || s.PoisonHits != 0 || s.Misuses != 0 {
			t.Errorf("pool is not idle: %+v", s)
		}
	}
}
