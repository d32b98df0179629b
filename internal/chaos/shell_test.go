package chaos

import (
	"context"
	"errors"
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

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/chaos/wire"
	"github.com/baton-pd/baton/internal/engine/sim"
	"github.com/baton-pd/baton/internal/room"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	evText   = `data: {"choices":[{"text":"ab"}]}` + "\n\n"
	evFinish = `data: {"choices":[{"text":"c","finish_reason":"length"}]}` + "\n\n"
	evDone   = "data: [DONE]\n\n"
	evError  = `data: {"error":{"message":"it is gone","cause":"peer_lost","side":"decode","phase":"streaming"}}` + "\n\n"
)

// answering is a server that streams body and then ends properly, or breaks off.
func answering(t *testing.T, status int, body string, breakOff bool) *clients {
	t.Helper()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // so that the client's leaving is noticed
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
		w.(http.Flusher).Flush()
		if breakOff {
			panic(http.ErrAbortHandler)
		}
	}))
	t.Cleanup(srv.Close)
	return newClients(srv.URL, new(net.Dialer).DialContext)
}

func patient(stream bool) *Request {
	return &Request{ID: 1, RID: "r", Ask: Ask{Prompt: "x", Max: 3, Want: "abc"}, Stream: stream, Deadline: 5 * time.Second, Manner: Patient}
}

func TestClientSeesEnds(t *testing.T) {
	for name, c := range map[string]struct {
		status   int
		body     string
		breakOff bool
		whole    bool
		kind     string
		text     string
		// finished, done, failed, trailing
		counts [4]int
	}{
		"answer":              {status: 200, body: evText + evFinish + evDone, kind: "answered", text: "abc", counts: [4]int{1, 1, 0, 0}},
		"whole answer":        {status: 200, body: `{"choices":[{"text":"abc","finish_reason":"length"}]}`, whole: true, kind: "answered", text: "abc", counts: [4]int{1, 0, 0, 0}},
		"no end":              {status: 200, body: evText, kind: "connection broke", text: "ab"},
		"two finishes":        {status: 200, body: evFinish + evFinish + evDone, kind: "connection broke", text: "cc", counts: [4]int{2, 1, 0, 1}},
		"text after the end":  {status: 200, body: evFinish + evDone + evText, kind: "answered", text: "cab", counts: [4]int{1, 1, 0, 2}},
		"error event":         {status: 200, body: evText + evError, breakOff: true, kind: "peer_lost", text: "ab", counts: [4]int{0, 0, 1, 0}},
		"error and then more": {status: 200, body: evError + evText, breakOff: true, kind: "peer_lost", text: "ab", counts: [4]int{0, 0, 1, 1}},
		"broken":              {status: 200, body: evText, breakOff: true, kind: "connection broke", text: "ab"},
		"error status":        {status: 502, body: strings.TrimPrefix(evError, "data: "), kind: "peer_lost", counts: [4]int{0, 0, 1, 0}},
		"error without cause": {status: 500, body: "oops", kind: "connection broke", counts: [4]int{0, 0, 1, 0}},
		"no JSON":             {status: 200, body: "data: {\n\n", kind: "connection broke"},
	} {
		t.Run(name, func(t *testing.T) {
			e := answering(t, c.status, c.body, c.breakOff).ask(t.Context(), patient(!c.whole))
			if got := [4]int{e.Finished, e.Done, e.Failed, e.Trailing}; e.Kind() != c.kind || e.Text != c.text || got != c.counts || e.Status != c.status {
				t.Errorf("%v %v; want %s, text %q, counts %v", e, got, c.kind, c.text, c.counts)
			}
			if c.kind == "peer_lost" && (e.Cause.Side != room.SideReceiver || e.Cause.Phase != "streaming" || e.Cause.Detail == "") {
				t.Errorf("cause %+v", e.Cause)
			}
		})
	}
}

// hanging is a server that begins to answer and then waits for its client to leave, and tells of it and of aborts.
func hanging(t *testing.T) (c *clients, gone chan error, aborts chan string) {
	t.Helper()
	gone, aborts = make(chan error, 1), make(chan string, 1)
	began := make(chan struct{})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if r.URL.Path == "/abort_request" {
			<-began // the two requests race on two connections
			aborts <- string(body)
			return
		}
		close(began)
		_, _ = io.WriteString(w, evText)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		gone <- r.Context().Err()
	}))
	t.Cleanup(srv.Close)
	return newClients(srv.URL, new(net.Dialer).DialContext), gone, aborts
}

