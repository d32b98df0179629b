package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/stack"
)

// TestForeignRouters: Baton's workers behind sglang-router and smg, on the sim engine. Retries are off, so that
// a failure is seen as it is; TestForeignRetries has them on.
func TestForeignRouters(t *testing.T) {
	python := needForeignRouters(t)
	s, m := startSim(t, simSetup{transport: "tcp", prefills: 2, decodes: 2, cost: "prefill-chunk=10ms,step=2ms", args: []string{"--request-timeout", "30s"}})
	usable(t, s)
	for i, p := range s.Prefills { // every pair has its session
		for k, d := range s.Decodes {
			tokens := prompt(i, 40)
			got, err := pair(t.Context(), p, d, uint64(1+10*i+k), generateBody("warm", tokens, 4, false))
			if err != nil || got.Choices[0].Text != m.text(tokens, 4) {
				t.Fatalf("%s and %s: %+v, %v", p.Name, d.Name, got, err)
			}
		}
	}
	base := takeBaseline(t, s)
	for pkg := range foreignRouters {
		t.Run(pkg, func(t *testing.T) {
			f := startForeign(t, python, pkg, 4, append(behind(s), "--disable-retries", "--disable-circuit-breaker")...)
			t.Run("answers", func(t *testing.T) { sameAnswers(t, s.URL(), f.url, foreignBodies("sim")) })
			t.Run("right", func(t *testing.T) { foreignServes(t, f.url, m, 100, 16) })
			t.Run("refused", func(t *testing.T) { foreignRefused(t, f.url) })
			t.Run("leave", func(t *testing.T) { foreignLeave(t, s, f.url) })
			t.Run("abort", func(t *testing.T) { foreignAbort(t, s, f.url) })
			t.Run("kill", func(t *testing.T) { foreignKill(t, s, m, f.url) })
			f.stop()
			base.check(t)
		})
	}
}

// TestForeignRoutersModel: the same answers of the real model through all three routers.
func TestForeignRoutersModel(t *testing.T) {
	python := needForeignRouters(t)
	needModel(t)
	s := start(t, stack.Config{Prefill: 1, Decode: 1, Args: []string{"--threads", "1"}})
	warm(t, s)
	base := takeBaseline(t, s)
	var models struct{ Data []struct{ ID string } }
	if err := getJSON(t.Context(), s.URL()+"/v1/models", &models); err != nil || len(models.Data) != 1 {
		t.Fatalf("models: %+v, %v", models, err)
	}
	for pkg := range foreignRouters {
		t.Run(pkg, func(t *testing.T) {
			f := startForeign(t, python, pkg, 2, append(behind(s), "--disable-retries")...)
			bodies := foreignBodies(models.Data[0].ID)
			maps.DeleteFunc(bodies, func(name string, _ foreignBody) bool {
				return !slices.Contains([]string{"chat n=2", "completions, n=2", "generate"}, name)
			})
			sameAnswers(t, s.URL(), f.url, bodies)
			f.stop()
		})
	}
	base.check(t)
}

type foreignBody struct {
	path string
	body map[string]any
}

// foreignBodies are one request for each form of room that the routers write.
func foreignBodies(model string) map[string]foreignBody {
	openai := func(path string, n int, more map[string]any) foreignBody {
		b := map[string]any{"model": model, "max_tokens": 8, "temperature": 0, "n": n, "ignore_eos": true}
		for k, v := range more {
			b[k] = v
		}
		return foreignBody{path, b}
	}
	generate := func(n int, input string, v any) foreignBody {
		return foreignBody{"/generate", map[string]any{input: v, "sampling_params": map[string]any{"max_new_tokens": 8, "temperature": 0, "n": n, "ignore_eos": true}}}
	}
	chat := map[string]any{"messages": []map[string]string{{"role": "user", "content": "Name three animals."}}}
	return map[string]foreignBody{
		"chat":                openai("/v1/chat/completions", 1, chat),
		"chat n=2":            openai("/v1/chat/completions", 2, chat),
		"completion":          openai("/v1/completions", 1, map[string]any{"prompt": "The sea"}),
		"completion n=2":      openai("/v1/completions", 2, map[string]any{"prompt": "The sea"}),
		"completions, n=2":    openai("/v1/completions", 2, map[string]any{"prompt": []string{"The sea", "The fox"}}),
		"generate":            generate(1, "text", "The sea"),
		"generate tokens":     generate(1, "input_ids", prompt(5, 50)),
		"generate batch, n=2": generate(2, "input_ids", [][]int32{{70, 80, 90}, {45, 50, 60}}),
	}
}

