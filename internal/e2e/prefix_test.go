package e2e

import (
	"context"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/stack"
)

// TestPrefixCache: the second turn of a chat sends only its new pages, from processes whose ranks differ; every answer is a hash over all
// KV bytes of all ranks, also of those that were not sent. A client that leaves and a prefill worker that is killed in the middle of
// such a turn leave the cache as it was, and it serves the next one. Budget: 30 s.
func TestPrefixCache(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ transport, prefill, decode string }{
		{"tcp", "tp=1", "tp=4,page=8"},
		{"shm", "tp=4,pp=2,page=5,hnd=true", "tp=2,page=8"},
		{"nixl", "tp=1", "tp=2,page=8"},
	} {
		t.Run(c.transport, func(t *testing.T) {
			if c.transport == "nixl" {
				needNIXL(t)
			}
			s, m := startSim(t, simSetup{transport: c.transport, model: rankModel,
				prefill: []string{"--sim", rankModel + "," + c.prefill + ",prefill-chunk=100ms"},
				decode:  []string{"--sim", rankModel + "," + c.decode + ",recheck=true", "--prefix-cache-pages", "800"}})
			const chat, first, second, third = 7, 82, 146, 280 // tokens of the prompt, turn by turn
			serves(t, s, m, chat, 1, first, 8)
			base := takeBaseline(t, s)
			ranks := kept(t, s) / (80 / 8)
			sent := sentBytes(t, s)
			serves(t, s, m, chat, 1, second, 8)
			const token = 4 * 2 * 4 * 8 // layers, K and V, heads, bytes a head
			if got := sentBytes(t, s) - sent; got != (second-1-80)*token {
				t.Errorf("the second turn sent %v bytes, want the %d of %d tokens", got, (second-1-80)*token, second-1-80)
			}
			base.check(t)
			if got := kept(t, s); got != 144/8*ranks {
				t.Errorf("%d pages are kept after the second turn, want %d", got, 144/8*ranks)
			}
			sharing := func(p, d *workerInfo) bool {
				return p.State.Running == 1 && d.State.Transfer == 1 && d.Pool.Shared == 144/8*ranks && d.Pool.Granted > 0
			}
			t.Run("client leaves", func(t *testing.T) {
				l := ask(t, s, chat, third, 8, true)
				l.at(sharing)
				l.gone(nothing)
				base.check(t)
			})
			t.Run("prefill killed", func(t *testing.T) {
				l := ask(t, s, chat, third, 8, true)
				l.at(sharing)
				s.Prefills[0].Kill()
				if a := <-l.ended; a.ok() && a.Text != m.text(prompt(chat, third), 8) || !a.ok() && a.Cause == nil {
					t.Errorf("answered wrongly, or ended without a cause: %v", a)
				}
				if err := s.Prefills[0].Start(t.Context()); err != nil {
					t.Fatal(err)
				}
				usable(t, s)
				base.check(t)
			})
			if got := kept(t, s); got != 144/8*ranks {
				t.Errorf("%d pages are kept after two failures, want %d", got, 144/8*ranks)
			}
			sent = sentBytes(t, s)
			serves(t, s, m, chat, 1, third, 8)
			if got := sentBytes(t, s) - sent; got != (third-1-144)*token {
				t.Errorf("the third turn sent %v bytes, want %d", got, (third-1-144)*token)
			}
			serves(t, s, m, 100, 6, 50, 8)
			base.check(t)
			flush(t, s.Decodes[0])
			if got := kept(t, s); got != 0 {
				t.Errorf("%d pages are kept after a flush", got)
			}
		})
	}
}

// kept is how many pages of the decode worker's pool are cached, once nothing else holds any.
func kept(t *testing.T, s *stack.Stack) int {
	t.Helper()
	waitIdle(t, s, settleTime)
	d, err := inspect(t.Context(), s.Decodes[0])
	if err != nil {
		t.Fatal(err)
	}
	return d.Pool.Cached
}

// sentBytes is what the prefill worker has sent, once nothing is under way.
func sentBytes(t *testing.T, s *stack.Stack) float64 {
	t.Helper()
	waitIdle(t, s, settleTime)
	n, err := metric(t.Context(), s.Prefills[0], "baton_kv_transfer_bytes_total")
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func flush(t *testing.T, p *stack.Process) {
	t.Helper()
	ctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	res, err := post(ctx, p.URL()+"/flush_cache", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != 200 {
		t.Fatalf("flush: %s", res.Status)
	}
}
