// Package browser drives a headless Chromium for tests of pages. It speaks the DevTools protocol over a pair of pipes, so there is no
// port that somebody else could take or find, and no websocket library.
package browser

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// ErrMissing: there is no Chromium on this machine.
var ErrMissing = errors.New("browser: no chromium or google-chrome is installed")

// lastLook bounds the look at a page that did not do what was waited for.
const lastLook = 2 * time.Second

// Browser is one process with one page. Close ends it. Its methods may be called by one goroutine at a time.
type Browser struct {
	cmd     *exec.Cmd
	out     *os.File // commands go there
	in      *os.File
	profile string
	session string
	reader  chan struct{} // closed when the reading goroutine has ended

	mu      sync.Mutex
	next    int
	waiting map[int]chan reply
	dead    error
	logs    []string // what the page said to its console, and its errors
}

type reply struct {
	Result json.RawMessage `json:"result"`
	Error  *struct {
		Message string `json:"message"`
	} `json:"error"`
}

// message is anything that comes from the browser.
type message struct {
	ID     int             `json:"id"`
	Method string          `json:"method"`
	Params json.RawMessage `json:"params"`
	reply
}

// Find is the path of a Chromium, or ErrMissing.
func Find() (string, error) {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path, nil
		}
	}
	return "", ErrMissing
}

// Start runs a browser with an empty page. ctx bounds its start only.
func Start(ctx context.Context) (b *Browser, err error) {
	path, err := Find()
	if err != nil {
		return nil, err
	}
	b = &Browser{waiting: map[int]chan reply{}, reader: make(chan struct{})}
	if b.profile, err = os.MkdirTemp("", "baton-browser-"); err != nil {
		return nil, err
	}
	theirIn, out, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(b.profile))
	}
	in, theirOut, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, theirIn.Close(), out.Close(), os.RemoveAll(b.profile))
	}
	b.out, b.in = out, in
	b.cmd = exec.Command(path, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage",
		"--disable-extensions", "--disable-component-update", "--no-proxy-server", "--hide-scrollbars", "--user-data-dir="+b.profile, "--remote-debugging-pipe", "about:blank")
	b.cmd.ExtraFiles = []*os.File{theirIn, theirOut} // descriptors 3 and 4, where Chromium looks for them
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	err = b.cmd.Start()
	_, _ = theirIn.Close(), theirOut.Close() // the child has its own
	if err != nil {
		return nil, errors.Join(err, out.Close(), in.Close(), os.RemoveAll(b.profile))
	}
	go b.read()
	if err := b.attach(ctx); err != nil {
		b.Close()
		return nil, fmt.Errorf("browser: start %s: %w", path, err)
	}
	return b, nil
}

// attach finds the page and turns on what the tests need.
func (b *Browser) attach(ctx context.Context) error {
	var made struct {
		TargetID string `json:"targetId"`
	}
	if err := b.call(ctx, "Target.createTarget", map[string]any{"url": "about:blank"}, &made); err != nil {
		return err
	}
	var attached struct {
		SessionID string `json:"sessionId"`
	}
	if err := b.call(ctx, "Target.attachToTarget", map[string]any{"targetId": made.TargetID, "flatten": true}, &attached); err != nil {
		return err
	}
	b.session = attached.SessionID
	for _, domain := range []string{"Page.enable", "Runtime.enable", "Log.enable"} {
		if err := b.call(ctx, domain, nil, nil); err != nil {
			return err
		}
	}
	return nil
}

// read takes everything that the browser says, until it is gone.
func (b *Browser) read() {
	defer close(b.reader)
	r := bufio.NewReaderSize(b.in, 1<<20)
	for {
		raw, err := r.ReadBytes(0)
		if err != nil {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.dead = fmt.Errorf("the browser is gone: %w", err)
			for id, ch := range b.waiting {
				close(ch)
				delete(b.waiting, id)
			}
			return
		}
		var m message
		if json.Unmarshal(raw[:len(raw)-1], &m) != nil {
			continue // not ours to judge
		}
		b.mu.Lock()
		switch ch := b.waiting[m.ID]; {
		case m.ID != 0 && ch != nil:
			ch <- m.reply // buffered
			delete(b.waiting, m.ID)
		case m.Method == "Runtime.exceptionThrown", m.Method == "Log.entryAdded", m.Method == "Runtime.consoleAPICalled":
			b.logs = append(b.logs, string(m.Params))
		}
		b.mu.Unlock()
	}
}