// sameAnswers compares what is answered through two routers, streamed and not.
func sameAnswers(t *testing.T, ours, theirs string, bodies map[string]foreignBody) {
	for name, r := range bodies {
		want, err := fold(t.Context(), ours+r.path, r.body, nil)
		if err != nil {
			t.Fatalf("%s: Baton's router: %v", name, err)
		}
		for _, c := range want.Choices {
			if c.Text == "" || c.Finish != "length" {
				t.Fatalf("%s: Baton's router: %+v", name, want)
			}
		}
		for _, streamed := range []bool{false, true} {
			if r.body["stream"] = streamed; streamed && r.path != "/generate" {
				r.body["stream_options"] = map[string]any{"include_usage": true}
			}
			if got, err := fold(t.Context(), theirs+r.path, r.body, nil); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s, streamed %v: %+v, %v; want %+v", name, streamed, got, err, want)
			}
		}
	}
}

// generateBody asks /generate for max tokens after tokens.
func generateBody(rid string, tokens any, max int, streamed bool) map[string]any {
	return map[string]any{"rid": rid, "input_ids": tokens, "stream": streamed,
		"sampling_params": map[string]any{"max_new_tokens": max, "temperature": 0, "ignore_eos": true}}
}

// foreignServes asks n requests at once; every byte of KV is in the answers.
func foreignServes(t *testing.T, url string, m simModel, seed, n int) {
	t.Helper()
	errs := make(chan error, n)
	for i := range n {
		go func() {
			ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
			defer stop()
			p := prompt(seed+i, 40+37*i)
			got, err := fold(ctx, url+"/generate", generateBody(fmt.Sprint("right-", i), p, 12, i%2 == 0), nil)
			if want := m.text(p, 12); err == nil && (!got.Done || got.Choices[0].Text != want) {
				err = fmt.Errorf("request %d: %+v, want %q", i, got, want)
			}
			errs <- err
		}()
	}
	for range n {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

// foreignRefused: a worker's 400 reaches the client with its words. What the routers do not have is listed in
// docs/behind-routers.md; when this test fails because they have it now, the page is to be changed.
func foreignRefused(t *testing.T, url string) {
	body := generateBody("bad", prompt(1, 20), 4, false)
	body["logprob_start_len"] = 3
	if _, err := fold(t.Context(), url+"/generate", body, nil); err == nil || !strings.Contains(err.Error(), "status 400") || !strings.Contains(err.Error(), "logprob_start_len") {
		t.Errorf("unsupported field: %v", err)
	}
	for path, body := range map[string]map[string]any{
		"/abort_request":  {"rid": "x"},
		"/v1/completions": {"model": "sim", "prompt": []int{1, 2, 3}},
		"/generate":       {"text": []string{"a", "b"}},
	} {
		if _, err := fold(t.Context(), url+path, body, nil); err == nil || !strings.Contains(err.Error(), "status 4") {
			t.Errorf("%s %v: %v, want that the router does not take it", path, body, err)
		}
	}
}

// busyWorker waits until one of the workers has what check looks for.
func busyWorker(t *testing.T, workers []*stack.Process, check func(w *workerInfo) bool) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		var last error
		for _, p := range workers {
			w, err := inspect(ctx, p)
			if err == nil && check(w) {
				return nil
			}
			last = errors.Join(last, fmt.Errorf("%s: %+v, %w", p.Name, w, err))
		}
		return last
	})
}

func isRunning(w *workerInfo) bool { return w.State.Running > 0 }

// foreignLeave: a client that goes away, while its prompt is computed and while its answer runs, is forgotten.
func foreignLeave(t *testing.T, s *stack.Stack, url string) {
	for _, streamed := range []bool{true, false} {
		for phase, of := range map[string][]*stack.Process{"prefill": s.Prefills, "decode": s.Decodes} {
			ctx, leave := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() {
				_, err := fold(ctx, url+"/generate", generateBody("leaves", prompt(7, 900), 3000, streamed), nil)
				ended <- err
			}()
			busyWorker(t, of, func(w *workerInfo) bool {
				return isRunning(w) || phase == "prefill" && w.State.CellsUsed > simChunk
			})
			leave()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("%s, streamed %v: %v", phase, streamed, err)
			}
			if took := waitIdle(t, s, settleTime); took > 3*time.Second {
				t.Errorf("%s, streamed %v: idle only after %v", phase, streamed, took)
			} else {
				t.Logf("%s, streamed %v: idle after %v", phase, streamed, took.Round(time.Millisecond))
			}
		}
	}
}

