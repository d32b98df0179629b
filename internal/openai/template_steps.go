package openai

import (
	"errors"

	controlstructures "github.com/nikolalohinski/gonja/v2/builtins/control_structures"
	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/nodes"
	"github.com/nikolalohinski/gonja/v2/parser"
	"github.com/nikolalohinski/gonja/v2/tokens"
)

// counted makes a control structure pay a step each time it runs, a loop one for each item and each
// round, and a macro one for each call. Only with all of them is the time of a rendering bounded.
func counted(p parser.ControlStructureParser) parser.ControlStructureParser {
	return func(ps, args *parser.Parser) (nodes.ControlStructure, error) {
		inner, err := p(ps, args)
		if err != nil {
			return nil, err
		}
		switch cs := inner.(type) {
		case *controlstructures.ForControlStructure:
			if cs.Recursive {
				return nil, errors.New("recursive loops are not supported in chat templates")
			}
			prepend(cs.BodyWrapper, func(r *run) error { return r.step(1) })
			return &countedLoop{cs}, nil
		case *controlstructures.MacroControlStructure:
			prepend(cs.Wrapper, (*run).enterMacro)
			cs.Wrapper.Nodes = append(cs.Wrapper.Nodes, block(cs.Wrapper, (*run).leaveMacro))
			return cs, nil
		case exec.ControlStructure:
			return &countedStructure{cs}, nil
		default:
			return inner, nil
		}
	}
}

// runOf is the run of a renderer; there always is one.
func runOf(r *exec.Renderer) *run {
	v, _ := r.Environment.Context.Get(runKey)
	return v.(*run)
}

type countedStructure struct{ exec.ControlStructure }

func (c *countedStructure) Execute(r *exec.Renderer, block *nodes.ControlStructureBlock) error {
	if err := runOf(r).step(1); err != nil {
		return err
	}
	return c.ControlStructure.Execute(r, block)
}

// itemsKey is where a counted loop finds what it goes over; no template can name it.
const itemsKey = "\x00items"

// countedLoop pays for every item before the loop looks at the first: a condition is evaluated for
// each, whether or not its round runs.
type countedLoop struct {
	*controlstructures.ForControlStructure
}

func (c *countedLoop) Execute(r *exec.Renderer, block *nodes.ControlStructureBlock) error {
	items := r.Eval(c.ObjectEvaluator)
	if items.IsError() {
		return items
	}
	if err := runOf(r).step(1 + items.Len()); err != nil {
		return err
	}
	once := *c.ForControlStructure // an expression may change what it reads, so it is evaluated once
	once.ObjectEvaluator = &nodes.Name{Name: &tokens.Token{Val: itemsKey}}
	sub := r.Inherit()
	sub.Environment.Context.Set(itemsKey, items)
	return once.Execute(sub, block)
}

// hook is a node that does something to the run.
type hook struct {
	at *tokens.Token
	do func(*run) error
}

func (h *hook) Position() *tokens.Token { return h.at }
func (h *hook) String() string          { return "hook" }

// Execute implements [exec.ControlStructure].
func (h *hook) Execute(r *exec.Renderer, _ *nodes.ControlStructureBlock) error { return h.do(runOf(r)) }

func block(w *nodes.Wrapper, do func(*run) error) nodes.Node {
	return &nodes.ControlStructureBlock{Location: w.Location, Name: "hook", ControlStructure: &hook{w.Location, do}}
}

func prepend(w *nodes.Wrapper, do func(*run) error) {
	w.Nodes = append([]nodes.Node{block(w, do)}, w.Nodes...)
}

// step pays for n steps.
func (r *run) step(n int) error {
	if r.steps -= n; r.steps < 0 {
		r.failed = errTooLong
		return errTooLong
	}
	return nil
}

var errTooDeep = errors.New("its macros call one another too deep")

func (r *run) enterMacro() error {
	if r.macros++; r.macros > maxMacros {
		r.failed = errTooDeep
		return errTooDeep
	}
	return r.step(1)
}

// leaveMacro is not reached after an error, which ends the rendering.
func (r *run) leaveMacro() error { r.macros--; return nil }
