package httpapi

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// Kinds of faults that others reported (docs/reported.md), at the edge of a worker.

func TestReportedK3Identity(t *testing.T) {
	// Two routers, or two clients, chose the same name. Each gets its own answer, and an abort that names the room hits its own.
	t.Run("one name for two requests", func(t *testing.T) {
		h := newHarness(t, func(r *sched.Request) ([]step, error) {
			return []step{text(0, string(rune(r.Prompt[0]))), {block: true}}, nil
		})
		h.sched.submitted = make(chan *fakeStream, 2)
		type end struct {
			status int
			body   string
		}
		ends := map[int]chan end{}
		for n := 4; n <= 5; n++ {
			ends[n] = make(chan end, 1)
			go func() {
				status, body, _, _ := h.post("/v1/completions", fmt.Sprintf(`{"prompt":"%d","rid":"same","stream":true,"bootstrap_host":"p","bootstrap_port":1,"bootstrap_room":%d}`, n, n))
				ends[n] <- end{status, body}
			}()
			<-(<-h.sched.submitted).blocked
		}
		if a, b := h.sched.requests[0], h.sched.requests[1]; a.ID == b.ID || a.Bootstrap.Key == b.Bootstrap.Key {
			t.Errorf("the scheduler knows them as %s %v and %s %v", a.ID, a.Bootstrap.Key, b.ID, b.Bootstrap.Key)
		}
		for n := 5; n >= 4; n-- {
			if _, got, _, _ := h.post("/abort_request", fmt.Sprintf(`{"rid":"same","bootstrap_room":%d}`, n)); strings.TrimSpace(got) != `{"aborted":1}` {
				t.Errorf("the abort of room %d hit %s", n, got)
			}
			e := <-ends[n]
			ev := events(t, e.body)
			if got := errorOf(t, 499, ev[len(ev)-1]); got.Cause.Code != room.CodeAborted || !strings.Contains(e.body, fmt.Sprintf(`"text":"%d"`, n)) {
				t.Errorf("room %d: %s", n, e.body)
			}
			if n == 5 && len(ends[4]) != 0 {
				t.Fatal("the abort of room 5 ended room 4 too")
			}
		}
	})
}

// A batch of which one prompt is refused, when others have been submitted: none of those lives on.
func TestReportedK6ForgottenResource(t *testing.T) {
	t.Run("refused half way through a batch", func(t *testing.T) {
		for refused := range 4 {
			h := newHarness(t, func(r *sched.Request) ([]step, error) {
				if int(r.Prompt[0]-'a') == refused {
					return nil, &room.Cause{Code: room.CodeCapacity, Retryable: true, Detail: "queue full"}
				}
				return []step{{block: true}}, nil
			})
			status, body, _, _ := h.post("/v1/completions", `{"prompt":["a","b","c","d"],"n":2,"stream":true,"rid":["1","2","3","4"]}`)
			if e := errorOf(t, status, body); status != http.StatusServiceUnavailable || e.Cause.Code != room.CodeCapacity {
				t.Errorf("%d %s", status, body)
			}
			if len(h.sched.streams) != refused {
				t.Errorf("%d prompts were submitted before and after prompt %d was refused", len(h.sched.streams), refused)
			}
			for i, s := range h.sched.streams {
				select {
				case <-s.closed:
				case <-time.After(10 * time.Second):
					t.Fatalf("prompt %d lives on after prompt %d was refused", i, refused)
				}
			}
			for _, rid := range []string{"1", "2", "3", "4"} { // and no name is left
				if _, got, _, _ := h.post("/abort_request", `{"rid":"`+rid+`"}`); strings.TrimSpace(got) != `{"aborted":0}` {
					t.Errorf("the name %s is still alive: %s", rid, got)
				}
			}
		}
	})
}

