package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/stack"
)

// TestClients: the clients that people have work unchanged on the real model, and whichever way
// they leave, nothing of them is left.
func TestClients(t *testing.T) {
	needModel(t)
	s := start(t, stack.Config{Prefill: 1, Decode: 1, Args: []string{"--threads", "1"}})
	warm(t, s)
	base := takeBaseline(t, s)
	t.Run("go", func(t *testing.T) { testGoClient(t, s.URL()) })
	t.Run("go-errors", func(t *testing.T) { testGoClientErrors(t, s.URL()) })
	t.Run("go-cancel", func(t *testing.T) { testGoClientCancel(t, s) })
	t.Run("python", func(t *testing.T) { testPythonClient(t, s) })
	t.Run("curl", func(t *testing.T) { testCurl(t, s) })
	t.Run("utf8", func(t *testing.T) { testUTF8(t, s.URL()) })
	base.check(t)
}

// warm opens the session between the workers, so that the baseline has it.
func warm(t *testing.T, s *stack.Stack) {
	t.Helper()
	if a := complete(t.Context(), s.URL(), "Hello", 2, nil); !a.ok() || !a.Done {
		t.Fatalf("first request: %v", a)
	}
}

// leaveTime is how soon both sides must have forgotten a client that left.
const leaveTime = time.Second

// forgotten checks that the stack was idle within leaveTime.
func forgotten(t *testing.T, s *stack.Stack) {
	t.Helper()
	if took := waitIdle(t, s, settleTime); took > leaveTime {
		t.Errorf("both sides were idle only %v after the client had left, want %v", took, leaveTime)
	} else {
		t.Logf("idle after %v", took.Round(time.Millisecond))
	}
}

// running waits until the decode worker generates for a client.
func running(t *testing.T, s *stack.Stack) {
	t.Helper()
	eventually(t, settleTime, func(ctx context.Context) error {
		w, err := inspect(ctx, s.Decodes[0])
		if err == nil && w.State.Running == 0 {
			err = errors.New("nothing is running")
		}
		return err
	})
}

