package routerbench

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// load is a closed loop of connections to one address. One goroutine.
type load struct {
	l       *loop
	addr    string
	request []byte
	stream  bool
	tokens  int   // in each answer
	times   bool  // look at the tokens' times
	until   int64 // no request is begun after it, unless less than least are done
	least   int
	left    int // connections that are not finished

	began, ended int64 // of the part that counts
	counting     bool
	latencies    []int64 // ns, of answers that ended while counting
	delays       []int64 // ns, of tokens
	gaps         []int64 // ns, between the arrivals of two tokens of a stream
	jitter       []int64 // ns, by which a token's delay differs from that of the one before
	open         int     // streams whose first event has come
}

// asker is a connection's request under way.
type asker struct {
	start   int64
	head    int // bytes of the header; 0: not yet whole
	length  int // of the body; -1: chunked
	chunk   int // bytes of the present chunk still to come, with its CRLF
	at      int // where in.in is read on
	body    []byte
	seen    int   // of body, looked at for tokens' times
	last    token // that came before
	hasLast bool
}

// token is one that has arrived.
type token struct {
	at    int64
	delay int64 // since its sending
}

// LoadConfig is one measurement.
type loadConfig struct {
	addr   string
	conns  int
	stream bool
	tokens int
	times  bool
	warmup time.Duration
	length time.Duration
	least  int // answers, however long they take
}

// requestBody is what every client of the bench asks: a short chat.
func requestBody(stream bool, tokens int) []byte {
	s := ""
	if stream {
		s = `"stream":true,`
	}
	return []byte(`{"model":"fake",` + s + `"max_tokens":` + strconv.Itoa(tokens) + `,"temperature":0,"messages":[{"role":"system","content":"You are a helpful assistant."},` +
		`{"role":"user","content":"Write a short note about the sea and the weather over it, in the style of a ship's log, please."}]}`)
}

func newLoad(c loadConfig) (*load, error) {
	l, err := newLoop()
	if err != nil {
		return nil, err
	}
	body := requestBody(c.stream, c.tokens)
	g := &load{l: l, addr: c.addr, stream: c.stream, tokens: c.tokens, times: c.times, least: c.least,
		request: append([]byte("POST /v1/chat/completions HTTP/1.1\r\nHost: "+c.addr+"\r\nUser-Agent: baton-bench\r\nAccept: */*\r\nContent-Type: application/json\r\nContent-Length: "+
			strconv.Itoa(len(body))+"\r\n\r\n"), body...)}
	l.received = g.received
	l.closed = func(c *conn, err error) error {
		if c.role.(*asker).start == 0 {
			return nil
		}
		return fmt.Errorf("the connection broke in the middle of an answer: %w", errors.Join(err, errors.New("closed")))
	}
	for range c.conns {
		cn, err := l.dial(c.addr)
		if err != nil {
			l.close()
			return nil, err
		}
		cn.role = &asker{}
	}
	return g, nil
}

// begin sends the first request of every connection.
func (g *load) begin() error {
	g.left = len(g.l.conns)
	for _, c := range g.l.conns {
		if err := g.ask(c); err != nil {
			return err
		}
	}
	return nil
}

// ask sends a connection's next request, unless it is time to end.
func (g *load) ask(c *conn) error {
	a := c.role.(*asker)
	t := now()
	*a = asker{body: a.body[:0]}
	if g.until > 0 && t >= g.until && len(g.latencies) >= g.least {
		g.left--
		return nil
	}
	a.start = t
	return g.l.write(c, g.request)
}

// run is the whole measurement: warm-up, the part that counts, and the answers that are still to come. count is called at
// both ends of the part that counts.
func run(c loadConfig, count func(begin bool)) (*load, error) {
	g, err := newLoad(c)
	if err != nil {
		return nil, err
	}
	defer g.l.close()
	if err := g.begin(); err != nil {
		return nil, err
	}
	warm := now() + int64(c.warmup)
	for now() < warm {
		if err := g.l.wait(time.Duration(max(1, warm-now()))); err != nil {
			return nil, err
		}
	}
	count(true)
	g.counting, g.began = true, now()
	g.until = g.began + int64(c.length)
	for now() < g.until || len(g.latencies) < g.least {
		if err := g.l.wait(10 * time.Millisecond); err != nil {
			return nil, err
		}
		if now()-g.began > int64(c.length)+int64(patience) {
			return nil, fmt.Errorf("only %d answers after %v", len(g.latencies), c.length+patience)
		}
	}
	g.ended, g.counting = now(), false
	count(false)
	for limit := now() + int64(patience); g.left > 0; {
		if now() > limit {
			return nil, fmt.Errorf("%d of %d requests have no answer after %v", g.left, c.conns, patience)
		}
		if err := g.l.wait(100 * time.Millisecond); err != nil {
			return nil, err
		}
	}
	slices.Sort(g.latencies)
	slices.Sort(g.delays)
	slices.Sort(g.gaps)
	slices.Sort(g.jitter)
	return g, nil
}

