package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/openai"
)

// resumeField is what a fake worker gets to go on.
type resumeField struct {
	Tokens  []int  `json:"tokens"`
	ID      string `json:"id"`
	Created int64  `json:"created"`
}

// talk is the stream of a chat of n tokens, as a Baton worker tells it: from token r.Tokens on, or from the start.
func talk(n int, r *resumeField) string {
	id, created, from := "chatcmpl-own", int64(1000), 0
	event := func(delta, finish string) string {
		return fmt.Sprintf(`data: {"id":%q,"created":%d,"choices":[{"index":0,"delta":{%s},"finish_reason":%s}]}`, id, created, delta, finish) + "\n\n"
	}
	var b strings.Builder
	if r != nil {
		id, created, from = r.ID, r.Created, len(r.Tokens)
	} else {
		b.WriteString(event(`"role":"assistant","content":""`, "null"))
	}
	for i := from; i < n; i++ {
		if i == n-1 {
			b.Write(openai.AppendTokens[int32](nil, nil, true))
		} else {
			b.Write(openai.AppendTokens(nil, []int32{int32(100 + i)}, false))
		}
		b.WriteString(event(fmt.Sprintf(`"content":"w%d "`, i), "null"))
	}
	b.WriteString(event("", `"length"`))
	return b.String() + done
}

// plainTalk is what the client is to see of talk.
func plainTalk(n int) string {
	var b strings.Builder
	for ev := range strings.SplitAfterSeq(talk(n, nil), "\n\n") {
		_, _, rest, _ := openai.CutTokens[int32](nil, []byte(ev))
		b.Write(rest)
	}
	return b.String()
}

// teller is a decode worker that can go on. broken changes what it says, from the whole of it.
func teller(n int, broken func(all string) []any) script {
	return func(w http.ResponseWriter, r *http.Request, l *leg1) {
		if l.header.Get(openai.HeaderTokens) != "1" {
			say(400, `{"error":{"message":"nobody asked for the tokens"}}`)(w, r, l)
			return
		}
		w.Header().Set(openai.HeaderTokens, "1")
		var field *resumeField
		if raw := l.fields[openai.FieldResume]; raw != nil {
			if err := json.Unmarshal(raw, &field); err != nil || field.Tokens == nil {
				panic(fmt.Sprintf("resume field %s: %v", raw, err))
			}
			for i, t := range field.Tokens {
				if t != 100+i {
					say(400, `{"error":{"message":"wrong tokens"}}`)(w, r, l)
					return
				}
			}
			w.Header().Set(openai.HeaderResumed, strconv.Itoa(len(field.Tokens)))
		}
		all := talk(n, field)
		if broken == nil {
			sse(all)(w, r, l)
			return
		}
		sse(broken(all)...)(w, r, l)
	}
}

// after3 breaks after three tokens, in the way that parts say.
func after3(parts ...any) func(all string) []any {
	return func(all string) []any {
		i := strings.Index(all, `w3 `)
		if i < 0 {
			return []any{all}
		}
		return append([]any{all[:strings.LastIndex(all[:i], "\n\n")+2]}, parts...)
	}
}

// resumeOne is least-inflight's choice in a fresh router: d0 comes first.
var resumeConfig = Config{Resume: true, InterTokenTimeout: 2 * time.Second}

