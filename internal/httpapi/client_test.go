package httpapi

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	sdk "github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// client is OpenAI's own, unchanged, pointed at the server.
func (h *harness) client() sdk.Client {
	return sdk.NewClient(option.WithBaseURL(h.srv.URL+"/v1"), option.WithAPIKey("none"), option.WithHTTPClient(h.srv.Client()))
}

func chatParams() sdk.ChatCompletionNewParams {
	return sdk.ChatCompletionNewParams{Model: "tiny", Messages: []sdk.ChatCompletionMessageParamUnion{
		sdk.SystemMessage("be brief"), sdk.UserMessage("hi"),
	}}
}

func TestOpenAIClient(t *testing.T) {
	ctx := context.Background()
	h := newHarness(t, hello)
	c := h.client()

	p := chatParams()
	p.Logprobs, p.TopLogprobs = sdk.Bool(true), sdk.Int(2)
	chat, err := c.Chat.Completions.New(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	ch := chat.Choices[0]
	if ch.Message.Content != "Hé" || ch.FinishReason != "stop" || chat.Usage.CompletionTokens != 4 || len(ch.Logprobs.Content) != 3 {
		t.Errorf("chat %+v", chat)
	}

	// What it answered can be sent back as the client does it.
	p = chatParams()
	p.Messages = append(p.Messages, ch.Message.ToParam(), sdk.UserMessage("and?"))
	if _, err := c.Chat.Completions.New(ctx, p); err != nil {
		t.Errorf("second turn: %v", err)
	}

	p = chatParams()
	p.N, p.StreamOptions = sdk.Int(2), sdk.ChatCompletionStreamOptionsParam{IncludeUsage: sdk.Bool(true)}
	stream := c.Chat.Completions.NewStreaming(ctx, p)
	var acc sdk.ChatCompletionAccumulator
	for stream.Next() {
		if !acc.AddChunk(stream.Current()) {
			t.Fatalf("chunk does not fit: %+v", stream.Current())
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if len(acc.Choices) != 2 || acc.Choices[1].Message.Content != "Hé" || acc.Choices[1].Message.Role != "assistant" || acc.Usage.TotalTokens == 0 {
		t.Errorf("accumulated %+v", acc.ChatCompletion)
	}

	text, err := c.Completions.New(ctx, sdk.CompletionNewParams{
		Model: "tiny", Prompt: sdk.CompletionNewParamsPromptUnion{OfArrayOfStrings: []string{"a", "b"}}, Logprobs: sdk.Int(2),
	})
	if err != nil || len(text.Choices) != 2 || text.Choices[1].Text != "Hé" || len(text.Choices[0].Logprobs.Tokens) != 3 {
		t.Errorf("completion %+v, %v", text, err)
	}

	models, err := c.Models.List(ctx)
	if err != nil || len(models.Data) != 1 || models.Data[0].ID != "tiny" {
		t.Errorf("models %+v, %v", models, err)
	}
	if m, err := c.Models.Get(ctx, "tiny"); err != nil || m.OwnedBy != "baton" {
		t.Errorf("model %+v, %v", m, err)
	}
}

func TestOpenAIClientSeesErrors(t *testing.T) {
	ctx := context.Background()
	var api *sdk.Error

	h := newHarness(t, hello)
	c := h.client()
	p := chatParams()
	p.Model = "gpt-9"
	if _, err := c.Chat.Completions.New(ctx, p); !errors.As(err, &api) || api.StatusCode != 404 || api.Code != "model_not_found" || api.Param != "model" {
		t.Errorf("unknown model: %v", err)
	}

	// The client repeats what is worth repeating, and only that.
	for _, s := range []struct {
		cause *room.Cause
		tries int
	}{
		{&room.Cause{Code: room.CodeAborted, Detail: "x"}, 1},
		{&room.Cause{Code: room.CodeDuplicate, Detail: "x"}, 1},
		{&room.Cause{Code: room.CodeEngine, Detail: "x"}, 1},
		{&room.Cause{Code: room.CodePeerLost, Detail: "x", Retryable: true}, 2},
	} {
		h := newHarness(t, failing(s.cause))
		c := sdk.NewClient(option.WithBaseURL(h.srv.URL+"/v1"), option.WithAPIKey("none"), option.WithHTTPClient(h.srv.Client()), option.WithMaxRetries(1))
		if _, err := c.Chat.Completions.New(ctx, chatParams()); !errors.As(err, &api) || api.Code != string(s.cause.Code) {
			t.Errorf("%s: %v", s.cause.Code, err)
		}
		if got := len(h.sched.requests); got != s.tries {
			t.Errorf("%s: %d tries, want %d", s.cause.Code, got, s.tries)
		}
	}

	h = newHarness(t, always(text(0, "a"), text(0, "b"), step{err: brokenTransfer()}))
	c = h.client()
	stream := c.Chat.Completions.NewStreaming(ctx, chatParams())
	got := ""
	for stream.Next() {
		got += stream.Current().Choices[0].Delta.Content
	}
	if err := stream.Err(); got != "ab" || err == nil || !strings.Contains(err.Error(), "the prefill worker died") {
		t.Errorf("broken stream: text %q, error %v", got, err)
	}
}

// simulated is a server over the real scheduler and the simulated engine, without rooms.
func simulated(t *testing.T, c sim.Config) *harness {
	t.Helper()
	eng, err := sim.Open(c)
	if err != nil {
		t.Fatal(err)
	}
	d := sched.NewDecode(sched.DecodeConfig{Engine: eng})
	// Ended after the server, which newHarness ends.
	t.Cleanup(func() {
		sn := d.Snapshot()
		if sn.Running+sn.Prealloc+sn.Transfer+sn.CellsUsed+sn.SeqsUsed != 0 {
			t.Errorf("not idle: %+v", sn)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		if err := eng.Close(); err != nil {
			t.Error(err)
		}
	})
	return newHarness(t, nil, func(cfg *Config) { cfg.Scheduler, cfg.Tokenizer, cfg.Info = d, eng.Tokenizer(), eng.Info() })
}

func TestOpenAIClientOverTheSimulatedEngine(t *testing.T) {
	ctx := context.Background()
	h := simulated(t, sim.Config{ModelName: "tiny", EOSEvery: 0})
	c := h.client()
	p := chatParams()
	p.MaxTokens, p.Temperature = sdk.Int(12), sdk.Float(0)
	whole, err := c.Chat.Completions.New(ctx, p)
	if err != nil {
		t.Fatal(err)
	}
	if whole.Choices[0].FinishReason != "length" || whole.Usage.CompletionTokens != 12 {
		t.Errorf("whole %+v", whole)
	}
	var acc sdk.ChatCompletionAccumulator
	stream := c.Chat.Completions.NewStreaming(ctx, p)
	for stream.Next() {
		acc.AddChunk(stream.Current())
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	if got, want := acc.Choices[0].Message.Content, whole.Choices[0].Message.Content; got != want || want == "" {
		t.Errorf("streamed %q, whole %q", got, want)
	}
	// A stop string ends the text before it, however the tokens fall.
	p.Stop = sdk.ChatCompletionNewParamsStopUnion{OfString: sdk.String(whole.Choices[0].Message.Content[4:7])}
	cut, err := c.Chat.Completions.New(ctx, p)
	if err != nil || cut.Choices[0].FinishReason != "stop" || !strings.HasPrefix(whole.Choices[0].Message.Content, cut.Choices[0].Message.Content) ||
		len(cut.Choices[0].Message.Content) > 4 {
		t.Errorf("with stop %+v, %v", cut, err)
	}
	if status, body := h.get("/health_generate"); status != 200 {
		t.Errorf("health: %d %s", status, body)
	}
}

func TestEOSFirstOverTheSimulatedEngine(t *testing.T) {
	prompt := "abc"
	eng, err := sim.Open(sim.Config{})
	if err != nil {
		t.Fatal(err)
	}
	toks, err := eng.Tokenizer().Tokenize(prompt, true, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := eng.Close(); err != nil {
		t.Fatal(err)
	}
	h := simulated(t, sim.Config{EOSAt: len(toks) - 1})
	for _, stream := range []string{"false", "true"} {
		status, body, _, err := h.post("/v1/completions", `{"prompt":"`+prompt+`","temperature":0,"stream":`+stream+`}`)
		if status != 200 || err != nil || !strings.Contains(body, `"text":"","logprobs":null,"finish_reason":"stop"`) {
			t.Errorf("%d %s %v", status, body, err)
		}
	}
	// With ignore_eos the same request goes on.
	_, body, _, _ := h.post("/v1/completions", `{"prompt":"`+prompt+`","temperature":0,"ignore_eos":true,"max_tokens":5}`)
	if !strings.Contains(body, `"finish_reason":"length"`) || !strings.Contains(body, `"completion_tokens":5`) {
		t.Errorf("ignore_eos: %s", body)
	}
}

func TestManyClientsOverTheSimulatedEngine(t *testing.T) {
	h := simulated(t, sim.Config{ModelName: "tiny"})
	h.srv.Client().Transport.(*http.Transport).MaxIdleConnsPerHost = 16
	want := make([]string, 16)
	ask := func(i int) string {
		body := fmt.Sprintf(`{"text":%q,"sampling_params":{"temperature":0,"max_new_tokens":6,"n":2}}`, strings.Repeat("x", i+1))
		status, got, _, err := h.post("/generate", body)
		if status != 200 || err != nil {
			t.Errorf("%d %s %v", status, got, err)
		}
		text, _, _ := strings.Cut(got, `"meta_info"`)
		return text
	}
	for i := range want {
		want[i] = ask(i)
	}
	var group sync.WaitGroup
	for i := range want {
		group.Go(func() {
			if got := ask(i); got != want[i] {
				t.Errorf("prompt %d: %s alone, %s in company", i, want[i], got)
			}
		})
	}
	group.Wait()
}
