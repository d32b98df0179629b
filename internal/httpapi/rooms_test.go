package httpapi

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sched"
)

// TestRoomReport fixes the form of /rooms: routers of other versions read it.
func TestRoomReport(t *testing.T) {
	at := func(ms int) time.Time { return time.Unix(100, 0).Add(time.Duration(ms) * time.Millisecond) }
	body, err := json.Marshal(reportOf(&sched.Way{
		ID: "r/1", Room: 1<<63 - 1, Phase: "ended", ChunksTotal: 3, PromptTokens: 40, Tokens: 2, Cause: &room.Cause{Code: room.CodeAborted, Phase: "decoding", Detail: "x"},
		Times: sched.Phases{Submitted: at(0), Granted: at(1), Transferred: at(20), Ended: at(30), Chunks: []sched.ChunkTime{{From: at(2), To: at(9)}}},
	}, at(50)))
	want := `{"room":"9223372036854775807","rid":"r/1","phase":"ended","age_ms":50,"granted_ms":1,"transferred_ms":20,"ended_ms":30,"chunks":[[2,9]],"chunks_total":3,` +
		`"prompt_tokens":40,"tokens":2,"cause":"aborted","cause_phase":"decoding","detail":"x"}`
	if err != nil || string(body) != want {
		t.Errorf("got\n%s (%v), want\n%s", body, err, want)
	}
	h := newHarness(t, hello) // its scheduler tells nothing
	if status, body := h.get("/rooms"); status != 200 || body != `{"role":"decode","rooms":[]}`+"\n" {
		t.Errorf("got %d %q", status, body)
	}
}
