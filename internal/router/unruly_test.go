package router

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// exchange is one generating request as an unruly worker saw it. Written under the worker's lock.
type exchange struct {
	req      string // header X-Test: which of the test's requests
	fault    string
	rid      string
	room     string
	gone     time.Time // the end of the exchange at the worker
	released bool      // the router let go first
	ended    bool      // the worker had said that it was over: it need not be told
}

// unruly is a worker that answers as it should, or breaks the rules in some way, at random. It writes its answers byte by byte
// itself, so that no server's good manners are in between.
type unruly struct {
	t      *testing.T
	addr   string
	prefix bool // a prefill worker
	kind   Kind
	bad    float64 // chance of a fault

	mu     sync.Mutex
	rng    *rand.Rand
	seen   []*exchange
	aborts map[string]time.Time // by rid and room, the first
	l      *memListener
	wg     sync.WaitGroup
}

func (n *memNet) unruly(t *testing.T, addr string, prefill bool, kind Kind, rng *rand.Rand, bad float64) *unruly {
	u := &unruly{t: t, addr: addr, prefix: prefill, kind: kind, bad: bad, rng: rng, aborts: map[string]time.Time{}, l: n.listen(addr)}
	u.wg.Go(func() {
		for {
			conn, err := u.l.Accept()
			if err != nil {
				return
			}
			u.wg.Go(func() { u.serve(conn) })
		}
	})
	return u
}

func (u *unruly) close() {
	_ = u.l.Close()
	u.wg.Wait()
}

// serve reads requests from one connection until it ends.
func (u *unruly) serve(conn net.Conn) {
	defer conn.Close()
	in := bufio.NewReader(conn)
	for {
		req, err := http.ReadRequest(in)
		if err != nil {
			return
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return
		}
		switch req.URL.Path {
		case "/generate", "/v1/completions", "/v1/chat/completions":
			if !u.answer(conn, in, req, body) {
				return
			}
			continue
		case "/abort_request":
			var a struct {
				RID  string          `json:"rid"`
				Room json.RawMessage `json:"bootstrap_room"`
			}
			_ = json.Unmarshal(body, &a)
			u.mu.Lock()
			if key := a.RID + " " + string(a.Room); u.aborts[key].IsZero() {
				u.aborts[key] = time.Now()
			}
			u.mu.Unlock()
		}
		if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"); err != nil {
			return
		}
	}
}

// answer plays one plan; false if the connection is of no use afterwards.
func (u *unruly) answer(conn net.Conn, in *bufio.Reader, req *http.Request, body []byte) bool {
	var l leg1
	if err := json.Unmarshal(body, &l.fields); err != nil {
		u.t.Errorf("%s got a body that is not JSON: %v: %s", u.addr, err, body)
		return false
	}
	u.mu.Lock()
	p := u.plan(askedFor(req.URL.Path, l.fields))
	e := &exchange{req: req.Header.Get("X-Test"), fault: p.name, rid: l.rid(), room: l.room(), ended: p.ended}
	u.seen = append(u.seen, e)
	u.mu.Unlock()

	gone, watched := make(chan struct{}), make(chan struct{})
	go func() { // the other side's leaving
		defer close(watched)
		if _, err := in.Peek(1); err != nil {
			if ne, ok := err.(net.Error); !ok || !ne.Timeout() { //nolint:errorlint // as net.Pipe gives it
				close(gone)
			}
		}
	}()
	whole := play(conn, p.steps, gone)
	_ = conn.SetReadDeadline(time.Now())
	<-watched
	_ = conn.SetReadDeadline(time.Time{})
	u.mu.Lock()
	e.gone = time.Now()
	select {
	case <-gone:
		e.released = true
	default:
	}
	u.mu.Unlock()
	return whole && p.keep
}

var errBreak = fmt.Errorf("the worker breaks the connection")

