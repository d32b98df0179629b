package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/config"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/stack"
	"github.com/baton-pd/baton/internal/supervise"
)

func newDemo(g *globals) *cobra.Command {
	var u upFlags
	c := &cobra.Command{
		Use:   "demo",
		Short: "The short proof: stream an answer, kill the prefill worker under a request, see its error, recover",
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := context.WithTimeout(cmd.Context(), 85*time.Second)
			defer stop()
			return runDemo(ctx, g, &u, cmd.OutOrStdout())
		},
	}
	u.add(c)
	return c
}

// demo drives a running stack.
type demo struct {
	out  io.Writer
	url  string
	mu   sync.Mutex
	pids map[string]int // of live processes
}

func (d *demo) hear(e supervise.Event) {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch e.Kind {
	case supervise.EventStarted:
		d.pids[e.Name] = e.PID
	case supervise.EventExited:
		delete(d.pids, e.Name)
	}
}

func (d *demo) pid(name string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pids[name]
}

// demoSim makes the test engine take its time, as a model does, and fit the long prompt, which
// is some 7000 tokens to it.
const demoSim = "ctx=8192,step=20ms,prefill-token=400us"

func runDemo(ctx context.Context, g *globals, u *upFlags, out io.Writer) error {
	ports, err := config.FreePorts(1)
	if err != nil {
		return err
	}
	u.listen = net.JoinHostPort("127.0.0.1", strconv.Itoa(ports[0]))
	g.logLevel = "warn"
	if u.engineFlags.kind == "sim" && u.simSpec == "" {
		u.simSpec = demoSim
	}
	p, err := u.plan(g)
	if err != nil {
		return err
	}
	d := &demo{out: out, url: "http://" + p.router, pids: make(map[string]int)}
	fmt.Fprintf(out, "1. Starting router, %d prefill and %d decode on free ports (%s)\n", u.prefills, u.decodes, p.note)
	pr := newProgress(out, p)
	pr.hear = d.hear
	return u.supervise(ctx, p, pr, slog.New(slog.DiscardHandler), os.Stderr, d.play)
}

// play is the demonstration; an error means that the promise was not kept.
func (d *demo) play(ctx context.Context) error {
	if err := stack.WaitHealthy(ctx, d.url); err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\n2. One streamed answer, prefill and decode in separate processes:\n   ")
	text, err := d.ask(ctx, "Say hello to the readers of this demo.", 40, nil)
	if err != nil {
		return fmt.Errorf("the first request should have succeeded: %w", err)
	}
	if text == "" {
		return errors.New("the first request gave no text")
	}
	pid := d.pid("prefill-0")
	fmt.Fprintf(d.out, "\n3. A long prompt; the prefill worker (pid %d) is killed with -9 while it computes it:\n   ", pid)
	began := time.Now()
	killed := make(chan error, 1)
	asking, asked := context.WithCancel(ctx)
	defer asked()
	busy := func() { // the prefill worker has the request in its hands
		go func() { killed <- d.killWhenBusy(asking, pid) }()
	}
	_, err = d.ask(ctx, strings.Repeat("Tell me about rivers, mountains and the sea. ", 150), 40, busy)
	took := time.Since(began)
	asked() // an answer before the kill: there is nothing left to kill under
	if kerr := <-killed; kerr != nil {
		return errors.Join(kerr, err)
	}
	var apiErr *apiError
	if !errors.As(err, &apiErr) {
		return fmt.Errorf("the second request should have ended with an error that names its cause, but: %v", err)
	}
	if apiErr.Cause == "" {
		return fmt.Errorf("the error names no cause: %s", apiErr.raw)
	}
	fmt.Fprintf(d.out, "the client got, after %.1f s:\n   HTTP %d %s\n", took.Seconds(), apiErr.status, apiErr.raw)

	fmt.Fprintf(d.out, "\n4. The supervisor restarts the worker; the next request:\n")
	if err := d.waitRestart(ctx, pid); err != nil {
		return err
	}
	if err := stack.WaitHealthy(ctx, d.url); err != nil {
		return err
	}
	fmt.Fprint(d.out, "   ")
	if _, err := d.ask(ctx, "Say hello again.", 40, nil); err != nil {
		return fmt.Errorf("the request after the restart should have succeeded: %w", err)
	}
	fmt.Fprintln(d.out, "\nEvery request ended: two with an answer, one with an error that names its cause.")
	return nil
}