// Two choices, of which one has ended well when the worker fails: that one keeps its one finish, the other has none, and the
// stream does not end cleanly.
func TestReportedK13FalseEnd(t *testing.T) {
	t.Run("one choice of two had ended", func(t *testing.T) {
		for _, ep := range endpoints[:2] {
			h := newHarness(t, always(text(0, "a"), text(1, "b"), end(0, sched.FinishLength), text(1, "c"), step{err: brokenTransfer()}))
			status, body, _, err := h.post(ep.path, ep.body+`,"n":2,"stream":true}`)
			if status != 200 || !errors.Is(err, io.ErrUnexpectedEOF) || strings.Contains(body, "[DONE]") {
				t.Errorf("%s: %d, %v: %s", ep.path, status, err, body)
			}
			if n := strings.Count(body, `"finish_reason":"`); n != 1 || strings.Count(body, `{"error":`) != 1 {
				t.Errorf("%s: %d finish reasons in %s", ep.path, n, body)
			}
			// Whole, there is nothing to deliver: an error status, not half an answer.
			status, body, _, err = h.post(ep.path, ep.body+`,"n":2}`)
			if status != 502 || err != nil || strings.Contains(body, "choices") {
				t.Errorf("%s: %d, %v: %s", ep.path, status, err, body)
			}
		}
	})
	// A character is cut in two by the failure: what was sent stays valid.
	t.Run("in the middle of a character", func(t *testing.T) {
		half := step{ev: sched.Event{Tokens: []sched.TokenEvent{{ID: 0xc3, Bytes: []byte{0xc3}, Logprob: -1}}}}
		for _, ep := range endpoints {
			h := newHarness(t, always(text(0, "a"), half, step{err: brokenTransfer()}))
			_, body, _, err := h.post(ep.path, ep.body+`,"stream":true}`)
			ev := events(t, body) // each is valid UTF-8 and JSON
			if e := errorOf(t, 502, ev[len(ev)-1]); !errors.Is(err, io.ErrUnexpectedEOF) || e.Cause.Code != room.CodePeerLost || strings.ContainsRune(body, '\ufffd') {
				t.Errorf("%s: %v: %s", ep.path, err, body)
			}
		}
	})
}

// What a first token's end looks like is written down: TestEveryFinishAtTheFirstToken, testdata/first_token.golden. Here: the same
// request is valid for both legs, and only one of them says something.
func TestReportedK12FirstToken(t *testing.T) {
	t.Run("the request is valid on both legs", func(t *testing.T) {
		for _, ep := range endpoints {
			for _, more := range []string{`"max_tokens":1`, `"n":2,"stop":["x"]`, `"ignore_eos":true,"seed":3`, `"stream":true,"stream_options":{"include_usage":true}`, `"temperature":0,"presence_penalty":1`} {
				if ep.path == "/generate" {
					more = `"sampling_params":{"max_new_tokens":1,"n":2,"stop":"x","ignore_eos":true},"return_logprob":true`
				}
				body := ep.body + "," + more + `,"bootstrap_host":"p","bootstrap_port":9,"bootstrap_room":7}`
				var got []*sched.Request
				for _, role := range []string{RolePrefill, RoleDecode} {
					script := always(endEOS(0), endEOS(1))
					if !strings.Contains(more, `"n":2`) {
						script = always(endEOS(0))
					}
					if role == RolePrefill {
						script = always()
					}
					h := newHarness(t, script, func(c *Config) { c.Role = role })
					status, answer, _, err := h.post(ep.path, body)
					if status != 200 || err != nil {
						t.Errorf("%s %s at %s: %d %v %s", ep.path, more, role, status, err, answer)
						continue
					}
					got = append(got, h.sched.requests[0])
				}
				if len(got) == 2 && (got[0].Bootstrap.Key != got[1].Bootstrap.Key || got[0].N != got[1].N || got[0].MaxTokens != got[1].MaxTokens || string(runes(got[0])) != string(runes(got[1]))) {
					t.Errorf("%s: the legs read %+v and %+v", body, got[0], got[1])
				}
			}
		}
	})
}

func runes(r *sched.Request) (out []rune) {
	for _, t := range r.Prompt {
		out = append(out, rune(t))
	}
	return out
}
