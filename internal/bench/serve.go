// Package bench measures Baton as its users would: whole requests against real
// processes ([TTFT], [Decode], [Interference]) and the lifecycle core alone ([Lifecycle]). Absolute times
// depend on the machine; ratios within one run are what to compare.
package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

// Target is an OpenAI-compatible endpoint under test.
type Target struct {
	Name   string
	URL    string // without /v1
	Bytes  bool   // tokens are bytes (sim): prompts are token ids
	client openai.Client
	model  string
}

// NewTarget asks url for its model.
func NewTarget(ctx context.Context, name, url string) (*Target, error) {
	t := &Target{Name: name, URL: url,
		client: openai.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))}
	models, err := t.client.Models.List(ctx)
	if err != nil {
		return nil, fmt.Errorf("%s at %s: list models: %w", name, url, err)
	}
	if len(models.Data) == 0 {
		return nil, fmt.Errorf("%s at %s serves no model", name, url)
	}
	t.model = models.Data[0].ID
	return t, nil
}

// Trace is one streamed answer as the client saw it.
type Trace struct {
	Start time.Time
	Marks []time.Time // arrival of each event with text
	Text  string
	Err   error
}

// TTFT is the time to the first token.
func (t Trace) TTFT() time.Duration {
	if len(t.Marks) == 0 {
		return 0
	}
	return t.Marks[0].Sub(t.Start)
}

// Gaps are the times between events.
func (t Trace) Gaps() []time.Duration {
	var out []time.Duration
	for i := 1; i < len(t.Marks); i++ {
		out = append(out, t.Marks[i].Sub(t.Marks[i-1]))
	}
	return out
}

// words are common English words, each one token in the vocabularies of most models.
var words = strings.Fields("the of and to in is was for on that with as it at by from this have an are not or be which one had were all can has " +
	"there when more out up into time some could them see other then now look only come over think also back after use two how our work first well way even new want")

// prompt makes a pseudo-random prompt of about n tokens: words, so that the answer is plain text and
// nearly every token is an event of its own (a token that is part of a character is held back until
// the character is whole, and would not be seen here). For the sim engine, whose tokens are bytes, n tokens.
func (t *Target) prompt(seed uint64, n int) openai.CompletionNewParamsPromptUnion {
	r := rand.New(rand.NewPCG(seed, 7))
	if t.Bytes {
		ids := make([]int64, n)
		for i := range ids {
			ids[i] = 20 + r.Int64N(200)
		}
		return openai.CompletionNewParamsPromptUnion{OfArrayOfTokens: ids}
	}
	out := make([]string, n)
	for i := range out {
		out[i] = words[r.IntN(len(words))]
	}
	return openai.CompletionNewParamsPromptUnion{OfString: openai.String(strings.Join(out, " "))}
}

// stream sends one greedy completion of maxTokens tokens, never ended by EOS.
func (t *Target) stream(ctx context.Context, prompt openai.CompletionNewParamsPromptUnion, maxTokens int) Trace {
	tr := Trace{Start: time.Now()}
	s := t.client.Completions.NewStreaming(ctx, openai.CompletionNewParams{
		Model:       openai.CompletionNewParamsModel(t.model),
		Prompt:      prompt,
		MaxTokens:   openai.Int(int64(maxTokens)),
		Temperature: openai.Float(0),
	}, option.WithJSONSet("ignore_eos", true))
	defer s.Close()
	finished := false
	for s.Next() {
		for _, c := range s.Current().Choices {
			if c.Text != "" || c.FinishReason == "" {
				tr.Marks = append(tr.Marks, time.Now())
			}
			tr.Text += c.Text
			finished = finished || c.FinishReason != ""
		}
	}
	tr.Err = s.Err()
	if tr.Err == nil && !finished {
		tr.Err = errors.New("stream ended without a finish reason")
	}
	return tr
}

