package router

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/router/record"
)

// uiState is one state as the page's script reads it. Times are milliseconds; those of a request count from its arrival.
type uiState struct {
	Started  int64  `json:"started"` // of the router, Unix
	Version  string `json:"version"`
	Policy   string `json:"policy"`
	Inflight int    `json:"inflight"`
	Queued   int    `json:"queued"`
	// Operator: Workers and Phases are told.
	Operator bool                      `json:"operator"`
	Workers  []uiWorker                `json:"workers,omitempty"`
	Phases   map[string]map[string]int `json:"phases,omitempty"` // router, prefill, decode: phase: rooms
	Requests []uiRequest               `json:"requests,omitempty"`
}

type uiWorker struct {
	ID       string  `json:"id"`
	Leg      string  `json:"leg"`
	Name     string  `json:"name"`
	Kind     string  `json:"kind,omitempty"`
	State    string  `json:"state"`
	Reason   string  `json:"reason,omitempty"`
	Ejected  float64 `json:"ejected,omitempty"` // seconds left
	Draining bool    `json:"draining,omitempty"`
	Inflight int64   `json:"inflight"`
	workerState
}

// workerState is a part of "state" in a Baton worker's /server_info.
type workerState struct {
	PagesTotal      int `json:"pages_total,omitempty"`
	PagesFree       int `json:"pages_free"`
	PagesQuarantine int `json:"pages_quarantine"`
	CellsTotal      int `json:"cells_total,omitempty"`
	CellsUsed       int `json:"cells_used"`
}

type uiRequest struct {
	ID        uint64        `json:"id"`
	RequestID string        `json:"request_id,omitempty"`
	RID       string        `json:"rid,omitempty"`
	Key       string        `json:"key,omitempty"`
	Path      string        `json:"path"`
	Model     string        `json:"model,omitempty"`
	Stream    bool          `json:"stream"`
	Choices   int           `json:"choices"`
	Phase     string        `json:"phase"`
	Outcome   string        `json:"outcome,omitempty"` // "": it runs
	Status    int           `json:"status,omitempty"`
	Cause     *record.Cause `json:"cause,omitempty"`
	Start     int64         `json:"start_ms"` // Unix
	Queue     float64       `json:"queue_ms"`
	FirstByte *float64      `json:"first_byte_ms,omitempty"`
	FirstTok  *float64      `json:"first_token_ms,omitempty"`
	Total     float64       `json:"total_ms"`
	Prompt    int           `json:"prompt_tokens,omitempty"`
	Tokens    int           `json:"tokens,omitempty"`
	// WorkerTokens are those that the decode worker says it has made so far.
	WorkerTokens int           `json:"worker_tokens,omitempty"`
	Attempts     []uiAttempt   `json:"attempts"`
	Lanes        []record.Lane `json:"lanes"`
}

type uiAttempt struct {
	Room    string        `json:"room"` // too large for a number in JavaScript
	Kind    string        `json:"kind,omitempty"`
	Prefill string        `json:"prefill,omitempty"`
	Decode  string        `json:"decode"`
	At      string        `json:"at,omitempty"` // phases at the workers
	Cause   *record.Cause `json:"cause,omitempty"`
}

// request is a record as the page sees it, with what its workers told.
func (u *ui) request(rec *record.Record, now time.Time) uiRequest {
	moment := func(d time.Duration) *float64 {
		if d == record.Never {
			return nil
		}
		v := ms(d)
		return &v
	}
	out := uiRequest{
		ID: rec.ID, RequestID: rec.RequestID, RID: rec.RID, Key: rec.Key, Path: rec.Path, Model: rec.Model, Stream: rec.Stream, Choices: rec.Choices, Phase: rec.Phase(), Outcome: rec.Outcome,
		Status: rec.Status, Cause: rec.Cause, Start: rec.Start.UnixMilli(), Queue: ms(rec.Queue), FirstByte: moment(rec.FirstByte), FirstTok: moment(rec.FirstToken()),
		Prompt: rec.PromptTokens, Tokens: rec.Tokens, Attempts: []uiAttempt{}, Lanes: record.Timeline(rec, now, u.reports.of),
	}
	if out.Total = ms(now.Sub(rec.Start)); rec.End != record.Never {
		out.Total = ms(rec.End)
	}
	for i := range rec.Attempts {
		a := &rec.Attempts[i]
		at := uiAttempt{Room: strconv.FormatUint(a.Room, 10), Kind: a.Kind, Prefill: a.Prefill, Decode: a.Decode, Cause: a.Cause}
		p, d := u.reports.of(a.Room)
		if p != nil {
			at.At = "prefill: " + p.Phase
		}
		if d != nil {
			if at.At != "" {
				at.At += ", "
			}
			at.At += "decode: " + d.Phase
			out.WorkerTokens = d.Tokens
			if out.Prompt == 0 {
				out.Prompt = d.PromptTokens
			}
		}
		out.Attempts = append(out.Attempts, at)
	}
	return out
}

