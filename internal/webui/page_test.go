package webui_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/stack"
	"github.com/baton-pd/baton/internal/webui/browser"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if built != "" {
			_ = os.RemoveAll(built) // in the temporary folder
		}
		os.Exit(code)
	}))
}

// built is the folder of the binary that build has made.
var built string

// shots, if set, is a folder for pictures of the page.
var shots = os.Getenv("BATON_SHOTS")

// build makes the binary under test, once.
var build = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "baton-webui-")
	if err != nil {
		return "", err
	}
	built = dir
	path := filepath.Join(dir, "baton")
	if msg, err := exec.Command("go", "build", "-o", path, "github.com/baton-pd/baton/cmd/baton").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build baton: %w: %s", err, msg)
	}
	return path, nil
})

// site is a stack of processes and a browser with the router's page open.
type site struct {
	t   *testing.T
	s   *stack.Stack
	b   *browser.Browser
	ctx context.Context
}

// open starts everything, or skips where there is no browser. A prompt of the stack takes 30 ms for 16 tokens, a token 15 ms.
func open(t *testing.T, router ...string) *site {
	t.Helper()
	if _, err := browser.Find(); errors.Is(err, browser.ErrMissing) {
		t.Skip("chromium is needed (make testdeps installs it): the page is not tested")
	}
	bin, err := build()
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(stop)
	s, err := stack.Start(ctx, stack.Config{
		Binary: bin, Prefill: 1, Decode: 2, RouterArgs: router,
		Args: []string{"--engine", "sim", "--chunk", "16", "--sim", "prefill-chunk=30ms,step=15ms", "--transport", "tcp", "--max-running", "8", "--pool-mib", "4", "--page-bytes", "4096"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Close()
		if t.Failed() {
			for _, p := range s.All() {
				t.Logf("--- %s (%v)\n%s", p.Name, p.Err(), p.Output())
			}
		}
	})
	b, err := browser.Start(ctx)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	x := &site{t: t, s: s, b: b, ctx: ctx}
	x.size(1280, 900, false)
	if err := b.Open(ctx, s.Router.URL()+"/ui"); err != nil {
		t.Fatal(err)
	}
	return x
}

func (x *site) size(width, height int, dark bool) {
	x.t.Helper()
	if err := x.b.Size(x.ctx, width, height, dark); err != nil {
		x.t.Fatal(err)
	}
}

// until waits for a condition in the page.
func (x *site) until(condition string) {
	x.t.Helper()
	if err := x.b.Until(x.ctx, condition); err != nil {
		x.t.Fatal(err)
	}
}

func (x *site) eval(expression string, result any) {
	x.t.Helper()
	if err := x.b.Eval(x.ctx, expression, result); err != nil {
		x.t.Fatal(err)
	}
}

// text is what the page shows of the first element that selector finds.
func (x *site) text(selector string) (s string) {
	x.t.Helper()
	x.eval(fmt.Sprintf("(document.querySelector(%q) || {innerText: ''}).innerText", selector), &s)
	return s
}

// clean fails the test if the page said anything to its console: exceptions, or what its policy refused. Failed requests are no fault of its.
func (x *site) clean() {
	x.t.Helper()
	for _, l := range x.b.Logs() {
		if !strings.Contains(l, `"source":"network"`) {
			x.t.Errorf("the page said: %s", l)
		}
	}
}

// shot takes a picture, if wanted.
func (x *site) shot(name string) {
	x.t.Helper()
	if shots == "" {
		return
	}
	png, err := x.b.Screenshot(x.ctx)
	if err == nil {
		err = os.WriteFile(filepath.Join(shots, name+".png"), png, 0o600)
	}
	if err != nil {
		x.t.Error(err)
	}
}

// ask sends a chat to the router and returns what came.
func (x *site) ask(ctx context.Context, words, tokens int, header ...string) (status int, body string, err error) {
	raw, err := json.Marshal(map[string]any{"messages": []map[string]string{{"role": "user", "content": strings.Repeat("go ", words)}}, "max_tokens": tokens, "stream": true, "ignore_eos": true})
	if err != nil {
		return 0, "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, x.s.Router.URL()+"/v1/chat/completions", bytes.NewReader(raw))
	if err != nil {
		return 0, "", err
	}
	req.Header.Set("Content-Type", "application/json")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(text), err
}

// TestPageUnderTraffic: the page shows requests as they come, live ones as live, each with its lanes, and the failure of a killed worker with its cause.
func TestPageUnderTraffic(t *testing.T) {
	x := open(t)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	x.until("document.querySelectorAll('.worker.up').length === 3")
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			if status, body, err := x.ask(x.ctx, 10+20*i, 20+10*i, "X-Request-Id", fmt.Sprint("fine-", i)); status != 200 || err != nil {
				t.Errorf("request %d: %d %s %v", i, status, body, err)
			}
		})
	}
	wg.Wait()
	x.until("document.querySelectorAll('.req .chip.ok').length === 6")
	ctx, leave := context.WithCancel(x.ctx) // what follows goes on for longer than anybody looks
	defer leave()
	for range 2 { // one to each decode worker, of which one is killed
		wg.Go(func() {
			_, _, _ = x.ask(ctx, 60, 2000, "X-Request-Id", "long") // one breaks, the other is left
		})
	}
	x.until("[...document.querySelectorAll('.req .chip.warn')].filter((e) => e.textContent === 'streaming').length === 2")
	x.until("document.querySelectorAll('.rail i.decode.open').length === 2")
	x.s.Decodes[1].Kill()
	x.until("document.querySelector('.req.failed .cause') && document.querySelector('.worker.out')")
	for range 3 {
		wg.Go(func() { _, _, _ = x.ask(ctx, 200, 2000, "X-Request-Id", "later") })
	}
	x.until("document.querySelectorAll('.rail i.open').length > 3")
	x.shot("light-1280")
	x.size(1280, 900, true)
	x.shot("dark-1280")
	x.size(390, 844, true)
	x.shot("dark-390")
	x.size(390, 2600, false)
	x.shot("light-390")
	x.size(1280, 900, false)
	leave()
	wg.Wait()
	x.until("document.querySelectorAll('.rail i.open').length === 0 && [...document.querySelectorAll('.req .chip')].filter((e) => e.textContent === 'client gone').length === 4")
	if c := x.text(".req.failed .cause"); !strings.Contains(c, "peer_lost") || !strings.Contains(c, "decode") || !strings.Contains(c, "streaming") {
		t.Errorf("the failure is shown as %q", c)
	}
	x.eval("document.querySelector('.req.failed button').click()", nil)
	x.eval("document.querySelector('.req.failed').scrollIntoView()", nil)
	x.shot("failed-1280")
	x.lanes("fine-5", "prefill wait chunk*22 transfer|kv transfer tick*22|decode wait transfer first decode")
	x.eval("document.querySelector('[data-show=failed]').click()", nil)
	var shown int
	x.eval("[...document.querySelectorAll('.req')].filter((e) => !e.hidden).length", &shown)
	if shown != 1 {
		t.Errorf("%d failed requests are shown, want 1", shown)
	}
	x.clean()
}

// lanes checks what a request's timeline has: its lanes, each with its bars in order, neighbours of a kind as kind*N.
func (x *site) lanes(request, want string) {
	x.t.Helper()
	var got string
	x.eval(fmt.Sprintf(`(() => {
		const req = [...document.querySelectorAll('.req')].find((e) => e.querySelector('.id').textContent === %q);
		const lanes = [...req.querySelectorAll('.lane')].filter((l) => l.querySelector('.who').textContent !== 'router');
		return lanes.map((l) => {
			const out = [l.querySelector('.who').textContent];
			let last = '', n = 0;
			const put = () => { if (n) out.push(last + (n > 1 ? '*' + n : '')); };
			for (const i of l.querySelectorAll('.rail i')) {
				const kind = i.className.split(' ')[0];
				if (kind === last) n++; else { put(); last = kind; n = 1; }
			}
			put();
			return out.join(' ');
		}).join('|');
	})()`, request), &got)
	if got != want {
		x.t.Errorf("the timeline of %s is %q, want %q", request, got, want)
	}
}