func TestClientManners(t *testing.T) {
	for _, m := range []Manner{Leaves, Breaks} {
		t.Run(string(m), func(t *testing.T) {
			c, gone, _ := hanging(t)
			r := patient(true)
			r.Manner, r.After = m, 20*time.Millisecond
			e := c.ask(t.Context(), r)
			if !e.Ended || !e.Left || e.Kind() != "left" || len(c.live) != 0 {
				t.Errorf("%v, %d are on record as live", e, len(c.live))
			}
			<-gone
		})
	}
	t.Run(string(Aborts), func(t *testing.T) {
		c, gone, aborts := hanging(t)
		r := patient(true)
		r.Manner = Aborts
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan *End)
		go func() { ended <- c.ask(ctx, r) }()
		if got := <-aborts; got != `{"rid":"r"}` {
			t.Errorf("abort of %s", got)
		}
		stop()
		if e := <-ended; !e.Aborted {
			t.Errorf("%v is not on record as aborted", e)
		}
		<-gone
	})
	t.Run("never", func(t *testing.T) {
		c, gone, _ := hanging(t)
		r := patient(true)
		r.Deadline = 0
		ctx, stop := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer stop()
		if e := c.ask(ctx, r); e.Ended {
			t.Errorf("%v; it did not end", e)
		}
		<-gone
	})
}

func TestCollector(t *testing.T) {
	c := newCollector()
	c.named("10.0.0.1:80", "prefill-0")
	c.line("router", `{"level":"WARN","msg":"request","outcome":"error","cause":"peer_lost","rid":"a","attempts":2,"prefill":"10.0.0.1:80","decode":"?"}`)
	c.starts("router")
	c.line("router", `{"level":"INFO","msg":"request","outcome":"ok","rid":"b","attempts":1}`)
	c.line("decode-0", `{"level":"INFO","msg":"request","outcome":"ok","rid":"b"}`) // not the router's
	c.line("decode-0", `{"level":"WARN","msg":"room failed","room":9223372036854775807,"generation":3,"cause":"peer_lost"}`)
	c.line("decode-0", `{"level":"WARN","msg":"session refused","room":"text","cause":{"x":1}}`)
	c.line("decode-0", `{"level":"ERROR","msg":"kv: invariant broken"}`)
	c.line("decode-0", "WARNING: DATA RACE")
	c.line("decode-0", "llama.cpp says hello")
	want := []Line{{Life: 1, RID: "a", Outcome: "error", Cause: "peer_lost", Prefill: "prefill-0", Attempts: 2}, {Life: 2, RID: "b", Outcome: "ok", Cause: "none", Attempts: 1}}
	if !slices.Equal(c.lines, want) {
		t.Errorf("lines %+v, want %+v", c.lines, want)
	}
	if f := []Failure{{"decode-0", 1, "9223372036854775807#3"}}; !slices.Equal(c.failures, f) {
		t.Errorf("failures %+v, want %+v", c.failures, f)
	}
	if len(c.odd) != 2 {
		t.Errorf("odd %q, want the error and the race", c.odd)
	}
}

func TestWeatherOfFaults(t *testing.T) {
	ports := map[string][]uint16{"data": {9}, "session": {8}}
	for line, want := range map[string][2]string{
		"0s partition a~b for=1s":                     {fmt.Sprint(wire.Weather{Drop: 1}), fmt.Sprint(wire.Weather{Drop: 1})},
		"0s half-open a~b for=1s":                     {fmt.Sprint(wire.Weather{Drop: 1}), fmt.Sprint(wire.Weather{})},
		"0s drop a~b for=1s p=0.5":                    {fmt.Sprint(wire.Weather{Drop: .5}), fmt.Sprint(wire.Weather{Drop: .5})},
		"0s delay a~b for=1s delay=5ms":               {fmt.Sprint(wire.Weather{Delay: 5e6, Jitter: 5e6}), fmt.Sprint(wire.Weather{Delay: 5e6, Jitter: 5e6})},
		"0s reorder a~b for=1s p=0.5":                 {fmt.Sprint(wire.Weather{Reorder: .5}), fmt.Sprint(wire.Weather{Reorder: .5})},
		"0s duplicate a~b for=1s p=0.5":               {fmt.Sprint(wire.Weather{Duplicate: .5}), fmt.Sprint(wire.Weather{Duplicate: .5})},
		"0s reset a~b for=1s":                         {fmt.Sprint(wire.Weather{Reset: 1}), fmt.Sprint(wire.Weather{Reset: 1})},
		"0s corrupt decode-0~b for=1s p=.5 port=data": {fmt.Sprint(wire.Weather{Corrupt: .5, Ports: []uint16{9}}), fmt.Sprint(wire.Weather{Corrupt: .5, Ports: []uint16{9}})},
	} {
		f, err := ParseFault(line)
		if err != nil {
			t.Fatal(err)
		}
		onward, back := weather(f, ports)
		if got := [2]string{fmt.Sprint(onward), fmt.Sprint(back)}; got != want {
			t.Errorf("%s: %v, want %v", line, got, want)
		}
	}
	for _, k := range Kinds() {
		if w, _ := weather(Fault{Kind: k, P: .5, Delay: 1}, nil); kinds[k].where == onLink && fmt.Sprint(w) == fmt.Sprint(wire.Weather{}) {
			t.Errorf("%s is fair weather", k)
		}
	}
}

