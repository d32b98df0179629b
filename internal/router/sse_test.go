package router

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// follow feeds in with cuts and returns what was let through and how it ended.
func follow(in []byte, choices int, cut func(left int) int) (out []byte, s *stream, e *openai.Error, err error) {
	s = new(stream)
	s.reset(room.SideReceiver, "streaming", choices)
	for len(in) > 0 && e == nil && err == nil {
		n := max(1, min(cut(len(in)), len(in)))
		var forward []byte
		forward, e, err = s.feed(in[:n])
		out = append(out, forward...)
		in = in[n:]
	}
	if e == nil && err == nil {
		err = s.ended()
	}
	return out, s, e, err
}

func whole(left int) int { return left }

func TestStreamVerdicts(t *testing.T) {
	gen := func(finish string) string {
		return `data: {"text":"x","meta_info":{"finish_reason":` + finish + "}}\n\n"
	}
	crlf := strings.ReplaceAll(token+last+done, "\n", "\r\n")
	for name, c := range map[string]struct {
		in, out string
		choices int
		fails   string // cause of an error in the stream
		bad     bool
	}{
		"whole":               {role + token + last + done, role + token + last + done, 1, "", false},
		"without done":        {token + last, token + last, 1, "", false},
		"line ends":           {crlf, crlf, 1, "", false},
		"two lines of data":   {"data: {\"choices\":\ndata: [{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n" + done, "data: {\"choices\":\ndata: [{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n" + done, 1, "", false},
		"other fields":        {"event: m\nid: 7\n" + last + done, "event: m\nid: 7\n" + last + done, 1, "", false},
		"generate":            {gen("null") + gen(`{"type":"stop","matched":2}`) + done, gen("null") + gen(`{"type":"stop","matched":2}`) + done, 1, "", false},
		"generate abort":      {gen("null") + gen(`{"type":"abort","message":"m"}`) + done, gen("null"), 1, "aborted", false},
		"generate fault":      {gen(`{"type":"abort","status_code":500}`), "", 1, "engine_failed", false},
		"finish with spaces":  {"data: {\"choices\":[{\"index\":0,\"finish_reason\" : \"stop\"}]}\n\n", "data: {\"choices\":[{\"index\":0,\"finish_reason\" : \"stop\"}]}\n\n", 1, "", false},
		"finish as text":      {token + "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"stop\\\"\"}}]}\n\n", token + "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"finish_reason\\\":\\\"stop\\\"\"}}]}\n\n", 1, "", true},
		"error as text":       {token + "data: {\"choices\":[{\"delta\":{\"content\":\"error\"}}],\"x\":\"error\"}\n\n" + last, token + "data: {\"choices\":[{\"delta\":{\"content\":\"error\"}}],\"x\":\"error\"}\n\n" + last, 1, "", false},
		"error null":          {"data: {\"error\":null,\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n", "data: {\"error\":null,\"choices\":[{\"index\":0,\"finish_reason\":\"stop\"}]}\n\n", 1, "", false},
		"error object":        {token + "data: {\"object\":\"error\",\"message\":\"m\"}\n\n" + done, token, 1, "engine_failed", false},
		"two choices, one":    {last + done, last, 2, "", true},
		"nothing":             {"", "", 1, "", true},
		"only done":           {done, "", 1, "", true},
		"done, nobody counts": {done, done, 0, "", false},
		"half an event":       {token + last + done[:6], token + last, 1, "", true},
		"bad finish":          {gen("[]"), "", 1, "", true},
		"bad UTF-8":           {token + "data: {\"x\":\"\xff\"}\n\n", token, 1, "", true},
		"after done":          {last + done + token + "garbage", last + done, 1, "", false},
	} {
		for cutName, cut := range map[string]func(int) int{"whole": whole, "bytes": func(int) int { return 1 }} {
			out, s, e, err := follow([]byte(c.in), c.choices, cut)
			switch {
			case string(out) != c.out:
				t.Errorf("%s, %s: let through %q; want %q", name, cutName, out, c.out)
			case (e != nil) != (c.fails != "") || e != nil && string(e.Cause.Code) != c.fails:
				t.Errorf("%s, %s: error %v; want %q", name, cutName, e, c.fails)
			case (err != nil) != c.bad || err != nil && !errors.Is(err, errMalformed):
				t.Errorf("%s, %s: verdict %v; want bad %v", name, cutName, err, c.bad)
			case cutName == "bytes" && cap(s.buf) > 4096:
				t.Errorf("%s: the buffer grew to %d", name, cap(s.buf))
			}
		}
	}
}

func TestLongEventIsRefused(t *testing.T) {
	s := new(stream)
	s.reset(room.SideReceiver, "streaming", 1)
	part := bytes.Repeat([]byte("x"), 1<<20)
	for range 4 {
		if _, _, err := s.feed(part); err != nil {
			t.Fatal(err)
		}
	}
	if _, _, err := s.feed(part); !errors.Is(err, errMalformed) {
		t.Fatalf("an event without an end: %v", err)
	}
}

