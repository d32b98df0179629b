package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

func TestReportedK12FirstToken(t *testing.T) {
	kind(t, map[string]func(*testing.T){"the same answer as one process": sameAnswerAsOneProcess})
}

func TestReportedK13FalseEnd(t *testing.T) {
	kind(t, map[string]func(*testing.T){"decode is killed after three tokens": decodeKilledAfterThreeTokens})
}

// personal is what differs from one request to the next.
var personal = regexp.MustCompile(`"(id|created|e2e_latency|[a-z_]*_time|[a-z_]*latency)":("[^"]*"|[0-9.e+-]+)`)

// whole answer of url: its status and body without what is personal.
func wholeAnswer(ctx context.Context, url string, body map[string]any) (string, error) {
	res, err := post(ctx, url, body)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	return fmt.Sprintf("%d %s", res.StatusCode, personal.ReplaceAll(raw, []byte(`"$1":0`))), err
}

// sameAnswerAsOneProcess is K12: whatever ends an answer at its first token, the whole HTTP answer through router, prefill
// and decode is that of one process that does everything, to the byte.
func sameAnswerAsOneProcess(t *testing.T) {
	const length = simChunk + 1
	model := fmt.Sprintf("eos-at=%d", length-1)
	pd, m := startSim(t, simSetup{transport: "shm", model: model})
	one := start(t, stack.Config{Binary: binaryRace, Decode: 1, Monolithic: true,
		Args: []string{"--engine", "sim", "--chunk", fmt.Sprint(simChunk), "--sim", model, "--max-running", "8"}})
	var tokens []engine.Token
	var first byte
	for seed := 1; first < '!' || first > '~'; seed++ { // a first token that reads as a stop string
		tokens = prompt(seed, length)
		first = byte(sim.Expected(sim.Config(m), tokens, 1, engine.Sampling{IgnoreEOS: true})[0] - 3)
	}
	stop := string(rune(first))
	with := func(more map[string]any) map[string]any {
		b := map[string]any{"temperature": 0, "max_tokens": 20, "prompt": tokens}
		maps.Copy(b, more)
		return b
	}
	generate := func(more map[string]any) map[string]any {
		p := map[string]any{"temperature": 0, "max_new_tokens": 20}
		maps.Copy(p, more)
		return map[string]any{"input_ids": tokens, "sampling_params": p, "return_logprob": true}
	}
	chat := map[string]any{"messages": []map[string]string{{"role": "user", "content": "hi"}}, "temperature": 0, "max_tokens": 1, "ignore_eos": true, "logprobs": true, "top_logprobs": 2}
	for _, c := range []struct {
		name, path string
		body       map[string]any
		says       string
	}{
		{"eos", "/v1/completions", with(nil), `"text":"","logprobs":null,"finish_reason":"stop"`},
		{"eos, logprobs", "/v1/completions", with(map[string]any{"logprobs": 2}), `"finish_reason":"stop"`},
		{"eos, echo", "/v1/completions", with(map[string]any{"echo": true}), `"finish_reason":"stop"`},
		{"eos of two choices", "/v1/completions", with(map[string]any{"n": 2}), `"finish_reason":"stop"`},
		{"length", "/v1/completions", with(map[string]any{"max_tokens": 1, "ignore_eos": true, "logprobs": 2}), `"finish_reason":"length"`},
		{"length, sampled with penalties", "/v1/completions", with(map[string]any{"max_tokens": 1, "ignore_eos": true, "temperature": 1, "seed": 5, "frequency_penalty": 1, "presence_penalty": 1}), `"finish_reason":"length"`},
		{"stop string", "/v1/completions", with(map[string]any{"stop": stop, "ignore_eos": true}), `"finish_reason":"stop"`},
		{"chat, length", "/v1/chat/completions", chat, `"finish_reason":"length"`},
		{"generate, eos", "/generate", generate(nil), `"type":"stop"`},
		{"generate, stop string", "/generate", generate(map[string]any{"stop": stop, "ignore_eos": true}), `"type":"stop"`},
		{"generate, length", "/generate", generate(map[string]any{"max_new_tokens": 1, "ignore_eos": true}), `"type":"length"`},
	} {
		for _, streamed := range []bool{false, true} {
			c.body["stream"] = streamed
			a, err := wholeAnswer(t.Context(), pd.URL()+c.path, c.body)
			b, err2 := wholeAnswer(t.Context(), one.URL()+c.path, c.body)
			if err != nil || err2 != nil || a != b {
				t.Errorf("%s, stream %v:\ntwo workers: %s (%v)\none process: %s (%v)", c.name, streamed, a, err, b, err2)
			}
			if !strings.HasPrefix(a, "200 ") || !strings.Contains(a, c.says) || streamed && strings.Count(a, "[DONE]") != 1 {
				t.Errorf("%s, stream %v: %s does not say %s", c.name, streamed, a, c.says)
			}
		}
	}
	quiet(t, pd)
}

