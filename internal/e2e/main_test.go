// Package e2e tests Baton as it is deployed: real processes of the real binary, on
// the real model where it says so, killed, stopped and cut while clients wait.
package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/stack"
)

// binary is the baton under test, built by TestMain; binaryRace the same with -race.
var binary, binaryRace string

// prove asks for the long forms.
var prove = os.Getenv("BATON_PROVE") != ""

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	dir, err := os.MkdirTemp("", "baton-e2e-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	binary, binaryRace = filepath.Join(dir, "baton"), filepath.Join(dir, "baton-race")
	for out, args := range map[string][]string{binary: nil, binaryRace: {"-race"}} {
		cmd := exec.Command("go", append(append([]string{"build"}, args...), "-o", out, "github.com/baton-pd/baton/cmd/baton")...)
		if msg, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build baton: %v\n%s", err, msg)
			return 1
		}
	}
	return m.Run()
}

// needModel skips unless `baton setup` has been run.
func needModel(t *testing.T) setup.Paths {
	t.Helper()
	p, err := setup.Locate("")
	if err != nil {
		t.Skipf("the real model is needed: %v; run `make setup`", err)
	}
	return p
}

// start runs a stack for the length of the test; its output is shown on failure.
func start(t *testing.T, c stack.Config) *stack.Stack {
	t.Helper()
	if c.Binary == "" {
		c.Binary = binary
	}
	ctx, stop := context.WithTimeout(t.Context(), 90*time.Second)
	defer stop()
	s, err := stack.Start(ctx, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		if c.TraceDir != "" {
			checkTraces(t, s)
		}
		if t.Failed() {
			for _, p := range s.All() {
				out := p.Output()
				if len(out) > 8000 {
					out = "..." + out[len(out)-8000:]
				}
				t.Logf("--- %s (%v)\n%s", p.Name, p.Err(), out)
			}
		}
		for _, p := range s.All() {
			if bytes.Contains([]byte(p.Output()), []byte("DATA RACE")) {
				t.Errorf("%s: data race\n%s", p.Name, p.Output())
			}
		}
	})
	return s
}

// answer is how a request ended.
type answer struct {
	Status int
	Text   string
	Tokens []int64
	Finish string
	Done   bool // the stream ended with [DONE]
	Cause  *room.Cause
	Raw    string // error body
	Err    error  // transport-level end: the connection broke, or the client's own deadline
	Took   time.Duration
}

// ok reports a complete success.
func (a answer) ok() bool { return a.Err == nil && a.Cause == nil && a.Status == 200 && a.Finish != "" }

func (a answer) String() string {
	return fmt.Sprintf("status %d finish %q done %v cause %v err %v after %v %s", a.Status, a.Finish, a.Done, a.Cause, a.Err, a.Took.Round(time.Millisecond), a.Raw)
}

// post sends body as JSON; the caller closes the answer's body.
func post(ctx context.Context, url string, body any, header ...string) (*http.Response, error) {
	raw, ok := body.([]byte)
	if !ok {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			return nil, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return http.DefaultClient.Do(req)
}

// complete asks /v1/completions for a streamed greedy answer to prompt (text or
// tokens). first, if not nil, is called at the first event.
func complete(ctx context.Context, url string, prompt any, maxTokens int, first func(), header ...string) answer {
	began := time.Now()
	a := stream(ctx, url, map[string]any{"prompt": prompt, "max_tokens": maxTokens, "temperature": 0, "stream": true, "ignore_eos": true}, first, header...)
	a.Took = time.Since(began)
	return a
}

func stream(ctx context.Context, url string, body map[string]any, first func(), header ...string) (a answer) {
	res, err := post(ctx, url+"/v1/completions", body, header...)
	if err != nil {
		a.Err = err
		return a
	}
	defer res.Body.Close()
	a.Status = res.StatusCode
	if res.StatusCode != http.StatusOK {
		raw, err := io.ReadAll(res.Body)
		a.Raw, a.Err = string(raw), err
		a.Cause = causeOf(raw)
		return a
	}
	events := openai.NewEventReader(res.Body, 0)
	for {
		data, err := events.Next()
		if err != nil {
			if !errors.Is(err, io.EOF) || (a.Cause == nil && !a.Done) {
				a.Err = err
			}
			return a
		}
		if first != nil {
			first()
			first = nil
		}
		if string(data) == openai.DoneData {
			a.Done = true
			return a
		}
		var e struct {
			Error   json.RawMessage `json:"error"`
			Choices []struct {
				Text   string `json:"text"`
				Finish string `json:"finish_reason"`
			} `json:"choices"`
		}
		if err := json.Unmarshal(data, &e); err != nil {
			a.Err = fmt.Errorf("event %q: %w", data, err)
			return a
		}
		if e.Error != nil {
			a.Raw = string(data)
			a.Cause = causeOf(data)
		}
		for _, c := range e.Choices {
			a.Text += c.Text
			if c.Finish != "" {
				a.Finish = c.Finish
			}
		}
	}
}

// causeOf reads an error object; nil if raw is none or names no cause.
func causeOf(raw []byte) *room.Cause {
	var e struct {
		Error struct {
			Message   string `json:"message"`
			Cause     string `json:"cause"`
			Phase     string `json:"phase"`
			Retryable bool   `json:"retryable"`
		} `json:"error"`
	}
	if json.Unmarshal(raw, &e) != nil || e.Error.Cause == "" {
		return nil
	}
	return &room.Cause{Code: room.Code(e.Error.Cause), Phase: e.Error.Phase, Detail: e.Error.Message, Retryable: e.Error.Retryable}
}
