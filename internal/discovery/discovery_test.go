package discovery

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watch runs a source in the bubble; what it reports is read by take.
type watch struct {
	t    *testing.T
	mu   sync.Mutex
	sets [][]string
	errs []error
}

func run(t *testing.T, s Source) *watch {
	t.Helper()
	w := &watch{t: t}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.Run(ctx, func(set []Worker, err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			if err != nil {
				w.errs = append(w.errs, err)
				return
			}
			names := []string{}
			for _, x := range set {
				names = append(names, fmt.Sprintf("%s %s %d", x.Leg, x.URL, x.BootstrapPort))
			}
			w.sets = append(w.sets, names)
		})
	}()
	t.Cleanup(func() { cancel(); <-ended })
	synctest.Wait()
	return w
}

// next lets one interval of a second pass and returns what was reported in it.
func (w *watch) next() (sets [][]string, errs []error) {
	<-time.After(time.Second)
	return w.take()
}

func (w *watch) take() (sets [][]string, errs []error) {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	sets, errs, w.sets, w.errs = w.sets, w.errs, nil, nil
	return sets, errs
}

func (w *watch) wants(what string, sets [][]string, errs []error, want ...string) {
	w.t.Helper()
	if len(errs) != 0 || len(sets) != 1 || !slices.Equal(sets[0], want) {
		w.t.Fatalf("%s: got %q, errors %v; want %q", what, sets, errs, want)
	}
}

const (
	oneFile = `{"workers":[{"leg":"decode","url":"http://d0:1/"}]}`
	twoFile = `{"workers":[{"leg":"prefill","url":"http://p0:1","bootstrap_port":9},{"leg":"decode","url":"http://d0:1"}]}`
)

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestFileChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "workers.json")
		f, err := NewFile(path, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		w := run(t, f)
		if sets, errs := w.take(); len(sets) != 0 || len(errs) != 1 || !errors.Is(errs[0], os.ErrNotExist) {
			t.Fatalf("without a file: %v, %v", sets, errs)
		}
		write(t, path, oneFile)
		sets, errs := w.next()
		w.wants("written", sets, errs, "decode http://d0:1 0")
		if sets, errs := w.next(); len(sets)+len(errs) != 0 {
			t.Fatalf("unchanged, but told %v, %v", sets, errs)
		}

		write(t, path+".new", twoFile)
		if err := os.Rename(path+".new", path); err != nil {
			t.Fatal(err)
		}
		sets, errs = w.next()
		w.wants("renamed over", sets, errs, "decode http://d0:1 0", "prefill http://p0:1 9")

		for i := range len(twoFile) { // whatever part of it a reader meets
			write(t, path, twoFile[:i])
			if sets, errs := w.next(); len(sets) != 0 || len(errs) != 1 || !strings.Contains(errs[0].Error(), path) {
				t.Fatalf("%d bytes of it: %v, %v", i, sets, errs)
			}
		}
		write(t, path, twoFile)
		sets, errs = w.next() // told again, because a failure was told
		w.wants("whole again", sets, errs, "decode http://d0:1 0", "prefill http://p0:1 9")

		write(t, path, `{"workers":[]}`)
		sets, errs = w.next()
		w.wants("emptied", sets, errs)
	})
}

// A ConfigMap's file is a link to a link that is swapped.
func TestFileBehindSwappedLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		for name, text := range map[string]string{"v1": oneFile, "v2": twoFile} {
			if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, name, "workers.json"), text)
		}
		data, path := filepath.Join(dir, "..data"), filepath.Join(dir, "workers.json")
		if err := errors.Join(os.Symlink("v1", data), os.Symlink("..data/workers.json", path)); err != nil {
			t.Fatal(err)
		}
		f, err := NewFile(path, time.Second)
		if err != nil {
			t.Fatal(err)
		}
		w := run(t, f)
		sets, errs := w.take()
		w.wants("first", sets, errs, "decode http://d0:1 0")
		if err := errors.Join(os.Symlink("v2", data+"_tmp"), os.Rename(data+"_tmp", data)); err != nil {
			t.Fatal(err)
		}
		sets, errs = w.next()
		w.wants("swapped", sets, errs, "decode http://d0:1 0", "prefill http://p0:1 9")
	})
}

