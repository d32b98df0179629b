package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/edge"
	"github.com/baton-pd/baton/internal/edge/edgetest"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/stack"
)

// closedFleet is a stack whose workers speak TLS only, to those with a certificate, and want a key.
type closedFleet struct {
	*stack.Stack
	m      simModel
	ca     *edgetest.Authority // of all its certificates
	client *tls.Config         // of somebody who gets in
	key    string

	mu    sync.Mutex
	extra map[string][]string // flags of a process at its next start
}

func startClosed(t *testing.T, decodes int, more ...string) *closedFleet {
	t.Helper()
	f := &closedFleet{ca: edgetest.NewAuthority(t), extra: map[string][]string{}}
	f.ca.Leaf("worker", "", time.Hour)
	f.ca.Leaf("router", "router.example", time.Hour)
	key, hash := edge.NewKey()
	f.key = key
	f.ca.Write("keys", []byte("router "+hash+"\n"))
	f.ca.Write("key", []byte(key+"\n"))
	own := edge.ClientTLS{CA: f.ca.Trust(), Own: f.ca.Own("router")}
	f.client = own.Config()
	worker := []string{"--tls-cert", f.ca.File("worker.pem"), "--tls-key", f.ca.File("worker.key"), "--tls-client-ca", f.ca.File("ca.pem"), "--api-key-file", f.ca.File("keys")}
	f.Stack, f.m = startSim(t, simSetup{
		transport: "tcp", decodes: decodes, model: "seed=8", cost: "step=5ms", args: worker, decode: []string{"--peer-ca", f.ca.File("ca.pem")}, tls: f.client, key: key,
		router: append([]string{"--worker-ca", f.ca.File("ca.pem"), "--worker-cert", f.ca.File("router.pem"), "--worker-cert-key", f.ca.File("router.key"), "--worker-api-key-file", f.ca.File("key")}, more...),
		extra: func(process string) []string {
			f.mu.Lock()
			defer f.mu.Unlock()
			return f.extra[process]
		},
	})
	usable(t, f.Stack)
	return f
}

// restart starts a process anew with more flags.
func (f *closedFleet) restart(t *testing.T, p *stack.Process, flags ...string) {
	t.Helper()
	f.mu.Lock()
	f.extra[p.Name] = flags
	f.mu.Unlock()
	p.Kill()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	if err := p.Start(ctx); err != nil {
		t.Fatal(err)
	}
}

// says waits until p has logged want: its log may arrive after its answer.
func says(t *testing.T, p *stack.Process, want string) {
	t.Helper()
	err := poll(t.Context(), settleTime, func(context.Context) error {
		if !strings.Contains(p.Output(), want) {
			return fmt.Errorf("%s does not say %q", p.Name, want)
		}
		return nil
	})
	if err != nil {
		t.Errorf("%v:\n%s", err, p.Output())
	}
}

// TestWorkersOverTLS: router, workers and their sessions over TLS, both ends with certificates; who has none, or no key, is refused by each port.
func TestWorkersOverTLS(t *testing.T) {
	f := startClosed(t, 1)
	serves(t, f.Stack, f.m, 1, 3, 40, 12)
	own := edge.ClientTLS{CA: f.ca.Trust()}
	for name, c := range map[string]struct {
		scheme, path, key string
		tls               *tls.Config
		status            int    // 0: no answer
		want              string // in the error or the body
	}{
		"no certificate":             {"https", "/health", "", own.Config(), 0, "certificate required"},
		"no TLS":                     {"http", "/health", "", nil, 400, "HTTP request to an HTTPS server"},
		"no key":                     {"https", "/metrics", "", f.client, 401, "an API key is needed"},
		"another key":                {"https", "/v1/models", "baton-no", f.client, 401, "not known here"},
		"certificate and key":        {"https", "/metrics", f.key, f.client, 200, "baton_"},
		"health wants no key":        {"https", "/health", "", f.client, 200, ""},
		"certificate, generate":      {"https", "/generate", "", f.client, 401, "an API key is needed"},
		"certificate, abort_request": {"https", "/abort_request", "", f.client, 401, "an API key is needed"},
	} {
		for _, p := range []*stack.Process{f.Prefills[0], f.Decodes[0]} {
			client := &http.Client{Transport: &http.Transport{TLSClientConfig: c.tls, DisableKeepAlives: true}, Timeout: 30 * time.Second}
			method := http.MethodGet
			if c.path == "/generate" || c.path == "/abort_request" {
				method = http.MethodPost
			}
			req, err := http.NewRequestWithContext(t.Context(), method, c.scheme+"://"+p.HTTP+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			if c.key != "" {
				req.Header.Set("Authorization", "Bearer "+c.key)
			}
			res, err := client.Do(req)
			for i := 0; i < 20 && edgetest.Unheard(err); i++ {
				res, err = client.Do(req)
			}
			if err != nil {
				if c.status != 0 || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%s, %s: %v", p.Name, name, err)
				}
				continue
			}
			body, err := io.ReadAll(res.Body)
			_ = res.Body.Close()
			if err != nil || res.StatusCode != c.status || !strings.Contains(string(body), c.want) {
				t.Errorf("%s, %s: %s %s %v; want %d %q", p.Name, name, res.Status, body, err, c.status, c.want)
			}
		}
	}
	waitIdle(t, f.Stack, settleTime)
}

