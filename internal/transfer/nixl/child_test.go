package nixl

import (
	"os/exec"
	"strings"
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