// Quantile of sorted or unsorted durations; 0 for none.
func Quantile(d []time.Duration, q float64) time.Duration {
	if len(d) == 0 {
		return 0
	}
	s := slices.Clone(d)
	slices.Sort(s)
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

// Row is one figure.
type Row struct {
	Work   string  `json:"work"`
	Target string  `json:"target"`
	Metric string  `json:"metric"`
	Value  float64 `json:"value"`
	Min    float64 `json:"min"`
	Max    float64 `json:"max"`
	Unit   string  `json:"unit"`
	N      int     `json:"n"`
}

func row(work, target, metric, unit string, values []float64) Row {
	s := slices.Clone(values)
	slices.Sort(s)
	r := Row{Work: work, Target: target, Metric: metric, Unit: unit, N: len(s)}
	if len(s) > 0 {
		r.Value, r.Min, r.Max = s[len(s)/2], s[0], s[len(s)-1]
	}
	return r
}

// TTFT measures the time to the first token for prompts of the given lengths, one
// request at a time, targets in turn; the median of rounds.
func TTFT(ctx context.Context, targets []*Target, lengths []int, rounds int) ([]Row, error) {
	var rows []Row
	for _, n := range lengths {
		got := make(map[string][]float64)
		for r := range rounds {
			for _, t := range targets {
				tr := t.stream(ctx, t.prompt(uint64(n*1000+r), n), 2)
				if tr.Err != nil {
					return rows, fmt.Errorf("%s, prompt of %d tokens: %w", t.Name, n, tr.Err)
				}
				got[t.Name] = append(got[t.Name], ms(tr.TTFT()))
			}
		}
		for _, t := range targets {
			rows = append(rows, row(fmt.Sprintf("ttft %d", n), t.Name, "ttft", "ms", got[t.Name]))
		}
	}
	return rows, nil
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// Decode measures tokens per second over all streams at each concurrency, from the
// moment when all streams run until the first of them ends.
func Decode(ctx context.Context, targets []*Target, concurrency []int, tokens, rounds int) ([]Row, error) {
	var rows []Row
	for _, c := range concurrency {
		rate := make(map[string][]float64)
		gap := make(map[string][]float64)
		for r := range rounds {
			for _, t := range targets {
				traces, err := together(ctx, t, c, tokens, uint64(r))
				if err != nil {
					return rows, fmt.Errorf("%s at concurrency %d: %w", t.Name, c, err)
				}
				tps, p50 := window(traces, tokens)
				if tps == 0 {
					return rows, fmt.Errorf("%s at concurrency %d: the first stream ended before all ran: %d tokens a stream are too few", t.Name, c, tokens)
				}
				rate[t.Name] = append(rate[t.Name], tps)
				gap[t.Name] = append(gap[t.Name], p50)
			}
		}
		for _, t := range targets {
			rows = append(rows,
				row(fmt.Sprintf("decode c=%d", c), t.Name, "tokens", "1/s", rate[t.Name]),
				row(fmt.Sprintf("decode c=%d", c), t.Name, "gap p50", "ms", gap[t.Name]))
		}
	}
	return rows, nil
}

// together runs c streams at once.
func together(ctx context.Context, t *Target, c, tokens int, seed uint64) ([]Trace, error) {
	traces := make([]Trace, c)
	var wg sync.WaitGroup
	for i := range c {
		wg.Go(func() { traces[i] = t.stream(ctx, t.prompt(seed*100+uint64(i), 16), tokens) })
	}
	wg.Wait()
	for _, tr := range traces {
		if tr.Err != nil {
			return nil, tr.Err
		}
	}
	return traces, nil
}

// window is the rate of tokens while all streams run, each of which gave tokens of them in
// perhaps fewer events, and the median gap between events. The rate is 0 if they never all ran.
func window(traces []Trace, tokens int) (perSecond, gapP50 float64) {
	var from, to time.Time
	for _, t := range traces {
		if first := t.Marks[0]; first.After(from) {
			from = first
		}
		if last := t.Marks[len(t.Marks)-1]; to.IsZero() || last.Before(to) {
			to = last
		}
	}
	n := 0.0
	var gaps []time.Duration
	for _, t := range traces {
		perEvent := float64(tokens) / float64(len(t.Marks))
		for _, m := range t.Marks {
			if m.After(from) && !m.After(to) {
				n += perEvent
			}
		}
		gaps = append(gaps, t.Gaps()...)
	}
	if d := to.Sub(from).Seconds(); d > 0 {
		perSecond = n / d
	}
	return perSecond, ms(Quantile(gaps, 0.5))
}

// Interference runs 2 streams and lets 3 prompts of longTokens arrive every apart; it
// reports the gaps of the running streams from the first arrival to the last
// long prompt's first token, and the long prompts' times to it.
func Interference(ctx context.Context, t *Target, longTokens int, apart time.Duration) ([]Row, error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	running := make([]Trace, 2)
	var wg sync.WaitGroup
	runCtx, endRunning := context.WithCancel(ctx)
	defer endRunning()
	for i := range running {
		wg.Go(func() { running[i] = t.stream(runCtx, t.prompt(uint64(i), 32), 4000) })
	}
	if err := pause(ctx, 2*time.Second); err != nil {
		return nil, err
	}
	long := make([]Trace, 3)
	var arrivals sync.WaitGroup
	from := time.Now()
	for i := range long {
		arrivals.Go(func() { long[i] = t.stream(ctx, t.prompt(uint64(100+i), longTokens), 2) })
		if i < len(long)-1 {
			if err := pause(ctx, apart); err != nil {
				return nil, err
			}
		}
	}
	arrivals.Wait()
	to := time.Now()
	endRunning()
	wg.Wait()
	var gaps []time.Duration
	for _, r := range running {
		for i := 1; i < len(r.Marks); i++ {
			if r.Marks[i].After(from) && r.Marks[i-1].Before(to) {
				gaps = append(gaps, r.Marks[i].Sub(r.Marks[i-1]))
			}
		}
	}
	var ttft []float64
	for _, l := range long {
		if l.Err != nil {
			return nil, fmt.Errorf("%s, long prompt: %w", t.Name, l.Err)
		}
		ttft = append(ttft, ms(l.TTFT()))
	}
	if len(gaps) == 0 {
		return nil, fmt.Errorf("%s: the running streams gave no token while the long prompts were served", t.Name)
	}
	work := fmt.Sprintf("2 streams + 3x%d", longTokens)
	one := func(metric string, q float64) Row {
		r := row(work, t.Name, metric, "ms", []float64{ms(Quantile(gaps, q))})
		r.N = len(gaps)
		return r
	}
	return []Row{one("gap p50", .5), one("gap p90", .9), one("gap p99", .99), one("gap max", 1),
		row(work, t.Name, "long ttft", "ms", ttft)}, nil
}

// pause waits on a timer unless ctx ends first.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
