package openai

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/room"
)

var allCodes = []room.Code{
	room.CodeAborted, room.CodeClientGone, room.CodeDeadline, room.CodePeerLost, room.CodeTransferFailed, room.CodeChunkDropped,
	room.CodeMismatch, room.CodeCapacity, room.CodeEngine, room.CodeShutdown, room.CodeDuplicate, room.CodeProtocol, room.CodeInvalid,
	room.CodeUnavailable, room.CodeInternal,
}

// golden compares got with testdata/name, or writes it when REWRITE is set.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := "testdata/" + name
	if os.Getenv("REWRITE") != "" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs:\ngot:\n%s\nwant:\n%s", path, got, want)
	}
}

// Every cause's status, headers and body, side by side.
func TestErrorsGolden(t *testing.T) {
	var b strings.Builder
	show := func(e *Error) {
		rec := httptest.NewRecorder()
		WriteError(rec, e)
		h := rec.Header()
		b.WriteString(http.StatusText(rec.Code) + " " + strings.TrimSpace(strings.Join([]string{
			rec.Result().Status, "retry-after=" + h.Get("Retry-After"), "should-retry=" + h.Get("X-Should-Retry")}, " ")) + "\n" + rec.Body.String())
	}
	for _, code := range allCodes {
		show(FromCause(&room.Cause{
			Code: code, Side: room.SideReceiver, Phase: "transferring", Key: room.Key{Room: 1<<63 - 1, Gen: 7}, Peer: "10.0.0.1:9000",
			Detail: "what happened <here> & now", Retryable: code == room.CodeCapacity || code == room.CodeUnavailable || code == room.CodePeerLost,
		}))
	}
	show(FromCause(&room.Cause{Code: room.CodeCapacity, Side: room.SideSender, Detail: "can never fit"}))
	show(FromCause(&room.Cause{Code: "from the future", Detail: "x"}))
	show(FromCause(nil))
	show(ModelNotFound("gpt-9"))
	show(NewError(413, CodeBodyTooLarge, "", "too large"))
	golden(t, "errors.golden", b.String())
}

// What the router reads is what the worker meant.
func TestErrorsCrossTheWire(t *testing.T) {
	for _, code := range allCodes {
		for _, retryable := range []bool{false, true} {
			in := &room.Cause{
				Code: code, Side: room.SideSender, Phase: "waiting", Key: room.Key{Room: 12, Gen: 3}, Peer: "p:1", Detail: "d", Retryable: retryable,
			}
			e := FromCause(in)
			out := ParseError(e.Status, e.Body(), room.SideRouter, "router")
			if !reflect.DeepEqual(out.Cause, in) || out.Status != e.Status || out.Code != e.Code {
				t.Errorf("%s: sent %+v, got %+v (status %d, code %s)", code, in, out.Cause, out.Status, out.Code)
			}
			if ev := ParseErrorEvent(e.Body(), room.SideRouter, "router"); ev == nil || !reflect.DeepEqual(ev.Cause, in) {
				t.Errorf("%s as an event: %+v", code, ev)
			}
		}
	}
	in := ModelNotFound("m")
	if out := ParseError(404, in.Body(), room.SideRouter, "router"); out.Param != "model" || out.Code != CodeModelNotFound || out.Status != 404 {
		t.Errorf("got %+v", out)
	}
}