// foreignAbort: /abort_request at the workers, by the id that the router has passed on.
func foreignAbort(t *testing.T, s *stack.Stack, url string) {
	for _, streamed := range []bool{true, false} {
		rid := fmt.Sprint("abort-", streamed)
		ended := make(chan error, 1)
		go func() {
			ctx, stop := context.WithTimeout(t.Context(), 20*time.Second)
			defer stop()
			_, err := fold(ctx, url+"/generate", generateBody(rid, prompt(8, 100), 3000, streamed), nil)
			ended <- err
		}()
		busyWorker(t, s.Decodes, isRunning)
		for _, p := range workers(s) {
			if err := abort(t.Context(), p.URL(), rid); err != nil {
				t.Error(err)
			}
		}
		if err := <-ended; err == nil || !strings.Contains(err.Error(), "aborted") {
			t.Errorf("streamed %v: %v", streamed, err)
		}
		waitIdle(t, s, settleTime)
	}
}

// foreignKill: of the requests on a worker that is killed none hangs and none gets a wrong answer; when the worker
// is back, so is the service.
func foreignKill(t *testing.T, s *stack.Stack, m simModel, url string) {
	for i, victim := range []*stack.Process{s.Decodes[0], s.Prefills[0]} {
		const n, max = 8, 150
		ended := make(chan error, n)
		began := time.Now()
		for k := range n {
			go func() {
				ctx, stop := context.WithTimeout(t.Context(), 40*time.Second)
				defer stop()
				p := prompt(500+10*i+k, 1200)
				got, err := fold(ctx, url+"/generate", generateBody(fmt.Sprint("kill-", k), p, max, k < n/2), nil)
				if want := m.text(p, max); err == nil && (!got.Done || got.Choices[0].Text != want) {
					t.Errorf("request %d looks complete and is not right: %+v", k, got)
				}
				ended <- err
			}()
		}
		busyWorker(t, []*stack.Process{victim}, func(w *workerInfo) bool { return isRunning(w) || w.State.CellsUsed > simChunk })
		victim.Kill()
		failed := 0
		for range n {
			err := <-ended
			if errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%s killed: a request hung: %v", victim.Name, err)
			} else if err != nil {
				failed++
				if failed == 1 {
					t.Logf("%s killed: %.300s", victim.Name, err.Error())
				}
			}
		}
		if failed == 0 {
			t.Errorf("%s killed: nobody noticed; the test shows nothing", victim.Name)
		}
		t.Logf("%s killed: %d of %d requests failed, all had ended after %v", victim.Name, failed, n, time.Since(began).Round(time.Millisecond))
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		if err := victim.Start(ctx); err != nil {
			t.Fatal(err)
		}
		stop()
		eventually(t, time.Minute, func(ctx context.Context) error { // the router takes it back after its next health check
			for k := range 4 { // round robin: every worker
				if _, err := fold(ctx, url+"/generate", generateBody("back", prompt(k, 30), 2, false), nil); err != nil {
					return err
				}
			}
			return nil
		})
		waitIdle(t, s, settleTime)
	}
	foreignServes(t, url, m, 900, 8)
}

