package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/builtins"
	"github.com/nikolalohinski/gonja/v2/config"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/parser"

	"github.com/baton-pd/baton/internal/engine"
)

// Template is a model's chat template (Jinja, with the settings of Hugging Face's
// renderer) and what is needed to tokenize its output safely. It is immutable and
// safe for concurrent use. Rendering reads no file, and is bounded in steps, depth and output. It is
// not bounded in memory: one expression can make a text of any length ('a' * 1000000000), and
// so far the model's file is trusted.
type Template struct {
	source   string
	compiled *exec.Template
	specials *specials
	bos, eos string
	bosToken engine.Token
	tok      engine.Tokenizer
}

// ErrNoTemplate: the model has no chat template.
var ErrNoTemplate = NewError(400, CodeInvalidValue, "messages",
	"the model has no chat template; use /v1/completions")

// Bounds of one rendering: control structures run, rounds of loops, calls of macros, and bytes
// written. They grow with the chat, so that only a template that loops or multiplies meets them.
const (
	stepsBase, stepsPerMessage = 20_000, 500
	bytesBase, bytesFactor     = 1 << 20, 8
	maxMacros                  = 50        // macros in one another, which live on the stack
	maxSource                  = 128 << 10 // bytes
	maxBrackets                = 500       // open at once in the source: the parser calls itself for each
)

// NewTemplate compiles info.ChatTemplate; ErrNoTemplate if there is none.
func NewTemplate(info engine.Info, tok engine.Tokenizer) (*Template, error) {
	if strings.TrimSpace(info.ChatTemplate) == "" {
		return nil, ErrNoTemplate
	}
	texts := tok.SpecialTexts()
	t := &Template{source: info.ChatTemplate, specials: newSpecials(texts), bosToken: info.BOS, tok: tok}
	t.bos, t.eos = textOf(info.BOS, texts, tok), textOf(info.EOS, texts, tok)
	if n := len(info.ChatTemplate); n > maxSource {
		return nil, fmt.Errorf("the model's chat template has %d bytes; at most %d", n, maxSource)
	}
	if brackets(info.ChatTemplate) > maxBrackets {
		return nil, fmt.Errorf("the model's chat template opens more than %d brackets in one another", maxBrackets)
	}
	var err error
	if t.compiled, err = compile(info.ChatTemplate); err != nil {
		return nil, fmt.Errorf("compile the model's chat template: %w", err)
	}
	return t, nil
}

// brackets is the most that are open at once, those in text included.
func brackets(source string) (most int) {
	open := 0
	for i := range len(source) {
		switch source[i] {
		case '(', '[', '{':
			open++
			most = max(most, open)
		case ')', ']', '}':
			open = max(0, open-1)
		}
	}
	return most
}

// textOf finds the text of a special token: the tokenizer can only go from text to token.
func textOf(want engine.Token, texts []string, tok engine.Tokenizer) string {
	if want < 0 {
		return ""
	}
	for _, s := range texts {
		if got, err := tok.Tokenize(s, false, true); err == nil && len(got) == 1 && got[0] == want {
			return s
		}
	}
	return ""
}

// Prompt renders the chat and tokenizes it. Text of special tokens inside message
// content stays ordinary text. now is for templates that show the date (in UTC, so
// that two workers agree). Errors are *Error.
func (t *Template) Prompt(msgs []Message, now time.Time) ([]engine.Token, error) {
	nonce, ok := freshNonce(t.source, msgs)
	if !ok {
		return nil, invalid("messages", "messages hold too many private-use characters")
	}
	guarded := make([]Message, len(msgs))
	for i, m := range msgs {
		guarded[i] = Message{Role: t.role(m.Role), Content: t.specials.guard(m.Content, nonce)}
	}
	rendered, err := t.render(guarded, now)
	if err != nil {
		return nil, err
	}
	parts, err := t.specials.split(rendered, nonce)
	if err != nil {
		return nil, invalid("messages", "%v", err)
	}
	return t.tokenize(parts)
}

// role maps developer to system for templates that do not know the newer name.
func (t *Template) role(role string) string {
	if role == "developer" && !strings.Contains(t.source, "developer") {
		return "system"
	}
	return role
}

// tokenize turns the parts into one prompt. The first asks for BOS, and one is taken
// away again if the template had written it itself.
func (t *Template) tokenize(parts []part) ([]engine.Token, error) {
	var out []engine.Token
	for i, p := range parts {
		toks, err := t.tok.Tokenize(p.text, i == 0, !p.literal)
		if err != nil {
			return nil, invalid("messages", "tokenize: %v", err)
		}
		out = append(out, toks...)
	}
	if b := t.bosToken; b >= 0 && len(out) >= 2 && out[0] == b && out[1] == b {
		out = out[1:]
	}
	return out, nil
}

