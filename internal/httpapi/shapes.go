package httpapi

import (
	"strings"
	"time"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/sched"
)

// shape writes the answer of one endpoint.
type shape interface {
	// chunks are the stream events that show ev, which c has taken already.
	chunks(c *choice, ev sched.Event) ([][]byte, error)
	// usage is the event with the counts, nil if there is none.
	usage(u openai.Usage) ([]byte, error)
	// whole is the answer of a request that does not stream.
	whole(cs []*choice, u openai.Usage) ([]byte, error)
	// keepsTokens: choices must keep their tokens, for logprobs or ids.
	keepsTokens() bool
}

// frame is what every answer of a request has in common.
type frame struct {
	id      string
	created int64
	model   string
	req     *openai.Request
	tok     engine.Tokenizer
}

func newShape(s *server, j *job) shape {
	f := frame{created: s.now().Unix(), model: s.Info.ModelName, req: j.req, tok: s.Tokenizer}
	switch j.req.Kind {
	case openai.KindChat:
		f.name("chatcmpl-" + j.w.id)
		return &chatShape{f}
	case openai.KindCompletion:
		f.name("cmpl-" + j.w.id)
		sh := &textShape{frame: f}
		if j.req.Echo {
			sh.echo = echoes(s.Tokenizer, j.admitted)
		}
		return sh
	default:
		f.name(j.w.id)
		return &generateShape{frame: f, job: j}
	}
}

// echoes is each prompt's text.
func echoes(tok engine.Tokenizer, a *admitted) []string {
	out := make([]string, len(a.prompts))
	for i, p := range a.req.Prompts {
		if !p.IsTokens {
			out[i] = p.Text
			continue
		}
		var b strings.Builder
		for _, t := range p.Tokens {
			b.Write(tok.Piece(t))
		}
		out[i] = strings.ToValidUTF8(b.String(), "\uFFFD")
	}
	return out
}

func (f *frame) keepsTokens() bool { return f.req.Logprobs > 0 }

// shownTokens leaves out the token that only ends the generation.
func (f *frame) shownTokens(toks []sched.TokenEvent) []sched.TokenEvent {
	if n := len(toks); n > 0 && len(toks[n-1].Bytes) == 0 && f.tok.IsEOG(toks[n-1].ID) {
		return toks[:n-1]
	}
	return toks
}

func finishPtr(f sched.FinishReason) *string {
	if f == "" {
		return nil
	}
	s := string(f)
	return &s
}

