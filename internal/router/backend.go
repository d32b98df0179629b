package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// Kind is what a worker's server is, and so how a pair of them is driven. Both workers of a pair are of one kind.
type Kind string

const (
	// KindDetect asks the worker, see [worker.detect].
	KindDetect Kind = ""
	// KindBaton gets a request on both legs at once, joined by bootstrap_host, _port and _room.
	KindBaton Kind = "baton"
	// KindSGLang is driven like KindBaton.
	KindSGLang Kind = "sglang"
	// KindVLLM is vLLM with its NIXL connector: prefill first, for one token; its kv_transfer_params go to decode.
	KindVLLM Kind = "vllm"
	// KindPlain serves a request alone. It is a decode worker that needs no prefill worker.
	KindPlain Kind = "plain"
)

func (k Kind) valid() bool {
	switch k {
	case KindDetect, KindBaton, KindSGLang, KindVLLM, KindPlain:
		return true
	}
	return false
}

// nature is what is known of a worker's server; immutable.
type nature struct {
	kind  Kind // KindDetect: not known, driven like KindBaton
	local bool // Baton: computes the prompt of a request without a room
}

// noWorker stands for the leg of an attempt that has one leg only.
var noWorker = &worker{side: room.SideSender, name: "none", kick: make(chan struct{}, 1), freed: func() {}}

// is what the worker is, as far as known.
func (w *worker) is() nature {
	if n := w.nature.Load(); n != nil {
		return *n
	}
	return nature{}
}

// pairs reports whether two workers can serve a request together.
func pairs(p, d *worker) bool {
	a, b := p.is().kind, d.is().kind
	switch {
	case a == KindPlain || b == KindPlain:
		return false
	case a == b:
		return true
	case a == KindVLLM || b == KindVLLM:
		return false
	}
	return a == KindDetect || b == KindDetect
}

// alone: the worker may serve a request without a prefill worker.
func (w *worker) alone(fallback bool) bool {
	n := w.is()
	return n.kind == KindPlain || fallback && (n.kind == KindVLLM || n.local)
}

// aborts: the worker knows /abort_request. The others end a request when its connection is closed.
func (w *worker) aborts() bool {
	k := w.is().kind
	return w != noWorker && k != KindVLLM && k != KindPlain
}

// detect finds out what the worker is, unless that was configured. The first line that fits decides:
//
//	/server_info          200, has allow_local                        baton
//	/server_info          200, disaggregation_mode prefill or decode  sglang
//	/server_info          200, disaggregation_mode null or "null"     plain (SGLang without PD)
//	/server_info          200, has vllm_config                        vllm (development mode)
//	/get_server_info      as /server_info: older SGLang
//	/version              200, has version                            vllm
//	/v1/models            200, data is a list                         plain
//	anything else                                                     not known: driven like baton
//
// A server that is not reached stays what it was, and is asked again with the next probe.
func (w *worker) detect(ctx context.Context, timeout time.Duration) {
	if w.fixed || w.settled {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	n := nature{}
	for _, path := range []string{"/server_info", "/get_server_info", "/version", "/v1/models"} {
		a, err := w.ask(ctx, http.MethodGet, path, nil, maxInfo)
		if err != nil || a.status/100 == 5 {
			return
		}
		var o map[string]json.RawMessage
		if a.status != http.StatusOK || json.Unmarshal(a.body, &o) != nil {
			continue
		}
		if n = natureOf(path, o); n.kind != KindDetect {
			break
		}
	}
	w.settled = true
	w.nature.Store(&n)
}

// natureOf is the table of detect.
func natureOf(path string, o map[string]json.RawMessage) nature {
	var mode string
	raw, hasMode := o["disaggregation_mode"]
	_ = json.Unmarshal(raw, &mode) // null stays ""
	switch {
	case path == "/version" && bytes.HasPrefix(o["version"], []byte(`"`)):
		return nature{kind: KindVLLM}
	case path == "/v1/models" && bytes.HasPrefix(o["data"], []byte("[")):
		return nature{kind: KindPlain}
	case !strings.HasSuffix(path, "server_info"):
		return nature{}
	case o["allow_local"] != nil:
		return nature{kind: KindBaton, local: string(o["allow_local"]) == "true"}
	case mode == "prefill" || mode == "decode":
		return nature{kind: KindSGLang}
	case hasMode:
		return nature{kind: KindPlain}
	case o["vllm_config"] != nil:
		return nature{kind: KindVLLM}
	}
	return nature{}
}

// solo takes a worker that serves c alone: where a leg has no worker, or has had its chances. busy: there is one, with no free place.
func (r *Router) solo(c *call, avoid map[*worker]bool) (d *worker, busy bool) {
	not, any := map[*worker]bool{}, false
	for _, w := range r.decodes.workers() {
		if able := w.alone(r.cfg.LocalFallback) && !avoid[w] && w.goesOn(c); !able {
			not[w] = true
		} else if w.usable() {
			any = true
		}
	}
	if !any {
		return nil, false
	}
	ch := r.decodes.take(c, not, nil)
	if ch.w != nil && !ch.fresh {
		ch.w.inflight.Add(-1) // nobody could have been let in meanwhile: see acquire
		ch.w = nil
	}
	return ch.w, ch.busy && ch.fresh
}

// unpaired adds to avoid the prefill workers for which no decode worker is usable.
func (r *Router) unpaired(avoid map[*worker]bool) map[*worker]bool {
	out := map[*worker]bool{}
	for w := range avoid {
		out[w] = true
	}
	for _, p := range r.prefills.workers() {
		ok := false
		for _, d := range r.decodes.workers() {
			ok = ok || d.usable() && pairs(p, d)
		}
		if !ok {
			out[p] = true
		}
	}
	return out
}

// legBody is what a leg is sent: two pieces, one after the other.
type legBody [2][]byte

func bodyOf(b []byte) legBody { return legBody{b} }

// taken counts a leg that its attempt will put back.
func (w *worker) taken() *worker {
	w.inflight.Add(1)
	return w
}

// setBodies makes the bodies of both legs, as the workers' kind wants them. The decode leg's of vLLM is made when its prefill has ended.
func (a *attempt) setBodies() error {
	p, d := a.prefill.w, a.decode.w
	switch {
	case a.staged():
		b, err := stagedPrefill(a.c.whole())
		if err != nil {
			return err
		}
		a.prefill.body = bodyOf(b)
	case p != noWorker:
		b := legBody{a.c.legHead(a.rid, p, a.rooms, a.resume), a.c.rest}
		a.prefill.body, a.decode.body = b, b
	case d.is().kind == KindPlain || d.is().kind == KindVLLM:
		a.decode.body = bodyOf(a.c.whole())
	default:
		fields := []openai.Field{{Name: "rid", Value: a.rid}}
		if a.resume != nil {
			fields = append(fields, openai.Field{Name: openai.FieldResume, Value: a.resume})
		}
		b, err := openai.Rewrite(a.c.whole(), fields...)
		if err != nil {
			return err
		}
		a.decode.body = bodyOf(b)
	}
	return nil
}

// staged: decode is asked when prefill has ended.
func (a *attempt) staged() bool { return a.prefill.w.is().kind == KindVLLM && a.prefill.w != noWorker }

// whole is the client's body without the router's own fields.
func (p *parsed) whole() []byte { return append([]byte("{"), p.rest...) }

// kvField carries vLLM's words between its workers. Facts: vLLM's NIXL connector and the proxy in its own tests.
const kvField = "kv_transfer_params"

// stagedPrefill asks vLLM for one token, and to keep the prompt's KV for a decode worker to fetch.
func stagedPrefill(body []byte) ([]byte, error) {
	m, err := openai.Members(body)
	if err != nil {
		return nil, err
	}
	set := []openai.Field{
		{Name: kvField, Value: json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)},
		{Name: "stream", Value: false}, {Name: "stream_options"}, {Name: "max_tokens", Value: 1}, {Name: "min_tokens"},
	}
	if m["max_completion_tokens"] != nil {
		set = append(set, openai.Field{Name: "max_completion_tokens", Value: 1})
	}
	return openai.Rewrite(body, set...)
}

