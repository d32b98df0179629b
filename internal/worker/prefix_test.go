package worker_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/worker"
)

// cached gives the decode worker a cache of so many pages.
func cached(pages int) func(*worker.Config) {
	return func(c *worker.Config) { c.PrefixPages = pages }
}

// turn is what a user says, n tokens.
func turn(id, k, n int) []engine.Token {
	out := make([]engine.Token, n)
	for i := range out {
		out[i] = engine.Token(3 + (id*53+k*17+i*7)%250)
	}
	return out
}

// sum is a metric of w, summed over its labels.
func sum(t *testing.T, w *worker.Worker, name string) (v float64) {
	t.Helper()
	families, err := w.Metrics.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				v += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return v
}

// TestChatsSendOnlyWhatIsNew: chats that begin alike, turn after turn and all at once, some of whose clients leave in the middle, are
// answered from the ranks' own memories byte for byte, whatever part of a prompt was sent.
func TestChatsSendOnlyWhatIsNew(t *testing.T) {
	for name, c := range map[string]struct{ prefill, decode string }{
		"tp 1 to 4":          {"tp=1", "tp=4,page=8"},
		"tp 4 to 1":          {"tp=4,page=12", "tp=1,page=6"},
		"pp 2 to 1":          {"pp=2", "pp=1,page=5"},
		"everything differs": {"tp=4,pp=3,page=10,hnd=true", "tp=2,pp=2,page=32"},
	} {
		for kind, tp := range transports(t) {
			t.Run(name+" "+kind, func(t *testing.T) {
				defer http.DefaultClient.CloseIdleConnections()
				decode := ranks(t, c.decode)
				s := decode.WithDefaults()
				pages := 300 * s.TP * s.PP / s.PageTokens // not enough for all that is said
				p := startTwo(t, ranks(t, c.prefill), decode, tp, cached(pages))
				var wg sync.WaitGroup
				for id := range 6 {
					wg.Go(func() { p.chat(t, id) })
				}
				wg.Wait()
				p.idle(t)
				if st := p.decode.Pool.Stats(); st.PrefixReused == 0 || st.Cached == 0 || st.Cached > pages || p.decode.Pool.CheckFree() != 0 {
					t.Errorf("%+v", st)
				}
				res, err := http.Post(p.dAddr+"/flush_cache", "", nil)
				if err != nil {
					t.Fatal(err)
				}
				defer res.Body.Close()
				if st := p.decode.Pool.Stats(); st.Cached != 0 || st.Free != st.Total {
					t.Errorf("after /flush_cache: %+v", st)
				}
			})
		}
	}
}

// chat is four turns of one user; the first words are those of all.
func (p *pair) chat(t *testing.T, id int) {
	prompt := turn(0, 0, 50)
	for k := range 4 {
		prompt = append(prompt, turn(id, k, 30)...)
		ctx, stop := context.WithTimeout(context.Background(), time.Duration(id+k)*time.Millisecond)
		_, _ = p.generateUntil(ctx, 1000+100*id+2*k, prompt, 12) // leaves somewhere on the way, or is answered
		stop()
		got, err := p.generate(1001+100*id+2*k, prompt, 12)
		if want := sim.Expected(p.cfg, prompt, 12); err != nil || fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("chat %d, turn %d: %v, want %v: %v", id, k, got, want, err)
			return
		}
		prompt = append(prompt, got...)
	}
}

// TestSecondTurnSendsOnlyNewPages: the bytes that the prefill worker sends for the second turn are those of the pages that the first did not
// bring, no more and no fewer, and both workers show it.
func TestSecondTurnSendsOnlyNewPages(t *testing.T) {
	defer http.DefaultClient.CloseIdleConnections()
	decode := ranks(t, "tp=4,page=8")
	p := startTwo(t, ranks(t, "tp=1"), decode, transports(t)["tcp"], cached(1000))
	const token = 6 * 2 * 4 * 5 // layers, K and V, heads, bytes a head
	prompt, sent := turn(1, 0, 100), 0.0
	for k, c := range []struct{ reused, tokens int }{{0, 99}, {96, 142 - 96}, {0, 9}} {
		switch k {
		case 1:
			prompt = append(prompt, turn(1, 1, 43)...)
		case 2:
			prompt = turn(2, 0, 10)
		}
		if got, err := p.generate(1+k, prompt, 8); err != nil || fmt.Sprint(got) != fmt.Sprint(sim.Expected(p.cfg, prompt, 8)) {
			t.Fatalf("turn %d: %v, %v", k, got, err)
		}
		p.idle(t)
		now := sum(t, p.prefill, "baton_kv_transfer_bytes_total")
		if now-sent != float64(c.tokens*token) {
			t.Errorf("turn %d sent %v bytes, want %d", k, now-sent, c.tokens*token)
		}
		sent = now
	}
	if st := p.decode.Pool.Stats(); st.PrefixReused != 96/8*4 || st.Cached != (96+40+8)/8*4 {
		t.Errorf("%+v", st)
	}
	res, err := http.Get(p.dAddr + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	text, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`baton_kv_pages{owner="cached",pool="landing"} 72`, `baton_kv_prefix_pages_total{act="reused",pool="landing"} 48`} {
		if !strings.Contains(string(text), want) {
			t.Errorf("/metrics does not show %s", want)
		}
	}
}

// TestPrefixCacheIsRefused: where there is nothing to share, the flag is an error and not silence.
func TestPrefixCacheIsRefused(t *testing.T) {
	try := func(settings string, local bool, pages int) error {
		eng, err := sim.Open(ranks(t, settings))
		if err != nil {
			t.Fatal(err)
		}
		defer eng.Close()
		l := listen(t)
		defer l.Close()
		w, err := worker.NewDecode(worker.Config{ID: "d", Engine: eng, HTTP: l, Transports: []transfer.Transport{transports(t)["tcp"]()}, PoolBytes: 1 << 20,
			MaxQueue: 1, MaxRunning: 1, Log: slog.New(slog.DiscardHandler), LocalOnly: local, PrefixPages: pages, Timeouts: worker.DefaultTimeouts()})
		if err == nil {
			_ = w.Close(t.Context())
		}
		return err
	}
	for name, err := range map[string]error{
		"blocks":             try("", false, 1),
		"monolithic":         try("tp=1", true, 1),
		"more than the pool": try("tp=1", false, 1<<20),
		"negative":           try("tp=1", false, -1),
	} {
		if err == nil || !strings.Contains(err.Error(), "prefix cache") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := worker.NewPrefill(worker.Config{PrefixPages: 1}, nil)
	if err == nil || !strings.Contains(err.Error(), "prefixes") {
		t.Errorf("prefill: %v", err)
	}
}
