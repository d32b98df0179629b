package routerbench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"time"
)

// FakesReady is what [ServeFakes] prints, one JSON line, when it serves.
type FakesReady struct {
	Prefills [2]string `json:"prefills"` // host:port
	Decodes  [2]string `json:"decodes"`
	Control  string    `json:"control"`
}

// side is which of a pair a connection of the fakes belongs to.
type side uint8

const (
	sideControl side = 0
	sidePrefill side = 1
	sideDecode  side = 2
)

// served is a connection of the fakes.
type served struct {
	side side
	left int   // tokens still to be sent on a paced stream
	due  int64 // of the next one: a multiple of the pace, on the clock of now
	gone bool
}

// fakes are four workers that answer at once, or at a pace. One goroutine.
type fakes struct {
	l      *loop
	tokens int
	pace   int64         // ns between tokens; 0: no pause
	paced  []*conn       // by due time
	buf    []byte        // of events
	static map[side]info // answers to questions about the worker
}

type info struct{ server []byte }

// quiet GC: the loop allocates next to nothing, and a collection in the middle of a round is noise.
const fakesGC = 400

// ServeFakes serves two prefill and two decode workers until ctx ends or in, a pipe, does, and prints where as [FakesReady].
func ServeFakes(ctx context.Context, in *os.File, out io.Writer) error {
	defer debug.SetGCPercent(debug.SetGCPercent(fakesGC))
	l, err := newLoop()
	if err != nil {
		return err
	}
	defer l.close()
	f := &fakes{l: l, tokens: 8, static: map[side]info{
		sidePrefill: {httpAnswer("application/json", []byte(serverInfo("prefill")))},
		sideDecode:  {httpAnswer("application/json", []byte(serverInfo("decode")))},
	}}
	l.received = f.received
	l.closed = func(c *conn, _ error) error {
		c.role.(*served).gone = true
		return nil
	}
	ready, err := f.listen()
	if err != nil {
		return err
	}
	line, err := json.Marshal(ready)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(out, "%s\n", line); err != nil {
		return err
	}
	end, err := l.endWith(ctx, in)
	if err != nil {
		return err
	}
	defer end()
	for !l.ended {
		if err := l.wait(f.pause()); err != nil {
			return err
		}
		f.tick()
	}
	return nil
}

func (f *fakes) listen() (ready FakesReady, err error) {
	for _, e := range []struct {
		side side
		at   *string
	}{{sidePrefill, &ready.Prefills[0]}, {sidePrefill, &ready.Prefills[1]}, {sideDecode, &ready.Decodes[0]}, {sideDecode, &ready.Decodes[1]}, {sideControl, &ready.Control}} {
		port, err := f.l.listen(func(c *conn) { c.role = &served{side: e.side} })
		if err != nil {
			return ready, fmt.Errorf("routerbench: fakes: %w", err)
		}
		*e.at = "127.0.0.1:" + strconv.Itoa(port)
	}
	return ready, nil
}

// serverInfo is what the three routers want to know of a worker.
func serverInfo(mode string) string {
	return `{"model_path":"fake","served_model_name":"fake","is_generation":true,"tp_size":1,"dp_size":1,"disaggregation_mode":"` + mode + `"}`
}

// httpAnswer is a whole answer with status 200.
func httpAnswer(contentType string, body []byte) []byte {
	return append([]byte("HTTP/1.1 200 OK\r\nContent-Type: "+contentType+"\r\nContent-Length: "+strconv.Itoa(len(body))+"\r\n\r\n"), body...)
}

// received takes whole requests out of c.in.
func (f *fakes) received(c *conn) error {
	for {
		path, body, n := parseRequest(c.in)
		if n == 0 {
			return nil
		}
		if n < 0 {
			return f.l.drop(c, fmt.Errorf("a request that the fake cannot read: %.200q", c.in))
		}
		if err := f.answer(c, path, body); err != nil {
			return f.l.drop(c, err)
		}
		c.in = c.in[:copy(c.in, c.in[n:])]
	}
}

// parseRequest finds one request at the start of b. n is its length, 0 if it is not whole, -1 if it is of another form.
func parseRequest(b []byte) (path string, body []byte, n int) {
	end := bytes.Index(b, []byte("\r\n\r\n"))
	if end < 0 {
		return "", nil, 0
	}
	first, rest, _ := bytes.Cut(b[:end+2], []byte("\r\n"))
	words := bytes.SplitN(first, []byte(" "), 3)
	if len(words) < 3 {
		return "", nil, -1
	}
	length := 0
	for len(rest) > 0 {
		var line []byte
		line, rest, _ = bytes.Cut(rest, []byte("\r\n"))
		switch {
		case hasFold(line, "content-length:"):
			v, err := strconv.Atoi(string(bytes.TrimSpace(line[len("content-length:"):])))
			if err != nil || v < 0 {
				return "", nil, -1
			}
			length = v
		case hasFold(line, "transfer-encoding:"):
			return "", nil, -1
		}
	}
	if n = end + 4 + length; len(b) < n {
		return "", nil, 0
	}
	return string(words[1]), b[end+4 : n], n
}

