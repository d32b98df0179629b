package e2e

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// rankModel is what every worker of these stacks computes, whatever its ranks and pages are.
const rankModel = "layers=4,heads=4,dim=8"

// TestRanks: processes whose ranks and pages differ serve together. Every answer is a hash over all KV bytes of all
// ranks of the decode worker, so it proves each of them. Budget: 40 s.
func TestRanks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ transport, prefill, decode string }{
		"tp 1 to 4":   {"tcp", "tp=1", "tp=4"},
		"tp 4 to 1":   {"shm", "tp=4", "tp=1"},
		"pp 2 to 1":   {"tcp", "pp=2", "pp=1"},
		"all differs": {"shm", "tp=2,pp=2,page=5,hnd=true", "tp=4,pp=3,page=32"},
	} {
		t.Run(name, func(t *testing.T) {
			s, m := startSim(t, simSetup{transport: c.transport, model: rankModel,
				prefill: []string{"--sim", rankModel + "," + c.prefill}, decode: []string{"--sim", rankModel + "," + c.decode + ",recheck=true"}})
			serves(t, s, m, 1000, 8, 150, 24) // sessions and connections stay
			base := takeBaseline(t, s)
			serves(t, s, m, 1, 12, 150, 24)
			serves(t, s, m, 100, 12, 17, 8)
			base.check(t)
		})
	}
}

// TestRanksRefused: 3 ranks can not take over what 2 have. The client hears at once which property it is.
func TestRanksRefused(t *testing.T) {
	t.Parallel()
	const six = "layers=4,heads=6,dim=8"
	s, _ := startSim(t, simSetup{transport: "tcp", model: six, prefill: []string{"--sim", six + ",tp=2"}, decode: []string{"--sim", six + ",tp=3"}})
	ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
	defer stop()
	a := complete(ctx, s.URL(), prompt(1, 50), 8, nil)
	if a.ok() || a.Cause == nil || a.Cause.Code != room.CodeMismatch || !strings.Contains(a.Cause.Detail, `tp differs: the prefill worker has "2", the decode worker has "3"`) {
		t.Errorf("%v", a)
	}
}
