package worker_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// ranks parses the settings of a worker with 6 layers and 4 heads, unless they say otherwise. Every step digests
// the whole memory of all ranks again.
func ranks(t *testing.T, settings string) sim.Config {
	t.Helper()
	c, err := sim.ParseConfig("layers=6,heads=4,dim=5,recheck=true," + settings)
	if err != nil {
		t.Fatal(err)
	}
	c.ChunkTokens = 24
	return c
}

// TestRanks serves with workers whose ranks and pages differ: the answers are a hash over every KV byte, of every
// rank, as it lies in the decode worker's memory.
func TestRanks(t *testing.T) {
	for name, c := range map[string]struct {
		prefill, decode string
		both            bool // transports; otherwise tcp
	}{
		"tp 1 to 4":          {"tp=1", "tp=4", true},
		"tp 4 to 1":          {"tp=4", "tp=1", true},
		"tp 2 to 4":          {"tp=2", "tp=4", true},
		"pp 2 to 1":          {"pp=2", "pp=1", true},
		"pp 4 to 3":          {"pp=4", "pp=3", false},
		"tp and pp":          {"tp=4,pp=2", "tp=2,pp=3", false},
		"pages 16 to 5":      {"page=16", "page=5", false},
		"pages 7 to 64":      {"page=7", "page=64", false},
		"orders":             {"tp=2,hnd=true,page=6", "tp=4,page=8", false},
		"heads on 4 ranks":   {"heads=2,tp=4", "heads=2,tp=1", false},
		"heads to 8 ranks":   {"heads=2,tp=2,page=3", "heads=2,tp=8,hnd=true", false},
		"latent":             {"heads=1,mla=true,tp=4", "heads=1,mla=true,tp=2,pp=2,page=9", false},
		"everything differs": {"tp=4,pp=3,page=10,hnd=true", "tp=2,pp=2,page=32", true},
	} {
		t.Run(name, func(t *testing.T) {
			kinds := transports(t)
			if !c.both {
				delete(kinds, "shm")
			}
			for kind, tp := range kinds {
				t.Run(kind, func(t *testing.T) {
					defer http.DefaultClient.CloseIdleConnections()
					p := startTwo(t, ranks(t, c.prefill), ranks(t, c.decode), tp)
					p.answers(t)
					shows(t, p.dAddr, ranks(t, c.decode).WithDefaults())
				})
			}
		})
	}
}

// shows asks a worker what its ranks are.
func shows(t *testing.T, url string, c sim.Config) {
	t.Helper()
	res, err := http.Get(url + "/server_info")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	var info struct {
		TP     int `json:"tp_size"`
		PP     int `json:"pp_size"`
		Engine struct {
			Shards string `json:"kv_shards"`
		} `json:"engine"`
	}
	if err := json.NewDecoder(res.Body).Decode(&info); err != nil {
		t.Fatal(err)
	}
	if want := fmt.Sprintf(" tp=%d pp=%d page=%d ", c.TP, c.PP, c.PageTokens); info.TP != c.TP || info.PP != c.PP || !strings.Contains(info.Engine.Shards, want) {
		t.Errorf("%s shows %+v, want%s", url, info, want)
	}
}

func transports(t *testing.T) map[string]func() transfer.Transport {
	return map[string]func() transfer.Transport{
		"tcp": func() transfer.Transport { return tcp.New(tcp.Config{Listen: "127.0.0.1:0"}) },
		"shm": func() transfer.Transport { return shm.New(shm.Config{Dir: t.TempDir()}) },
	}
}

// TestRanksThatCannotMeet: the session is refused, the request fails at once on both sides with the field named, and the
// prefill worker has computed nothing.
func TestRanksThatCannotMeet(t *testing.T) {
	for name, c := range map[string]struct{ prefill, decode, want string }{
		"tp 2 to 3":     {"heads=6,tp=2", "heads=6,tp=3", `tp differs: the prefill worker has "2", the decode worker has "3"`},
		"other heads":   {"heads=4,tp=2", "heads=8,tp=2", "kv_layout differs"},
		"blocks, pages": {"", "tp=1", "kv_layout differs"},
	} {
		t.Run(name, func(t *testing.T) {
			defer http.DefaultClient.CloseIdleConnections()
			computed := make(chan sim.Call, 100)
			prefill := ranks(t, c.prefill)
			prefill.Hook = func(call sim.Call) error {
				if call.Op == sim.OpPrefill {
					computed <- call
				}
				return nil
			}
			p := startTwo(t, prefill, ranks(t, c.decode), transports(t)["tcp"])
			began := time.Now()
			_, err := p.generate(1, []engine.Token{5, 6, 7, 8}, 4)
			if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), c.want) || !strings.Contains(err.Error(), `"mismatch"`) {
				t.Errorf("the decode worker answered: %v", err)
			}
			if d := time.Since(began); d > 20*time.Second {
				t.Errorf("it took %v", d)
			}
			if len(computed) > 0 {
				t.Errorf("the prefill worker computed %+v for a worker that it cannot send to", <-computed)
			}
			ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
			defer stop()
			if err := p.decode.Registry.Drain(ctx); err != nil {
				t.Error(err)
			}
		})
	}
}
