package router

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

const (
	// askTimeout bounds a question to workers on behalf of a client.
	askTimeout = 3 * time.Second
	// generateTimeout is the deadline of /health_generate's own request.
	generateTimeout = 20 * time.Second
	// maxInfo is the longest answer to such a question, in bytes.
	maxInfo = 4 << 20
	// maxAdminBody is the longest body of an administrative request, in bytes.
	maxAdminBody = 1 << 20
)

// writeJSON answers with v, which must marshal.
func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := openai.Marshal(v)
	if err != nil {
		openai.WriteError(w, openai.FromErr(fmt.Errorf("marshal an answer: %w", err)))
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client may be gone; there is nobody left to tell
}

// health is readiness: 200 if a request could be served.
func (r *Router) health(w http.ResponseWriter, _ *http.Request) {
	prefills, decodes, e := r.ready()
	if e != nil {
		openai.WriteError(w, e)
		return
	}
	writeJSON(w, http.StatusOK, map[string]any{"status": "ok", "prefill": prefills, "decode": decodes})
}

// workerView is a worker as /workers shows it.
type workerView struct {
	Leg       string  `json:"leg"`
	Worker    string  `json:"worker"`
	URL       string  `json:"url"`
	Bootstrap string  `json:"bootstrap,omitempty"`
	Kind      string  `json:"kind,omitempty"`
	State     string  `json:"state"`
	Ejected   float64 `json:"ejected_seconds,omitempty"`
	Seconds   float64 `json:"seconds_in_state"`
	Reason    string  `json:"reason,omitempty"`
	Inflight  int64   `json:"inflight"`
	ID        string  `json:"id"`
	// Draining: it gets no new requests. Sources are where it is listed; one that is listed nowhere goes when it is idle.
	Draining bool     `json:"draining"`
	Sources  []string `json:"sources"`
}

func (w *worker) view() workerView {
	w.mu.Lock()
	defer w.mu.Unlock()
	v := workerView{
		Leg: w.side.String(), Worker: w.name, URL: w.base.String(), Kind: string(w.is().kind), Ejected: w.outlier.left(time.Now()).Round(time.Millisecond).Seconds(), State: w.status().String(),
		Seconds: time.Since(w.since).Round(time.Millisecond).Seconds(), Reason: w.reason, Inflight: w.inflight.Load(),
	}
	if w.bootPort > 0 {
		v.Bootstrap = fmt.Sprintf("%s:%d", w.bootHost, w.bootPort)
	}
	return v
}

func (r *Router) listWorkers(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, map[string]any{"workers": r.views()})
}

// told is what became of a question to one worker.
type told struct {
	Leg    string `json:"leg"`
	Worker string `json:"worker"`
	Status int    `json:"status,omitempty"`
	Error  string `json:"error,omitempty"`
	// Answer is the worker's own JSON, if it was wanted and is sound.
	Answer json.RawMessage `json:"answer,omitempty"`
}

// askAll asks every worker at once and returns the answers in the workers' order.
func (r *Router) askAll(ctx context.Context, method, path string, body []byte) []told {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	all := r.all()
	out := make([]told, len(all))
	var wg sync.WaitGroup
	for i, w := range all {
		wg.Go(func() {
			out[i] = told{Leg: w.side.String(), Worker: w.name}
			a, err := w.ask(ctx, method, path, body, maxInfo)
			switch {
			case err != nil:
				out[i].Error = plainError(err)
			case a.status/100 != 2:
				out[i].Status, out[i].Error = a.status, fmt.Sprintf("%.500s", bytes.TrimSpace(a.body))
			default:
				out[i].Status = a.status
				if json.Valid(a.body) {
					out[i].Answer = bytes.TrimSpace(a.body)
				}
			}
		})
	}
	wg.Wait()
	return out
}

// serverInfo is the router's state and what each worker says of itself.
func (r *Router) serverInfo(w http.ResponseWriter, req *http.Request) {
	byLeg := map[string][]told{}
	for _, t := range r.askAll(req.Context(), http.MethodGet, "/server_info", nil) {
		byLeg[t.Leg] = append(byLeg[t.Leg], t)
	}
	writeJSON(w, http.StatusOK, map[string]any{
		"router": map[string]any{
			"role": "router", "version": r.cfg.Version, "prefill_policy": r.cfg.PrefillPolicy, "decode_policy": r.cfg.DecodePolicy, "uptime_seconds": int(time.Since(r.started).Seconds()),
			"inflight": r.inflight.Load(), "max_inflight": r.cfg.MaxInflight, "max_queue": max(r.cfg.MaxQueue, 0), "queue": r.queue.Stats(), "live_requests": r.live.count(),
			"default_timeout_seconds": r.cfg.DefaultTimeout.Seconds(), "max_timeout_seconds": r.cfg.MaxTimeout.Seconds(), "workers": r.views(),
		},
		"prefill": byLeg[room.SideSender.String()], "decode": byLeg[room.SideReceiver.String()],
	})
}

