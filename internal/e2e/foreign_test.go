package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/stack"
)

// foreignRouters are the Python packages of SGLang's routers and the versions under test, which
// scripts/router-requirements.txt pins.
var foreignRouters = map[string]string{"sglang_router": "0.3.2", "smg": "1.13.0"}

// needForeignRouters is the interpreter that has both routers.
func needForeignRouters(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../.cache/venv/bin/python")
	for pkg, version := range foreignRouters {
		if err == nil {
			err = exec.CommandContext(t.Context(), path, "-c", fmt.Sprintf("from importlib.metadata import version as v; assert v(%q) == %q", pkg, version)).Run()
		}
	}
	switch {
	case err == nil:
		return path
	case os.Getenv("BATON_NEED_MODEL") != "": // make test: they have been installed
		t.Fatalf("sglang-router and smg are missing: %v", err)
	default:
		t.Skipf("sglang-router and smg are missing (%v); run `make testdeps`", err)
	}
	return ""
}

// foreign is a running router that is not Baton's.
type foreign struct {
	url  string
	stop func()
}

// startForeign runs the router of pkg in front of workers, given by its flags, and waits until it would use all of them.
func startForeign(t *testing.T, python, pkg string, workers int, flags ...string) *foreign {
	t.Helper()
	var addrs [2]string
	for i := range addrs {
		var err error
		if addrs[i], err = stack.FreePort(); err != nil {
			t.Fatal(err)
		}
	}
	_, port, _ := net.SplitHostPort(addrs[0])
	_, metrics, _ := net.SplitHostPort(addrs[1])
	log, err := os.Create(filepath.Join(t.TempDir(), pkg+".log"))
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(python, append([]string{"testdata/pd_router.py", pkg, "--pd-disaggregation", "--host", "127.0.0.1", "--port", port,
		"--prometheus-host", "127.0.0.1", "--prometheus-port", metrics, "--worker-startup-check-interval", "1", "--policy", "round_robin",
		"--health-check-interval-secs", "1", "--health-success-threshold", "1", "--health-failure-threshold", "1", "--log-level", "warn"}, flags...)...)
	cmd.Stdout, cmd.Stderr = log, log
	lifeline, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	f := &foreign{url: "http://" + addrs[0], stop: func() {
		_ = lifeline.Close() // its watcher ends, and kills it
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // says that it was killed
	}}
	t.Cleanup(func() {
		f.stop()
		log.Close()
		if out, _ := os.ReadFile(log.Name()); t.Failed() {
			t.Logf("--- %s\n%s", pkg, out[max(0, len(out)-6000):])
		}
	})
	eventually(t, time.Minute, func(ctx context.Context) error {
		var ready struct {
			Status  string
			Healthy int `json:"healthy_workers"`
		}
		err := getJSON(ctx, f.url+"/readiness", &ready)
		if err == nil && (ready.Status != "ready" || ready.Healthy != workers) {
			err = fmt.Errorf("%s: %+v, want %d workers", pkg, ready, workers)
		}
		return err
	})
	return f
}

func getJSON(ctx context.Context, url string, out any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	return json.NewDecoder(res.Body).Decode(out)
}

// behind are the flags of either router for the workers of s.
func behind(s *stack.Stack) (flags []string) {
	for _, p := range s.Prefills {
		_, port, _ := net.SplitHostPort(p.Bootstrap)
		flags = append(flags, "--prefill", p.URL(), port)
	}
	for _, d := range s.Decodes {
		flags = append(flags, "--decode", d.URL())
	}
	return flags
}