// reports is what Baton's workers told of their rooms and memory, asked while somebody watches. Safe for concurrent use.
type reports struct {
	asking sync.Mutex // one asks at a time

	mu     sync.Mutex
	asked  time.Time
	byRoom map[uint64]*pairReport
	states map[*worker]workerState
	live   map[*worker]map[string]int // rooms by phase
}

// pairReport is what both workers of a room told last.
type pairReport struct {
	prefill, decode *openai.RoomReport
	seen            time.Time
}

const (
	// reportsFresh is how long what workers told is good enough, so that several viewers ask once.
	reportsFresh = uiEvery * 4 / 5
	// reportsTimeout bounds asking; who is late is asked the next time.
	reportsTimeout = 400 * time.Millisecond
	// reportsKeep is how long what was told of a room is kept.
	reportsKeep = 15 * time.Minute
	// reportsMost bounds the rooms that are kept, beyond what a page shows.
	reportsMost = 4 * uiRecords
)

// of gives the latest reports of a room.
func (p *reports) of(id uint64) (prefill, decode *openai.RoomReport) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.byRoom[id]; r != nil {
		return r.prefill, r.decode
	}
	return nil, nil
}

// refresh asks every Baton worker that is up, unless somebody has just done so.
func (p *reports) refresh(ctx context.Context, r *Router) {
	p.asking.Lock()
	defer p.asking.Unlock()
	if time.Since(p.asked) < reportsFresh {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, reportsTimeout)
	defer cancel()
	states, live := map[*worker]workerState{}, map[*worker]map[string]int{}
	var wg sync.WaitGroup
	for _, w := range r.all() {
		if w.status() == statusOut || w.is().kind != KindBaton {
			continue
		}
		wg.Go(func() {
			rooms, state, ok := askRooms(ctx, w)
			if !ok {
				return
			}
			p.mu.Lock()
			defer p.mu.Unlock()
			states[w] = state
			live[w] = p.take(w.side, rooms, time.Now())
		})
	}
	wg.Wait()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked, p.states, p.live = time.Now(), states, live
	p.prune(p.asked)
}

// askRooms asks one worker. ok is false if it did not answer, or answered something else.
func askRooms(ctx context.Context, w *worker) (rooms []openai.RoomReport, state workerState, ok bool) {
	var told openai.RoomReports
	a, err := w.ask(ctx, http.MethodGet, "/rooms", nil, maxInfo)
	if err != nil || a.status/100 != 2 || json.Unmarshal(a.body, &told) != nil {
		return nil, state, false
	}
	var info struct {
		State workerState `json:"state"`
	}
	a, err = w.ask(ctx, http.MethodGet, "/server_info", nil, maxInfo)
	if err != nil || a.status/100 != 2 || json.Unmarshal(a.body, &info) != nil {
		return nil, state, false
	}
	return told.Rooms, info.State, true
}

// take keeps a worker's reports and counts its live rooms by phase. Under mu.
func (p *reports) take(side room.Side, rooms []openai.RoomReport, now time.Time) map[string]int {
	phases := map[string]int{}
	for i := range rooms {
		one := &rooms[i]
		if one.EndedMS == nil {
			phases[one.Phase]++
		}
		if one.Room == 0 {
			continue
		}
		pair := p.byRoom[one.Room]
		if pair == nil {
			pair = &pairReport{}
			p.byRoom[one.Room] = pair
		}
		pair.seen = now
		if side == room.SideSender {
			pair.prefill = one
		} else {
			pair.decode = one
		}
	}
	return phases
}

// prune forgets rooms that were told of long ago, and, of too many, any that no worker tells any more. Under mu.
func (p *reports) prune(now time.Time) {
	for id, r := range p.byRoom {
		if age := now.Sub(r.seen); age > reportsKeep || len(p.byRoom) > reportsMost && age > 2*uiEvery {
			delete(p.byRoom, id)
		}
	}
}

// phases counts live rooms by leg and phase.
func (p *reports) phases() map[string]map[string]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := map[string]map[string]int{room.SideSender.String(): {}, room.SideReceiver.String(): {}}
	for w, phases := range p.live {
		for phase, n := range phases {
			out[w.side.String()][phase] += n
		}
	}
	return out
}

// workers adds what workers told of their memory to what is known of them.
func (p *reports) workers(views []workerView) []uiWorker {
	p.mu.Lock()
	defer p.mu.Unlock()
	states := map[string]workerState{}
	for w, s := range p.states {
		states[workerID(w)] = s
	}
	out := make([]uiWorker, 0, len(views))
	for _, v := range views {
		out = append(out, uiWorker{
			ID: v.ID, Leg: v.Leg, Name: v.Worker, Kind: v.Kind, State: v.State, Reason: v.Reason, Ejected: v.Ejected, Draining: v.Draining,
			Inflight: v.Inflight, workerState: states[v.ID],
		})
	}
	return out
}