func goClient(t *testing.T, url string) (sdk.Client, string) {
	t.Helper()
	c := sdk.NewClient(option.WithBaseURL(url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	models, err := c.Models.List(t.Context())
	if err != nil || len(models.Data) != 1 {
		t.Fatalf("models: %+v, %v", models, err)
	}
	id := models.Data[0].ID
	if m, err := c.Models.Get(t.Context(), id); err != nil || m.ID != id {
		t.Fatalf("model %s: %+v, %v", id, m, err)
	}
	return c, id
}

func goChat(model string, max int64) sdk.ChatCompletionNewParams {
	return sdk.ChatCompletionNewParams{Model: model, MaxTokens: sdk.Int(max), Temperature: sdk.Float(0), Messages: []sdk.ChatCompletionMessageParamUnion{
		sdk.SystemMessage("You answer briefly."), sdk.UserMessage("Name three animals."),
	}}
}

func testGoClient(t *testing.T, url string) {
	ctx := t.Context()
	c, model := goClient(t, url)
	whole, err := c.Chat.Completions.New(ctx, goChat(model, 16))
	if err != nil {
		t.Fatal(err)
	}
	p := goChat(model, 16)
	p.StreamOptions.IncludeUsage = sdk.Bool(true)
	stream := c.Chat.Completions.NewStreaming(ctx, p)
	var acc sdk.ChatCompletionAccumulator
	for stream.Next() {
		if !acc.AddChunk(stream.Current()) {
			t.Fatalf("chunk does not fit: %s", stream.Current().RawJSON())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if got, want := acc.Choices[0].Message.Content, whole.Choices[0].Message.Content; got != want || want == "" {
		t.Errorf("streamed %q, whole %q", got, want)
	}
	if acc.Usage.PromptTokens != whole.Usage.PromptTokens || acc.Usage.CompletionTokens != whole.Usage.CompletionTokens || whole.Usage.CompletionTokens < 1 {
		t.Errorf("usage %+v, whole %+v", acc.Usage, whole.Usage)
	}
	if acc.Choices[0].FinishReason != whole.Choices[0].FinishReason || whole.Choices[0].FinishReason == "" {
		t.Errorf("finish %q, whole %q", acc.Choices[0].FinishReason, whole.Choices[0].FinishReason)
	}

	text := sdk.CompletionNewParams{Model: sdk.CompletionNewParamsModel(model), MaxTokens: sdk.Int(10), Temperature: sdk.Float(1), Seed: sdk.Int(3), N: sdk.Int(2),
		Prompt: sdk.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{"The sea", "A fox"}}, Echo: sdk.Bool(true)}
	first, err := c.Completions.New(ctx, text)
	if err != nil {
		t.Fatal(err)
	}
	again, err := c.Completions.New(ctx, text)
	if err != nil {
		t.Fatal(err)
	}
	if len(first.Choices) != 4 {
		t.Fatalf("%d choices of 2 prompts with n=2", len(first.Choices))
	}
	for i, ch := range first.Choices {
		if want := []string{"The sea", "A fox"}[i/2]; !strings.HasPrefix(ch.Text, want) || len(ch.Text) == len(want) {
			t.Errorf("choice %d is %q, want an echo of %q and more", i, ch.Text, want)
		}
		if ch.Text != again.Choices[i].Text {
			t.Errorf("choice %d with the same seed: %q and %q", i, ch.Text, again.Choices[i].Text)
		}
	}
	if first.Choices[0].Text == first.Choices[1].Text {
		t.Errorf("two sampled choices are both %q", first.Choices[0].Text)
	}
	if first.Usage.CompletionTokens > 40 || first.Usage.CompletionTokens < 4 {
		t.Errorf("usage %+v", first.Usage)
	}
}

func testGoClientErrors(t *testing.T, url string) {
	c, model := goClient(t, url)
	for name, s := range map[string]struct {
		set         func(p *sdk.ChatCompletionNewParams)
		status      int
		code, param string
	}{
		"unknown model": {func(p *sdk.ChatCompletionNewParams) { p.Model = "gpt-9" }, 404, "model_not_found", "model"},
		"tools": {func(p *sdk.ChatCompletionNewParams) {
			p.Tools = []sdk.ChatCompletionToolUnionParam{sdk.ChatCompletionFunctionTool(sdk.FunctionDefinitionParam{Name: "f"})}
		}, 400, "unsupported_field", "tools"},
		"json schema": {func(p *sdk.ChatCompletionNewParams) {
			p.ResponseFormat.OfJSONObject = &sdk.ResponseFormatJSONObjectParam{}
		}, 400, "unsupported_field", "response_format"},
		"too many choices": {func(p *sdk.ChatCompletionNewParams) { p.N = sdk.Int(4000) }, 400, "invalid_value", "n"},
		"too long": {func(p *sdk.ChatCompletionNewParams) {
			p.Messages = append(p.Messages, sdk.UserMessage(strings.Repeat("word ", 9000)))
		}, 400, "context_length_exceeded", "messages"},
	} {
		for _, streamed := range []bool{false, true} {
			p := goChat(model, 4)
			s.set(&p)
			var err error
			if streamed {
				st := c.Chat.Completions.NewStreaming(t.Context(), p)
				for st.Next() {
					t.Errorf("%s: event %s", name, st.Current().RawJSON())
				}
				err = st.Err()
			} else {
				_, err = c.Chat.Completions.New(t.Context(), p)
			}
			var api *sdk.Error
			if !errors.As(err, &api) || api.StatusCode != s.status || api.Code != s.code || api.Param != s.param || !strings.Contains(api.RawJSON(), `"cause":"invalid_request"`) {
				t.Errorf("%s (streamed %v): %v", name, streamed, err)
			}
		}
	}
}

// testGoClientCancel leaves while the answer runs, while it is waited for, and while the prompt is computed.
func testGoClientCancel(t *testing.T, s *stack.Stack) {
	c, model := goClient(t, s.URL())
	p := goChat(model, 3000)
	forever := option.WithJSONSet("ignore_eos", true)

	stream := c.Chat.Completions.NewStreaming(t.Context(), p, forever)
	for range 5 {
		if !stream.Next() {
			t.Fatal(stream.Err())
		}
	}
	if err := stream.Close(); err != nil {
		t.Fatal(err)
	}
	forgotten(t, s)

	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := c.Chat.Completions.New(ctx, p, forever)
		ended <- err
	}()
	running(t, s)
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled request: %v", err)
	}
	forgotten(t, s)

	ctx, stop = context.WithCancel(t.Context())
	p.Messages = append(p.Messages, sdk.UserMessage(strings.Repeat("river mountain sea ", 900)))
	go func() {
		_, err := c.Chat.Completions.New(ctx, p, forever)
		ended <- err
	}()
	eventually(t, settleTime, func(ctx context.Context) error { // some chunks are there, more are to come
		w, err := inspect(ctx, s.Prefills[0])
		if err == nil && w.State.CellsUsed < 256 {
			err = fmt.Errorf("%d cells used", w.State.CellsUsed)
		}
		return err
	})
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled request: %v", err)
	}
	forgotten(t, s)
}

