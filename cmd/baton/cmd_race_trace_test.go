package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/trace"
)

// recordRoom writes the trace of one room that is handed over.
func recordRoom(t *testing.T, path string) {
	t.Helper()
	w, err := trace.Open(trace.Config{Path: path, Worker: "prefill-0", Side: room.SideSender, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	g := room.NewRegistry(room.Config{Side: room.SideSender, Observe: w, Log: slog.New(slog.DiscardHandler)})
	r, err := g.Open(room.Key{Room: 7}, time.Now().Add(time.Minute), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []room.EventKind{room.EvGrant, room.EvBegin, room.EvSettle, room.EvRelease} {
		r.Apply(room.Event{Kind: k})
	}
	g.Close()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

func checkTrace(args ...string) (string, error) {
	var out bytes.Buffer
	root := newRoot()
	root.SetArgs(append([]string{"race"}, args...))
	root.SetOut(&out)
	err := root.Execute()
	return out.String(), err
}

func TestCheckTrace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rooms.jsonl")
	recordRoom(t, file)
	out, err := checkTrace("--check-trace", file)
	if err != nil || !strings.Contains(out, "prefill     success 1\n") || !strings.Contains(out, "verdict     valid\n") {
		t.Errorf("%v\n%s", err, out)
	}
	out, err = checkTrace("--check-trace", file, "--json", "-")
	var rep trace.Report
	if err != nil || json.Unmarshal([]byte(out), &rep) != nil || rep.Verdict != "valid" || rep.Records != 7 {
		t.Errorf("%v\n%s", err, out)
	}

	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	// The fault that Baton excludes: a failed room that goes on.
	bad := strings.Replace(string(text), `"to":"success/done"`, `"to":"transferring"`, 1)
	if err := os.WriteFile(file, []byte(bad), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err = checkTrace("--check-trace", file)
	if err == nil || report(&bytes.Buffer{}, err) != 1 || !strings.Contains(out, "rooms.jsonl:5: replay: room 7 (instance 1): node after of event 3 (settle): expected success/done, got transferring") {
		t.Errorf("%v\n%s", err, out)
	}
	for _, args := range [][]string{
		{"--check-trace", file + ".none"},
		{"--check-trace", file, "--trace-slack", "0s"},
		{"--check-trace", file, "--trace-findings", "-1"},
	} {
		var usage usageError
		if _, err := checkTrace(args...); !errors.As(err, &usage) {
			t.Errorf("%v: %v; want a usage error", args, err)
		}
	}
}