// pair asks a prefill and a decode worker for the same room, as a router does, and returns the answer.
func pair(ctx context.Context, p, d *stack.Process, room uint64, body map[string]any) (*folded, error) {
	host, port, err := net.SplitHostPort(p.Bootstrap)
	if err != nil {
		return nil, err
	}
	sent := maps.Clone(body)
	sent["bootstrap_host"], sent["bootstrap_port"], sent["bootstrap_room"] = host, json.Number(port), room
	ended := make(chan error, 1)
	go func() {
		_, err := fold(ctx, p.URL()+"/generate", sent, nil)
		ended <- err
	}()
	answer, err := fold(ctx, d.URL()+"/generate", sent, nil)
	return answer, errors.Join(err, <-ended)
}

// folded is an answer of any of the three endpoints, streamed or not, without what differs between two runs.
type folded struct {
	Choices     []foldedChoice
	Usage       [2]int // tokens of prompt and answer
	Done        bool   // a stream ended with [DONE]
	foldedError error
}

type foldedChoice struct{ Text, Finish string }

// foldedPart is one answer or event.
type foldedPart struct {
	Error   json.RawMessage
	Choices []struct {
		Index          int
		Text           string
		Delta, Message struct{ Content string }
		Finish         string `json:"finish_reason"`
	}
	Usage *foldedUsage
	// Of /generate:
	Index int
	Text  *string // all of it so far
	Meta  struct {
		Finish *struct{ Type string } `json:"finish_reason"`
		foldedUsage
	} `json:"meta_info"`
}

type foldedUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
}

func (f *folded) choice(i int) *foldedChoice {
	for len(f.Choices) <= i {
		f.Choices = append(f.Choices, foldedChoice{})
	}
	return &f.Choices[i]
}

// add takes an answer or event.
func (f *folded) add(p foldedPart, raw []byte) {
	if p.Error != nil {
		f.foldedError = errors.Join(f.foldedError, fmt.Errorf("error in the answer: %s", raw))
	}
	for _, c := range p.Choices {
		to := f.choice(c.Index)
		to.Text += c.Text + c.Delta.Content + c.Message.Content
		to.Finish += c.Finish
	}
	if p.Usage != nil {
		f.Usage = [2]int{p.Usage.Prompt, p.Usage.Completion}
	}
	if p.Text != nil && p.Choices == nil {
		f.choice(p.Index).Text = *p.Text
		f.Usage = [2]int{p.Meta.Prompt, p.Meta.Completion} // of the last one: all prompts of a test's batch are of one length
		if p.Meta.Finish != nil {
			f.choice(p.Index).Finish += p.Meta.Finish.Type
		}
	}
}

// fold asks and folds the answer; first, if not nil, is called at a stream's first event. The error says how an
// answer ended that is not complete and good.
func fold(ctx context.Context, url string, body map[string]any, first func()) (*folded, error) {
	res, err := post(ctx, url, body)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		raw, err := io.ReadAll(res.Body)
		return nil, errors.Join(fmt.Errorf("status %d: %s", res.StatusCode, raw), err)
	}
	f := &folded{}
	if body["stream"] != true {
		raw, err := io.ReadAll(res.Body)
		if err != nil {
			return nil, err
		}
		parts := make([]foldedPart, 1)
		if raw[0] == '[' {
			err = json.Unmarshal(raw, &parts)
		} else {
			err = json.Unmarshal(raw, &parts[0])
		}
		for i, p := range parts {
			if raw[0] == '[' {
				p.Index = i
			}
			f.add(p, raw)
		}
		f.Done = true
		return f, errors.Join(err, f.foldedError)
	}
	events := openai.NewEventReader(res.Body, 0)
	for {
		data, err := events.Next()
		if err != nil {
			if errors.Is(err, io.EOF) && f.Done {
				err = nil
			}
			return f, errors.Join(f.foldedError, err)
		}
		if first != nil {
			first()
			first = nil
		}
		if bytes.Equal(data, []byte(openai.DoneData)) {
			f.Done = true
			continue
		}
		var p foldedPart
		if err := json.Unmarshal(data, &p); err != nil {
			return f, fmt.Errorf("event %q: %w", data, err)
		}
		f.add(p, data)
	}
}