// TestWorkerCertificatesChange: a new certificate is shown to who comes then, and a stream of before goes on to its end.
func TestWorkerCertificatesChange(t *testing.T) {
	f := startClosed(t, 1)
	shown := func(p *stack.Process, addr string) string {
		t.Helper()
		conf := f.client.Clone()
		if addr == p.Bootstrap {
			conf.NextProtos = []string{"h2"}
		}
		d := tls.Dialer{Config: conf}
		ctx, stop := context.WithTimeout(t.Context(), 30*time.Second)
		defer stop()
		conn, err := d.DialContext(ctx, "tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		return conn.(*tls.Conn).ConnectionState().PeerCertificates[0].SerialNumber.String()
	}
	ports := map[string]*stack.Process{f.Prefills[0].HTTP: f.Prefills[0], f.Prefills[0].Bootstrap: f.Prefills[0], f.Decodes[0].HTTP: f.Decodes[0]}
	before := map[string]string{}
	for addr, p := range ports {
		before[addr] = shown(p, addr)
	}
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var events atomic.Int64
	ended := make(chan error, 1)
	go func() {
		long := streamed{"/v1/completions", map[string]any{"stream": true, "prompt": prompt(1, 60), "max_tokens": 3000, "temperature": 0, "ignore_eos": true}}
		_, err := followStream(ctx, f.URL(), long, func(n int) { events.Store(int64(n)) })
		ended <- err
	}()
	goesOn := func() {
		t.Helper()
		from := events.Load()
		eventually(t, settleTime, func(context.Context) error {
			select {
			case err := <-ended:
				t.Fatalf("the stream has ended: %v", err)
			default:
			}
			if now := events.Load(); now < from+20 {
				return fmt.Errorf("%d events, %d before", now, from)
			}
			return nil
		})
	}
	goesOn()
	f.ca.Leaf("worker", "", time.Hour)
	for addr, p := range ports {
		eventually(t, settleTime, func(context.Context) error {
			if shown(p, addr) == before[addr] {
				return fmt.Errorf("%s still shows the old certificate", p.Name)
			}
			return nil
		})
	}
	goesOn()
	serves(t, f.Stack, f.m, 2, 3, 40, 12)
	goesOn()
	leave()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the stream's end: %v", err)
	}
	waitIdle(t, f.Stack, settleTime)
}