// takeKV keeps what vLLM's prefill answer says of its KV. Without it, or with null, decode computes the prompt itself. Anything but an
// object is the prefill worker's fault: decode would refuse it, which looks like the client's.
func (l *leg) takeKV(answer []byte) error {
	var o struct {
		KV json.RawMessage `json:"kv_transfer_params"`
	}
	if json.Unmarshal(answer, &o) != nil || len(o.KV) == 0 || isNull(o.KV) {
		return nil
	}
	if o.KV[0] != '{' {
		return fmt.Errorf("%w: %s is no object: %.64q", errMalformed, kvField, o.KV)
	}
	l.a.kv = append(json.RawMessage(nil), o.KV...) // the answer's buffer is used again
	return nil
}

// awaitPrefill makes a staged decode leg wait for its turn.
func (a *attempt) awaitPrefill() *failure {
	l := &a.decode
	if !a.staged() {
		return nil
	}
	l.enter(legWaiting)
	select {
	case <-a.prefillDone:
	case <-a.ctx.Done():
	}
	if a.ctx.Err() != nil || legPhase(a.prefill.at.Load()) != legDone { // its failure is about to be the cause
		<-a.ctx.Done()
		l.end() // never sent
		return failureOf(a.ctx)
	}
	l.enter(legHeaders)
	b := a.c.whole()
	if a.kv != nil {
		var err error
		if b, err = openai.Rewrite(b, openai.Field{Name: kvField, Value: a.kv}); err != nil {
			l.end()
			return a.prefill.failed(room.CodeProtocol, true, "sent %s that cannot be passed on: %v", kvField, err)
		}
	}
	l.body = bodyOf(b)
	return nil
}

// checkKind checks what was configured.
func (b Backend) checkKind(prefill bool) error {
	switch {
	case !b.Kind.valid():
		return fmt.Errorf("router: worker %s: kind %q: use baton, sglang, vllm or plain", b.URL, string(b.Kind))
	case prefill && b.Kind == KindPlain:
		return fmt.Errorf("router: worker %s: a plain server needs no prefill worker: give it as a decode worker", b.URL)
	case prefill && b.Kind != KindVLLM && (b.BootstrapPort < 1 || b.BootstrapPort > 65535):
		return fmt.Errorf("router: prefill worker %s: bootstrap port %s is not a port", b.URL, strconv.Itoa(b.BootstrapPort))
	}
	return nil
}