// However a decode worker gives up in mid-stream, the client sees the stream of an undisturbed one.
func TestResume(t *testing.T) {
	for name, c := range map[string]struct {
		parts []any
		after time.Duration
	}{
		"reset":             {[]any{errReset}, 0},
		"end":               {nil, 0},
		"half an event":     {[]any{": baton-tokens 103\ndata: {\"id\":", errReset}, 0},
		"bad JSON":          {[]any{": baton-tokens 103\ndata: {\"id\":}\n\n", nil}, 0},
		"bad tokens":        {[]any{": baton-tokens 1o3\ndata: {}\n\n", nil}, 0},
		"not UTF-8":         {[]any{": baton-tokens 103\ndata: {\"id\":\"\xff\"}\n\n", nil}, 0},
		"engine":            {[]any{`data: {"error":{"message":"oom","cause":"engine_failed","retryable":false}}` + "\n\n", errReset}, 0},
		"shutdown":          {[]any{`data: {"error":{"message":"ends","cause":"shutdown","retryable":false}}` + "\n\n", errReset}, 0},
		"foreign error":     {[]any{`data: {"error":{"message":"cuda"}}` + "\n\n", errReset}, 0},
		"finish error":      {[]any{`data: {"choices":[{"index":0,"delta":{},"finish_reason":"error"}]}` + "\n\n", nil}, 0},
		"done too soon":     {[]any{done}, 0},
		"silence":           {[]any{nil}, 2 * time.Second},
		"pings":             {[]any{time.Second, ": ping\n\n", time.Second, ": ping\n\n", nil}, 2 * time.Second},
		"tokens of nothing": {[]any{time.Second, ": baton-tokens 103\n\n", errReset}, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			broken := teller(6, after3(c.parts...))
			inBubble(t, resumeConfig, []script{okPrefill, okPrefill}, []script{broken, teller(6, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
				start := time.Now()
				g := b.chatStream()
				body := strings.ReplaceAll(g.body, ": ping\n\n", "")
				if g.err != nil || g.status != 200 || body != plainTalk(6) && name != "tokens of nothing" || g.took != c.after {
					t.Fatalf("%d %v after %v, want %v:\n%s\nwant\n%s", g.status, g.err, g.took, c.after, g.body, plainTalk(6))
				}
				for k := range g.header {
					if strings.HasPrefix(k, "X-Baton-") {
						t.Errorf("the client sees header %s", k)
					}
				}
				var field resumeField
				l := d[1].leg(0)
				if err := json.Unmarshal(l.fields[openai.FieldResume], &field); err != nil || field.ID != "chatcmpl-own" || field.Created != 1000 {
					t.Errorf("resumed with %s, %v", l.fields[openai.FieldResume], err)
				}
				if first := d[0].leg(0); l.room() == first.room() || l.rid() == first.rid() || first.fields[openai.FieldResume] != nil {
					t.Errorf("the second attempt has the room or id of the first: %s, %s", l.body, first.body)
				}
				synctest.Wait()
				<-time.After(time.Second)
				if c.parts != nil && c.parts[len(c.parts)-1] == nil && !strings.HasPrefix(name, "finish") {
					d[0].released(0, start, c.after+time.Second)
				}
				if m := b.get("/metrics").body; !strings.Contains(m, "baton_router_resumes_total{cause=") || !strings.Contains(m, "baton_router_resume_seconds_count 1") {
					t.Errorf("not counted: %s", m)
				}
			})
		})
	}
}

