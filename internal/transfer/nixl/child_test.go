package nixl

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

func TestLastWords(t *testing.T) {
	for text, want := range map[string]string{
		"":                        "",
		"one\ntwo\nthree\nfour\n": "two | three | four",
		"ucx: hello\nSIGABRT: abort\nPC=0x1\nrax 1\nrbx 2\n": "SIGABRT: abort | PC=0x1",
		"x\nterminate called after throwing":                 "terminate called after throwing",
	} {
		var l lastLines
		for i := range len(text) { // in any pieces
			_, _ = l.Write([]byte(text[i : i+1]))
		}
		if got := l.String(); got != want {
			t.Errorf("of %q: %q, want %q", text, got, want)
		}
	}
	var l lastLines
	for range 10_000 {
		_, _ = l.Write([]byte("a talkative library\n"))
	}
	if len(l.buf) > tailMax {
		t.Errorf("%d bytes are kept", len(l.buf))
	}
}

// TestHelperByHand: a helper that no worker has started says so, and fails.
func TestHelperByHand(t *testing.T) {
	cfg := testConfig()
	out, err := exec.Command(cfg.Helper[0], cfg.Helper[1:]...).CombinedOutput()
	if err == nil || !strings.Contains(string(out), "own use") {
		t.Errorf("%v, output %q; want a failure that says why", err, out)
	}
}

// TestHelperLeavesAProcess: the end of a helper is its own, not that of what it has started.
func TestHelperLeavesAProcess(t *testing.T) {
	needLibrary(t)
	cfg, file := testConfig(), filepath.Join(t.TempDir(), "pid")
	cfg.Helper = append([]string{"sh", "-c", `sleep 600 3>&- & echo $! >"$0"; exec "$@"`, file}, cfg.Helper...)
	t.Cleanup(func() {
		if b, err := os.ReadFile(file); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	done := make(chan error, 1)
	go func() { done <- New(cfg).Probe(t.Context()) }()
	if err := recv(t, done, "end of a helper whose child lives"); err != nil {
		t.Error(err)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err != nil || syscall.Kill(pid, 0) != nil {
		t.Errorf("its child, %q, does not live: %v", b, err)
	}
}