// However a stream is cut, the verdict and what is let through are the same; and only whole
// events are let through, each sound JSON.
func FuzzStream(f *testing.F) {
	f.Add([]byte(role+token+last+done), uint64(1))
	f.Add([]byte(token+abortLast+done), uint64(2))
	f.Add([]byte("\r\n\n\r\ndata:\n\ndata: {}\r\n\r\n: c\n\ndata: {\"error\":{\"message\":\"x\"}}\n\n"), uint64(3))
	f.Add([]byte("data: {\"choices\":[{\"finish_reason\":{\"type\":\"abort\"}}]}\n\n"), uint64(4))
	f.Fuzz(func(t *testing.T, in []byte, seed uint64) {
		rng := rand.New(rand.NewPCG(seed, 0))
		out1, s1, e1, err1 := follow(in, 1, whole)
		out2, s2, e2, err2 := follow(in, 1, func(int) int { return 1 + rng.IntN(9) })
		if !bytes.Equal(out1, out2) || (e1 == nil) != (e2 == nil) || (err1 == nil) != (err2 == nil) || s1.done != s2.done || s1.content != s2.content {
			t.Fatalf("%q cut differently:\n%q %v %v\n%q %v %v", in, out1, e1, err1, out2, e2, err2)
		}
		if len(out1) > 0 && !bytes.HasSuffix(out1, []byte("\n\n")) && !bytes.HasSuffix(out1, []byte("\n\r\n")) {
			t.Fatalf("half an event was let through: %q", out1)
		}
		if e1 != nil && (e1.Cause == nil || !json.Valid(e1.Body())) {
			t.Fatalf("bad error %v", e1)
		}
		events := openai.NewEventReader(bytes.NewReader(out1), 0)
		for {
			data, err := events.Next()
			if err != nil {
				break
			}
			if string(data) != openai.DoneData && !json.Valid(data) {
				t.Fatalf("an event that is not JSON was let through: %q", data)
			}
		}
	})
}

func TestJudge(t *testing.T) {
	for name, c := range map[string]struct {
		kind  openai.Kind
		body  string
		cause string
		bad   bool
	}{
		"chat":              {openai.KindChat, chatAnswer, "", false},
		"generate":          {openai.KindGenerate, genAnswer, "", false},
		"generate list":     {openai.KindGenerate, " [" + genAnswer + "," + genAnswer + "]\n", "", false},
		"one of two aborts": {openai.KindGenerate, "[" + genAnswer + "," + genAbort + "]", "engine_failed", false},
		"abort":             {openai.KindGenerate, genAbort, "engine_failed", false},
		"client's abort":    {openai.KindGenerate, `{"meta_info":{"finish_reason":{"type":"abort","status_code":400}}}`, "invalid_request", false},
		"chat abort":        {openai.KindChat, strings.Replace(chatAnswer, `"stop"`, `"abort"`, 1), "aborted", false},
		"error with 200":    {openai.KindChat, `{"error":{"message":"x"}}`, "engine_failed", false},
		"error object":      {openai.KindChat, `{"object":"error","message":"x","code":400}`, "engine_failed", false},
		"unfinished":        {openai.KindChat, strings.Replace(chatAnswer, `"stop"`, `null`, 1), "", true},
		"no choices":        {openai.KindCompletion, `{"choices":[]}`, "", true},
		"list for chat":     {openai.KindChat, "[" + chatAnswer + "]", "", true},
		"not JSON":          {openai.KindGenerate, "ok", "", true},
		"empty":             {openai.KindGenerate, "", "", true},
	} {
		e, err := judge(c.kind, []byte(c.body), room.SideReceiver, "x")
		if (e != nil) != (c.cause != "") || e != nil && string(e.Cause.Code) != c.cause || (err != nil) != c.bad {
			t.Errorf("%s: %v, %v", name, e, err)
		}
	}
}

func FuzzJudge(f *testing.F) {
	f.Add([]byte(chatAnswer), byte(1))
	f.Add([]byte("["+genAnswer+","+genAbort+"]"), byte(3))
	f.Fuzz(func(t *testing.T, body []byte, kind byte) {
		e, err := judge(openai.Kind(kind%3+1), body, room.SideReceiver, "x")
		if e != nil && (err != nil || !json.Valid(e.Body()) || e.Status < 400) {
			t.Fatalf("%q: %v %v", body, e, err)
		}
		if e == nil && err == nil && !json.Valid(body) {
			t.Fatalf("%q passes", body)
		}
	})
}

// Whatever the body, what the workers get is a JSON object with the router's fields once,
// and everything else as it was.
func FuzzBody(f *testing.F) {
	f.Add([]byte(`{"text":["a","b"],"rid":"x","bootstrap_room":5,"n":2}`), byte(3))
	f.Add([]byte(`{"prompt":[1,2,3],"stream":true,"seed":18446744073709551615}`), byte(2))
	f.Add([]byte(`{ }`), byte(1))
	f.Fuzz(func(t *testing.T, body []byte, k byte) {
		kind := openai.Kind(k%3 + 1)
		p, e := parseBody(kind, body)
		if e != nil {
			if e.Status != http.StatusBadRequest {
				t.Fatalf("status %d", e.Status)
			}
			return
		}
		if p.prompts > openai.MaxPrompts || p.choices < 0 {
			t.Fatalf("%+v", p)
		}
		w := &worker{bootHost: "h\"", bootPort: 7}
		var out bytes.Buffer
		out.Write(p.legHead(quoted("r"), w, newRooms(p.prompts), nil))
		out.Write(p.rest)
		var in, sent map[string]json.RawMessage
		if json.Unmarshal(body, &in) != nil || json.Unmarshal(out.Bytes(), &sent) != nil {
			t.Fatalf("not an object: %s", out.Bytes())
		}
		for _, name := range ours {
			if name != "bootstrap_generation" && name != FieldTimeout && name != openai.FieldResume && sent[name] == nil {
				t.Fatalf("%s is missing: %s", name, out.Bytes())
			}
			delete(in, name)
			delete(sent, name)
		}
		if len(in) != len(sent) {
			t.Fatalf("%d fields became %d", len(in), len(sent))
		}
		for k, v := range in {
			if !bytes.Equal(v, sent[k]) {
				t.Fatalf("%q: %s became %s", k, v, sent[k])
			}
		}
	})
}
