package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/stack"
)

// streamed is a streaming request.
type streamed struct {
	path string
	body map[string]any
}

// seen is a stream as its client saw it: the events' data without names and times, which two requests do not share.
type seen struct {
	events []string
	names  []string // different ids and creation times; two in a sound stream, of /generate one
}

var (
	names  = regexp.MustCompile(`"(id|created)":("[^"]*"|[0-9]+)`)
	clocks = regexp.MustCompile(`"(id|created|e2e_latency)":("[^"]*"|[0-9.e-]+)`)
)

// followStream reads a stream to its [DONE]. at is told the number of events so far.
func followStream(ctx context.Context, url string, a streamed, at func(n int)) (s seen, err error) {
	res, err := post(ctx, url+a.path, a.body)
	if err != nil {
		return s, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		raw, _ := io.ReadAll(res.Body)
		return s, fmt.Errorf("%s: %s", res.Status, raw)
	}
	r := openai.NewEventReader(res.Body, 0)
	for {
		data, err := r.Next()
		if err != nil {
			return s, fmt.Errorf("after %d events: %w", len(s.events), err)
		}
		if string(data) == openai.DoneData {
			return s, nil
		}
		if strings.HasPrefix(string(data), `{"error"`) {
			return s, fmt.Errorf("after %d events: %s", len(s.events), data)
		}
		for _, n := range names.FindAllString(string(data), -1) {
			if !slices.Contains(s.names, n) {
				s.names = append(s.names, n)
			}
		}
		s.events = append(s.events, clocks.ReplaceAllString(string(data), `"$1":0`))
		at(len(s.events))
	}
}

// differs says where two streams part; "": nowhere.
func (s seen) differs(want seen) string {
	for i := range max(len(s.events), len(want.events)) {
		switch {
		case i >= len(s.events):
			return fmt.Sprintf("event %d is missing: %s", i, want.events[i])
		case i >= len(want.events):
			return fmt.Sprintf("event %d is too much: %s", i, s.events[i])
		case s.events[i] != want.events[i]:
			return fmt.Sprintf("event %d is %s\nundisturbed  %s", i, s.events[i], want.events[i])
		}
	}
	if len(s.names) != len(want.names) {
		return fmt.Sprintf("names %v, undisturbed %v", s.names, want.names)
	}
	return ""
}

// interrupt runs all requests at once, hits the victim when each has had enough events, and compares them with undisturbed runs. It returns
// how many streams went on elsewhere.
func interrupt(t *testing.T, s *stack.Stack, requests []streamed, want []seen, enough int, hit func()) float64 {
	t.Helper()
	before, _ := metric(t.Context(), s.Router, "baton_router_resume_seconds_count")
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	defer stop()
	var ready, all sync.WaitGroup
	begun := make(chan struct{}) // closed by hit's turn: no stream may be over before
	for i, a := range requests {
		ready.Add(1)
		all.Go(func() {
			once := sync.OnceFunc(ready.Done)
			defer once()
			got, err := followStream(ctx, s.URL(), a, func(n int) {
				if n == enough {
					once()
					<-begun // the worker may go on for some tokens meanwhile: what they fill is far from full
				}
			})
			if err != nil {
				t.Errorf("request %d, %s: %v", i, a.path, err)
			} else if d := got.differs(want[i]); d != "" {
				t.Errorf("request %d, %s: %s", i, a.path, d)
			}
		})
		dealt(t, s, i+1)
	}
	ready.Wait()
	hit()
	close(begun)
	all.Wait()
	after, err := metric(t.Context(), s.Router, "baton_router_resume_seconds_count")
	if err != nil {
		t.Fatal(err)
	}
	return after - before
}

// dealt waits until n requests have their decode workers, so that they are dealt out in order.
func dealt(t *testing.T, s *stack.Stack, n int) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		raw, err := s.Router.Get(ctx, "/workers")
		if err != nil {
			return err
		}
		var all struct {
			Workers []struct {
				Leg      string
				Inflight int
			}
		}
		if err := json.Unmarshal(raw, &all); err != nil {
			return err
		}
		legs := 0
		for _, w := range all.Workers {
			if w.Leg == "decode" {
				legs += w.Inflight
			}
		}
		if legs < n {
			return fmt.Errorf("%d of %d requests are at decode workers", legs, n)
		}
		return nil
	})
}

// undisturbed runs each request alone.
func undisturbed(t *testing.T, s *stack.Stack, requests []streamed) (out []seen) {
	t.Helper()
	for i, a := range requests {
		got, err := followStream(t.Context(), s.URL(), a, func(int) {})
		if err != nil || len(got.events) < 10 || len(got.names) > 2 {
			t.Fatalf("request %d, %s: %d events, names %v, %v", i, a.path, len(got.events), got.names, err)
		}
		out = append(out, got)
	}
	return out
}

// revive brings a decode worker back, however it was hit, and waits until the router uses it.
func revive(t *testing.T, s *stack.Stack, p *stack.Process) {
	t.Helper()
	p.Kill()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if err := p.Start(ctx); err != nil {
		t.Fatal(err)
	}
	eventually(t, settleTime, func(ctx context.Context) error {
		raw, err := s.Router.Get(ctx, "/workers")
		if err == nil && strings.Count(string(raw), `"state":"up"`) < len(s.Prefills)+len(s.Decodes) {
			err = fmt.Errorf("not all are up: %s", raw)
		}
		return err
	})
}