// TestForeignRetries: what the routers send is what Baton parses, the same to both workers, and a retry comes with a
// new room.
func TestForeignRetries(t *testing.T) {
	python := needForeignRouters(t)
	for pkg := range foreignRouters {
		t.Run(pkg, func(t *testing.T) {
			prefill, decode := newRecorder(t, "prefill"), newRecorder(t, "decode")
			f := startForeign(t, python, pkg, 2, "--prefill", prefill.URL, "8998", "--decode", decode.URL, "--retry-max-retries", "3", "--retry-initial-backoff-ms", "1", "--disable-circuit-breaker")
			seen, earlier := map[uint64]bool{}, map[string]bool{}
			for name, r := range foreignBodies("sim") {
				if _, err := fold(t.Context(), f.url+r.path, r.body, nil); err == nil || !strings.Contains(err.Error(), "status 500") {
					t.Errorf("%s: %v", name, err)
				}
				attempts := map[string]int{} // by the body, which is the same for both workers
				for _, sent := range append(prefill.take(), decode.take()...) {
					if !earlier[sent] { // smg does not wait for what it sends to one when the other has failed: that may come late, or not at all
						attempts[sent]++
					}
				}
				if len(attempts) != 3 {
					t.Errorf("%s: %d attempts, want 3: %v", name, len(attempts), attempts)
				}
				for sent, n := range attempts {
					earlier[sent] = true
					if n > 2 {
						t.Errorf("%s: sent %d times: %s", name, n, sent)
					}
					kind := map[string]openai.Kind{"/generate": openai.KindGenerate, "/v1/completions": openai.KindCompletion, "/v1/chat/completions": openai.KindChat}[r.path]
					req, err := openai.Parse(kind, []byte(sent))
					if err != nil {
						t.Errorf("%s: %v: %s", name, err, sent)
						continue
					}
					for _, b := range req.Bootstrap {
						if seen[b.Key.Room] || b.Key.Room > math.MaxInt64 || b.Key.Gen != 0 || b.Host != "127.0.0.1" || b.Port != 8998 {
							t.Errorf("%s: room %+v was used before, or is not as expected", name, b)
						}
						seen[b.Key.Room] = true
					}
				}
			}
		})
	}
}

// recorder stands for a worker that fails every request.
type recorder struct {
	*httptest.Server
	mu     sync.Mutex
	bodies []string
}

func newRecorder(t *testing.T, role string) *recorder {
	r := &recorder{}
	r.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info := `{"model_path":"sim","served_model_name":"sim","is_generation":true,"tp_size":1,"dp_size":1,"disaggregation_mode":"` + role + `"}`
		switch {
		case req.Method == http.MethodPost:
			raw, _ := io.ReadAll(req.Body)
			r.mu.Lock()
			r.bodies = append(r.bodies, string(raw))
			r.mu.Unlock()
			http.Error(w, `{"error":{"message":"it failed"}}`, http.StatusInternalServerError)
		case req.URL.Path == "/v1/models":
			fmt.Fprint(w, `{"object":"list","data":[{"id":"sim","object":"model","owned_by":"baton"}]}`)
		case strings.HasSuffix(req.URL.Path, "/health"), strings.HasSuffix(req.URL.Path, "server_info"), strings.HasSuffix(req.URL.Path, "model_info"):
			fmt.Fprint(w, info)
		default:
			http.NotFound(w, req)
		}
	}))
	t.Cleanup(r.Close)
	return r
}

func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := r.bodies
	r.bodies = nil
	return out
}

// TestRoomTwice: the same room again, as a retry that keeps its room would send it, is refused at once by both
// workers, while the first request runs and after it; the first is not disturbed.
func TestRoomTwice(t *testing.T) {
	s, m := startSim(t, simSetup{transport: "tcp", cost: "prefill-chunk=5ms,step=2ms"})
	const room, max = 4711, 200
	tokens := prompt(3, 300)
	body := generateBody("one", tokens, max, false)
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	again := func(when string) {
		began := time.Now()
		_, err := pair(ctx, s.Prefills[0], s.Decodes[0], room, body)
		if err == nil || strings.Count(err.Error(), "status 409") != 2 || strings.Count(err.Error(), `"duplicate_room"`) < 2 {
			t.Errorf("the room again %s: %v", when, err)
		}
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("refused only after %v", took)
		}
	}
	ended := make(chan error, 1)
	go func() {
		got, err := pair(ctx, s.Prefills[0], s.Decodes[0], room, body)
		if want := m.text(tokens, max); err == nil && got.Choices[0].Text != want {
			err = fmt.Errorf("%+v, want %q", got, want)
		}
		ended <- err
	}()
	busyWorker(t, s.Prefills, func(w *workerInfo) bool { return w.State.CellsUsed > 0 })
	busyWorker(t, s.Decodes, func(w *workerInfo) bool { return w.Rooms.Live > 0 })
	again("during the first")
	if err := <-ended; err != nil {
		t.Error(err)
	}
	again("after the first")
	waitIdle(t, s, settleTime)
}