// patience is how long an answer may take.
const patience = 30 * time.Second

// received takes what has come of an answer.
func (g *load) received(c *conn) error {
	a := c.role.(*asker)
	if a.start == 0 {
		return fmt.Errorf("bytes that nobody asked for: %.200q", c.in)
	}
	if a.head == 0 {
		if err := a.readHead(c.in); err != nil || a.head == 0 {
			return err
		}
		g.open++
	}
	done, err := a.readBody(c.in)
	if err != nil {
		return err
	}
	if g.times {
		g.look(a)
	}
	if !done {
		return nil
	}
	if err := g.check(a.body); err != nil {
		return err
	}
	if g.counting {
		g.latencies = append(g.latencies, now()-a.start)
	}
	c.in = c.in[:0]
	return g.ask(c)
}

// readHead looks for the end of the header.
func (a *asker) readHead(in []byte) error {
	end := bytes.Index(in, []byte("\r\n\r\n"))
	if end < 0 {
		return nil
	}
	first, rest, _ := bytes.Cut(in[:end+2], []byte("\r\n"))
	if !bytes.HasPrefix(first, []byte("HTTP/1.1 200")) {
		return fmt.Errorf("the answer begins with %.300q", in)
	}
	a.length = -2
	for len(rest) > 0 {
		var line []byte
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		switch {
		case hasFold(line, "content-length:"):
			n, err := strconv.Atoi(string(bytes.TrimSpace(line[len("content-length:"):])))
			if err != nil {
				return fmt.Errorf("header %q: %w", line, err)
			}
			a.length = n
		case hasFold(line, "transfer-encoding:"):
			a.length = -1
		}
	}
	if a.length == -2 {
		return fmt.Errorf("the answer has no length: %.300q", in)
	}
	a.head, a.at = end+4, end+4
	return nil
}

// readBody adds what has come to the body and says whether that is all.
func (a *asker) readBody(in []byte) (done bool, err error) {
	if a.length >= 0 {
		a.body = append(a.body, in[a.at:]...)
		a.at = len(in)
		if len(a.body) > a.length {
			return false, fmt.Errorf("%d bytes after the answer", len(a.body)-a.length)
		}
		return len(a.body) == a.length, nil
	}
	for {
		if a.chunk > 0 { // its last two bytes are CRLF
			n := min(a.chunk, len(in)-a.at)
			data := min(n, max(a.chunk-2, 0))
			a.body = append(a.body, in[a.at:a.at+data]...)
			a.at, a.chunk = a.at+n, a.chunk-n
		}
		if a.chunk > 0 {
			return false, nil
		}
		i := bytes.IndexByte(in[a.at:], '\n')
		if i < 0 {
			return false, nil
		}
		size, err := strconv.ParseUint(string(bytes.TrimSpace(in[a.at:a.at+i])), 16, 31)
		if err != nil {
			return false, fmt.Errorf("chunk size: %w", err)
		}
		if size == 0 {
			return len(in) >= a.at+i+3, nil
		}
		a.at, a.chunk = a.at+i+1, int(size)+2
	}
}

// look takes the tokens' times out of what is new in the body.
func (g *load) look(a *asker) {
	arrived := now()
	for {
		i := bytes.IndexByte(a.body[a.seen:], '@')
		if i < 0 {
			a.seen = len(a.body)
			return
		}
		from := a.seen + i + 1
		n := bytes.IndexByte(a.body[from:], '"')
		if n < 0 {
			a.seen = from - 1
			return
		}
		sent, err := strconv.ParseInt(string(a.body[from:from+n]), 10, 64)
		if a.seen = from + n; err != nil {
			continue
		}
		t := token{arrived, arrived - sent}
		if g.counting {
			g.delays = append(g.delays, t.delay)
			if a.hasLast {
				g.gaps = append(g.gaps, t.at-a.last.at)
				g.jitter = append(g.jitter, max(t.delay-a.last.delay, a.last.delay-t.delay))
			}
		}
		a.last, a.hasLast = t, true
	}
}

// check is sure of an answer: all tokens, a finish, and the end.
func (g *load) check(body []byte) error {
	switch {
	case bytes.Count(body, []byte("@")) != g.tokens:
		return fmt.Errorf("an answer of %d tokens, want %d: %.600q", bytes.Count(body, []byte("@")), g.tokens, body)
	case !bytes.Contains(body, []byte(`"finish_reason":"length"`)):
		return fmt.Errorf("an answer without finish: %.600q", body)
	case g.stream && !bytes.HasSuffix(bytes.TrimSpace(body), []byte("data: [DONE]")):
		return fmt.Errorf("a stream without its end: %.600q", body)
	}
	return nil
}
