package shm

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// deadPID is no process: larger than any kernel's pid limit.
const deadPID = 1 << 22

// bind makes a socket file that nobody serves any more.
func bind(t *testing.T, path string) {
	t.Helper()
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ln.SetUnlinkOnClose(false)
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestStaleSocketsAreRemovedAndNothingElse(t *testing.T) {
	dir := socketDir(t)
	at := func(name string) string { return filepath.Join(dir, name) }
	live, err := net.Listen("unix", at(socketName(deadPID, 1))) // in another pid namespace, say
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	old := time.Now().Add(-2 * staleAge)
	bind(t, at(socketName(deadPID, 2)))
	bind(t, at(socketName(os.Getpid(), 3))) // about to listen, for all we know
	bind(t, at(socketName(os.Getpid(), 4)))
	if err := os.Chtimes(at(socketName(os.Getpid(), 4)), old, old); err != nil {
		t.Fatal(err)
	}
	bind(t, at("other.sock"))
	if err := os.WriteFile(at(socketName(deadPID, 5)), []byte("no socket"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := cleanDir(dir); err != nil {
		t.Fatal(err)
	}
	for name, kept := range map[string]bool{
		socketName(deadPID, 1): true, socketName(deadPID, 2): false, socketName(os.Getpid(), 3): true,
		socketName(os.Getpid(), 4): false, "other.sock": true, socketName(deadPID, 5): true,
	} {
		if _, err := os.Lstat(at(name)); (err == nil) != kept {
			t.Errorf("%s: kept %v, want %v", name, err == nil, kept)
		}
	}
	if err := cleanDir(at("missing")); err == nil {
		t.Error("a missing directory was cleaned")
	}
}

func TestSocketNames(t *testing.T) {
	if pid, ok := socketPID(socketName(4711, 1<<63)); !ok || pid != 4711 {
		t.Errorf("pid %d, %v", pid, ok)
	}
	for _, bad := range []string{"", "kv-", "kv-1.sock", "kv--1.sock", "kv-x-1.sock", "kv-0-1.sock", "xx-1-1.sock", "kv-1-1.lock"} {
		if pid, ok := socketPID(bad); ok {
			t.Errorf("%q names process %d", bad, pid)
		}
	}
}

func TestDirectoryMustBePrivate(t *testing.T) {
	base := socketDir(t)
	fresh := filepath.Join(base, "fresh")
	if err := openDir(fresh, true); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(fresh); err != nil || fi.Mode().Perm() != 0o700 {
		t.Fatalf("made with %v, %v", fi.Mode(), err)
	}
	open := filepath.Join(base, "open")
	if err := os.Mkdir(open, 0o755); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(base, "link")
	if err := os.Symlink(fresh, link); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(base, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{open, link, file} {
		if err := openDir(bad, true); err == nil {
			t.Errorf("%s accepted", bad)
		}
	}
	if err := openDir(open, false); err != nil {
		t.Errorf("a directory that the operator chose: %v", err)
	}
	if err := openDir(file, false); err == nil {
		t.Error("a file accepted as directory")
	}
	if !strings.HasSuffix(defaultDir(), fmt.Sprintf("baton-%d", os.Getuid())) {
		t.Errorf("default directory %s", defaultDir())
	}
}

func TestReachableOnlyHere(t *testing.T) {
	p := listen(t, Config{}, 4096)
	d := p.tgt.Descriptor()
	if d.Kind != "shm" || d.Size != 4096 || d.Host == "" || !p.tr.Reachable(d) {
		t.Fatalf("descriptor %+v, reachable %v", d, p.tr.Reachable(d))
	}
	if fi, err := os.Stat(d.Addr); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v", fi.Mode(), err)
	}
	for name, edit := range map[string]func(*transfer.Descriptor){
		"kind": func(d *transfer.Descriptor) { d.Kind = "tcp" }, "machine": func(d *transfer.Descriptor) { d.Host = "x" },
		"size": func(d *transfer.Descriptor) { d.Size = 0 }, "path": func(d *transfer.Descriptor) { d.Addr += "x" },
		"another file": func(d *transfer.Descriptor) { d.Addr = filepath.Join(filepath.Dir(d.Addr), "file") },
		"inode":        func(d *transfer.Descriptor) { d.Meta = map[string]string{metaSocket: "1:2"} },
		"no inode":     func(d *transfer.Descriptor) { d.Meta = nil },
	} {
		bad := p.tgt.Descriptor()
		edit(&bad)
		if p.tr.Reachable(bad) {
			t.Errorf("%s changed: reachable", name)
		}
	}
	if err := p.tgt.Close(); err != nil {
		t.Fatal(err)
	}
	if p.tr.Reachable(d) {
		t.Error("reachable after close")
	}
	if left, _ := os.ReadDir(filepath.Dir(d.Addr)); len(left) != 0 {
		t.Errorf("%d files left", len(left))
	}
}