// killWhenBusy kills pid in the middle of a request: 0.8 s after the prefill worker reports a
// room, when some chunks have been sent and more are to come.
func (d *demo) killWhenBusy(ctx context.Context, pid int) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for busy := 0; ; {
		if busy > 0 {
			busy++
		} else if n, err := d.prefillBusy(ctx); err == nil && n > 0 {
			busy = 1
		}
		if busy > 40 {
			return syscall.Kill(pid, syscall.SIGKILL)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.New("the request ended, or time was up, before the prefill worker could be killed under it")
		}
	}
}

// prefillBusy counts live rooms at the prefill workers, through the router's /server_info.
func (d *demo) prefillBusy(ctx context.Context) (int, error) {
	var info struct {
		Prefill []struct {
			Answer struct {
				Rooms struct {
					Live int `json:"live"`
				} `json:"rooms"`
			} `json:"answer"`
		} `json:"prefill"`
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, d.url+"/server_info", nil)
	if err != nil {
		return 0, err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	if err := json.NewDecoder(res.Body).Decode(&info); err != nil {
		return 0, err
	}
	n := 0
	for _, p := range info.Prefill {
		n += p.Answer.Rooms.Live
	}
	return n, nil
}

// waitRestart waits until the prefill worker lives again under another pid.
func (d *demo) waitRestart(ctx context.Context, old int) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if p := d.pid("prefill-0"); p != 0 && p != old {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the prefill worker was not restarted: %w", ctx.Err())
		}
	}
}

// apiError is an answer that is an error, before or inside the stream.
type apiError struct {
	status int
	Cause  string `json:"cause"`
	Msg    string `json:"message"`
	raw    string
}

func (e *apiError) Error() string { return fmt.Sprintf("HTTP %d: %s", e.status, e.raw) }

// ask streams one chat answer to the output; sent is called once the request is on its way.
func (d *demo) ask(ctx context.Context, content string, maxTokens int, sent func()) (string, error) {
	body, err := json.Marshal(map[string]any{
		"messages":   []map[string]string{{"role": "user", "content": content}},
		"max_tokens": maxTokens, "temperature": 0, "stream": true,
	})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("content-type", "application/json")
	if sent != nil {
		sent()
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		raw, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
		if err != nil {
			return "", err
		}
		return "", parseAPIError(res.StatusCode, raw)
	}
	return d.copyStream(res)
}

func parseAPIError(status int, raw []byte) error {
	var e struct {
		Error apiError `json:"error"`
	}
	if err := json.Unmarshal(raw, &e); err != nil {
		return fmt.Errorf("HTTP %d with a body that is no error object: %s", status, raw)
	}
	e.Error.status, e.Error.raw = status, string(bytes.TrimSpace(raw))
	return &e.Error
}

// waitUsable waits until the router has a usable pair.
func waitUsable(ctx context.Context, addr string) error {
	return stack.WaitHealthy(ctx, "http://"+addr)
}

// copyStream prints the deltas of a stream; an error event, or an end without a
// finish, is an error.
func (d *demo) copyStream(res *http.Response) (string, error) {
	events := openai.NewEventReader(res.Body, 0)
	var text strings.Builder
	for {
		data, err := events.Next()
		if err != nil {
			return text.String(), fmt.Errorf("the stream broke off: %w", err)
		}
		if string(data) == openai.DoneData {
			fmt.Fprintln(d.out)
			return text.String(), nil
		}
		var chunk struct {
			Error   *json.RawMessage
			Choices []struct {
				Delta struct{ Content string }
			}
		}
		if err := json.Unmarshal(data, &chunk); err != nil {
			return "", fmt.Errorf("event %q: %w", data, err)
		}
		if chunk.Error != nil {
			return text.String(), parseAPIError(res.StatusCode, bytes.Clone(data))
		}
		for _, c := range chunk.Choices {
			text.WriteString(c.Delta.Content)
			fmt.Fprint(d.out, c.Delta.Content)
		}
	}
}