// hasFold: line begins with the lower-case prefix, whatever its case.
func hasFold(line []byte, prefix string) bool {
	return len(line) >= len(prefix) && bytes.EqualFold(line[:len(prefix)], []byte(prefix))
}

// answer serves one request.
func (f *fakes) answer(c *conn, path string, body []byte) error {
	s := c.role.(*served)
	path, query, _ := strings.Cut(path, "?")
	switch path {
	case "/v1/chat/completions", "/v1/completions", "/generate":
		return f.generate(c, s, bytes.Contains(body, []byte(`"stream":true`)))
	case "/v1/models":
		return f.l.write(c, httpAnswer("application/json", []byte(`{"object":"list","data":[{"id":"fake","object":"model","owned_by":"baton"}]}`)))
	case "/set":
		if s.side != sideControl {
			break
		}
		if _, err := fmt.Sscanf(query, "pace=%d&tokens=%d", &f.pace, &f.tokens); err != nil {
			return err
		}
		return f.l.write(c, httpAnswer("text/plain", nil))
	case "/metrics":
		return f.l.write(c, httpAnswer("text/plain", nil))
	}
	return f.l.write(c, f.static[s.side].server)
}

// The parts of an answer. A token's text is the time of its sending.
const (
	chunkHead  = `{"id":"x","object":"chat.completion.chunk","created":1,"model":"fake","choices":[{"index":0,"delta":`
	chunkRole  = chunkHead + `{"role":"assistant","content":""},"finish_reason":null}]}`
	chunkToken = chunkHead + `{"content":"@`
	chunkMore  = `"},"finish_reason":null}]}`
	chunkEnd   = chunkHead + `{},"finish_reason":"length"}]}`
	wholeHead  = `{"id":"x","object":"chat.completion","created":1,"model":"fake","choices":[{"index":0,"message":{"role":"assistant","content":"`
	wholeTail  = `"},"finish_reason":"length"}],"usage":{"prompt_tokens":40,"completion_tokens":8,"total_tokens":48}}`
	streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
	lastChunk  = "0\r\n\r\n"
)

// appendChunk adds an event with this data as a chunk of the transfer encoding.
func appendChunk(b []byte, data string) []byte {
	b = strconv.AppendInt(b, int64(len("data: \n\n")+len(data)), 16)
	return append(append(append(b, "\r\ndata: "...), data...), "\n\n\r\n"...)
}

// token is a token's event, with the present time in it.
func (f *fakes) token() []byte {
	f.buf = appendChunk(f.buf[:0], chunkToken+strconv.FormatInt(now(), 10)+chunkMore)
	return f.buf
}

// generate answers a generating request as its side does: prefill with a single token, at once.
func (f *fakes) generate(c *conn, s *served, stream bool) error {
	switch {
	case !stream:
		n := f.tokens
		if s.side == sidePrefill {
			n = 1
		}
		return f.l.write(c, httpAnswer("application/json", []byte(wholeHead+strings.Repeat("@1234567 ", n)+wholeTail)))
	case s.side == sidePrefill:
		b := appendChunk([]byte(streamHead), chunkRole)
		b = appendChunk(appendChunk(b, chunkEnd), "[DONE]")
		return f.l.write(c, append(b, lastChunk...))
	}
	if err := f.l.write(c, appendChunk([]byte(streamHead), chunkRole)); err != nil {
		return err
	}
	s.left = f.tokens
	if f.pace > 0 {
		s.due = (now()/f.pace + 1) * f.pace // the next step
		f.later(c, s)
		return nil
	}
	for s.left > 0 {
		if err := f.next(c, s); err != nil {
			return err
		}
	}
	return nil
}

// next sends a token, and the end after the last.
func (f *fakes) next(c *conn, s *served) error {
	s.left--
	if err := f.l.write(c, f.token()); err != nil || s.left > 0 {
		return err
	}
	if err := f.l.write(c, appendChunk(f.buf[:0], chunkEnd)); err != nil {
		return err
	}
	return f.l.write(c, append(appendChunk(f.buf[:0], "[DONE]"), lastChunk...))
}

// later puts c where its time is: at the end, unless the fake is late.
func (f *fakes) later(c *conn, s *served) {
	i := len(f.paced)
	for i > 0 && f.paced[i-1].role.(*served).due > s.due {
		i--
	}
	f.paced = slices.Insert(f.paced, i, c)
}

// tick sends the tokens that are due.
func (f *fakes) tick() {
	for len(f.paced) > 0 {
		c := f.paced[0]
		s := c.role.(*served)
		if s.gone {
			f.paced = f.paced[1:]
			continue
		}
		if s.due > now() {
			return
		}
		f.paced = f.paced[1:]
		if f.next(c, s) != nil {
			_ = f.l.drop(c, nil)
			continue
		}
		if s.left > 0 {
			s.due += f.pace
			f.later(c, s)
		}
	}
}

// pause is how long nothing is due.
func (f *fakes) pause() time.Duration {
	if len(f.paced) == 0 {
		return -1
	}
	return time.Duration(max(0, f.paced[0].role.(*served).due-now()))
}
