package probe

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/sglang"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// fakeSGLang is a prefill server's bootstrap side and one control socket for all of its ranks.
type fakeSGLang struct {
	ack   func(n int, a *sglang.Abort) *sglang.AbortAck // nil: as the release does
	seen  chan any                                      // messages
	info  string                                        // of /server_info
	extra string                                        // keys of the topology
	tp    int
	gone  bool // the rank's port is closed
}

func (f *fakeSGLang) start(t *testing.T) string {
	t.Helper()
	f.seen = make(chan any, 256)
	n := 0
	pushes := map[string]*zmtp.Push{}
	pull, err := zmtp.Listen("127.0.0.1:0", zmtp.Limits{}, func(_ net.Addr, m zmtp.Message) {
		v, err := sglang.DecodeMessage(m)
		f.seen <- v
		a, ok := v.(*sglang.Abort)
		if err != nil || !ok {
			return
		}
		n++
		ack := &sglang.AbortAck{Room: a.Room, Gen: a.Gen}
		if f.ack != nil {
			ack = f.ack(n, a)
		}
		if ack == nil {
			return
		}
		if pushes[a.Addr()] == nil {
			pushes[a.Addr()] = zmtp.Dial(a.Addr(), zmtp.PushConfig{})
		}
		_ = pushes[a.Addr()].Send(ack.Encode())
	})
	if err != nil {
		t.Fatal(err)
	}
	port := pull.Addr().Port
	if f.gone {
		_ = pull.Close()
	}
	var s *httptest.Server
	s = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/server_info" && f.info != "":
			fmt.Fprint(w, f.info)
		case r.URL.Path != "/route":
			http.NotFound(w, r)
		case r.FormValue("prefill_dp_rank") == "-1":
			fmt.Fprintf(w, `{"attn_tp_size":%d,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":1,"kv_cache_dtype":"bfloat16","follow_bootstrap_room":true,"prefill_http_port":%d%s}`,
				max(f.tp, 1), s.Listener.Addr().(*net.TCPAddr).Port, f.extra)
		default:
			fmt.Fprintf(w, `{"rank_ip":"127.0.0.1","rank_port":%d}`, port)
		}
	}))
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		s.Close()
		_ = pull.Close() // closed twice where the rank is gone
		for _, p := range pushes {
			p.Close(0)
		}
	})
	return s.Listener.Addr().String()
}

// TestSGLangProbe: one worker that keeps the protocol, and the ways not to.
func TestSGLangProbe(t *testing.T) {
	const sharded = `,"enable_kv_cache_sharding":false`
	for _, tc := range []struct {
		name  string
		f     fakeSGLang
		given string
		rules []string
		doubt string
		steps int
	}{
		{name: "good", f: fakeSGLang{info: `{"version":"0.5.23"}`}, steps: 5},
		{name: "two ranks", f: fakeSGLang{extra: sharded, tp: 2}, steps: 8},
		{name: "release from the topology", f: fakeSGLang{extra: sharded}, steps: 5},
		{name: "release given", given: "0.5.22", steps: 5},
		{name: "release unknown", doubt: "not known", steps: 2},
		{name: "abort would kill it", given: "0.5.15", rules: []string{"version"}, steps: 2},
		{name: "no acks to be had", f: fakeSGLang{info: `{"version":"0.5.17"}`}, rules: []string{"version"}, steps: 2},
		{name: "no version", given: "main", doubt: "no version of three numbers", steps: 2},
		{name: "dead control thread", given: "0.5.23", f: fakeSGLang{ack: func(int, *sglang.Abort) *sglang.AbortAck { return nil }}, rules: []string{"probe-no-ack"}, steps: 3},
		{name: "dies of metadata", given: "0.5.23", f: fakeSGLang{ack: func(n int, a *sglang.Abort) *sglang.AbortAck {
			if n > 1 {
				return nil
			}
			return &sglang.AbortAck{Room: a.Room, Gen: a.Gen}
		}}, rules: []string{"probe-no-ack"}, steps: 4},
		{name: "ack of another life", given: "0.5.23", f: fakeSGLang{ack: func(_ int, a *sglang.Abort) *sglang.AbortAck { return &sglang.AbortAck{Room: a.Room, Gen: a.Gen - 1} }},
			rules: []string{"probe-no-ack"}, steps: 3},
		{name: "registered and gone", given: "0.5.23", f: fakeSGLang{gone: true}, rules: []string{"probe-rank-gone"}, steps: 3},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := SGLang{Release: tc.given, Listen: "127.0.0.1:0", Patience: 300 * time.Millisecond}.Probe(t.Context(), tc.f.start(t))
			text := ""
			for _, d := range r.Doubts {
				text += d.Text
			}
			if got := rules(r); !slices.Equal(got, tc.rules) || len(r.Steps) != tc.steps || (text == "") != (tc.doubt == "") || !strings.Contains(text, tc.doubt) {
				t.Errorf("found %v, want %v; doubts %q, want %q; %d steps, want %d: %+v", got, tc.rules, text, tc.doubt, len(r.Steps), tc.steps, r.Steps)
			}
			for len(tc.f.seen) > 0 {
				switch m := (<-tc.f.seen).(type) {
				case *sglang.Abort:
					if !isProbeRoom(m.Room) || !m.HasGen {
						t.Errorf("an abort that is not the probe's: %+v", m)
					}
				case *sglang.Metadata:
					if !isProbeRoom(m.Room) || m.Required != 2 || !m.Dummy || len(m.Pages) != 0 {
						t.Errorf("metadata that could complete: %+v", m)
					}
				default:
					t.Errorf("the worker heard %T", m)
				}
			}
		})
	}
}