// Wherever the connection breaks, byte by byte, nothing is missing and nothing comes twice. Between the last text and the finish
// the stream can not go on, and says so.
func TestResumeAtEveryByte(t *testing.T) {
	all := talk(2, nil)
	whole := plainTalk(2)
	lastText := strings.Index(all, "w1 ")
	lastText += strings.Index(all[lastText:], "\n\n") + 2
	finish := strings.Index(all, `"length"`)
	finish += strings.Index(all[finish:], "\n\n") + 2
	lost := 0
	for k := 1; k < len(all); k++ {
		cut := func(all string) []any { return []any{all[:min(k, len(all))], errReset} }
		inBubble(t, resumeConfig, []script{okPrefill}, []script{teller(2, cut), teller(2, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
			g := b.chatStream()
			if g.err == nil && g.body == whole {
				if k >= lastText && k < finish {
					t.Errorf("%d bytes: the end was made up", k)
				}
				return
			}
			lost++
			if k < lastText || k >= finish {
				t.Fatalf("%d bytes: %d %v\n%s\nwant\n%s", k, g.status, g.err, g.body, whole)
			}
			at := strings.Index(g.body, `data: {"error"`)
			if e := g.breaks(t, g.body[:at], "peer_lost"); !strings.Contains(e.Error.Message, "only its end is missing") {
				t.Errorf("%d bytes: %s", k, e.Error.Message)
			}
		})
	}
	if lost != finish-lastText {
		t.Errorf("%d of %d cuts lost the stream", lost, len(all))
	}
}

// Where a stream cannot go on it ends with the error that it had, which says why not.
func TestResumeImpossible(t *testing.T) {
	breaks := teller(6, after3(errReset))
	refuses := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		if l.fields[openai.FieldResume] != nil {
			say(400, `{"error":{"message":"unsupported field: baton_resume"}}`)(w, r, l)
			return
		}
		breaks(w, r, l)
	}
	ignores := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		delete(l.fields, openai.FieldResume)
		breaks(w, r, l)
	}
	whole := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		if l.fields[openai.FieldResume] != nil {
			say(200, chatAnswer)(w, r, l)
			return
		}
		breaks(w, r, l)
	}
	silentAfter := teller(6, after3(nil))
	aborted := teller(6, after3(`data: {"error":{"message":"aborted by /abort_request","cause":"aborted","retryable":false}}`+"\n\n", errReset))
	for name, c := range map[string]struct {
		d      []script
		body   string
		config func(*Config)
		cause  string
		words  string // of the reason; "" none
		legs   int    // at decode workers
		took   time.Duration
	}{
		"off":             {d: []script{sse(role, token, errReset), okStream}, config: func(c *Config) { c.Resume = false }, cause: "peer_lost", legs: 1},
		"n=2":             {d: []script{sse(role, token, errReset), okStream}, body: strings.Replace(streamBody, "{", `{"n":2,`, 1), cause: "peer_lost", words: "it has 2 choices", legs: 1},
		"no tokens":       {d: []script{sse(role, token, errReset), okStream}, cause: "peer_lost", words: "decode worker d0:80 (kind unknown) does not tell the tokens", legs: 1},
		"no other worker": {d: []script{breaks}, cause: "peer_lost", words: "no other pair of workers", legs: 1},
		"bounded":         {d: []script{breaks, teller(6, func(string) []any { return []any{errReset} }), teller(6, func(string) []any { return []any{errReset} }), breaks, breaks}, config: func(c *Config) { c.MaxResumes = 2 }, cause: "peer_lost", words: "it has gone on 2 times", legs: 3},
		"refused":         {d: []script{refuses, refuses, refuses}, cause: "peer_lost", words: "unsupported field: baton_resume", legs: 2},
		"ignored":         {d: []script{breaks, sse(role, token, last, done)}, cause: "protocol", words: "no other pair", legs: 2},
		"misunderstood":   {d: []script{breaks, ignores}, cause: "protocol", words: "no other pair", legs: 2},
		"no stream":       {d: []script{breaks, whole}, cause: "protocol", words: "no other pair", legs: 2},
		"aborted":         {d: []script{aborted, breaks}, cause: "aborted", legs: 1},
		"deadline":        {d: []script{silentAfter, breaks}, config: func(c *Config) { c.InterTokenTimeout = 0; c.DefaultTimeout = 3 * time.Second }, cause: "deadline", legs: 1, took: 3 * time.Second},
		"deadline in the gap": {d: []script{breaks, silent}, config: func(c *Config) { c.DefaultTimeout = 3 * time.Second; c.HealthInterval = time.Minute }, cause: "deadline", legs: 2,
			took: 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			config := resumeConfig
			if c.config != nil {
				c.config(&config)
			}
			body := c.body
			if body == "" {
				body = streamBody
			}
			inBubble(t, config, []script{okPrefill}, c.d, func(t *testing.T, b *bed, p, d []*fake) {
				g := b.post(t.Context(), "/v1/chat/completions", body)
				at := strings.Index(g.body, `data: {"error"`)
				if at < 0 || g.took < c.took || g.took > c.took+500*time.Millisecond {
					t.Fatalf("%d %v after %v: %s", g.status, g.err, g.took, g.body)
				}
				e := g.breaks(t, g.body[:at], c.cause)
				if has := strings.Contains(e.Error.Message, "not go on elsewhere"); has != (c.words != "") || !strings.Contains(e.Error.Message, c.words) {
					t.Errorf("%s: want %q", e.Error.Message, c.words)
				}
				if strings.Contains(g.body, "baton-tokens") || e.Error.Room == "" || e.Error.Phase == "" {
					t.Errorf("%s", g.body)
				}
				synctest.Wait()
				legs := 0
				for _, w := range d {
					legs += w.count()
				}
				if legs != c.legs {
					t.Errorf("%d legs at decode workers, want %d", legs, c.legs)
				}
				<-time.After(time.Second)
			})
		})
	}
}