// cut is how a stream ended that was not to end well.
type cut struct {
	path string
	body []byte
	err  error // of reading
	at   time.Time
}

// follow reads a stream, tells begun at its fourth event, and goes on to the end.
func follow(ctx context.Context, url, path string, body map[string]any, begun chan<- string) cut {
	c := cut{path: path}
	res, err := post(ctx, url+path, body)
	if err != nil {
		c.err = err
		return c
	}
	defer res.Body.Close()
	var all bytes.Buffer
	events := openai.NewEventReader(io.TeeReader(res.Body, &all), 0)
	for n := 1; c.err == nil; n++ {
		if _, c.err = events.Next(); n == 4 && c.err == nil {
			begun <- path
		}
	}
	c.body, c.at = all.Bytes(), time.Now()
	return c
}

// decodeKilledAfterThreeTokens is K13: what has begun ends with one error event and a broken body, never with [DONE] or
// a finish reason; what has not begun is an error status.
func decodeKilledAfterThreeTokens(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", cost: "step=30ms"})
	serves(t, s, m, 1, 2, simChunk+1, 4)
	begun, cuts := make(chan string, 8), make(chan cut, 8)
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	streams := map[string]map[string]any{
		"/v1/completions":      {"prompt": prompt(2, simChunk), "max_tokens": 300, "ignore_eos": true, "stream": true},
		"/v1/chat/completions": {"messages": []map[string]string{{"role": "user", "content": "hi"}}, "max_tokens": 300, "ignore_eos": true, "stream": true},
		"/generate":            {"text": "hi", "sampling_params": map[string]any{"max_new_tokens": 300, "ignore_eos": true}, "stream": true},
	}
	for path, body := range streams {
		go func() { cuts <- follow(ctx, s.URL(), path, body, begun) }()
	}
	whole := ask(t, s, 3, simChunk, 300, false)
	for range streams {
		select {
		case <-begun:
		case c := <-cuts:
			t.Fatalf("%s ended early: %v %s", c.path, c.err, c.body)
		}
	}
	whole.at(func(p, d *workerInfo) bool { return d.State.Running == 4 })
	killed := time.Now()
	s.Decodes[0].Kill()
	for range streams {
		c := <-cuts
		if !errors.Is(c.err, io.ErrUnexpectedEOF) || c.at.Sub(killed) > toldWithin {
			t.Errorf("%s ended with %v, %v after the kill", c.path, c.err, c.at.Sub(killed))
		}
		last := c.body[bytes.LastIndex(bytes.TrimSpace(c.body), []byte("data: "))+len("data: "):]
		if cause := causeOf(last); cause == nil || cause.Code != room.CodePeerLost || bytes.Count(c.body, []byte(`{"error":`)) != 1 {
			t.Errorf("%s: the last event is %s", c.path, last)
		}
		for _, lie := range []string{"[DONE]", `"finish_reason":"`, `"finish_reason":{`} {
			if bytes.Contains(c.body, []byte(lie)) {
				t.Errorf("%s says %s: %s", c.path, lie, c.body)
			}
		}
	}
	if a := <-whole.ended; a.Status != http.StatusBadGateway || a.Cause == nil || a.Cause.Code != room.CodePeerLost || a.Text != "" {
		t.Errorf("the answer that had not begun: %v", a)
	}
	if err := s.Decodes[0].Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	usable(t, s)
	serves(t, s, m, 4, 2, simChunk+1, 4)
	quiet(t, s)
}