// relay passes a GET on to a decode worker; another is asked if one does not answer.
func (r *Router) relay(path string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		ctx, cancel := context.WithTimeout(req.Context(), askTimeout)
		defer cancel()
		avoid := map[*worker]bool{}
		for {
			d := r.decodes.pick(avoid)
			if d == nil {
				openai.WriteError(w, routerFailure(room.CodeUnavailable, true, "no decode worker answers: %s", r.decodes.why()).err)
				return
			}
			a, err := d.ask(ctx, http.MethodGet, path, nil, maxInfo)
			if err != nil || a.status/100 == 5 {
				avoid[d] = true
				continue
			}
			passHeader(w.Header(), a.header)
			w.WriteHeader(a.status)
			_, _ = w.Write(a.body) // the client may be gone; there is nobody left to tell
			return
		}
	}
}

// readAdmin reads a small body.
func readAdmin(w http.ResponseWriter, req *http.Request) ([]byte, *openai.Error) {
	ctl := http.NewResponseController(w)
	_ = ctl.SetReadDeadline(time.Now().Add(askTimeout)) // a recorder in a test has none
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, maxAdminBody))
	if err != nil {
		w.Header().Set("Connection", "close") // the time stays limited: net/http reads on after a refusal
		return nil, invalidBody("read the body: %v", err)
	}
	_ = ctl.SetReadDeadline(time.Time{})
	return body, nil
}

// abortRequest ends a request by its id, or all. One of this router's own is ended here, which also
// releases its workers; an unknown one may be another router's, so every worker is told.
func (r *Router) abortRequest(w http.ResponseWriter, req *http.Request) {
	body, e := readAdmin(w, req)
	if e != nil {
		openai.WriteError(w, e)
		return
	}
	a, err := openai.ParseAbort(body)
	if err != nil {
		openai.WriteError(w, openai.FromErr(err))
		return
	}
	who := edge.From(req.Context())
	n := r.live.abort(a.RID, a.All, func(c *call) bool { return owns(who, c.keyName) })
	out := map[string]any{"aborted": n}
	if (n == 0 || a.All) && (who == nil || who.Operator) { // workers do not know whose a request is
		out["workers"] = r.askAll(req.Context(), http.MethodPost, "/abort_request", body)
	}
	writeJSON(w, http.StatusOK, out)
}

// flushCache asks every worker to flush; anything but success of all is a 502.
func (r *Router) flushCache(w http.ResponseWriter, req *http.Request) {
	status := http.StatusOK
	all := r.askAll(req.Context(), http.MethodPost, "/flush_cache", nil)
	for _, t := range all {
		if t.Error != "" {
			status = http.StatusBadGateway
		}
	}
	writeJSON(w, status, map[string]any{"success": status == http.StatusOK, "workers": all})
}

// healthGenerate has one token made by a pair of workers.
func (r *Router) healthGenerate(w http.ResponseWriter, req *http.Request) {
	rid := newRID()
	c := &call{
		parsed: &parsed{
			rest:    []byte(`"text":"a","sampling_params":{"max_new_tokens":1,"temperature":0,"ignore_eos":true}}`),
			prompts: 1, choices: 1, rid: quoted(rid), names: []string{rid},
		},
		privileged: true, kind: openai.KindGenerate, path: "/generate", start: time.Now(), header: http.Header{"Content-Type": {"application/json"}},
	}
	c.deadline = c.start.Add(generateTimeout)
	cl := newClient(&discard{header: http.Header{}})
	r.arm(c, req, cl.ctl)
	defer c.disarm()
	if f := r.serve(cl, c); f != nil {
		e := *f.err
		e.Status = http.StatusServiceUnavailable // whatever the cause: probes look at nothing else
		openai.WriteError(w, &e)
		return
	}
	a := c.current.Load()
	writeJSON(w, http.StatusOK, map[string]any{"status": "ok", "prefill": a.prefill.w.name, "decode": a.decode.w.name, "ms": ms(time.Since(c.start))})
}

// discard is a client that looks at nothing.
type discard struct{ header http.Header }

func (d *discard) Header() http.Header         { return d.header }
func (d *discard) Write(p []byte) (int, error) { return len(p), nil }
func (d *discard) WriteHeader(int)             {}
