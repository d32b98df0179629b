package etcd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/discovery"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// patience bounds what should take a moment.
const patience = 30 * time.Second

// server is a real etcd.
type server struct {
	t      *testing.T
	args   []string
	client string // its address
	cmd    *exec.Cmd
	log    *safeBuffer
}

type safeBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *safeBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *safeBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func newServer(t *testing.T) *server {
	t.Helper()
	path, err := exec.LookPath("etcd")
	if err != nil {
		t.Skip("etcd is not installed (Debian: etcd-server; scripts/deps.sh test)")
	}
	var urls []string
	for range 2 {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		urls = append(urls, "http://"+l.Addr().String())
		_ = l.Close()
	}
	s := &server{t: t, client: urls[0], log: &safeBuffer{}}
	s.args = []string{
		path, "--data-dir", t.TempDir(), "--name", "one", "--listen-client-urls", urls[0], "--advertise-client-urls", urls[0],
		"--listen-peer-urls", urls[1], "--initial-advertise-peer-urls", urls[1], "--initial-cluster", "one=" + urls[1],
	}
	t.Cleanup(s.kill)
	s.start()
	return s
}

func (s *server) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.args[0], s.args[1:]...)
	s.cmd.Stdout, s.cmd.Stderr = s.log, s.log
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
}

func (s *server) kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	s.cmd = nil
	if s.t.Failed() {
		s.t.Logf("etcd said: %.4000s", s.log)
	}
}

// bed is a source on an etcd, and a client that changes it.
type bed struct {
	t    *testing.T
	s    *Source
	cl   *clientv3.Client
	told chan said
}

type said struct {
	set []string
	err error
}

func newBed(t *testing.T, srv *server) *bed {
	t.Helper()
	c := Config{Endpoints: []string{srv.client}, Resync: time.Second, Timeout: 2 * time.Second, Retry: 20 * time.Millisecond}
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	cl, err := clientv3.New(clientv3.Config{Endpoints: c.Endpoints, DialTimeout: patience})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(cl.Close(), s.Close()); err != nil {
			t.Error(err)
		}
	})
	return &bed{t: t, s: s, cl: cl, told: make(chan said, 10_000)}
}

func (b *bed) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		b.s.Run(ctx, b.report)
	}()
	b.t.Cleanup(func() { cancel(); <-ended })
}

func (b *bed) report(set []discovery.Worker, err error) {
	s := said{err: err}
	for _, w := range set {
		s.set = append(s.set, w.URL)
	}
	b.told <- s
}

// ctx of a request by the test itself: etcd may still be starting.
func (b *bed) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	b.t.Cleanup(cancel)
	return ctx
}

func (b *bed) put(name string, opts ...clientv3.OpOption) {
	b.t.Helper()
	value := fmt.Sprintf(`{"leg":"decode","url":"http://%s:1"}`, name)
	if _, err := b.cl.Put(b.ctx(), "/baton/workers/"+name, value, opts...); err != nil {
		b.t.Fatal(err)
	}
}

// await reads reports until one is the set, and returns the errors before it. kept are workers that no set on the way
// may lack.
func (b *bed) await(what string, want []string, kept ...string) (errs []error) {
	b.t.Helper()
	late := time.After(patience)
	for {
		select {
		case s := <-b.told:
			if s.err != nil {
				errs = append(errs, s.err)
				continue
			}
			for _, k := range kept {
				if !slices.Contains(s.set, k) {
					b.t.Fatalf("%s: a set %q without %s", what, s.set, k)
				}
			}
			if slices.Equal(s.set, want) {
				return errs
			}
		case <-late:
			b.t.Fatalf("%s: never told %q; errors %v", what, want, errs)
		}
	}
}

// awaitErr reads reports until an error has these words; sets on the way must be want.
func (b *bed) awaitErr(words string, want []string) {
	b.t.Helper()
	late := time.After(patience)
	for {
		select {
		case s := <-b.told:
			if s.err == nil && !slices.Equal(s.set, want) {
				b.t.Fatalf("told %q while waiting for the error %q", s.set, words)
			}
			if s.err != nil && strings.Contains(s.err.Error(), words) {
				return
			}
		case <-late:
			b.t.Fatalf("no error with %q", words)
		}
	}
}

func TestKeysComeAndGo(t *testing.T) {
	b := newBed(t, newServer(t))
	b.put("d0")
	b.run()
	b.await("what was there", []string{"http://d0:1"})
	b.put("d1")
	b.await("a key more", []string{"http://d0:1", "http://d1:1"}, "http://d0:1")
	lease, err := b.cl.Grant(b.ctx(), 1)
	if err != nil {
		t.Fatal(err)
	}
	b.put("d2", clientv3.WithLease(lease.ID))
	b.await("a key with a lease", []string{"http://d0:1", "http://d1:1", "http://d2:1"})
	b.await("a lease that nobody keeps", []string{"http://d0:1", "http://d1:1"}, "http://d0:1", "http://d1:1")

	if _, err := b.cl.Put(b.ctx(), "/baton/workers/d1", `{"leg":"decode"`); err != nil {
		t.Fatal(err)
	}
	b.awaitErr("/baton/workers/d1", []string{"http://d0:1", "http://d1:1"})
	b.put("d1")
	if _, err := b.cl.Delete(b.ctx(), "/baton/workers/d0"); err != nil {
		t.Fatal(err)
	}
	b.await("a key less", []string{"http://d1:1"}, "http://d1:1")
	if _, err := b.cl.Put(b.ctx(), "/baton/other", "x"); err != nil {
		t.Fatal(err)
	}
	b.put("d3")
	if errs := b.await("another prefix is no concern", []string{"http://d1:1", "http://d3:1"}); len(errs) != 0 {
		t.Errorf("errors %v", errs)
	}
}

// A kill is no reason to change the fleet; what happened until etcd is back is seen then.
func TestKillAndRestart(t *testing.T) {
	srv := newServer(t)
	b := newBed(t, srv)
	b.put("d0")
	b.put("d1")
	b.run()
	both := []string{"http://d0:1", "http://d1:1"}
	b.await("at first", both)
	for range 2 {
		srv.kill()
		b.awaitErr("read the keys under /baton/workers/", both)
		srv.start()
		if _, err := b.cl.Delete(b.ctx(), "/baton/workers/d1"); err != nil {
			t.Fatal(err)
		}
		b.await("after the restart", []string{"http://d0:1"}, "http://d0:1")
		b.put("d1")
		b.await("and on", both, "http://d0:1")
	}
}

// A watch from a revision that was compacted away ends in a new reading, not in an error.
func TestCompaction(t *testing.T) {
	b := newBed(t, newServer(t))
	for range 5 {
		b.put("d0")
	}
	if _, err := b.cl.Delete(b.ctx(), "/baton/workers/d0"); err != nil {
		t.Fatal(err)
	}
	b.put("d1")
	got, err := b.cl.Get(b.ctx(), "/baton/workers/d1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.cl.Compact(b.ctx(), got.Header.Revision); err != nil {
		t.Fatal(err)
	}
	b.s.c.Resync = patience
	start := time.Now()
	if err := b.s.watch(b.ctx(), 1, b.report); err != nil || time.Since(start) > patience/2 {
		t.Fatalf("a watch from revision 1 ended with %v after %v", err, time.Since(start))
	}
	b.s.c.Resync = time.Second
	b.run()
	b.await("read anew", []string{"http://d1:1"})
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []Config{{}, {Endpoints: []string{"a:1"}, Resync: -1}} {
		if s, err := New(c); err == nil {
			_ = s.Close()
			t.Errorf("%+v was taken", c)
		}
	}
}
