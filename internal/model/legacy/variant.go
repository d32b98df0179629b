package legacy

import (
	"fmt"
	"strings"
)

// Sizes of a world. A bigger variant needs bigger arrays in State.
const (
	maxRequests = 3
	maxConns    = 2
	maxQueue    = 4
)

// request is what a variant asks of one request.
type request struct {
	room   uint8 // index of its room id; two requests with the same one reuse it
	chunks uint8
	// ready: it begins bootstrapped with every chunk in the queue; with computing none is, and the
	// scheduler hands them over one by one.
	ready, computing bool
	// cancelled: the prefill side's own user cancels it, at any time.
	cancelled bool
	// after: it is not created, and its decode side says nothing, before request 0 was told its end.
	after bool
}

// frame is one message of the decode side about request req.
type frame struct {
	abort bool // else transfer information
	req   uint8
}

// Variant is a small world in which every interleaving is walked.
type Variant struct {
	Name string
	// Tells what happens in it, for people.
	Tells    string
	requests []request
	// conns are the decode side's connections; order holds within one only.
	conns [][]frame
	// defers: the first attempt at chunk 0 finds no staging memory and puts it back at the end of the queue.
	defers bool
	// keeps: the worker does not drop the transfer information after the last chunk.
	keeps bool
	// asserts: the NIXL policies have the bootstrap thread of 0.5.13 to 0.5.15, which knows no
	// ABORT and ends with an assertion when it gets one.
	asserts bool
}

var variants = []Variant{
	{Name: "late-abort", Tells: "two chunks are queued; ABORT comes at any moment (the twelve steps)",
		requests: []request{{chunks: 2, ready: true}}, conns: [][]frame{{{abort: true}}}},
	{Name: "three-chunks", Tells: "late-abort with three chunks",
		requests: []request{{chunks: 3, ready: true}}, conns: [][]frame{{{abort: true}}}},
	{Name: "late-success", Tells: "the only chunk, hence the last, is being written when ABORT comes",
		requests: []request{{chunks: 1, ready: true}}, conns: [][]frame{{{abort: true}}}},
	{Name: "abort-before-init", Tells: "transfer information and ABORT may both come before the sender is created",
		requests: []request{{chunks: 2}}, conns: [][]frame{{{}, {abort: true}}}},
	{Name: "abort-unknown", Tells: "ABORT comes for a request whose transfer information was never sent",
		requests: []request{{chunks: 2}}, conns: [][]frame{{{abort: true}}}},
	{Name: "drop-abort", Tells: "transfer information dropped by the ABORT handler, while the chunks are still being computed",
		requests: []request{{chunks: 2, ready: true, computing: true}}, conns: [][]frame{{{abort: true}}}},
	{Name: "drop-done", Tells: "transfer information dropped by the worker after the last chunk, while chunk 0 waits for staging memory",
		requests: []request{{chunks: 2, ready: true}}, defers: true},
	{Name: "drop-clear", Tells: "transfer information dropped by the scheduler's clear() after Success, while chunk 0 waits for staging memory",
		requests: []request{{chunks: 2, ready: true}}, defers: true, keeps: true},
	{Name: "drop-failure", Tells: "transfer information dropped by clear() in failure_exception(): cancelled on the prefill side, then the room id is used again",
		requests: []request{{chunks: 2, ready: true, cancelled: true}, {chunks: 1, after: true}}, conns: [][]frame{{{req: 1}}}},
	{Name: "room-reuse", Tells: "late-abort, and the room id is used again at once by a request on another connection",
		requests: []request{{chunks: 2, ready: true}, {chunks: 1, after: true}}, conns: [][]frame{{{abort: true}}, {{req: 1}}}},
	{Name: "mass-abort", Tells: "two requests are aborted at once beside a third that nobody aborts; the old assertion",
		requests: []request{{chunks: 1, ready: true}, {room: 1, chunks: 1, ready: true}, {room: 2, chunks: 1}},
		conns:    [][]frame{{{abort: true}, {abort: true, req: 1}, {req: 2}}}, asserts: true},
}

// Variants are all of them; the first one is the main one.
func Variants() []Variant { return append([]Variant(nil), variants...) }

// VariantNamed finds a variant; the error lists what there is.
func VariantNamed(name string) (Variant, error) {
	var names []string
	for _, v := range variants {
		if v.Name == name {
			return v, nil
		}
		names = append(names, v.Name)
	}
	return Variant{}, fmt.Errorf("no variant %q; there are %s", name, strings.Join(names, ", "))
}
