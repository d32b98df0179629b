package httpapi

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/engine"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

func itoa(n int) string { return strconv.Itoa(n) }

func (s *server) models(w *response, _ *http.Request) *openai.Error {
	return w.json(openai.ModelList{Object: "list", Data: []openai.Model{s.theModel()}})
}

func (s *server) theModel() openai.Model {
	return openai.NewModel(s.Info.ModelName, s.started.Unix(), s.Info.ContextLen)
}

func (s *server) model(w *response, r *http.Request) *openai.Error {
	if id := strings.TrimPrefix(r.URL.Path, modelPrefix); id != s.Info.ModelName {
		return openai.ModelNotFound(id)
	}
	return w.json(s.theModel())
}

// health: the process answers and the scheduler's loop lives and moves.
func (s *server) health(w *response, _ *http.Request) *openai.Error {
	if err := s.Scheduler.Healthy(); err != nil {
		return s.unhealthy(err)
	}
	return w.json(map[string]string{"status": "ok"})
}

// unhealthy is a 503 whatever the cause: health checks look at nothing else.
func (s *server) unhealthy(err error) *openai.Error {
	e := openai.FromErr(err)
	c := *e.Cause
	if c.Code == room.CodeInternal && c.Side == 0 {
		c = *s.cause(room.CodeInternal, "unhealthy: %v", err)
	}
	return &openai.Error{Status: http.StatusServiceUnavailable, Code: e.Code, Cause: &c}
}

// healthGenerate generates one token. A prefill worker generates nothing, and computes
// nothing without a decode worker that takes it, so there only the loop's own account
// counts (it reports an engine call that does not return). Probes run one at a time:
// more of them would only measure each other.
func (s *server) healthGenerate(w *response, r *http.Request) *openai.Error {
	ctx, stop := context.WithTimeout(r.Context(), s.HealthTimeout)
	defer stop()
	if err := s.Scheduler.Healthy(); err != nil {
		return s.unhealthy(err)
	}
	if s.Role == RolePrefill {
		return w.json(map[string]string{"status": "ok"})
	}
	select {
	case s.probe <- struct{}{}:
		defer func() { <-s.probe }()
	case <-ctx.Done():
		return s.unhealthy(s.cause(room.CodeDeadline, "an earlier health probe has not ended within %s", s.HealthTimeout))
	}
	if err := s.generateOne(ctx); err != nil {
		return s.unhealthy(err)
	}
	return w.json(map[string]string{"status": "ok"})
}

func (s *server) generateOne(ctx context.Context) error {
	deadline, _ := ctx.Deadline()
	st, err := s.Scheduler.Submit(ctx, &sched.Request{
		ID: "health/" + strconv.FormatUint(s.counter.Add(1), 10), Prompt: s.probePrompt(), N: 1, MaxTokens: 1,
		IgnoreEOS: true, Sampling: engine.Sampling{IgnoreEOS: true}, Deadline: deadline,
	})
	if err != nil {
		return err
	}
	defer st.Close()
	for {
		switch _, err := st.Next(ctx); {
		case err == io.EOF:
			return nil
		case errors.Is(err, context.DeadlineExceeded):
			return s.cause(room.CodeDeadline, "the health probe was not answered within %s", s.HealthTimeout)
		case err != nil:
			return err
		}
	}
}

// probePrompt is one token, whatever the vocabulary.
func (s *server) probePrompt() []engine.Token {
	if toks, err := s.Tokenizer.Tokenize("a", true, false); err == nil && len(toks) > 0 {
		return toks[:1]
	}
	return []engine.Token{0}
}

// serverInfo shows what the worker is and what it holds right now.
func (s *server) serverInfo(w *response, _ *http.Request) *openai.Error {
	in, sn := s.Info, s.Scheduler.Snapshot()
	out := map[string]any{
		"role": s.Role, "disaggregation_mode": s.Role, "version": s.Version, "uptime_seconds": int(s.now().Sub(s.started).Seconds()),
		"served_model_name": in.ModelName, "model_path": in.ModelPath, "tp_size": max(in.Shards.TP, 1), "pp_size": max(in.Shards.PP, 1), "dp_size": 1,
		"max_total_num_tokens": in.KVCells, "context_length": in.ContextLen, "max_running_requests": in.MaxSeqs,
		"allow_local": s.Role == RoleDecode && s.AllowLocal, "live_requests": s.live.count(),
		"engine": map[string]any{
			"engine": in.Engine, "model_digest": in.ModelDigest, "kv_layout": in.KVLayout, "kv_shards": in.Shards.String(), "attention": in.Attention,
			"chunk_tokens": in.ChunkTokens, "threads": in.Threads, "vocab_size": in.VocabSize,
		},
		"state": map[string]any{
			"role": sn.Role, "bootstrap": sn.Bootstrap, "waiting": sn.Waiting, "inflight": sn.Inflight,
			"prealloc": sn.Prealloc, "transfer": sn.Transfer, "running": sn.Running, "preempted": sn.Preempted,
			"rooms": sn.Rooms, "tombstones": sn.Tombstones,
			"pages_total": sn.PagesTotal, "pages_free": sn.PagesFree, "pages_quarantine": sn.PagesQuarantine,
			"cells_used": sn.CellsUsed, "cells_total": sn.CellsTotal, "seqs_used": sn.SeqsUsed,
		},
	}
	if s.Extra != nil {
		for k, v := range s.Extra() {
			out[k] = v
		}
	}
	return w.json(out)
}

func (s *server) modelInfo(w *response, _ *http.Request) *openai.Error {
	return w.json(map[string]any{
		"model_path": s.Info.ModelPath, "tokenizer_path": s.Info.ModelPath, "served_model_name": s.Info.ModelName,
		"is_generation": true, "weight_version": s.Info.ModelDigest, "context_length": s.Info.ContextLen,
		"vocab_size": s.Info.VocabSize, "has_chat_template": s.templateErr == nil,
	})
}

// flushCache answers as SGLang does, whose clients call it between runs.
func (s *server) flushCache(w *response, _ *http.Request) *openai.Error {
	if s.FlushCache == nil {
		return w.json(map[string]any{"success": true, "message": "this worker keeps no cache between requests"})
	}
	if err := s.FlushCache(); err != nil {
		return openai.FromErr(err)
	}
	return w.json(map[string]any{"success": true, "message": "cache flushed"})
}

// abortRequest cancels by the id a client gave, or everything. It is idempotent.
func (s *server) abortRequest(w *response, r *http.Request) *openai.Error {
	body, e := s.readBody(w, r)
	if e != nil {
		return e
	}
	a, err := openai.ParseAbort(body)
	if err != nil {
		return openai.FromErr(err)
	}
	c := s.cause(room.CodeAborted, "aborted by /abort_request")
	if !a.All {
		return w.json(map[string]int{"aborted": s.live.abort(a, c)})
	}
	n := s.live.abort(a, c)
	s.Scheduler.Abort("", c) // also what did not come through here
	return w.json(map[string]int{"aborted": n})
}