// python is the interpreter that has the OpenAI client; scripts/deps.sh made it.
func python(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../.cache/venv/bin/python")
	if err == nil {
		_, err = os.Stat(path)
	}
	if err != nil {
		t.Skipf("the OpenAI Python client is missing (%v); run `make testdeps`", err)
	}
	return path
}

func testPythonClient(t *testing.T, s *stack.Stack) {
	interpreter := python(t)
	ctx, stop := context.WithTimeout(t.Context(), 4*time.Minute)
	defer stop()
	out, err := exec.CommandContext(ctx, interpreter, "testdata/openai_client.py", s.URL(), "check").CombinedOutput()
	if err != nil || bytes.Count(out, []byte("ok ")) != 10 {
		t.Errorf("python client: %v\n%s", err, out)
	}

	cmd := exec.CommandContext(ctx, interpreter, "testdata/openai_client.py", s.URL(), "cancel")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	expect := func(want string) {
		if !lines.Scan() || lines.Text() != want {
			t.Errorf("python client says %q (%v), want %q", lines.Text(), lines.Err(), want)
		}
	}
	expect("streaming")
	running(t, s)
	fmt.Fprintln(in)
	expect("closed")
	forgotten(t, s)
	in.Close()
	if err := cmd.Wait(); err != nil {
		t.Errorf("python client: %v", err)
	}
}

// curl runs curl; its output ends with the status in a line of its own.
func curl(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "curl", append([]string{"--silent", "--show-error", "--no-buffer", "--max-time", "60",
		"--header", "content-type: application/json", "--write-out", "\n%{http_code}"}, args...)...)
}