func TestParseFileRefuses(t *testing.T) {
	for text, want := range map[string]string{
		`{"workers":[{"leg":"decode","url":"http://a:1","kind":"x"}]}`:      `kind "x"`,
		`{"workers":[{"leg":"prefill","url":"http://a:1","kind":"plain"}]}`: "serves alone",
		"":                          "EOF",
		"{}":                        `"workers" is missing`,
		"[]":                        "not a list of workers",
		`{"workers":null}`:          `"workers" is missing`,
		oneFile + "{":               "something after",
		`{"workers":[{"lag":"x"}]}`: `"lag"`,
		`{"workers":[{"leg":"x"}]}`: "want prefill or decode",
		`{"workers":[{"leg":"decode","url":"d0:1"}]}`:                                            "want http://host:port",
		`{"workers":[{"leg":"decode","url":"http://u:p@d0:1"}]}`:                                 "want http://host:port",
		`{"workers":[{"leg":"prefill","url":"http://p0:1"}]}`:                                    "bootstrap port 0",
		`{"workers":[{"leg":"prefill","url":"http://p0:1","bootstrap_port":70000}]}`:             "bootstrap port 70000",
		`{"workers":[{"leg":"decode","url":"http://a:1"},{"leg":"decode","url":"http://a:1/"}]}`: "given twice",
	} {
		if set, err := ParseFile([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, error %v; want %q", text, set, err, want)
		}
	}
}

func FuzzParseFile(f *testing.F) {
	f.Add([]byte(oneFile))
	f.Add([]byte(twoFile))
	f.Add([]byte(`{"workers":[{"leg":"prefill","url":"http://a:1","kind":"vllm"},{"leg":"decode","url":"http://[::1]:2","zone":"z","models":["m"]}]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		set, err := ParseFile(text)
		if err != nil {
			return
		}
		for i := range set {
			if err := set[i].Check(); err != nil {
				t.Errorf("accepted, but: %v", err)
			}
		}
	})
}

// names is a resolver whose answers the test changes.
type names struct {
	mu    sync.Mutex
	addrs []string
	srv   []*net.SRV
	err   error
}

func (n *names) set(err error, addrs ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.err, n.addrs = err, addrs
}

func (n *names) LookupNetIP(_ context.Context, network, host string) (out []netip.Addr, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if network != "ip" || host != "pool.test" {
		return nil, fmt.Errorf("asked for %s %s", network, host)
	}
	for _, a := range n.addrs {
		out = append(out, netip.MustParseAddr(a))
	}
	return out, n.err
}

func (n *names) LookupSRV(_ context.Context, service, proto, name string) (string, []*net.SRV, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if service != "" || proto != "" || name != "_http._tcp.pool.test" {
		return "", nil, fmt.Errorf("asked for %q %q %q", service, proto, name)
	}
	return name, n.srv, n.err
}

func TestDNSAddresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := ParseDNS("leg=prefill,host=pool.test,port=81,bootstrap-port=9")
		if err != nil {
			t.Fatal(err)
		}
		n := &names{}
		n.set(nil, "10.0.0.2", "10.0.0.1", "::ffff:10.0.0.1", "fd00::1")
		d, err := NewDNS(c, time.Second, n)
		if err != nil {
			t.Fatal(err)
		}
		w := run(t, d)
		sets, errs := w.take()
		w.wants("first", sets, errs, "prefill http://10.0.0.1:81 9", "prefill http://10.0.0.2:81 9", "prefill http://[fd00::1]:81 9")
		n.set(nil, "fd00::1", "10.0.0.1", "10.0.0.2") // resolvers answer in turn
		if sets, errs := w.next(); len(sets)+len(errs) != 0 {
			t.Fatalf("another order is told as a change: %v, %v", sets, errs)
		}
		for what, err := range map[string]error{
			"failure": errors.New("server misbehaving"), "no such name": &net.DNSError{IsNotFound: true}, "no record": nil,
		} {
			n.set(err)
			if sets, errs := w.next(); len(sets) != 0 || len(errs) != 1 {
				t.Fatalf("%s: %v, %v; want an error and no set", what, sets, errs)
			}
		}
		n.set(nil, "10.0.0.2")
		sets, errs = w.next()
		w.wants("well again", sets, errs, "prefill http://10.0.0.2:81 9")
	})
}

func TestDNSServices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := ParseDNS("leg=decode,srv=_http._tcp.pool.test,scheme=https")
		if err != nil {
			t.Fatal(err)
		}
		n := &names{srv: []*net.SRV{{Target: "b.test.", Port: 82}, {Target: "a.test.", Port: 81}, {Target: "a.test.", Port: 83}}}
		d, err := NewDNS(c, time.Second, n)
		if err != nil {
			t.Fatal(err)
		}
		w := run(t, d)
		sets, errs := w.take()
		w.wants("first", sets, errs, "decode https://a.test:81 0", "decode https://a.test:83 0", "decode https://b.test:82 0")
	})
}

func TestDNSRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"leg=decode": "either a host or an srv name", "leg=decode,host=a,srv=b": "either a host or an srv name",
		"leg=decode,host=a": "port 0", "leg=decode,host=a,port=x": "not a number", "leg=decode,host": "KEY=VALUE",
		"leg=prefill,host=a,port=1": "bootstrap port 0", "leg=both,host=a,port=1": "want prefill or decode",
		"leg=decode,host=a,port=1,x=y": "want leg", "leg=decode,host=a,port=1,scheme=ftp": "want http://host:port",
	} {
		c, err := ParseDNS(text)
		if err == nil {
			_, err = NewDNS(c, time.Second, nil)
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v; want %q", text, err, want)
		}
	}
	if _, err := NewDNS(DNSConfig{Leg: LegDecode, Host: "a", Port: 1}, 0, nil); !errors.Is(err, errInterval) {
		t.Error(err)
	}
	if _, err := NewFile("a", -1); !errors.Is(err, errInterval) {
		t.Error(err)
	}
}