func TestSGLangNobody(t *testing.T) {
	s := httptest.NewServer(http.NotFoundHandler())
	defer func() { http.DefaultClient.CloseIdleConnections(); s.Close() }()
	for _, addr := range []string{s.Listener.Addr().String(), "127.0.0.1:1"} {
		if r := (SGLang{Patience: time.Second}).Probe(t.Context(), addr); len(r.Doubts) != 1 || len(r.Findings) != 0 {
			t.Errorf("%s: %+v", addr, r)
		}
	}
}

// TestRealSGLang: the release's own prefill manager answers; after a foreign frame, which ends its control thread, the
// probe says so.
func TestRealSGLang(t *testing.T) {
	python, script := realSGLang(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	_, port, _ := net.SplitHostPort(addr)
	_ = l.Close()
	ctx, stop := context.WithTimeout(t.Context(), 90*time.Second)
	defer stop()
	cmd := exec.CommandContext(ctx, python, script, "prefill", "--slim", "--deferred", "--bootstrap-port", port)
	cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1", "UCX_TLS=tcp,self", "UCX_NET_DEVICES=lo")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // killed
		http.DefaultClient.CloseIdleConnections()
	}()
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil { // its first line: it is ready
		t.Fatalf("the peer did not start: %v", err)
	}
	p := SGLang{Release: "0.5.23", Listen: "127.0.0.1:0", Patience: 3 * time.Second}
	for range 2 {
		if r := p.Probe(ctx, addr); len(r.Findings)+len(r.Doubts) != 0 || len(r.Steps) != 5 {
			t.Fatalf("%+v", r)
		}
	}
	var at sglang.RankAddr
	run := &sglangRun{run: run{addr: addr}, cfg: p}
	if err := run.get(ctx, "http://"+addr+"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", &at); err != nil {
		t.Fatal(err)
	}
	push := zmtp.Dial(fmt.Sprintf("%s:%d", at.IP, at.Port), zmtp.PushConfig{})
	if err := push.Send(zmtp.Message{[]byte("GET / HTTP/1.1")}); err != nil {
		t.Fatal(err)
	}
	push.Close(5 * time.Second)
	if r := p.Probe(ctx, addr); !slices.Equal(rules(r), []string{"probe-no-ack"}) {
		t.Errorf("its control thread is dead: %+v", r)
	}
}

// realSGLang finds the driver of the real code and the Python that `make testdeps` has prepared.
func realSGLang(t *testing.T) (python, script string) {
	t.Helper()
	shared := os.Getenv("BATON_SHARED")
	if shared == "" {
		shared = filepath.Join("..", "..", "..", "..", "shared")
	}
	script, err := filepath.Abs(filepath.Join(shared, "peers", "sglang", "sgl_peer.py"))
	if err == nil {
		_, err = os.Stat(script)
	}
	if err != nil {
		t.Skipf("needs the driver of the real SGLang code (set BATON_SHARED): %v", err)
	}
	cache, err := setup.DefaultDir()
	if err == nil {
		python = filepath.Join(cache, "sglang-peer-0.5.23", "bin", "python")
		_, err = os.Stat(python)
	}
	if err != nil {
		t.Skipf("needs the real SGLang code from PyPI (make testdeps): %v", err)
	}
	return python, script
}