// resumeRound kills one decode worker and then stops the other, each in the middle of the requests' streams.
func resumeRound(t *testing.T, s *stack.Stack, requests []streamed, enough int) {
	want := undisturbed(t, s, requests)
	for i, how := range []struct {
		name string
		hit  func(p *stack.Process)
	}{
		{"killed", func(p *stack.Process) { p.Kill() }},
		{"stopped", func(p *stack.Process) {
			if err := p.Signal(syscall.SIGSTOP); err != nil {
				t.Error(err)
			}
		}},
	} {
		victim := s.Decodes[i]
		began := time.Now()
		n := interrupt(t, s, requests, want, enough, func() { how.hit(victim) })
		t.Logf("%s %s: %v of %d streams went on elsewhere, all over after %v", victim.Name, how.name, n, len(requests), time.Since(began).Round(time.Millisecond))
		if n < 1 {
			t.Errorf("%s %s: no stream went on elsewhere; the test shows nothing", victim.Name, how.name)
		}
		revive(t, s, victim)
	}
	waitIdle(t, s, settleTime)
}

// TestResumeSim: a decode worker is killed, then another stopped, in the middle of 12 streams of all kinds; every client sees the
// undisturbed stream, event by event.
func TestResumeSim(t *testing.T) {
	s, _ := startSim(t, simSetup{
		transport: "tcp", prefills: 2, decodes: 2, model: "seed=5", cost: "prefill-chunk=2ms,step=4ms",
		router: []string{"--resume", "--max-resumes", "20", "--inter-token-timeout", "2s"},
	})
	usable(t, s)
	const max = 250
	var requests []streamed
	for i := range 4 {
		sampling := map[string]any{"temperature": float64(i % 2), "seed": 7 + i, "top_p": 0.95, "ignore_eos": true, "frequency_penalty": 0.3 * float64(i/2)}
		with := func(more map[string]any) map[string]any {
			body := map[string]any{"stream": true}
			for _, m := range []map[string]any{sampling, more} {
				for k, v := range m {
					body[k] = v
				}
			}
			return body
		}
		requests = append(requests,
			streamed{"/v1/chat/completions", with(map[string]any{"messages": []map[string]string{{"role": "user", "content": fmt.Sprint("tell me ", i)}}, "max_tokens": max,
				"stream_options": map[string]any{"include_usage": true}, "logprobs": i > 1})},
			streamed{"/v1/completions", with(map[string]any{"prompt": prompt(i, 100+40*i), "max_tokens": max, "logprobs": 2, "stop": []string{"zqzqzq", "never\n"}})},
			streamed{"/generate", map[string]any{"input_ids": prompt(50+i, 10+90*i), "stream": true, "return_logprob": i%2 == 0, "sampling_params": map[string]any{
				"max_new_tokens": max, "temperature": float64(i % 2), "sampling_seed": 3 + i, "ignore_eos": true}}},
		)
	}
	resumeRound(t, s, requests, 20)
}

// TestResumeModel: the same with the real model, greedy and seeded, with logprobs to the last bit. It holds under the conditions of
// TestEquality: one compute thread a worker, equal builds and processors, weights as the default model's.
func TestResumeModel(t *testing.T) {
	needModel(t)
	s := start(t, stack.Config{Prefill: 1, Decode: 2, Args: []string{"--threads", "1", "--transport", "tcp"},
		RouterArgs: []string{"--resume", "--max-resumes", "20", "--inter-token-timeout", "5s", "--decode-policy", "round-robin"}})
	warm(t, s)
	max := 120
	if prove {
		max = 300
	}
	chat := func(text string, more map[string]any) streamed {
		body := map[string]any{"stream": true, "max_tokens": max, "messages": []map[string]string{{"role": "user", "content": text}}, "logprobs": true, "top_logprobs": 2,
			"stream_options": map[string]any{"include_usage": true}, "ignore_eos": true}
		for k, v := range more {
			body[k] = v
		}
		return streamed{"/v1/chat/completions", body}
	}
	// Dealt out in turn: whichever worker is hit, one greedy and one seeded stream go on.
	requests := []streamed{
		chat("Tell me a long story about a fox and the sea.", map[string]any{"temperature": 0}),
		chat("Tell me a long story about a king.", map[string]any{"temperature": 1, "seed": 11, "top_p": 0.9}),
		chat("Write in French about the é and the ü. "+strings.Repeat("Some more words to make it longer. ", 20), map[string]any{"temperature": 1.2, "seed": 12, "top_k": 40, "presence_penalty": 0.5}),
		{"/generate", map[string]any{"text": "The quick brown fox", "stream": true, "return_logprob": true, "top_logprobs_num": 1,
			"sampling_params": map[string]any{"max_new_tokens": max, "temperature": 0, "ignore_eos": true, "stop": []string{"\n\n\n\n"}}}},
	}
	resumeRound(t, s, requests, 12)
	if got, err := metric(t.Context(), s.Router, "baton_router_requests_total"); err != nil || got == 0 {
		t.Error(errors.Join(err, errors.New("nothing was counted")))
	}
}