// A worker that does not tell its tokens is logged once, not with every stream.
func TestMuteWorkerIsLoggedOnce(t *testing.T) {
	inBubble(t, resumeConfig, []script{okPrefill}, []script{okStream}, func(t *testing.T, b *bed, p, d []*fake) {
		for range 3 {
			b.chatStream().ok(t, role+token+last+done)
		}
		if n := strings.Count(b.log.String(), "cannot go on elsewhere"); n != 1 {
			t.Errorf("logged %d times: %s", n, b.log)
		}
	})
}

// A client that leaves, in the stream or while another pair is being asked, ends both legs.
func TestResumeEndsWithTheClient(t *testing.T) {
	inBubble(t, resumeConfig, []script{okPrefill}, []script{teller(6, after3(errReset)), silent}, func(t *testing.T, b *bed, p, d []*fake) {
		ctx, cancel := context.WithCancel(t.Context())
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://router/v1/chat/completions", strings.NewReader(streamBody))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := b.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		got := make([]byte, strings.Index(plainTalk(6), "w2 ")+3)
		if _, err := io.ReadFull(resp.Body, got); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the second decode worker is silent
		if d[1].count() != 1 {
			t.Fatal("the stream does not go on")
		}
		cancel()
		left := time.Now()
		<-time.After(2 * time.Second)
		d[1].released(0, left, time.Second)
		if d[0].count()+d[1].count() != 2 {
			t.Errorf("legs: %d and %d", d[0].count(), d[1].count())
		}
	})
}

// A worker that answers no probe is hung: streams on it that are silent go on elsewhere without any limit on silence; one that is not silent
// stays.
func TestHungWorkersStreamsGoOn(t *testing.T) {
	hang := func(all string) []any {
		i := strings.Index(all, "w3 ")
		if i < 0 {
			return []any{all}
		}
		return []any{time.Millisecond, all[:strings.LastIndex(all[:i], "\n\n")+2], nil}
	}
	drip := func(all string) (parts []any) {
		for ev := range strings.SplitAfterSeq(all, "\n\n") {
			parts = append(parts, ev, time.Second)
		}
		return parts
	}
	for name, c := range map[string]struct {
		first func(string) []any
		other int // legs at the other worker
		least time.Duration
	}{
		"silent": {hang, 1, 4 * time.Second}, "not silent": {drip, 0, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, Config{Resume: true}, []script{okPrefill}, []script{teller(25, c.first), teller(25, nil)}, func(t *testing.T, b *bed, p, d []*fake) {
				d[0].setHealth(hung)
				g := b.chatStream()
				g.ok(t, plainTalk(25))
				if g.took < c.least || g.took > c.least+10*time.Second || d[1].count() != c.other {
					t.Errorf("took %v, %d legs at the other worker", g.took, d[1].count())
				}
				<-time.After(2 * time.Second)
			})
		})
	}
}

// The prefill worker may be lost, too, while it computes for the second decode worker; and a resumed stream may break again.
func TestResumeTwice(t *testing.T) {
	second := func(all string) []any { // one token more, then gone
		i := strings.Index(all, "w4 ")
		return []any{all[:strings.LastIndex(all[:i], "\n\n")+2], errReset}
	}
	var n int
	prefill := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		if n++; n == 2 {
			reset(w, r, l)
			return
		}
		okPrefill(w, r, l)
	}
	slow := func(s script) script { return after(10*time.Millisecond, s) }
	inBubble(t, resumeConfig, []script{prefill, okPrefill}, []script{slow(teller(6, after3(errReset))), slow(teller(6, second)), slow(teller(6, nil))}, func(t *testing.T, b *bed, p, d []*fake) {
		b.chatStream().ok(t, plainTalk(6))
	})
}

