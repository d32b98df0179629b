package nixl

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// TestTargetFences: whoever gets this wrong frees pages too early. Unknown is no.
func TestTargetFences(t *testing.T) {
	for _, c := range []struct {
		tls, backend, memory string
		want                 bool
	}{
		{DefaultTLS, "UCX", "DRAM", true},
		{"tcp", "UCX", "DRAM", true},
		{"tcp,self", "UCX", "DRAM", true},
		{"rc,tcp", "UCX", "DRAM", true},
		{"posix,sysv,tcp", "UCX", "DRAM", true},
		{"^ cma, knem, xpmem, gdr_copy", "UCX", "DRAM", true},
		{"all", "UCX", "DRAM", false},
		{"sm,tcp", "UCX", "DRAM", false},
		{"shm", "UCX", "DRAM", false},
		{"mm", "UCX", "DRAM", false},
		{"tcp,cma", "UCX", "DRAM", false},
		{`\cma,tcp`, "UCX", "DRAM", false},
		{"tcp,cuda", "UCX", "DRAM", false},
		{"^cma", "UCX", "DRAM", false},
		{"^rc", "UCX", "DRAM", false},
		{"tcp", "LIBFABRIC", "DRAM", false},
		{DefaultTLS, "UCX", "VRAM:0", false},
	} {
		cfg := Config{TLS: c.tls, Backend: c.backend, Memory: c.memory}
		if got := cfg.targetFences(); got != c.want {
			t.Errorf("%s over %s to %s: %v, want %v", c.tls, c.backend, c.memory, got, c.want)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Setenv(LibraryEnv, "")
	t.Setenv("UCX_TLS", "")
	lib := filepath.Join(t.TempDir(), "libnixl_capi.so")
	if err := os.WriteFile(lib, []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := Config{Library: lib}.withDefaults()
	if err != nil || c.TLS != DefaultTLS || c.Backend != "UCX" || len(c.Helper) != 2 {
		t.Errorf("defaults: %+v, %v", c, err)
	}
	t.Setenv("UCX_TLS", "rc")
	if c, err = (Config{Library: lib}).withDefaults(); err != nil || c.TLS != "rc" {
		t.Errorf("TLS of the environment: %q, %v", c.TLS, err)
	}
	for name, bad := range map[string]Config{
		"no such library": {Library: lib + ".9"}, "directory": {Library: filepath.Dir(lib)}, "negative": {Library: lib, Queue: -1},
		"negative time": {Library: lib, Watch: -time.Second}, "memory": {Library: lib, Memory: "TAPE"}, "device": {Library: lib, Memory: "VRAM:x"},
	} {
		tr := New(bad)
		if tr.Err() == nil {
			t.Errorf("%s was accepted", name)
		}
		if _, err := tr.Listen(transfer.Memory{}, nil); err == nil {
			t.Errorf("%s: listens", name)
		}
	}
	if err := New(Config{}).Err(); !errors.Is(err, ErrNoLibrary) {
		t.Errorf("without a library: %v", err)
	}
}

// TestOtherMemory: a target with another kind of memory is refused before anything is started.
func TestOtherMemory(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	tr := New(Config{Library: self, Helper: []string{self}}) // neither is ever opened
	d := transfer.Descriptor{Kind: "nixl", Addr: "127.0.0.1:1", Size: 4096, Meta: map[string]string{metaBackend: "UCX", metaMemory: "VRAM:0"}}
	_, err = tr.Dial(context.Background(), d, 1)
	if err == nil || !strings.Contains(err.Error(), "--nixl-memory") {
		t.Errorf("dial of VRAM from DRAM: %v, want an error that names --nixl-memory", err)
	}
}