// Render is the chat as text, with special texts in content left as they are; for tests and people.
func (t *Template) Render(msgs []Message, now time.Time) (string, error) { return t.render(msgs, now) }

func (t *Template) render(msgs []Message, now time.Time) (_ string, err error) {
	in := 0
	list := make(messageList, len(msgs))
	for i, m := range msgs {
		in += len(m.Content)
		list[i] = map[string]any{"role": m.Role, "content": m.Content}
	}
	run := &run{steps: stepsBase + stepsPerMessage*len(msgs), bytes: bytesBase + bytesFactor*in}
	// gonja panics on some type errors; a template's fault must not be the worker's.
	defer func() {
		if p := recover(); p != nil {
			err = invalid("messages", "the chat template failed: %v", p)
		}
	}()
	data := exec.NewContext(map[string]any{
		"messages": list, "add_generation_prompt": true, "bos_token": t.bos, "eos_token": t.eos,
		runKey: run,
		"raise_exception": func(va *exec.VarArgs) (any, error) {
			run.raised = errors.New(va.First().String())
			return nil, run.raised
		},
		"strftime_now": func(va *exec.VarArgs) (any, error) { return strftime(now.UTC(), va.First().String()) },
		"range":        boundedRange,
	})
	err = t.compiled.Execute(run, data)
	if err == nil {
		err = run.failed // a template can hide an error of its own, but not this one
	}
	if err != nil {
		switch {
		case run.raised != nil:
			return "", invalid("messages", "the chat template refuses these messages: %v", run.raised)
		case run.failed != nil:
			return "", invalid("messages", "the chat template failed: %v", run.failed)
		default:
			return "", invalid("messages", "the chat template failed: %s", clipTo(err.Error(), 512))
		}
	}
	return run.out.String(), nil
}

func clipTo(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}

// run is the budget and output of one rendering.
type run struct {
	steps, bytes   int
	macros         int // being run in one another
	out            bytes.Buffer
	raised, failed error
}

// runKey is where control structures find their run; no template can name it.
const runKey = "\x00run"

var errTooLong = errors.New("it exceeds its bounds of steps or output")

// Write is called by the renderer.
func (r *run) Write(p []byte) (int, error) {
	if r.bytes -= len(p); r.bytes < 0 {
		r.failed = errTooLong
		return 0, errTooLong
	}
	return r.out.Write(p)
}

func compile(source string) (_ *exec.Template, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("parser failed: %v", p)
		}
	}()
	cfg := config.New()
	cfg.TrimBlocks, cfg.LeftStripBlocks = true, true
	return exec.NewTemplate("chat_template", cfg, oneSource(source), environment())
}

// environment is gonja's with everything removed that reads files or is unbounded.
func environment() *exec.Environment {
	structures := map[string]parser.ControlStructureParser{}
	for _, name := range []string{"for", "if", "set"} {
		if p, ok := builtins.ControlStructures.Get(name); ok {
			structures[name] = counted(p)
		}
	}
	if p, ok := builtins.ControlStructures.Get("macro"); ok {
		structures["macro"] = counted(p)
	}
	for _, name := range []string{"raw", "with", "do", "break", "continue", "filter", "call"} {
		if p, ok := builtins.ControlStructures.Get(name); ok {
			structures[name] = p
		}
	}
	globals := map[string]any{}
	for _, name := range []string{"namespace", "dict", "cycler", "joiner"} {
		if f, ok := builtins.GlobalFunctions.Get(name); ok {
			globals[name] = f
		}
	}
	filters := exec.NewFilterSet(map[string]exec.FilterFunction{}).Update(builtins.Filters)
	_ = filters.Replace("tojson", toJSON) // fails only if gonja had no such filter
	return &exec.Environment{
		Context: exec.NewContext(globals), Filters: filters, Tests: builtins.Tests,
		ControlStructures: exec.NewControlStructureSet(structures), Methods: builtins.Methods,
	}
}

// oneSource is a loader that holds one template and refuses every other path.
type oneSource string

func (s oneSource) Read(path string) (io.Reader, error) {
	if path != "chat_template" {
		return nil, fmt.Errorf("chat templates must not load %q", path)
	}
	return strings.NewReader(string(s)), nil
}
func (s oneSource) Resolve(path string) (string, error) { return path, nil }
