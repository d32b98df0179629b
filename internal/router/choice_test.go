package router

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router/policy"
)

// Each policy serves requests, for each leg by itself, and leaves nothing counted.
func TestEveryPolicyServes(t *testing.T) {
	for _, name := range policy.Names() {
		c := Config{Policy: PolicyRoundRobin, DecodePolicy: name, PolicyOptions: policy.Options{Seed: 1}}
		inBubble(t, c, []script{okPrefill, okPrefill}, []script{after(time.Second, okAnswer), after(time.Second, okAnswer), after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
			var wg sync.WaitGroup
			for i := range 30 {
				wg.Go(func() { b.chat("X-Session-Id", fmt.Sprint(i)).ok(t, chatAnswer) })
			}
			wg.Wait()
			if p[0].count() != 15 || p[1].count() != 15 {
				t.Errorf("%s: prefill in turn: %d and %d", name, p[0].count(), p[1].count())
			}
			for i := range d {
				if n := d[i].count(); n < 3 || n > 17 {
					t.Errorf("%s: decode worker %d got %d of 30", name, i, n)
				}
			}
			if g := b.get("/server_info"); !strings.Contains(g.body, `"decode_policy":"`+name+`"`) {
				t.Errorf("%s: /server_info is silent about it: %s", name, g.body)
			}
		})
	}
}

// Requests that come at the same time do not all go to the worker that was idle when they came.
func TestChoiceAndCountAreOneStep(t *testing.T) {
	inBubble(t, Config{}, []script{okPrefill}, []script{after(time.Second, okAnswer), after(time.Second, okAnswer), after(time.Second, okAnswer), after(time.Second, okAnswer)}, func(t *testing.T, b *bed, p, d []*fake) {
		var wg sync.WaitGroup
		for range 40 {
			wg.Go(func() { b.chat().ok(t, chatAnswer) })
		}
		wg.Wait()
		for i := range d {
			if n := d[i].count(); n != 10 {
				t.Errorf("worker %d got %d of 40", i, n)
			}
		}
	})
}

// A conversation stays with its prefill worker; the tree's memory is seen.
func TestPrefixCacheKeepsConversations(t *testing.T) {
	body := func(who string, turns int) string {
		text := ""
		for i := range turns {
			text += fmt.Sprintf(`,{"role":"user","content":"%s %d %s"}`, who, i, strings.Repeat("word ", 60))
		}
		return `{"model":"m","messages":[{"role":"system","content":"` + who + `"}` + text + `]}`
	}
	inBubble(t, Config{PrefillPolicy: policy.PrefixCache}, []script{okPrefill, okPrefill, okPrefill}, []script{okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		homes := map[int]bool{}
		for _, who := range []string{"ann", "bob", "cid"} {
			home := -1
			for turns := 1; turns < 6; turns++ {
				before := []int{p[0].count(), p[1].count(), p[2].count()}
				b.post(t.Context(), "/v1/chat/completions", body(who, turns)).ok(t, chatAnswer)
				synctest.Wait()
				for i := range p {
					if p[i].count() == before[i] {
						continue
					}
					if home >= 0 && home != i {
						t.Errorf("turn %d of %s went to %d, not %d", turns, who, i, home)
					}
					home = i
				}
			}
			homes[home] = true
		}
		if len(homes) != 3 {
			t.Errorf("three conversations on idle workers went to %v", homes)
		}
		g := b.get("/metrics")
		if strings.Contains(g.body, `baton_router_prefix_tree_bytes{leg="prefill"} 0`) || !strings.Contains(g.body, `baton_router_prefix_tree_bytes{leg="decode"} 0`) {
			t.Error("the trees' memory is not as it should be")
		}
		ws := b.r.prefills.workers()
		b.r.replace(&b.r.prefills, nil)
		if s := b.r.prefills.treeStats(); s.Nodes != 0 || s.Bytes != 0 {
			t.Errorf("left of workers that have gone: %+v", s)
		}
		b.r.replace(&b.r.prefills, ws)
	})
}