// marshalAll is the JSON of each value.
func marshalAll[T any](vs []T) ([][]byte, error) {
	out := make([][]byte, 0, len(vs))
	for _, v := range vs {
		b, err := openai.Marshal(v)
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}

// chatShape is /v1/chat/completions.
type chatShape struct{ frame }

func (s *chatShape) chunk(choices ...openai.ChatChunkChoice) openai.ChatChunk {
	return openai.ChatChunk{
		ID: s.id, Object: openai.ObjectChatChunk, Created: s.created, Model: s.model,
		Choices: choices, Usage: openai.StreamUsage(s.req.IncludeUsage, nil),
	}
}

// chunks: the role once, then text, then the finish reason in a chunk of its own.
func (s *chatShape) chunks(c *choice, ev sched.Event) ([][]byte, error) {
	var out []openai.ChatChunk
	if !c.started {
		c.started = true
		empty := ""
		out = append(out, s.chunk(openai.ChatChunkChoice{Index: c.index, Delta: openai.ChatDelta{Role: "assistant", Content: &empty}}))
	}
	lp := s.logprobs(ev.Tokens)
	if ev.Text != "" || lp != nil {
		out = append(out, s.chunk(openai.ChatChunkChoice{Index: c.index, Delta: openai.ChatDelta{Content: &ev.Text}, Logprobs: lp}))
	}
	if ev.Finish != "" {
		out = append(out, s.chunk(openai.ChatChunkChoice{Index: c.index, FinishReason: finishPtr(ev.Finish)}))
	}
	return marshalAll(out)
}

func (s *chatShape) usage(u openai.Usage) ([]byte, error) {
	if !s.req.IncludeUsage {
		return nil, nil
	}
	c := s.chunk()
	c.Choices, c.Usage = []openai.ChatChunkChoice{}, openai.StreamUsage(true, &u)
	return openai.Marshal(c)
}

func (s *chatShape) whole(cs []*choice, u openai.Usage) ([]byte, error) {
	out := openai.ChatCompletion{ID: s.id, Object: openai.ObjectChat, Created: s.created, Model: s.model, Usage: u}
	for _, c := range cs {
		ch := openai.ChatChoice{
			Index: c.index, Message: openai.ChatMessage{Role: "assistant", Content: c.text.String()}, FinishReason: string(c.finish),
		}
		if s.req.Logprobs > 0 {
			if ch.Logprobs = s.logprobs(c.tokens); ch.Logprobs == nil {
				ch.Logprobs = &openai.ChatLogprobs{Content: []openai.ChatTokenLogprob{}}
			}
		}
		out.Choices = append(out.Choices, ch)
	}
	return openai.Marshal(out)
}

// logprobs is nil if none are asked for or there is no token to show.
func (s *chatShape) logprobs(toks []sched.TokenEvent) *openai.ChatLogprobs {
	toks = s.shownTokens(toks)
	if s.req.Logprobs == 0 || len(toks) == 0 {
		return nil
	}
	out := &openai.ChatLogprobs{}
	for _, t := range toks {
		l := openai.ChatTokenLogprob{
			Token: openai.TokenText(t.Bytes), Logprob: openai.JSONLogprob(t.Logprob), Bytes: openai.TokenBytes(t.Bytes),
			TopLogprobs: []openai.ChatTopLogprob{},
		}
		for _, a := range t.Top {
			b := s.tok.Piece(a.Token)
			l.TopLogprobs = append(l.TopLogprobs, openai.ChatTopLogprob{
				Token: openai.TokenText(b), Logprob: openai.JSONLogprob(a.Logprob), Bytes: openai.TokenBytes(b),
			})
		}
		out.Content = append(out.Content, l)
	}
	return out
}

// textShape is /v1/completions.
type textShape struct {
	frame
	echo []string // by prompt; nil without echo
}

func (s *textShape) answer(choices []openai.TextChoice) openai.TextCompletion {
	return openai.TextCompletion{ID: s.id, Object: openai.ObjectText, Created: s.created, Model: s.model, Choices: choices}
}

func (s *textShape) chunks(c *choice, ev sched.Event) ([][]byte, error) {
	text := ev.Text
	if !c.started && s.echo != nil {
		text = s.echo[c.prompt] + text
	}
	c.started = true
	lp := s.logprobs(c, ev.Tokens)
	if text == "" && lp == nil && ev.Finish == "" {
		return nil, nil
	}
	a := s.answer([]openai.TextChoice{{Index: c.index, Text: text, Logprobs: lp, FinishReason: finishPtr(ev.Finish)}})
	a.Usage = openai.StreamUsage(s.req.IncludeUsage, nil)
	return marshalAll([]openai.TextCompletion{a})
}

func (s *textShape) usage(u openai.Usage) ([]byte, error) {
	if !s.req.IncludeUsage {
		return nil, nil
	}
	a := s.answer([]openai.TextChoice{})
	a.Usage = openai.StreamUsage(true, &u)
	return openai.Marshal(a)
}

func (s *textShape) whole(cs []*choice, u openai.Usage) ([]byte, error) {
	var out []openai.TextChoice
	for _, c := range cs {
		text := c.text.String()
		if s.echo != nil {
			text = s.echo[c.prompt] + text
		}
		out = append(out, openai.TextChoice{Index: c.index, Text: text, Logprobs: s.logprobs(c, c.tokens), FinishReason: finishPtr(c.finish)})
	}
	a := s.answer(out)
	a.Usage = openai.StreamUsage(true, &u)
	return openai.Marshal(a)
}

func (s *textShape) logprobs(c *choice, toks []sched.TokenEvent) *openai.TextLogprobs {
	toks = s.shownTokens(toks)
	if s.req.Logprobs == 0 || len(toks) == 0 {
		return nil
	}
	out := &openai.TextLogprobs{}
	for _, t := range toks {
		key, lp := openai.TokenKey(t.Bytes), openai.JSONLogprob(t.Logprob)
		// OpenAI shows the chosen token among the alternatives even if it is not one of the most likely.
		top := map[string]float64{key: lp}
		for _, a := range t.Top {
			if k := openai.TokenKey(s.tok.Piece(a.Token)); k != key {
				top[k] = openai.JSONLogprob(a.Logprob)
			}
		}
		out.Tokens = append(out.Tokens, key)
		out.TokenLogprobs = append(out.TokenLogprobs, lp)
		out.TopLogprobs = append(out.TopLogprobs, top)
		out.TextOffset = append(out.TextOffset, c.chars)
		for _, b := range t.Bytes {
			if utf8.RuneStart(b) {
				c.chars++
			}
		}
	}
	return out
}

// generateShape is SGLang's /generate. Stream events repeat the text so far.
type generateShape struct {
	frame
	job *job
}

func (s *generateShape) keepsTokens() bool { return true }

func (s *generateShape) chunks(c *choice, ev sched.Event) ([][]byte, error) {
	if ev.Text == "" && len(ev.Tokens) == 0 && ev.Finish == "" {
		return nil, nil
	}
	g := s.generated(c)
	if len(s.job.choices) > 1 {
		g.Index = &c.index
	}
	return marshalAll([]openai.Generated{g})
}

func (s *generateShape) usage(openai.Usage) ([]byte, error) { return nil, nil } // in every meta_info

func (s *generateShape) whole(cs []*choice, _ openai.Usage) ([]byte, error) {
	var out []openai.Generated
	for _, c := range cs {
		out = append(out, s.generated(c))
	}
	if len(out) == 1 && !s.req.Batch {
		return openai.Marshal(out[0])
	}
	return openai.Marshal(out)
}

func (s *generateShape) generated(c *choice) openai.Generated {
	g := openai.Generated{Text: c.text.String(), OutputIDs: make([]int32, 0, len(c.tokens)), Meta: openai.Meta{
		ID: s.name(c), PromptTokens: len(s.job.prompts[c.prompt]), CompletionTokens: c.count, FinishReason: s.finish(c),
	}}
	for _, t := range c.tokens {
		g.OutputIDs = append(g.OutputIDs, int32(t.ID))
	}
	if c.finish != "" {
		took := s.job.s.now().Sub(s.job.w.start)
		if r := s.req.Resume; r != nil {
			took += r.Elapsed
		}
		sec := took.Round(time.Microsecond).Seconds()
		g.Meta.E2ELatency = &sec
	}
	if s.req.Logprobs > 0 {
		s.logprobs(c, &g.Meta)
	}
	return g
}

// name is the id of a choice's prompt: its own, or the request's with its number.
func (s *generateShape) name(c *choice) string {
	switch {
	case s.req.Resume != nil && s.req.Resume.ID != "":
		return s.req.Resume.ID
	case len(s.job.ids) > 1:
		return s.job.ids[c.prompt]
	case len(s.job.prompts) > 1:
		return s.job.ids[0] + "_" + itoa(c.prompt)
	default:
		return s.job.ids[0]
	}
}

func (s *generateShape) finish(c *choice) *openai.GenerateFinish {
	switch c.finish {
	case sched.FinishStop:
		f := &openai.GenerateFinish{Type: "stop"}
		if c.matched != "" {
			f.Matched = c.matched
		} else if c.last >= 0 && s.tok.IsEOG(c.last) {
			f.Matched = int32(c.last)
		}
		return f
	case sched.FinishLength:
		return &openai.GenerateFinish{Type: "length", Length: c.count}
	default:
		return nil
	}
}

func (s *generateShape) logprobs(c *choice, m *openai.Meta) {
	one := func(t engine.Token, lp float32, b []byte) openai.GenerateLogprob {
		g := openai.GenerateLogprob{Logprob: openai.JSONLogprob(lp), ID: int32(t)}
		if s.req.TextInLogprobs {
			text := openai.TokenText(b)
			g.Text = &text
		}
		return g
	}
	for _, t := range c.tokens {
		m.OutputTokenLogprobs = append(m.OutputTokenLogprobs, one(t.ID, t.Logprob, t.Bytes))
		if s.req.Logprobs > 1 {
			top := openai.GenerateTop{}
			for _, a := range t.Top {
				top = append(top, one(a.Token, a.Logprob, s.tok.Piece(a.Token)))
			}
			m.OutputTopLogprobs = append(m.OutputTopLogprobs, top)
		}
	}
}
