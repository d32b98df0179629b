package router

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// codeForbidden is the error code of a change that the caller may not make.
const codeForbidden = "forbidden"

// workerSpec is the body of POST /workers. Type and Bootstrap are also known by SGLang's names.
type workerSpec struct {
	URL           string   `json:"url"`
	Leg           string   `json:"leg"`
	WorkerType    string   `json:"worker_type"`
	BootstrapHost string   `json:"bootstrap_host"`
	BootstrapPort int      `json:"bootstrap_port"`
	Zone          string   `json:"zone"`
	Models        []string `json:"models"`
	Kind          Kind     `json:"kind"`
}

// mayChange refuses changes of the fleet without the operator's token: whoever adds a worker reads every prompt.
func (r *Router) mayChange(w http.ResponseWriter, req *http.Request) bool {
	if who := edge.From(req.Context()); who != nil && who.Operator {
		return true
	}
	if r.cfg.AdminToken == "" {
		openai.WriteError(w, openai.NewError(http.StatusForbidden, codeForbidden, "",
			"changing the fleet over HTTP is off; start the router with an admin token (--admin-token-file)"))
		return false
	}
	scheme, got, _ := strings.Cut(req.Header.Get("Authorization"), " ")
	a, b := sha256.Sum256([]byte(strings.TrimSpace(got))), sha256.Sum256([]byte(r.cfg.AdminToken))
	if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(a[:], b[:]) != 1 {
		w.Header().Set("WWW-Authenticate", "Bearer")
		openai.WriteError(w, openai.NewError(http.StatusUnauthorized, codeForbidden, "Authorization", "the admin token is missing or wrong"))
		return false
	}
	return true
}

// addWorker is POST /workers: 201 if it is new, 200 if it was there (and, if it was drained, is not any more).
func (r *Router) addWorker(w http.ResponseWriter, req *http.Request) {
	if !r.mayChange(w, req) {
		return
	}
	body, e := readAdmin(w, req)
	if e != nil {
		openai.WriteError(w, e)
		return
	}
	var spec workerSpec
	d := json.NewDecoder(strings.NewReader(string(body)))
	d.DisallowUnknownFields()
	if err := d.Decode(&spec); err != nil {
		openai.WriteError(w, invalidBody("a worker is {\"leg\":\"prefill\" or \"decode\",\"url\":...,\"bootstrap_port\":...}: %v", err))
		return
	}
	if _, err := d.Token(); err != io.EOF {
		openai.WriteError(w, invalidBody("there is something after the worker's JSON object"))
		return
	}
	b := Backend{URL: spec.URL, BootstrapHost: spec.BootstrapHost, BootstrapPort: spec.BootstrapPort, Zone: spec.Zone, Models: spec.Models, Kind: spec.Kind}
	leg := spec.Leg
	if leg == "" {
		leg = spec.WorkerType
	}
	var prefills, decodes []Backend
	switch leg {
	case room.SideSender.String():
		prefills = []Backend{b}
	case room.SideReceiver.String():
		decodes = []Backend{b}
	default:
		openai.WriteError(w, invalidValue("leg", "leg %.32q: want prefill or decode", leg))
		return
	}
	set, err := r.checkSet(prefills, decodes)
	if err != nil {
		openai.WriteError(w, invalidValue("url", "%v", err))
		return
	}
	status := http.StatusOK
	err = r.change(SourceAPI, func() {
		if m := r.member(set[0].key); m == nil {
			status = http.StatusCreated
		} else {
			m.drained = false
		}
		r.list(SourceAPI, set[0])
	})
	r.answerChange(w, err, status, set[0].key)
}

// member finds a worker by its id, or by host:port or URL where only one leg has it. Under the roster's lock.
func (r *Router) member(id string) *member {
	var found *member
	for _, m := range r.roster.members {
		if m.key == id {
			return m
		}
		if m.w.name == id || m.backend.URL == strings.TrimSuffix(id, "/") {
			if found != nil {
				return nil
			}
			found = m
		}
	}
	return found
}