func TestSessionsStay(t *testing.T) {
	inBubble(t, Config{DecodePolicy: policy.SessionHash, SessionHeader: "X-Chat"}, []script{okPrefill}, []script{okAnswer, okAnswer, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for s := range 12 {
			before := []int{d[0].count(), d[1].count(), d[2].count()}
			for range 4 {
				b.chat("X-Chat", fmt.Sprint("s", s)).ok(t, chatAnswer)
			}
			moved := 0
			for i := range d {
				if n := d[i].count() - before[i]; n != 0 && n != 4 {
					moved++
				}
			}
			if moved > 0 {
				t.Errorf("session %d was at several workers", s)
			}
		}
		if d[0].count() == 0 || d[1].count() == 0 || d[2].count() == 0 {
			t.Errorf("12 sessions went to %d, %d and %d", d[0].count(), d[1].count(), d[2].count())
		}
	})
}

// What workers say of their load decides: one is full of others' requests, one has no memory.
func TestPairCostReadsMetrics(t *testing.T) {
	texts := []string{
		"# HELP x y\nbaton_num_decode_prealloc_queue_reqs 40\nbaton_kv_pages{owner=\"free\",pool=\"landing\"} 90\nbaton_kv_pages{owner=\"request\",pool=\"landing\"} 10\n",
		"sglang:num_queue_reqs{model_name=\"m\"} 0.0\nsglang:token_usage{model_name=\"m\"} 1.0\n",
		"vllm:num_requests_waiting{engine=\"0\"} 0.0\nvllm:kv_cache_usage_perc{engine=\"0\"} 0.5\n",
	}
	inBubble(t, Config{Policy: policy.PairCost}, []script{okPrefill}, []script{okAnswer, okAnswer, okAnswer}, func(t *testing.T, b *bed, p, d []*fake) {
		for i, f := range d {
			f.setMetrics(texts[i])
		}
		<-time.After(1500 * time.Millisecond) // another probe
		for i, want := range []policy.Load{{Known: true, Queue: 40, Free: 0.9}, {Known: true}, {Known: true, Free: 0.5}} {
			if got := b.r.decodes.workers()[i].reportedLoad(); got != want {
				t.Errorf("worker %d: %+v, want %+v", i, got, want)
			}
		}
		for range 5 {
			b.chat().ok(t, chatAnswer)
		}
		if d[2].count() != 5 {
			t.Errorf("requests: %d, %d, %d", d[0].count(), d[1].count(), d[2].count())
		}
		d[0].setMetrics("")
		<-time.After(loadStale*time.Second + time.Second)
		if got := b.r.decodes.workers()[0].reportedLoad(); got.Known {
			t.Errorf("a report is believed for ever: %+v", got)
		}
	})
}

func TestParseLoad(t *testing.T) {
	for text, want := range map[string]policy.Load{
		"":                                   {},
		"sglang:num_queue_reqs":              {},
		"sglang:num_queue_reqs{a=\"b\" 3":    {},
		"sglang:num_queue_reqs NaN":          {},
		"sglang:num_queue_reqs -3":           {},
		"other:num_queue_reqs 3":             {},
		"sglang:num_queue_reqs 3 1700000000": {Known: true, Queue: 3, Free: 1},
		"sglang:num_queue_reqs{dp=\"0\"} 3\nsglang:num_queue_reqs{dp=\"1\"} 4\nsglang:token_usage{dp=\"0\"} 0.25\nsglang:token_usage{dp=\"1\"} 0.75": {Known: true, Queue: 7, Free: 0.25},
		"vllm:kv_cache_usage_perc 1.5": {Known: true},
		"baton_num_queue_reqs 1\nbaton_room_oldest_age_seconds{side=\"prefill\",state=\"waiting\"} 2.5\nbaton_room_oldest_age_seconds{side=\"prefill\",state=\"success\"} 60": {
			Known: true, Queue: 1, Free: 1, Oldest: 2500 * time.Millisecond},
		"baton_num_queue_reqs 1e300": {Known: true, Queue: 1e6, Free: 1},
	} {
		if got := parseLoad([]byte(text)); got != want {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
}

func FuzzParseLoad(f *testing.F) {
	f.Add("baton_num_queue_reqs{a=\"}\"} 1 2\nsglang:token_usage 0.5\n")
	f.Add("baton_kv_pages{owner=\"free\"} 1e308\nbaton_kv_pages 1e308\nvllm:num_requests_waiting{ 1")
	f.Fuzz(func(t *testing.T, text string) {
		if l := parseLoad([]byte(text)); l.Queue < 0 || !(l.Free >= 0 && l.Free <= 1) || l.Oldest < 0 {
			t.Errorf("%+v", l)
		}
	})
}