func TestDrawRequest(t *testing.T) {
	m := sim.Config{ChunkTokens: 4}.WithDefaults() // small, because each right answer is computed
	work := &SimWork{Model: m, PoolTokens: 64}
	p := Pace{Deadline: 5 * time.Second, Hurry: 600 * time.Millisecond}
	manners, short, past, whole, large := map[Manner]int{}, 0, 0, 0, 0
	for id := range 2000 {
		a, b := DrawRequest(7, id, work, p, false, false), DrawRequest(7, id, work, p, false, false)
		if a.String() != b.String() || a.Ask.Want != b.Ask.Want {
			t.Fatalf("request %d is drawn differently: %v, %v", id, a, b)
		}
		n := map[bool]int{true: 1}
		manners[a.Manner]++
		short, past, whole = short+n[a.Deadline > 0 && a.Deadline < p.Deadline], past+n[a.Deadline <= 0], whole+n[!a.Stream]
		if f := DrawRequest(7, id, work, p, true, true); f.Manner != Patient || f.Deadline != p.Deadline {
			t.Fatalf("a filling request is %v", f)
		} else {
			large += n[f.Ask.TooLarge]
		}
		if s := DrawRequest(7, id, work, p, true, false); s.Deadline > p.Hurry+20*time.Millisecond {
			t.Fatalf("in a hurry: %v", s)
		}
	}
	if len(manners) != 5 || manners[Patient] < 1200 || short < 100 || past < 10 || whole < 300 || large < 200 || large > 600 {
		t.Errorf("manners %v, %d short and %d past deadlines, %d not streamed, %d too large", manners, short, past, whole, large)
	}
}

func TestWaits(t *testing.T) {
	if d, ok := parseWait("12 3456 7\n"); !ok || d != 3456 {
		t.Errorf("3456 ns on a run queue are read as %v, %v", d, ok)
	}
	if _, ok := parseWait("12"); ok {
		t.Error("half a line is read")
	}
	w := waits{}
	if w.step(os.Getpid()) != 0 {
		t.Error("the first look knows what was before it")
	}
	if w.step(-1) != 0 {
		t.Error("a process that is none waited")
	}
}

func TestRebase(t *testing.T) {
	whole := Draw(3, 40, testWorld)
	part, n := Rebase(whole[20:22], whole, 4000)
	if len(part) != 2 || part[0].At != time.Second || part[1].At-part[0].At != whole[21].At-whole[20].At || n < 20 || n > 2000 {
		t.Errorf("%v of %v, %d requests", part, whole[20:22], n)
	}
	if whole[20].At == time.Second {
		t.Error("the whole has moved")
	}
}

func TestTempDirRemovesTheDead(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	cmd := exec.CommandContext(t.Context(), "true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	dead := filepath.Join(os.TempDir(), fmt.Sprintf("chaos-%d-1", cmd.Process.Pid))
	living := filepath.Join(os.TempDir(), fmt.Sprintf("chaos-%d-1", os.Getpid()))
	if err := errors.Join(os.Mkdir(dead, 0o700), os.Mkdir(living, 0o700)); err != nil {
		t.Fatal(err)
	}
	own, err := TempDir()
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{dead: false, living: true, own: true} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s: %v, want it to be there: %v", dir, err, want)
		}
	}
}
