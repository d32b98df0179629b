package httpapi

import (
	"net/http"
	"time"

	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/sched"
)

// rooms tells the ways of the worker's requests, for a router's page. Nothing of prompts or answers is in it.
func (s *server) rooms(w *response, _ *http.Request) *openai.Error {
	out := openai.RoomReports{Role: s.Role, Rooms: []openai.RoomReport{}}
	if t, ok := s.Scheduler.(sched.Teller); ok {
		now := s.now()
		for _, way := range t.Ways() {
			out.Rooms = append(out.Rooms, reportOf(&way, now))
		}
	}
	return w.json(out)
}

func reportOf(w *sched.Way, now time.Time) openai.RoomReport {
	since := func(t time.Time) float64 { return float64(t.Sub(w.Times.Submitted).Microseconds()) / 1000 }
	moment := func(t time.Time) *float64 {
		if t.IsZero() {
			return nil
		}
		ms := since(t)
		return &ms
	}
	r := openai.RoomReport{
		Room: w.Room, RID: w.ID, Phase: w.Phase, AgeMS: since(now), GrantedMS: moment(w.Times.Granted), TransferredMS: moment(w.Times.Transferred),
		FirstTokenMS: moment(w.Times.FirstToken), EndedMS: moment(w.Times.Ended), ChunksTotal: w.ChunksTotal, PromptTokens: w.PromptTokens, Tokens: w.Tokens,
	}
	for _, c := range w.Times.Chunks {
		r.Chunks = append(r.Chunks, [2]float64{since(c.From), since(c.To)})
	}
	if w.Cause != nil {
		r.Cause, r.CausePhase, r.Detail = string(w.Cause.Code), w.Cause.Phase, clip(w.Cause.Detail, 512)
	}
	return r
}
