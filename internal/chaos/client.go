package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// hopeless is how long after its deadline a client still waits for the end of its request.
const hopeless = 30 * time.Second

// clients sends requests, each over a connection of its own, so that nothing is ever sent twice.
type clients struct {
	url   string
	http  *http.Client
	began time.Time

	mu   sync.Mutex
	live map[int]*asking
}

// asking is one request under way.
type asking struct {
	leave   context.CancelFunc
	left    atomic.Bool
	aborted atomic.Bool
	conn    atomic.Pointer[net.TCPConn]
}

// breakOff ends the request from the client's side; hard: by a reset.
func (a *asking) breakOff(hard bool) {
	a.left.Store(true)
	if c := a.conn.Load(); hard && c != nil {
		_ = c.SetLinger(0)
	}
	a.leave()
}

func newClients(url string, dial func(ctx context.Context, network, addr string) (net.Conn, error)) *clients {
	return &clients{url: url, began: time.Now(), live: map[int]*asking{},
		http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true, DisableCompression: true}}}
}

func (c *clients) now() time.Duration { return time.Since(c.began) }

// each calls f for every request under way.
func (c *clients) each(f func(*asking)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, a := range c.live {
		f(a)
	}
}

// ask sends r and returns how it ended.
func (c *clients) ask(ctx context.Context, r *Request) *End {
	ctx, stop := context.WithTimeout(ctx, max(r.Deadline, 0)+hopeless)
	defer stop()
	a := &asking{leave: stop}
	c.mu.Lock()
	c.live[r.ID] = a
	c.mu.Unlock()
	e := &End{Sent: c.now()}
	var own sync.WaitGroup // what the client does besides
	own.Go(func() { c.behave(ctx, r, a) })
	c.exchange(ctx, r, a, e)
	e.Over = c.now()
	e.Left = a.left.Load() && !e.OK() && e.Cause == nil
	e.Ended = e.Left || !errors.Is(ctx.Err(), context.DeadlineExceeded)
	stop()
	own.Wait()
	c.mu.Lock()
	delete(c.live, r.ID)
	c.mu.Unlock()
	e.Aborted = a.aborted.Load()
	return e
}

// behave does what the client's manner says.
func (c *clients) behave(ctx context.Context, r *Request, a *asking) {
	if r.Manner == Patient || r.Manner == Slow {
		return
	}
	select {
	case <-time.After(r.After):
	case <-ctx.Done():
		return
	}
	switch r.Manner {
	case Aborts:
		a.aborted.Store(true)
		_ = c.post(context.WithoutCancel(ctx), "/abort_request", map[string]any{"rid": r.RID}) // the router may be gone: then nothing comes of it
	default:
		a.breakOff(r.Manner == Breaks)
	}
}

// post sends a small request and looks at nothing but whether it was answered, for 5 s.
func (c *clients) post(ctx context.Context, path string, body any) error {
	ctx, stop := context.WithTimeout(ctx, 5*time.Second)
	defer stop()
	raw, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+path, bytes.NewReader(raw))
	if err != nil {
		return err
	}
	res, err := c.http.Do(req)
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, res.Body)
	return errors.Join(err, res.Body.Close())
}

// exchange sends the request and reads its answer into e.
func (c *clients) exchange(ctx context.Context, r *Request, a *asking, e *End) {
	body, err := json.Marshal(map[string]any{"prompt": r.Ask.Prompt, "max_tokens": r.Ask.Max, "temperature": 0, "stream": r.Stream, "ignore_eos": true, "rid": r.RID})
	if err != nil {
		e.Broken = err.Error()
		return
	}
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(i httptrace.GotConnInfo) {
		if tcp, ok := i.Conn.(*net.TCPConn); ok {
			a.conn.Store(tcp)
		}
	}})
	req, err := http.NewRequestWithContext(traced, http.MethodPost, c.url+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		e.Broken = err.Error()
		return
	}
	req.GetBody = nil // nothing is sent twice
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Timeout-Ms", strconv.FormatInt(r.Deadline.Milliseconds(), 10))
	res, err := c.http.Do(req)
	if err != nil {
		e.Broken = err.Error()
		return
	}
	defer res.Body.Close()
	e.Status = res.StatusCode
	if r.Stream && res.StatusCode == http.StatusOK {
		events(ctx, res.Body, r, e)
		return
	}
	raw, err := io.ReadAll(res.Body)
	if err != nil {
		e.Broken = err.Error()
	}
	if res.StatusCode != http.StatusOK {
		e.Failed, e.Raw, e.Cause = 1, string(raw), causeOf(raw)
		return
	}
	e.event(raw)
}

// events reads a stream to its end, also beyond what should have been its end.
func events(ctx context.Context, body io.Reader, r *Request, e *End) {
	in := openai.NewEventReader(body, 0)
	for n := 0; ; n++ {
		data, err := in.Next()
		if err != nil {
			// With an error event the connection breaks off by design.
			if !errors.Is(err, io.EOF) && e.Failed == 0 && e.Done == 0 {
				e.Broken = err.Error()
			}
			return
		}
		if n == 0 && r.Manner == Slow {
			select {
			case <-time.After(r.After):
				e.Paused = r.After
			case <-ctx.Done():
			}
		}
		if e.Done+e.Failed > 0 {
			e.Trailing++
		}
		if string(data) == openai.DoneData {
			e.Done++
			continue
		}
		e.event(data)
	}
}

// event takes an answer, or one event of it.
func (e *End) event(data []byte) {
	var v struct {
		Error   json.RawMessage `json:"error"`
		Choices []struct {
			Text   string `json:"text"`
			Finish string `json:"finish_reason"`
		} `json:"choices"`
	}
	if err := json.Unmarshal(data, &v); err != nil {
		e.Broken = "bad JSON: " + err.Error()
		return
	}
	if v.Error != nil {
		e.Failed++
		e.Raw, e.Cause = string(data), causeOf(data)
	}
	for _, c := range v.Choices {
		if e.Finished > 0 {
			e.Trailing++ // text or a finish after the finish
		}
		e.Text += c.Text
		if c.Finish != "" {
			e.Finished++
		}
	}
}

// causeOf reads an error object; nil if raw is none or names no cause.
func causeOf(raw []byte) *room.Cause {
	var v struct {
		Error struct {
			Message   string `json:"message"`
			Cause     string `json:"cause"`
			Side      string `json:"side"`
			Phase     string `json:"phase"`
			Peer      string `json:"peer"`
			Retryable bool   `json:"retryable"`
		} `json:"error"`
	}
	if json.Unmarshal(raw, &v) != nil || v.Error.Cause == "" {
		return nil
	}
	c := &room.Cause{Code: room.Code(v.Error.Cause), Phase: v.Error.Phase, Peer: v.Error.Peer, Detail: v.Error.Message, Retryable: v.Error.Retryable}
	for _, s := range []room.Side{room.SideSender, room.SideReceiver, room.SideRouter} {
		if s.String() == v.Error.Side {
			c.Side = s
		}
	}
	return c
}