func testCurl(t *testing.T, s *stack.Stack) {
	if _, err := exec.LookPath("curl"); err != nil {
		t.Skipf("curl is missing: %v; run `make testdeps`", err)
	}
	ask := func(path, body string) (string, string) {
		args := []string{s.URL() + path}
		if body != "" {
			args = append(args, "--data-binary", body)
		}
		out, err := curl(t.Context(), args...).Output()
		if err != nil {
			t.Errorf("curl %s: %v", path, err)
		}
		at := bytes.LastIndexByte(out, '\n')
		return string(out[:at]), string(out[at+1:])
	}
	if body, status := ask("/v1/models", ""); status != "200" || !strings.Contains(body, `"object":"list"`) {
		t.Errorf("models: %s %s", status, body)
	}
	chat := `{"messages":[{"role":"user","content":"Say hello."}],"max_tokens":8,"temperature":0`
	if body, status := ask("/v1/chat/completions", chat+"}"); status != "200" || !strings.Contains(body, `"role":"assistant"`) {
		t.Errorf("chat: %s %s", status, body)
	}
	body, status := ask("/v1/chat/completions", chat+`,"stream":true,"stream_options":{"include_usage":true}}`)
	if status != "200" || !strings.HasSuffix(strings.TrimSpace(body), "data: [DONE]") || strings.Count(body, `"usage":{`) != 1 {
		t.Errorf("stream: %s %s", status, body)
	}
	for _, bad := range []struct{ path, body, status, has string }{
		{"/v1/chat/completions", `{"model":"gpt-9",` + chat[1:] + "}", "404", "model_not_found"},
		{"/v1/chat/completions", chat + `,"tools":[{"type":"function"}]}`, "400", `"param":"tools"`},
		{"/v1/completions", `{"prompt":"x","best_of":3}`, "400", `"param":"best_of"`},
		{"/v1/completions", `{"prompt":`, "400", "invalid_body"},
		{"/v1/nothing", `{}`, "404", "not_found"},
		{"/v1/completions", "", "405", "method_not_allowed"},
	} {
		if body, status := ask(bad.path, bad.body); status != bad.status || !strings.Contains(body, bad.has) {
			t.Errorf("%s %s: %s %s", bad.path, bad.body, status, body)
		}
	}

	// Killed in mid-stream, as a terminal that is closed does.
	cmd := curl(t.Context(), s.URL()+"/v1/completions", "--data-binary", `{"prompt":"Tell","max_tokens":3000,"ignore_eos":true,"stream":true}`)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	events := openai.NewEventReader(out, 0)
	for range 3 {
		if _, err := events.Next(); err != nil {
			t.Errorf("event: %v", err)
		}
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait() // says that it was killed
	forgotten(t, s)
}

// testUTF8: the model is made to write characters of several tokens, and to end within one. Every
// event is valid UTF-8, and the events together are the whole answer.
func testUTF8(t *testing.T, url string) {
	emoji := strings.Repeat("😀🎉🚀", 3)
	held := 0 // tokens that waited for the rest of their character: events that did not come
	for i, s := range []struct {
		path        string
		prompt      string
		temperature float64
		max         int
	}{
		{"/v1/completions", emoji, 0, 32}, // ends within a character
		{"/v1/completions", emoji, 1.5, 24},
		{"/v1/completions", emoji, 1.5, 24},
		{"/v1/completions", "北京上海广州北京上海", 0.7, 24},
		{"/v1/chat/completions", "Repeat this: " + emoji + emoji, 1.5, 24},
	} {
		body := map[string]any{"prompt": s.prompt, "temperature": s.temperature, "seed": i, "max_tokens": s.max, "ignore_eos": true}
		if strings.Contains(s.path, "chat") {
			delete(body, "prompt")
			body["messages"] = []map[string]string{{"role": "user", "content": s.prompt}}
			body["logprobs"] = true
		} else {
			body["echo"] = i%2 == 1
		}
		body["stream"] = true
		events := rawEvents(t, url+s.path, body)
		body["stream"] = false
		whole := rawAnswer(t, url+s.path, body)
		if len(events) < 2 || !bytes.Equal(events[len(events)-1], []byte(openai.DoneData)) {
			t.Fatalf("%d events, the last is %q", len(events), events[len(events)-1])
		}
		got := ""
		for _, ev := range events[:len(events)-1] {
			if !utf8.Valid(ev) {
				t.Errorf("event is not valid UTF-8: %q", ev)
			}
			got += textOf(t, ev)
		}
		want := textOf(t, whole)
		if got != want || !utf8.Valid(whole) {
			t.Errorf("%s %q: streamed %q, whole %q", s.path, s.prompt, got, want)
		}
		if body["echo"] == true && !strings.HasPrefix(want, s.prompt) {
			t.Errorf("echo of %q is %q", s.prompt, want)
		}
		if body["logprobs"] == nil { // with them a chat has more events
			held += max(s.max-(len(events)-1), 0)
		}
	}
	if held < 15 {
		t.Errorf("only %d tokens were a part of a character: this test shows nothing", held)
	}
	t.Logf("%d tokens were a part of a character", held)
}

// textOf is the text of all choices of an answer or event.
func textOf(t *testing.T, raw []byte) string {
	t.Helper()
	var a struct {
		Choices []struct {
			Text    string
			Delta   struct{ Content string }
			Message struct{ Content string }
		}
	}
	if err := json.Unmarshal(raw, &a); err != nil {
		t.Fatalf("%q: %v", raw, err)
	}
	out := ""
	for _, c := range a.Choices {
		out += c.Text + c.Delta.Content + c.Message.Content
	}
	return out
}

func rawAnswer(t *testing.T, url string, body any) []byte {
	t.Helper()
	res, err := post(t.Context(), url, body)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	raw, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s, %v: %s", url, res.Status, err, raw)
	}
	return raw
}

func rawEvents(t *testing.T, url string, body any) [][]byte {
	t.Helper()
	events := openai.NewEventReader(bytes.NewReader(rawAnswer(t, url, body)), 0)
	var out [][]byte
	for {
		data, err := events.Next()
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, bytes.Clone(data))
	}
}
