package httpapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

var endpoints = []struct{ path, body string }{
	{"/v1/chat/completions", chatBody}, {"/v1/completions", completionBody}, {"/generate", generateBody},
}

func brokenTransfer() *room.Cause {
	return &room.Cause{
		Code: room.CodePeerLost, Side: room.SideReceiver, Phase: "transferring", Key: room.Key{Room: 5}, Peer: "p:1",
		Detail: "the prefill worker died", Retryable: true,
	}
}

// A failure before the first token is an HTTP status, also of a request that streams.
func TestFailureBeforeTheFirstByte(t *testing.T) {
	for _, ep := range endpoints {
		for _, stream := range []bool{false, true} {
			for name, script := range map[string]func(*sched.Request) ([]step, error){
				"at submit": failing(brokenTransfer()), "later": always(step{err: brokenTransfer()}),
			} {
				h := newHarness(t, script)
				status, body, hdr, err := h.post(ep.path, fmt.Sprintf(`%s,"stream":%v}`, ep.body, stream))
				e := errorOf(t, status, body)
				if err != nil || status != 502 || *e.Cause != *brokenTransfer() {
					t.Errorf("%s %s stream=%v: %d %s %v", name, ep.path, stream, status, body, err)
				}
				if hdr.Get("Content-Type") != "application/json" || hdr.Get("X-Should-Retry") != "true" {
					t.Errorf("header %v", hdr)
				}
			}
		}
	}
}

// After three tokens a failure is one error event, no [DONE], and a body that breaks off.
func TestFailureInMidStream(t *testing.T) {
	for _, ep := range endpoints {
		h := newHarness(t, always(text(0, "a"), text(0, "b"), text(0, "c"), step{err: brokenTransfer()}))
		status, body, _, err := h.post(ep.path, ep.body+`,"stream":true}`)
		if status != 200 || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: status %d, reading the body gave %v, want 200 and an unexpected EOF", ep.path, status, err)
		}
		ev := events(t, body)
		if strings.Contains(body, "[DONE]") || strings.Contains(body, `"finish_reason":"`) {
			t.Errorf("%s: looks like a success: %s", ep.path, body)
		}
		if e := errorOf(t, 502, ev[len(ev)-1]); *e.Cause != *brokenTransfer() {
			t.Errorf("%s: cause %+v", ep.path, e.Cause)
		}
		if n := strings.Count(body, `{"error":`); n != 1 {
			t.Errorf("%s: %d error events", ep.path, n)
		}
	}
}

// A scheduler that breaks its contract gives an error, never a half answer that looks whole.
func TestSchedulerBreaksItsContract(t *testing.T) {
	for name, steps := range map[string][]step{
		"no finish":       {text(0, "a")},
		"after finish":    {text(0, "a"), end(0, sched.FinishStop), text(0, "b")},
		"strange choice":  {text(3, "a")},
		"negative choice": {text(-1, "a")},
		"unknown error":   {step{err: io.ErrClosedPipe}},
	} {
		h := newHarness(t, always(steps...))
		status, body, _, err := h.post("/v1/chat/completions", chatBody+`}`)
		if e := errorOf(t, status, body); status != 500 || e.Cause.Code != room.CodeInternal || err != nil {
			t.Errorf("%s: %d %s %v", name, status, body, err)
		}
	}
}

func TestEveryCauseHasItsStatus(t *testing.T) {
	for code, want := range map[room.Code]int{
		room.CodeInvalid: 400, room.CodeDuplicate: 409, room.CodeAborted: 499, room.CodeDeadline: 504, room.CodeUnavailable: 503,
		room.CodeShutdown: 503, room.CodePeerLost: 502, room.CodeTransferFailed: 502, room.CodeChunkDropped: 502, room.CodeMismatch: 502,
		room.CodeProtocol: 502, room.CodeEngine: 500, room.CodeInternal: 500,
	} {
		h := newHarness(t, failing(&room.Cause{Code: code, Detail: "x"}))
		if status, body, _, _ := h.post("/generate", generateBody+`}`); status != want {
			t.Errorf("%s: %d %s, want %d", code, status, body, want)
		}
	}
	h := newHarness(t, failing(&room.Cause{Code: room.CodeCapacity, Retryable: true, Detail: "queue full"}))
	status, body, hdr, _ := h.post("/generate", generateBody+`}`)
	if status != 503 || hdr.Get("Retry-After") == "" || errorOf(t, status, body).Code != openai.CodeQueueFull {
		t.Errorf("full queue: %d %s %v", status, body, hdr)
	}
	h = newHarness(t, failing(&room.Cause{Code: room.CodeCapacity, Detail: "too large for the pool"}))
	if status, body, hdr, _ := h.post("/generate", generateBody+`}`); status != 400 || hdr.Get("Retry-After") != "" {
		t.Errorf("never fits: %d %s", status, body)
	}
}

