package bench

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// pair is a pair of workers that are counters, behind an API that says one text.
type pair struct {
	sums   map[string]float64
	cost   map[string]float64 // what a request adds, seconds
	text   string
	served int
	tokens []int // of each prompt
}

func (p *pair) metric(_ context.Context, name string) (float64, error) {
	if _, ok := p.cost[name]; p.served == 0 && ok {
		return 0, fmt.Errorf("nothing was sent yet, so there is no %s", name)
	}
	return p.sums[name], nil
}

func (p *pair) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if strings.HasSuffix(r.URL.Path, "/models") {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model"}]}`)
		return
	}
	var body struct{ Prompt []int }
	if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	p.tokens = append(p.tokens, len(body.Prompt))
	p.served++
	for k, v := range p.cost {
		p.sums[k] += v
	}
	w.Header().Set("Content-Type", "text/event-stream")
	fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"text\":%q,\"finish_reason\":\"length\"}]}\n\ndata: [DONE]\n\n", p.text)
}

func (p *pair) target(t *testing.T, name string) *Target {
	t.Helper()
	s := httptest.NewServer(p)
	t.Cleanup(s.Close)
	target, err := NewTarget(t.Context(), name, s.URL)
	if err != nil {
		t.Fatal(err)
	}
	target.Bytes = true
	return target
}

func newPair(text string, exposed float64) *pair {
	return &pair{text: text, sums: map[string]float64{}, cost: map[string]float64{
		"baton_engine_chunk_seconds_sum":          1,
		"baton_engine_export_seconds_sum":         0.002,
		"baton_kv_transfer_latency_seconds_sum":   0.078,
		"baton_kv_exposed_transfer_seconds_sum":   exposed,
		"baton_kv_exposed_transfer_seconds_count": 1,
	}}
}

// TestPipelineFigures: a share is a part's of the whole transfer, the warm-up does not count, and prompts are whole chunks.
func TestPipelineFigures(t *testing.T) {
	a, b := newPair("same", 0.020), newPair("same", 0.006)
	of := func(p *pair, name string, parts int) *Pipeline {
		return &Pipeline{Target: p.target(t, name), Prefill: p.metric, Decode: p.metric, Chunks: 4, Tokens: 16, Parts: parts}
	}
	rows, err := Pipelines(t.Context(), []*Pipeline{of(a, "chunks", 1), of(b, "layers", 8)}, newPair("same", 0).target(t, "single"), 3)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for _, r := range rows {
		if got[r.Target+" "+r.Metric] = r.Value; r.N != 3 {
			t.Errorf("%+v: want 3 rounds", r)
		}
	}
	for name, want := range map[string]float64{
		"chunks compute": 1000, "chunks transfer": 80, "chunks share": 20, "chunks exposed": 20, "chunks exposed / share": 1,
		"layers transfer": 80, "layers share": 2.5, "layers exposed": 6, "layers exposed / share": 2.4,
	} {
		if math.Abs(got[name]-want) > 1e-9 {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	if got["single ttft"] == 0 || got["layers ttft"] == 0 {
		t.Errorf("no times to the first token: %v", got)
	}
	for _, n := range a.tokens {
		if n != 65 {
			t.Errorf("a prompt of %d tokens, want 4 chunks and the last token", n)
		}
	}
}

// TestPipelineErrors: answers that differ, and a room that is never counted.
func TestPipelineErrors(t *testing.T) {
	a := newPair("same", 0.02)
	p := &Pipeline{Target: a.target(t, "chunks"), Prefill: a.metric, Decode: a.metric, Chunks: 1, Tokens: 16, Parts: 1}
	if _, err := Pipelines(t.Context(), []*Pipeline{p}, newPair("other", 0).target(t, "single"), 1); err == nil || !strings.Contains(err.Error(), "answers differ") {
		t.Errorf("other answers: %v", err)
	}
	delete(a.cost, "baton_kv_exposed_transfer_seconds_count")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	n := 0
	p.Prefill = func(ctx context.Context, name string) (float64, error) {
		if n++; n == 40 {
			stop()
		}
		return a.metric(ctx, name)
	}
	if _, err := Pipelines(ctx, []*Pipeline{p}, nil, 1); err == nil || !strings.Contains(err.Error(), "did not count") {
		t.Errorf("a room that is not counted: %v", err)
	}
}
