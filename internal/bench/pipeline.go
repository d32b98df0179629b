package bench

import (
	"context"
	"fmt"
	"time"
)

// Pipeline is a prefill/decode pair of which one request at a time is measured: how much of its KV's way it
// waited for.
type Pipeline struct {
	*Target
	// Prefill and Decode sum the samples of a metric of that worker, over its labels.
	Prefill, Decode func(ctx context.Context, metric string) (float64, error)
	// Chunks are a prompt's, Tokens a chunk's; Parts is in how many a chunk leaves.
	Chunks, Tokens, Parts int
}

// The figures of one request, each the growth of a metric's sum; ms. For a prefill side that never
// overlaps anything, exposed would be all of transfer.
var pipelineFigures = []struct {
	name     string
	prefill  bool
	counters []string
}{
	{"compute", true, []string{"baton_engine_chunk_seconds_sum"}},
	{"transfer", true, []string{"baton_engine_export_seconds_sum", "baton_kv_transfer_latency_seconds_sum"}},
	{"exposed", true, []string{"baton_kv_exposed_transfer_seconds_sum"}},
	{"import", false, []string{"baton_engine_import_seconds_sum"}},
	{"exposed by import", false, []string{"baton_kv_exposed_transfer_seconds_sum"}},
}

// Pipelines measures rounds requests of each, in turn. transfer is the time of all exports and writes of a
// request, the share of one part is transfer / (chunks * parts), and the goal is exposed <= share. With a
// target single, which computes the same prompts without a transfer, ttft tells what the client waits. All
// targets must give the same answers, or it is an error: in sim's a wrong byte of the KV shows.
func Pipelines(ctx context.Context, list []*Pipeline, single *Target, rounds int) ([]Row, error) {
	got := make(map[[2]string][]float64)
	add := func(target, metric string, v float64) {
		k := [2]string{target, metric}
		got[k] = append(got[k], v)
	}
	for _, p := range list { // warm up: session, connections, and metrics that exist once something was sent
		if t := p.stream(ctx, p.prompt(0, p.Chunks*p.Tokens+1), 8); t.Err != nil {
			return nil, fmt.Errorf("%s: %w", p.Name, t.Err)
		}
	}
	for r := range rounds {
		answers := make(map[string]string)
		for _, p := range list {
			figures, text, err := p.once(ctx, uint64(r+1))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.Name, err)
			}
			answers[text] = p.Name
			for k, v := range figures {
				add(p.Name, k, v)
			}
		}
		if single == nil {
			continue
		}
		t := single.stream(ctx, single.prompt(uint64(r+1), list[0].Chunks*list[0].Tokens+1), 8)
		if t.Err != nil {
			return nil, fmt.Errorf("%s: %w", single.Name, t.Err)
		}
		add(single.Name, "ttft", ms(t.TTFT()))
		if answers[t.Text] = single.Name; len(answers) > 1 {
			return nil, fmt.Errorf("round %d: the answers differ, so bytes of the KV do: %v", r, answers)
		}
	}
	var rows []Row
	out := func(name string, metrics ...string) {
		for _, m := range metrics {
			unit := "ms"
			if m == "exposed / share" {
				unit = ""
			}
			if v := got[[2]string{name, m}]; v != nil {
				rows = append(rows, row("pipeline", name, m, unit, v))
			}
		}
	}
	for _, p := range list {
		out(p.Name, "compute", "transfer", "share", "exposed", "exposed / share", "import", "exposed by import", "ttft")
	}
	if single != nil {
		out(single.Name, "ttft")
	}
	return rows, nil
}

// once is one request and what it added to the workers' metrics.
func (p *Pipeline) once(ctx context.Context, seed uint64) (figures map[string]float64, text string, err error) {
	before, err := p.figures(ctx)
	if err != nil {
		return nil, "", err
	}
	t := p.stream(ctx, p.prompt(seed, p.Chunks*p.Tokens+1), 8)
	if t.Err != nil {
		return nil, "", t.Err
	}
	// The prefill side learns of its room's success about when the client has its answer.
	ctx, stop := context.WithTimeout(ctx, 10*time.Second)
	defer stop()
	for {
		after, err := p.figures(ctx)
		if err != nil {
			return nil, "", err
		}
		if after["rooms"] > before["rooms"] {
			d := make(map[string]float64)
			for k := range after {
				d[k] = 1000 * (after[k] - before[k])
			}
			delete(d, "rooms")
			d["ttft"] = ms(t.TTFT())
			d["share"] = d["transfer"] / float64(p.Chunks*p.Parts)
			d["exposed / share"] = d["exposed"] / d["share"]
			return d, t.Text, nil
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return nil, "", fmt.Errorf("the prefill worker did not count the request's room: %w", err)
		}
	}
}

func (p *Pipeline) figures(ctx context.Context) (map[string]float64, error) {
	out := make(map[string]float64)
	var err error
	if out["rooms"], err = p.Prefill(ctx, "baton_kv_exposed_transfer_seconds_count"); err != nil {
		return nil, err
	}
	for _, f := range pipelineFigures {
		from := p.Decode
		if f.prefill {
			from = p.Prefill
		}
		for _, c := range f.counters {
			v, err := from(ctx, c)
			if err != nil {
				return nil, err
			}
			out[f.name] += v
		}
	}
	return out, nil
}