func TestBadRequests(t *testing.T) {
	long := strings.Repeat("x", 200)
	huge := strings.Repeat("x", 60_000)
	for _, c := range []struct {
		path, body  string
		status      int
		code, param string
	}{
		{"/v1/chat/completions", `{`, 400, openai.CodeInvalidBody, ""},
		{"/v1/chat/completions", "{\"messages\":[{\"role\":\"user\",\"content\":\"\xff\"}]}", 400, openai.CodeInvalidBody, ""},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"\u0000"}]}`, 400, openai.CodeInvalidBody, ""},
		{"/v1/chat/completions", chatBody + `,"tools":[{}]}`, 400, openai.CodeUnsupportedField, "tools"},
		{"/v1/chat/completions", `{"model":"gpt-9","messages":[{"role":"user","content":"x"}]}`, 404, openai.CodeModelNotFound, "model"},
		{"/v1/chat/completions", `{"messages":[{"role":"user","content":"` + long + `"}]}`, 400, openai.CodeContextLength, "messages"},
		{"/v1/completions", `{"prompt":"` + long + `"}`, 400, openai.CodeContextLength, "prompt"},
		{"/v1/completions", `{"prompt":"` + huge + `"}`, 400, openai.CodeContextLength, "prompt"},
		{"/v1/completions", `{"prompt":""}`, 400, openai.CodeInvalidValue, "prompt"},
		{"/v1/completions", `{"prompt":[400]}`, 400, openai.CodeInvalidValue, "prompt"},
		{"/v1/completions", completionBody + `,"logit_bias":{"400":1}}`, 400, openai.CodeInvalidValue, "logit_bias"},
		{"/generate", generateBody + `,"bootstrap_room":4}`, 400, openai.CodeInvalidValue, "bootstrap_host"},
		{"/generate", generateBody + `,"bootstrap_room":4,"bootstrap_host":"h"}`, 400, openai.CodeInvalidValue, "bootstrap_host"},
		{"/abort_request", `{}`, 400, openai.CodeInvalidValue, "rid"},
	} {
		h := newHarness(t, hello)
		status, body, _, _ := h.post(c.path, c.body)
		if e := errorOf(t, status, body); status != c.status || e.Code != c.code || e.Param != c.param || e.Cause.Code != room.CodeInvalid {
			t.Errorf("%s %.80s: %d %s", c.path, c.body, status, body)
		}
		if len(h.sched.requests) != 0 {
			t.Errorf("%.80s reached the scheduler", c.body)
		}
	}
}

func TestRolesRefuseWhatTheyCannotServe(t *testing.T) {
	for _, c := range []struct {
		role string
		says string
	}{{RolePrefill, "prefill worker"}, {RoleDecode, "bootstrap_host"}} {
		h := newHarness(t, hello, func(cfg *Config) { cfg.Role, cfg.AllowLocal = c.role, false })
		status, body, _, _ := h.post("/v1/completions", completionBody+`}`)
		if e := errorOf(t, status, body); status != 400 || e.Param != "bootstrap_room" || !strings.Contains(e.Cause.Detail, c.says) {
			t.Errorf("%s: %d %s", c.role, status, body)
		}
	}
}

func TestNoChatTemplate(t *testing.T) {
	for template, says := range map[string]string{"": "no chat template; use /v1/completions", "{% for %}": "cannot be used"} {
		h := newHarness(t, hello, func(c *Config) { c.Info.ChatTemplate = template })
		status, body, _, _ := h.post("/v1/chat/completions", chatBody+`}`)
		if e := errorOf(t, status, body); status != 400 || !strings.Contains(e.Cause.Detail, says) {
			t.Errorf("%d %s", status, body)
		}
		if status, body, _, _ := h.post("/v1/completions", completionBody+`}`); status != 200 {
			t.Errorf("completions: %d %s", status, body)
		}
	}
}

// zeros is an endless body.
type zeros struct{ read int64 }

func (z *zeros) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	z.read += int64(len(p))
	return len(p), nil
}

func TestBodyTooLarge(t *testing.T) {
	for _, declared := range []bool{true, false} {
		h := newHarness(t, hello, func(c *Config) { c.MaxBody = 1 << 20 })
		const size = 50 << 20
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		req, err := http.NewRequest(http.MethodPost, h.srv.URL+"/v1/completions", io.LimitReader(&zeros{}, size))
		if err != nil {
			t.Fatal(err)
		}
		if declared {
			req.ContentLength = size
		}
		res, err := h.srv.Client().Do(req)
		if err != nil {
			t.Fatalf("declared=%v: %v", declared, err)
		}
		body, err := io.ReadAll(res.Body)
		res.Body.Close()
		runtime.ReadMemStats(&after)
		if e := errorOf(t, res.StatusCode, string(body)); err != nil || res.StatusCode != 413 || e.Code != openai.CodeBodyTooLarge {
			t.Errorf("declared=%v: %d %s %v", declared, res.StatusCode, body, err)
		}
		if used := after.TotalAlloc - before.TotalAlloc; used > 16<<20 {
			t.Errorf("declared=%v: %d bytes allocated for a limit of 1 MiB", declared, used)
		}
	}
}

func TestSlowBody(t *testing.T) {
	for _, c := range []struct {
		header, status, says string
		limit                time.Duration
	}{
		{"", "408", openai.CodeBodyTimeout, 50 * time.Millisecond},
		{HeaderTimeout + ": 50\r\n", "504", `"cause":"deadline"`, time.Minute}, // the request's own is earlier
	} {
		h := newHarness(t, hello, func(cfg *Config) { cfg.BodyTimeout = c.limit })
		conn, err := net.Dial("tcp", h.srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, "POST /generate HTTP/1.1\r\nHost: x\r\n"+c.header+"Content-Length: 100\r\n\r\n{"); err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(conn) // the server must answer and close
		if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 "+c.status) || !strings.Contains(string(answer), c.says) {
			t.Errorf("got %q, %v", answer, err)
		}
	}
}

// A long answer must survive the deadline that its body had.
func TestBodyTimeoutEndsWithTheBody(t *testing.T) {
	h := newHarness(t, always(step{block: true}), func(c *Config) { c.BodyTimeout = 20 * time.Millisecond })
	// The request's own deadline is later than the body's, and is the one that must end it.
	status, body, _, err := h.post("/generate", generateBody+`}`, HeaderTimeout, "200")
	if e := errorOf(t, status, body); err != nil || status != 504 || e.Cause.Code != room.CodeDeadline {
		t.Errorf("%d %s %v", status, body, err)
	}
}

func TestDeadlineHeader(t *testing.T) {
	h := newHarness(t, hello, func(c *Config) { c.MaxTimeout = 10 * time.Second })
	for _, v := range []string{"0", "-1", "x", "1.5", "10001", "99999999999999999999"} {
		status, body, _, _ := h.post("/generate", generateBody+`}`, HeaderTimeout, v)
		if e := errorOf(t, status, body); status != 400 || e.Param != HeaderTimeout {
			t.Errorf("%s: %d %s", v, status, body)
		}
	}
	start := time.Now()
	h.post("/generate", generateBody+`}`, HeaderTimeout, "10000")
	h.post("/generate", generateBody+`}`)
	end := time.Now()
	for i, r := range h.sched.requests {
		// The scheduler's is a little earlier, so that its cause arrives in time.
		if r.Deadline.Before(start.Add(9*time.Second)) || !r.Deadline.Before(end.Add(10*time.Second)) {
			t.Errorf("request %d: deadline %s after the start, %s after the end", i, r.Deadline.Sub(start), r.Deadline.Sub(end))
		}
	}
}

// A scheduler that hangs does not hold the client beyond its deadline.
func TestDeadlineWithStuckScheduler(t *testing.T) {
	for _, ep := range endpoints {
		h := newHarness(t, always(step{block: true}))
		status, body, _, err := h.post(ep.path, ep.body+`,"stream":true}`, HeaderTimeout, "50")
		if e := errorOf(t, status, body); err != nil || status != 504 || e.Cause.Code != room.CodeDeadline {
			t.Errorf("%d %s %v", status, body, err)
		}
		h2 := newHarness(t, always(text(0, "a"), step{block: true}))
		for _, limit := range []string{"50", "500", "10000"} { // the first that the machine's text was in time for
			if status, body, _, err = h2.post(ep.path, ep.body+`,"stream":true}`, HeaderTimeout, limit); status == 200 {
				break
			}
		}
		ev := events(t, body)
		if e := errorOf(t, 504, ev[len(ev)-1]); !errors.Is(err, io.ErrUnexpectedEOF) || e.Cause.Code != room.CodeDeadline {
			t.Errorf("mid-stream: %s %v", body, err)
		}
	}
}

// A client that leaves ends its request at once: while it waits, and in mid-stream.
func TestDisconnectCancels(t *testing.T) {
	for name, steps := range map[string][]step{"waiting": {{block: true}}, "in mid-stream": {text(0, "a"), {block: true}}} {
		for _, stream := range []bool{false, true} {
			h := newHarness(t, always(steps...))
			h.sched.submitted = make(chan *fakeStream, 1)
			ctx, leave := context.WithCancel(context.Background())
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, h.srv.URL+"/v1/chat/completions",
				strings.NewReader(fmt.Sprintf(`%s,"stream":%v}`, chatBody, stream)))
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				if res, err := h.srv.Client().Do(req); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					res.Body.Close()
				}
			}()
			st := <-h.sched.submitted
			<-st.blocked
			leave()
			select {
			case <-st.closed:
			case <-time.After(10 * time.Second): // its own deadline is minutes away
				t.Fatalf("%s stream=%v: not closed within 10 s", name, stream)
			}
			if <-st.ended; st.cause.Code != room.CodeClientGone {
				t.Errorf("%s stream=%v: cause %v", name, stream, st.cause)
			}
			<-done
		}
	}
}

func TestFirstFailureCancelsTheOtherPrompts(t *testing.T) {
	for _, stream := range []bool{false, true} {
		h := newHarness(t, func(r *sched.Request) ([]step, error) {
			if r.Prompt[0] == 'b' {
				return []step{{err: brokenTransfer()}}, nil
			}
			return []step{{block: true}}, nil
		})
		status, body, _, err := h.post("/v1/completions", fmt.Sprintf(`{"prompt":["a","b","c"],"stream":%v}`, stream))
		if e := errorOf(t, status, body); err != nil || status != 502 || e.Cause.Code != room.CodePeerLost {
			t.Errorf("%d %s %v", status, body, err)
		}
		for i, st := range h.sched.streams {
			if <-st.ended; st.cause.Code != room.CodePeerLost {
				t.Errorf("stream %d: %v", i, st.cause)
			}
		}
	}
	// The second is refused at submission: the first must not run on.
	h := newHarness(t, func(r *sched.Request) ([]step, error) {
		if r.Prompt[0] == 'b' {
			return nil, &room.Cause{Code: room.CodeCapacity, Retryable: true}
		}
		return []step{{block: true}}, nil
	})
	if status, body, _, _ := h.post("/v1/completions", `{"prompt":["a","b"]}`); status != 503 {
		t.Errorf("%d %s", status, body)
	}
	<-h.sched.streams[0].ended
}

func TestAbortRequest(t *testing.T) {
	h := newHarness(t, always(text(0, "a"), step{block: true}))
	h.sched.submitted = make(chan *fakeStream, 4)
	type answer struct {
		status int
		body   string
	}
	start := func(rid string, stream bool) chan answer {
		out := make(chan answer, 1)
		go func() {
			status, body, _, _ := h.post("/v1/completions", fmt.Sprintf(`%s,"rid":%q,"stream":%v}`, completionBody, rid, stream))
			out <- answer{status, body}
		}()
		<-(<-h.sched.submitted).blocked
		return out
	}
	abort := func(body string) string {
		status, got, _, _ := h.post("/abort_request", body)
		if status != 200 {
			t.Fatalf("abort: %d %s", status, got)
		}
		return strings.TrimSpace(got)
	}

	one, other := start("one", false), start("other", true)
	if got := abort(`{"rid":"one"}`); got != `{"aborted":1}` {
		t.Errorf("abort hit %s", got)
	}
	a := <-one
	if e := errorOf(t, a.status, a.body); a.status != 499 || e.Cause.Code != room.CodeAborted {
		t.Errorf("aborted request: %d %s", a.status, a.body)
	}
	if got := abort(`{"abort_all":true}`); got != `{"aborted":1}` {
		t.Errorf("abort all hit %s", got)
	}
	a = <-other
	ev := events(t, a.body)
	if e := errorOf(t, 499, ev[len(ev)-1]); e.Cause.Code != room.CodeAborted {
		t.Errorf("aborted stream: %s", a.body)
	}

	// Late and twice: nothing happens, and a later request of the same name lives.
	if got := abort(`{"rid":"one"}`); got != `{"aborted":0}` {
		t.Errorf("late abort hit %s", got)
	}
	again := start("one", false)
	abort(`{"rid":"one"}`)
	<-again

	// Too early: remembered for exactly one request.
	if got := abort(`{"rid":"early"}`); got != `{"aborted":0}` {
		t.Errorf("early abort hit %s", got)
	}
	before := len(h.sched.requests)
	status, body, _, _ := h.post("/v1/completions", completionBody+`,"rid":"early"}`)
	if e := errorOf(t, status, body); status != 499 || e.Cause.Code != room.CodeAborted || len(h.sched.requests) != before {
		t.Errorf("request after its abort: %d %s", status, body)
	}
	next := start("early", false)
	abort(`{"rid":"early"}`)
	<-next
}

func TestPanicIsOneFailedRequest(t *testing.T) {
	h := newHarness(t, func(*sched.Request) ([]step, error) { panic("boom") })
	status, body, _, _ := h.post("/generate", generateBody+`}`)
	if e := errorOf(t, status, body); status != 500 || e.Cause.Code != room.CodeInternal || strings.Contains(body, "boom") {
		t.Errorf("%d %s", status, body)
	}
	if !strings.Contains(h.logs.String(), "boom") {
		t.Error("the panic is not in the log")
	}
	if got := metric(t, h, "baton_http_requests_in_flight"); got != 0 {
		t.Errorf("in flight %v", got)
	}
}

// One line per request, with what is needed to follow it.
func TestAccessLogAndMetrics(t *testing.T) {
	h := newHarness(t, always(text(0, "a"), step{err: brokenTransfer()}))
	h.post("/v1/chat/completions", chatBody+`,"stream":true,"bootstrap_host":"p","bootstrap_port":1,"bootstrap_room":9}`, "X-Request-Id", "req-7")
	h.srv.Close() // the line is written after the answer
	var line map[string]any
	for _, l := range strings.Split(h.logs.String(), "\n") {
		if strings.Contains(l, `"msg":"http"`) {
			if line != nil {
				t.Errorf("a second line: %s", l)
			}
			if err := json.Unmarshal([]byte(l), &line); err != nil {
				t.Fatal(err)
			}
		}
	}
	for k, want := range map[string]any{
		"level": "WARN", "method": "POST", "path": "/v1/chat/completions", "status": 200.0, "rid": "req-7", "room": "9", "prompt_tokens": 19.0,
		"completion_tokens": 1.0, "cause": "peer_lost", "phase": "transferring", "aborted": true, "first_token_after": 5e6,
	} {
		if line[k] != want {
			t.Errorf("%s = %v, want %v", k, line[k], want)
		}
	}
	if got := metric(t, h, "baton_http_failures_total"); got != 1 {
		t.Errorf("failures %v", got)
	}
}

// metric is the sum over all series of a name.
func metric(t *testing.T, h *harness, name string) float64 {
	t.Helper()
	families, err := h.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}