// TestDoctorOverTLS: the doctor sees workers that want certificates and keys, by their metrics and by asking; without, it says what is missing.
func TestDoctorOverTLS(t *testing.T) {
	f := startClosed(t, 1)
	p, d := f.Prefills[0], f.Decodes[0]
	trust := []string{"--tls-ca", f.ca.File("ca.pem")}
	own := append([]string{"--tls-cert", f.ca.File("router.pem"), "--tls-key", f.ca.File("router.key")}, trust...)
	look := func(more []string, args ...string) examined {
		t.Helper()
		return examine(t, slices.Concat(args, more)...)
	}
	metrics := []string{"--metrics", "prefill-0=" + p.URL(), "--metrics", "decode-0=" + d.URL(), "--window", "4s", "--interval", "250ms", "--stuck-after", "3s"}
	probe := []string{"--probe", "tls://" + p.Bootstrap, "--probe-as", d.URL()}
	if e := look(own, probe...); e.status != 2 || !strings.Contains(e.errs, "401") {
		t.Errorf("asked without a key: %+v", e)
	}
	t.Setenv("BATON_API_KEY", f.key)
	if e := look(own, slices.Concat(metrics, probe)...); e.status != 0 || len(e.report.Probes) != 1 {
		t.Errorf("with certificate and key: %+v", e)
	}
	e := look(trust, "--probe", "tls://"+p.Bootstrap)
	if e.status != 2 || len(e.report.Findings) != 0 || !strings.Contains(fmt.Sprint(e.report), "certificate required") {
		t.Errorf("asked without a certificate: %+v", e)
	}
	if e := look(nil, "--probe", p.Bootstrap); e.status != 2 || !strings.Contains(fmt.Sprint(e.report), "does not speak TLS") {
		t.Errorf("asked without TLS: %+v", e)
	}
	if e := look(trust, metrics...); e.status != 2 {
		t.Errorf("scraped without a certificate: %+v", e)
	}
}

// TestWrongAuthorities: a router, and a decode worker, that trust another CA: the error names whose trust is missing, and why.
func TestWrongAuthorities(t *testing.T) {
	f, other := startClosed(t, 1), edgetest.NewAuthority(t)
	other.Leaf("worker", "", time.Hour)
	fails := func(code room.Code, want ...string) {
		t.Helper()
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		a := complete(ctx, f.URL(), prompt(1, 5), 4, nil, timeoutHeader(20*time.Second)...)
		if a.Status/100 != 5 || a.Cause == nil || a.Cause.Code != code {
			t.Errorf("%v; want %s", a, code)
		}
		for _, w := range want {
			if !strings.Contains(a.Raw, w) {
				t.Errorf("%s; want %q", a.Raw, w)
			}
		}
	}
	const unknown = "certificate signed by unknown authority"
	f.restart(t, f.Router, "--worker-ca", other.File("ca.pem"))
	fails(room.CodeUnavailable, unknown, "127.0.0.1:") // of the attempt, or of a probe that was first
	f.restart(t, f.Router)
	usable(t, f.Stack)
	d := f.Decodes[0]
	for want, flags := range map[string][]string{
		unknown:        {"--peer-ca", other.File("ca.pem")},
		"remote error": {"--peer-cert", other.File("worker.pem"), "--peer-cert-key", other.File("worker.key")},
	} {
		f.restart(t, d, flags...)
		usable(t, f.Stack)
		fails(room.CodeMismatch, want, `"side":"decode"`, "no session to the prefill worker at "+f.Prefills[0].Bootstrap, "one of the two does not trust the other")
		says(t, d, want)
	}
	says(t, f.Prefills[0], "TLS handshake failed")
	f.restart(t, d)
	usable(t, f.Stack)
	serves(t, f.Stack, f.m, 2, 2, 20, 4)
	waitIdle(t, f.Stack, settleTime)
}

// TestResumeOverTLS: a decode worker that speaks TLS is killed in the middle of streams, which go on with the other.
func TestResumeOverTLS(t *testing.T) {
	f := startClosed(t, 2, "--resume", "--max-resumes", "20")
	var requests []streamed
	for i := range 4 {
		requests = append(requests, streamed{"/v1/completions", map[string]any{"stream": true, "prompt": prompt(i, 60), "max_tokens": 200, "temperature": i % 2, "seed": 7, "ignore_eos": true}})
	}
	want := undisturbed(t, f.Stack, requests)
	if n := interrupt(t, f.Stack, requests, want, 20, f.Decodes[0].Kill); n < 1 {
		t.Error("no stream went on elsewhere; the test shows nothing")
	}
	revive(t, f.Stack, f.Decodes[0])
	waitIdle(t, f.Stack, settleTime)
}