// /generate repeats its logprobs in each event, so the worker that goes on gets those of before.
func TestResumeGenerateLogprobs(t *testing.T) {
	event := func(ids, lps string) string {
		return ": baton-tokens " + ids[strings.LastIndex(ids, ",")+1:] + "\n" + `data: {"text":"x","output_ids":[` + ids + `],"meta_info":{"id":"r7","finish_reason":null,"output_token_logprobs":[` + lps + `],"output_top_logprobs":[` + lps + `]}}` + "\n\n"
	}
	first := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		w.Header().Set(openai.HeaderTokens, "1")
		sse(event("5", "[-0.1,5,null]"), event("5,6", "[-0.1,5,null],[-0.25,6,null]"), errReset)(w, r, l)
	}
	var told chan string // what the prefill worker is told of the tokens; without it the answer would not wait for that leg
	prefill := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		if f := l.fields[openai.FieldResume]; f != nil {
			told <- string(f)
		}
		okPrefill(w, r, l)
	}
	rest := func(w http.ResponseWriter, r *http.Request, l *leg1) {
		told <- <-told
		w.Header().Set(openai.HeaderTokens, "1")
		w.Header().Set(openai.HeaderResumed, "2")
		sse(`data: {"text":"xyz","output_ids":[5,6,7],"meta_info":{"id":"r7","finish_reason":{"type":"length"}}}`+"\n\n", done)(w, r, l)
	}
	inBubble(t, resumeConfig, []script{prefill}, []script{first, rest}, func(t *testing.T, b *bed, p, d []*fake) {
		told = make(chan string, 1)
		if g := b.post(t.Context(), "/generate", `{"text":"a","stream":true,"return_logprob":true,"baton_resume":{"tokens":[1]}}`); g.err != nil || !strings.HasSuffix(g.body, done) || strings.Contains(g.body, "baton") {
			t.Fatalf("%+v", g)
		}
		if f := d[0].leg(0).fields[openai.FieldResume]; f != nil {
			t.Errorf("the client's own field went to a worker: %s", f)
		}
		want := `{"tokens":[5,6],"id":"r7","elapsed_ms":0,"logprobs":[[-0.1,5,null],[-0.25,6,null]],"top":[[-0.1,5,null],[-0.25,6,null]]}`
		if got, pre := string(d[1].leg(0).fields[openai.FieldResume]), <-told; got != want || pre != want {
			t.Errorf("decode got  %s\nprefill got %s\nwant        %s", got, pre, want)
		}
	})
}

// However a stream is cut, the same tokens are told and the same bytes let through; no comment with tokens reaches the client.
func FuzzTold(f *testing.F) {
	f.Add([]byte(talk(3, nil)), uint64(1))
	f.Add([]byte(": baton-tokens 1,2\n\n: baton-tokens 3 end\r\ndata: {}\n\n"), uint64(2))
	f.Add([]byte(": baton-tokens 1\ndata: {\n\n"), uint64(3))
	f.Add([]byte(": baton-tokens 1\n: baton-tokens 2\ndata: {}\n\n"), uint64(4))
	f.Fuzz(func(t *testing.T, in []byte, seed uint64) {
		run := func(cut func(left int) int) (out []byte, tokens []int32, over bool, e *openai.Error, err error) {
			s := &stream{follow: true, keep: true, choices: 1}
			for rest := in; len(rest) > 0 && e == nil && err == nil && !s.done; {
				n := min(cut(len(rest)), len(rest))
				var forward []byte
				forward, e, err = s.feed(rest[:n])
				out, tokens, rest = append(out, forward...), append(tokens, s.tokens...), rest[n:]
			}
			return out, tokens, s.over, e, err
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		out1, tokens1, over1, e1, err1 := run(func(left int) int { return left })
		out2, tokens2, over2, e2, err2 := run(func(int) int { return 1 + rng.IntN(9) })
		if !bytes.Equal(out1, out2) || !slices.Equal(tokens1, tokens2) || over1 != over2 || (e1 == nil) != (e2 == nil) || (err1 == nil) != (err2 == nil) {
			t.Fatalf("%q cut differently:\n%q %v %v %v %v\n%q %v %v %v %v", in, out1, tokens1, over1, e1, err1, out2, tokens2, over2, e2, err2)
		}
	})
}