func TestErrorsOfOtherServers(t *testing.T) {
	for _, c := range []struct {
		status        int
		body          string
		code          room.Code
		wantStatus    int
		says          string
		wantRetryable bool
	}{
		{400, `{"object":"error","message":"too long","type":"BadRequest","code":400}`, room.CodeInvalid, 400, "too long", false},
		{400, `{"error":{"message":"bad","type":"x","code":400}}`, room.CodeInvalid, 400, "bad", false},
		{422, `{"detail":"nope"}`, room.CodeInvalid, 422, "nope", false},
		{429, `busy`, room.CodeCapacity, 503, "busy", true},
		{503, ``, room.CodeUnavailable, 503, "no message", true},
		{500, `{"error":"boom"}`, room.CodeEngine, 500, "boom", false},
		{502, `<html>`, room.CodeEngine, 500, "<html>", false},
		{504, "\xff\xfe", room.CodeDeadline, 504, "\uFFFD", false},
		{499, `{}`, room.CodeAborted, 499, "{}", false},
		{500, `{"error":{"message":"m","cause":"no such cause"}}`, room.CodeEngine, 500, "m", false},
	} {
		e := ParseError(c.status, []byte(c.body), room.SideReceiver, "decoding")
		if e.Cause.Code != c.code || e.Status != c.wantStatus || e.Cause.Retryable != c.wantRetryable || !strings.Contains(e.Cause.Detail, c.says) {
			t.Errorf("%d %q: got %d %+v", c.status, c.body, e.Status, e.Cause)
		}
		if e.Cause.Side != room.SideReceiver || e.Cause.Phase != "decoding" {
			t.Errorf("%d: place is lost: %+v", c.status, e.Cause)
		}
	}
	for data, isError := range map[string]bool{
		`{"choices":[]}`: false, `[DONE]`: false, `{"error":null}`: false, `{"error":{"message":"x"}}`: true, `{"error":"x"}`: true,
	} {
		if e := ParseErrorEvent([]byte(data), room.SideReceiver, "decoding"); (e != nil) != isError {
			t.Errorf("%s: error event %v, want %v", data, e, isError)
		}
	}
}

func TestFromErr(t *testing.T) {
	c := &room.Cause{Code: room.CodeDeadline}
	if e := FromErr(c); e.Cause != c || e.Status != 504 {
		t.Errorf("got %+v", e)
	}
	if e := FromErr(ErrNoTemplate); e != ErrNoTemplate {
		t.Errorf("got %+v", e)
	}
	if e := FromErr(io.ErrClosedPipe); e.Cause.Code != room.CodeInternal || e.Status != 500 {
		t.Errorf("got %+v", e)
	}
	if !errors.Is(FromCause(c), &room.Cause{Code: room.CodeDeadline}) {
		t.Error("the cause is not in the chain")
	}
}

func TestEventReader(t *testing.T) {
	in := ": hi\n\n" + string(AppendEvent(nil, []byte(`{"a":1}`))) +
		"event: x\r\nid: 5\r\ndata:no space\r\n\r\n\n\ndata: a\ndata: b\n\n" + "data: " + strings.Repeat("x", 20_000) + "\n\n"
	r := NewEventReader(strings.NewReader(in), 0)
	for _, want := range []string{`{"a":1}`, "no space", "a\nb", strings.Repeat("x", 20_000)} {
		if got, err := r.Next(); err != nil || string(got) != want {
			t.Fatalf("got %.40q, %v; want %.40q", got, err, want)
		}
	}
	if _, err := r.Next(); err != io.EOF {
		t.Errorf("end: %v, want io.EOF", err)
	}
	for in, want := range map[string]error{
		"":                                     io.EOF,
		"data: a":                              io.ErrUnexpectedEOF,
		"data: a\n":                            io.ErrUnexpectedEOF,
		"data: " + strings.Repeat("x", 101):    io.ErrUnexpectedEOF,
		"data: " + strings.Repeat("x", 30_000): ErrEventTooLarge,
		strings.Repeat("data: 0123456789\n", 20) + "\n": ErrEventTooLarge,
	} {
		if _, err := NewEventReader(strings.NewReader(in), 100).Next(); !errors.Is(err, want) {
			t.Errorf("%.20q: %v, want %v", in, err, want)
		}
	}
}

func TestLogprobsFitJSON(t *testing.T) {
	for in, want := range map[float32]float64{-0.5: -0.5, 1e-9: 0, -1e30: -9999} {
		if got := JSONLogprob(in); got != want {
			t.Errorf("%v: got %v, want %v", in, got, want)
		}
	}
	if k := TokenKey([]byte{0xe2, 0x0a}); k != `bytes:\xe2\x0a` {
		t.Errorf("key %q", k)
	}
}