// play writes steps: a string as it is, a chunk as one of a chunked body; a duration waits, errBreak breaks off, nil
// waits until the other side goes. True if all was written.
func play(conn net.Conn, steps []any, gone chan struct{}) bool {
	write := func(s string) bool { _, err := io.WriteString(conn, s); return err == nil }
	for _, s := range steps {
		ok := true
		switch s := s.(type) {
		case string:
			ok = write(s)
		case chunk:
			ok = write(s.wire())
		case time.Duration:
			ok = pause(s, gone)
		case []any: // for ever
			for ok {
				ok = play(conn, s, gone)
			}
		case error:
			ok = false
		case nil:
			<-gone
			ok = false
		}
		if !ok {
			return false
		}
	}
	return true
}

func pause(d time.Duration, gone chan struct{}) bool {
	select {
	case <-time.After(d):
		return true
	case <-gone:
		return false
	}
}

// chunk is a piece of a chunked body.
type chunk string

func (c chunk) wire() string { return fmt.Sprintf("%x\r\n%s\r\n", len(c), string(c)) }

// want is what a request asks for.
type want struct {
	path    string
	stream  bool
	list    bool // /generate answers with a list
	choices int
}

func askedFor(path string, f map[string]json.RawMessage) want {
	w := want{path: path, stream: string(f["stream"]) == "true", choices: 1}
	n := f["n"]
	if path == "/generate" {
		var p map[string]json.RawMessage
		_ = json.Unmarshal(f["sampling_params"], &p)
		n = p["n"]
	}
	if _ = json.Unmarshal(n, &w.choices); w.choices < 1 {
		w.choices = 1
	}
	var prompts []string
	if json.Unmarshal(f["text"], &prompts) == nil && len(prompts) > 0 || json.Unmarshal(f["prompt"], &prompts) == nil && len(prompts) > 0 {
		w.choices *= len(prompts)
		w.list = path == "/generate"
	}
	w.list = w.list || path == "/generate" && w.choices > 1
	return w
}

// textOf is a choice's whole text, tokens what comes of it one by one.
func textOf(choice int) string { return strings.Join(tokensOf(choice), "") }

func tokensOf(choice int) []string {
	return []string{fmt.Sprint("<", choice), "hé", "€ 😀", "\n\"}>"}
}

func js(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// event is one event with some of a choice's text, and its finish reason if that is not "".
func (w want) event(choice int, text, finish string) string {
	type m = map[string]any
	var reason any
	if finish != "" {
		reason = finish
	}
	switch w.path {
	case "/generate":
		if finish != "" {
			reason = m{"type": finish, "message": "m"}
		}
		return "data: " + js(m{"index": choice, "text": text, "output_ids": []int{1}, "meta_info": m{"id": "x", "finish_reason": reason}}) + "\n\n"
	case "/v1/completions":
		return "data: " + js(m{"choices": []m{{"index": choice, "text": text, "finish_reason": reason}}}) + "\n\n"
	default:
		return "data: " + js(m{"choices": []m{{"index": choice, "delta": m{"content": text}, "finish_reason": reason}}}) + "\n\n"
	}
}

// events is a sound stream, [DONE] last.
func (w want) events() []string {
	var out []string
	n := len(tokensOf(0))
	for k := range n {
		for c := range w.choices {
			finish := ""
			if k == n-1 {
				finish = "stop"
			}
			out = append(out, w.event(c, tokensOf(c)[k], finish))
		}
	}
	if w.path != "/generate" {
		out = append(out, `data: {"choices":[],"usage":{"completion_tokens":4}}`+"\n\n")
	}
	return append(out, done)
}

// whole is a sound answer that is not a stream; finish is the first choice's reason.
func (w want) whole(finish string) string {
	type m = map[string]any
	var all []m
	for c := range w.choices {
		reason := any("length")
		if c == 0 {
			reason = finish
		}
		switch w.path {
		case "/generate":
			all = append(all, m{"text": textOf(c), "meta_info": m{"id": "x", "finish_reason": m{"type": reason, "message": "m"}}})
		case "/v1/completions":
			all = append(all, m{"index": c, "text": textOf(c), "finish_reason": reason})
		default:
			all = append(all, m{"index": c, "message": m{"role": "assistant", "content": textOf(c)}, "finish_reason": reason})
		}
	}
	switch {
	case w.list:
		return js(all)
	case w.path == "/generate":
		return js(all[0])
	default:
		return js(m{"id": "x", "choices": all, "kv_transfer_params": m{"remote_engine_id": "e"}})
	}
}
