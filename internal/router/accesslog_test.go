package router

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/baton-pd/baton/internal/router/accesslog"
)

// TestAccessLog: one line for every request, also for one that was refused unread, with what is true of it.
func TestAccessLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "access.log")
	decodes := []script{sse(20*time.Millisecond, role, token, 30*time.Millisecond, last, usageEvent, done)}
	synctest.Test(t, func(t *testing.T) {
		log, err := accesslog.Open(accesslog.Config{Path: path})
		if err != nil {
			t.Fatal(err)
		}
		b := &bed{t: t, net: newMemNet(), log: &lockedLog{}}
		p, d := b.net.worker(t, "p0:80", after(10*time.Millisecond, okAnswer)), b.net.worker(t, "d0:80", decodes[0])
		b.start(Config{
			AccessLog: log, DialContext: b.net.dial, MaxRetries: -1,
			Prefills: []Backend{{URL: "http://p0:80", BootstrapPort: 1}}, Decodes: []Backend{{URL: "http://d0:80"}},
		})
		synctest.Wait()
		b.chatStream()
		d.set(say(503, `{"error":{"message":"full","code":"capacity"}}`))
		b.chat()
		b.post(t.Context(), "/generate", "{")
		b.close()
		p.kill()
		d.kill()
		<-time.After(time.Second) // net/http lingers on connections that it closed itself
		if err := log.Close(); err != nil {
			t.Error(err)
		}
	})
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	if len(lines) != 3 {
		t.Fatalf("%d lines: %s", len(lines), text)
	}
	var got [3]map[string]any
	for i, s := range lines {
		if err := json.Unmarshal([]byte(s), &got[i]); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []map[string]any{
		{"outcome": "ok", "status": 200.0, "model": "m", "stream": true, "prefill": "p0:80", "decode": "d0:80", "attempts": 1.0, "prefill_ms": 10.0, "first_byte_ms": 20.0,
			"first_token_ms": 20.0, "decode_ms": 30.0, "total_ms": 50.0, "completion_tokens": 2.0, "prompt_tokens": 5.0, "events": 5.0},
		{"outcome": "error", "status": 503.0, "cause": "unavailable", "worker": "d0:80", "side": "decode", "attempts": 1.0, "stream": false},
		{"outcome": "refused", "status": 400.0, "cause": "invalid_request", "attempts": 0.0, "path": "/generate"},
	} {
		for k, v := range want {
			if got[i][k] != v {
				t.Errorf("line %d: %s is %v, want %v: %s", i, k, got[i][k], v, lines[i])
			}
		}
	}
}