// call sends a command and waits for its result.
func (b *Browser) call(ctx context.Context, method string, params, result any) error {
	b.mu.Lock()
	if b.dead != nil {
		b.mu.Unlock()
		return b.dead
	}
	b.next++
	id, ch := b.next, make(chan reply, 1)
	b.waiting[id] = ch
	b.mu.Unlock()
	m := map[string]any{"id": id, "method": method}
	if params != nil {
		m["params"] = params
	}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if _, err := b.out.Write(append(raw, 0)); err != nil {
		return fmt.Errorf("%s: %w", method, err)
	}
	select {
	case r, ok := <-ch:
		switch {
		case !ok:
			return b.dead
		case r.Error != nil:
			return fmt.Errorf("%s: %s", method, r.Error.Message)
		case result != nil:
			return json.Unmarshal(r.Result, result)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", method, ctx.Err())
	}
}

// Open goes to a page.
func (b *Browser) Open(ctx context.Context, url string) error {
	var r struct {
		ErrorText string `json:"errorText"`
	}
	if err := b.call(ctx, "Page.navigate", map[string]any{"url": url}, &r); err != nil {
		return err
	}
	if r.ErrorText != "" {
		return fmt.Errorf("open %s: %s", url, r.ErrorText)
	}
	return nil
}

// Size makes the window so wide and high, in CSS pixels, with a dark or light preference.
func (b *Browser) Size(ctx context.Context, width, height int, dark bool) error {
	if err := b.call(ctx, "Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false}, nil); err != nil {
		return err
	}
	scheme := "light"
	if dark {
		scheme = "dark"
	}
	return b.call(ctx, "Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{{"name": "prefers-color-scheme", "value": scheme}}}, nil)
}

// Eval runs an expression in the page, waits for it if it is a promise, and puts its value, which must be JSON, into result unless that is nil.
func (b *Browser) Eval(ctx context.Context, expression string, result any) error {
	var r struct {
		Result struct {
			Value json.RawMessage `json:"value"`
		} `json:"result"`
		Exception *struct {
			Text      string `json:"text"`
			Exception struct {
				Description string `json:"description"`
			} `json:"exception"`
		} `json:"exceptionDetails"`
	}
	err := b.call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true}, &r)
	switch {
	case err != nil:
		return err
	case r.Exception != nil:
		return fmt.Errorf("in the page: %s %s", r.Exception.Text, r.Exception.Exception.Description)
	case result == nil:
		return nil
	}
	return json.Unmarshal(r.Result.Value, result)
}

// reloads is how often a page may go to another one, or load itself again, under one wait.
const reloads = 5

// navigated: the page that was asked has made way for the next one.
func navigated(err error) bool {
	return strings.Contains(err.Error(), "navigated") || strings.Contains(err.Error(), "context was destroyed") || strings.Contains(err.Error(), "Cannot find context")
}

// Until waits until a condition holds in the page, or in the one that takes its place meanwhile.
func (b *Browser) Until(ctx context.Context, condition string) error {
	wait := "new Promise((done) => { const look = () => { let ok = false; try { ok = (" + condition + "); } catch (e) {} if (ok) done(true); else setTimeout(look, 20); }; look(); })"
	err := b.Eval(ctx, wait, nil)
	for again := 0; err != nil && navigated(err) && again < reloads; again++ {
		err = b.Eval(ctx, wait, nil)
	}
	if err != nil {
		var text string
		short, stop := context.WithTimeout(context.WithoutCancel(ctx), lastLook)
		defer stop()
		_ = b.Eval(short, "document.body.innerText.slice(0, 4000)", &text) // only for the words
		return fmt.Errorf("wait for %s: %w; the page shows:\n%s\nit said: %q", condition, err, text, b.Logs())
	}
	return nil
}

// Screenshot is the window's picture as PNG.
func (b *Browser) Screenshot(ctx context.Context) ([]byte, error) {
	var r struct {
		Data string `json:"data"`
	}
	if err := b.call(ctx, "Page.captureScreenshot", map[string]any{"format": "png"}, &r); err != nil {
		return nil, err
	}
	return base64.StdEncoding.DecodeString(r.Data)
}

// Logs are the page's console, its exceptions and what the browser itself refused, as the protocol tells them.
func (b *Browser) Logs() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.logs...)
}

// Close ends the browser and waits for it.
func (b *Browser) Close() {
	_ = syscall.Kill(-b.cmd.Process.Pid, syscall.SIGKILL) // its whole group, renderers too
	_ = b.cmd.Wait()                                      // killed, as was asked
	_ = b.out.Close()
	<-b.reader // ends when the last process has closed the pipe
	_ = b.in.Close()
	_ = os.RemoveAll(b.profile) // in the temporary folder; what is left is nobody's
}