// changeWorker serves /workers/{id} and /workers/{id}/{verb}.
func (r *Router) changeWorker(w http.ResponseWriter, req *http.Request) {
	id, verb := splitWorkerPath(req.URL.EscapedPath())
	want := map[string]string{"": http.MethodDelete, "drain": http.MethodPost, "undrain": http.MethodPost}[verb]
	switch {
	case want == "":
		openai.WriteError(w, openai.NewError(http.StatusNotFound, openai.CodeNotFound, "", "there is nothing at %.128s", req.URL.Path))
		return
	case verb == "" && (req.Method == http.MethodGet || req.Method == http.MethodHead):
		if v, ok := r.viewOf(id); ok {
			writeJSON(w, http.StatusOK, v)
		} else {
			openai.WriteError(w, unknownWorker(id))
		}
		return
	case req.Method != want:
		w.Header().Set("Allow", want)
		openai.WriteError(w, openai.NewError(http.StatusMethodNotAllowed, openai.CodeMethodNotAllowed, "", "%.16s is not allowed for %s", req.Method, req.URL.Path))
		return
	case !r.mayChange(w, req):
		return
	}
	force := verb == "" && (req.URL.RawQuery == "force" || req.URL.Query().Get("force") == "true" || req.URL.Query().Get("force") == "1")
	var e *openai.Error
	var gone *worker
	err := r.change(SourceAPI, func() {
		m := r.member(id)
		if m == nil {
			e = unknownWorker(id)
			return
		}
		id = m.key
		if verb != "" {
			m.drained = verb == "drain"
			return
		}
		if others := m.foreign(); len(others) > 0 {
			e = openai.NewError(http.StatusConflict, openai.CodeInvalidValue, "", "%s is listed by %s: take it out there, or drain it here", id, strings.Join(others, ", "))
			return
		}
		m.from = map[string]bool{}
		gone = m.w
	})
	if e != nil {
		openai.WriteError(w, e)
		return
	}
	if gone != nil && force {
		r.cutLegs(gone)
	}
	r.answerChange(w, err, http.StatusOK, id)
}

// splitWorkerPath takes "/workers/ID/verb" apart; the id may be a URL with its slashes escaped.
func splitWorkerPath(path string) (id, verb string) {
	rest := strings.TrimSuffix(strings.TrimPrefix(path, "/workers/"), "/")
	id, verb, _ = strings.Cut(rest, "/")
	if plain, err := url.PathUnescape(id); err == nil {
		id = plain
	}
	return id, verb
}

func unknownWorker(id string) *openai.Error {
	return openai.NewError(http.StatusNotFound, openai.CodeNotFound, "", "there is no worker %.200s, or one on each leg: use an id of GET /workers", id)
}

// foreign are the sources that list m and that the router cannot change.
func (m *member) foreign() (names []string) {
	for s := range m.from {
		if s != SourceStatic && s != SourceAPI {
			names = append(names, s)
		}
	}
	slices.Sort(names)
	return names
}

// cutLegs ends every attempt with a leg at w, which takes no new ones. A request that has not begun its answer is tried
// elsewhere.
func (r *Router) cutLegs(w *worker) {
	for _, c := range r.live.all() {
		a := c.current.Load()
		if a == nil {
			continue
		}
		for _, l := range []*leg{&a.prefill, &a.decode} {
			if l.w == w && !l.over.Load() {
				a.cancel(l.failed(room.CodeAborted, true, "was removed from the fleet by force"))
			}
		}
	}
}

// answerChange tells what a change of worker id has come to: the worker, or {"id":...,"state":"gone"}.
func (r *Router) answerChange(w http.ResponseWriter, err error, status int, id string) {
	if err != nil {
		openai.WriteError(w, failureOf(&r.base).err)
		return
	}
	if v, ok := r.viewOf(id); ok {
		writeJSON(w, status, v)
		return
	}
	writeJSON(w, status, map[string]string{"id": id, "state": "gone"})
}

func (r *Router) viewOf(id string) (workerView, bool) {
	r.roster.mu.Lock()
	defer r.roster.mu.Unlock()
	if m := r.member(id); m != nil {
		return m.view(), true
	}
	return workerView{}, false
}

// view is a worker with its place in the fleet. Under the roster's lock.
func (m *member) view() workerView {
	v := m.w.view()
	v.ID, v.Sources, v.Draining = m.key, []string{}, !m.serving()
	for s := range m.from {
		v.Sources = append(v.Sources, s)
	}
	slices.Sort(v.Sources)
	return v
}

// views are all workers, prefill first.
func (r *Router) views() []workerView {
	r.roster.mu.Lock()
	defer r.roster.mu.Unlock()
	out := []workerView{}
	for _, side := range []room.Side{room.SideSender, room.SideReceiver} {
		for _, m := range r.roster.members {
			if m.w.side == side {
				out = append(out, m.view())
			}
		}
	}
	return out
}
