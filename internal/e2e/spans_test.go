package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/otel"
	"github.com/baton-pd/baton/internal/otel/oteltest"
	"github.com/baton-pd/baton/internal/room"
)

// family is the spans of one trace, and how each is found.
type family struct {
	t    *testing.T
	all  []oteltest.Span
	root oteltest.Span
}

// below is the only span of a name from a service below a parent.
func (f *family) below(parent oteltest.Span, service, name string) oteltest.Span {
	f.t.Helper()
	var found []oteltest.Span
	for _, s := range f.all {
		if s.Parent == parent.ID && s.Service == service && s.Name == name {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		f.t.Fatalf("%d spans %q of %s below %q:\n%s", len(found), name, service, parent.Name, oteltest.Tree(f.all))
	}
	return found[0]
}

const completions = "POST /v1/completions"

// legs are the spans of both legs of the only attempt, and of their workers. A worker that has died leaves none.
func (f *family) legs() (attempt, pleg, dleg oteltest.Span) {
	f.t.Helper()
	attempt = f.below(f.root, "baton-router", "attempt")
	return attempt, f.below(attempt, "baton-router", "prefill leg"), f.below(attempt, "baton-router", "decode leg")
}

// request sends one with a trace of its own as the parent and waits for the spans of all that live.
func request(t *testing.T, r *oteltest.Receiver, url string, id, max int, first func(), services ...string) (answer, *family) {
	t.Helper()
	trace := fmt.Sprintf("%032x", 0xabcd00+id)
	ctx, stop := context.WithTimeout(t.Context(), 60*time.Second)
	defer stop()
	header := []string{"Traceparent", "00-" + trace + "-00f067aa0ba902b7-01"}
	a := stream(ctx, url, map[string]any{"prompt": prompt(id, 5*simChunk+1), "max_tokens": max, "temperature": 0, "stream": true, "ignore_eos": true, "rid": fmt.Sprint("spans-", id)}, first, header...)
	f := &family{t: t}
	r.Wait(t, "the spans of every process", func(all []oteltest.Span) bool {
		f.all = nil
		had := map[string]bool{}
		for _, s := range all {
			if s.Trace != trace {
				continue
			}
			f.all = append(f.all, s)
			if s.Name == completions { // each process ends with it
				had[s.Service] = true
			}
			if s.Service == "baton-router" && s.Name == completions {
				f.root = s
			}
			if s.Name == "prefill leg" || s.Name == "decode leg" {
				had[s.Name] = true
			}
		}
		for _, want := range append(services, "baton-router", "prefill leg", "decode leg") {
			if !had[want] {
				return false
			}
		}
		return true
	})
	if f.root.Parent != "00f067aa0ba902b7" {
		t.Errorf("the router's span is not the client's child: %+v", f.root)
	}
	return a, f
}

// failed checks that a span tells of a failure by this cause.
func failed(t *testing.T, f *family, s oteltest.Span, cause room.Code) {
	t.Helper()
	if !s.Failed || s.Text(otel.Cause) != string(cause) || s.Message == "" {
		t.Errorf("%s of %s: failed %v, cause %q, want %s:\n%s", s.Name, s.Service, s.Failed, s.Text(otel.Cause), cause, oteltest.Tree(f.all))
	}
}

// TestTracesOfAStack: one request through real processes is one trace with the work of each, and so are requests that are aborted or
// whose worker is killed.
func TestTracesOfAStack(t *testing.T) {
	r := oteltest.Start(t)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", r.Endpoint) // the processes inherit it
	t.Setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
	s, m := startSim(t, simSetup{transport: "tcp", cost: "prefill-chunk=100ms,step=20ms"})

	t.Run("answered", func(t *testing.T) {
		a, f := request(t, r, s.URL(), 1, 8, nil, "baton-prefill", "baton-decode")
		if !a.ok() || a.Text != m.text(prompt(1, 5*simChunk+1), 8) {
			t.Fatalf("%v", a)
		}
		attempt, pleg, dleg := f.legs()
		p, d := f.below(pleg, "baton-prefill", completions), f.below(dleg, "baton-decode", completions)
		id := attempt.Text(otel.Room)
		tree := oteltest.Tree(f.all)
		t.Logf("\n%s", tree)
		f.below(f.root, "baton-router", "queue")
		for _, name := range []string{"bootstrap", "queue", "transfer"} {
			f.below(p, "baton-prefill", name)
		}
		for _, name := range []string{"queue", "bootstrap", "import", "decode"} {
			f.below(d, "baton-decode", name)
		}
		computed, chunks := f.below(p, "baton-prefill", "prefill"), 0
		for _, c := range f.all {
			if c.Name == "chunk" && c.Parent == computed.ID {
				chunks++
			}
		}
		if landed := f.below(d, "baton-decode", "transfer").Events; chunks != 5 || len(landed) != 5 {
			t.Errorf("%d chunk spans and %d that landed, want 5:\n%s", chunks, len(landed), tree)
		}
		if computed.End.Sub(computed.Start) < 5*100*time.Millisecond {
			t.Errorf("5 chunks of 100 ms took %v", computed.End.Sub(computed.Start))
		}
		for _, sp := range f.all {
			if sp.Failed || id == "" || sp.Name != "queue" && sp.Name != "chunk" && sp.Text(otel.Room) != id || sp.End.Before(sp.Start) {
				t.Errorf("%s of %s: %+v", sp.Name, sp.Service, sp)
			}
		}
		if p.Kind != "server" || p.Attrs[otel.InputTokens] != int64(5*simChunk+1) || d.Attrs[otel.OutputTokens] != int64(8) ||
			p.Text(otel.Worker) == "" || p.Text(otel.Leg) != "prefill" || d.Text(otel.Leg) != "decode" {
			t.Errorf("attributes of the workers:\n%s", tree)
		}
	})
	t.Run("aborted", func(t *testing.T) {
		stop := func() {
			if err := abort(t.Context(), s.URL(), "spans-2"); err != nil {
				t.Error(err)
			}
		}
		a, f := request(t, r, s.URL(), 2, 1000, stop, "baton-prefill", "baton-decode")
		if a.Cause == nil || a.Cause.Code != room.CodeAborted {
			t.Fatalf("%v", a)
		}
		attempt, _, dleg := f.legs()
		d := f.below(dleg, "baton-decode", completions)
		failed(t, f, f.root, room.CodeAborted)
		failed(t, f, attempt, room.CodeAborted)
		failed(t, f, dleg, room.CodeAborted)
		failed(t, f, d, room.Code(d.Text(otel.Cause))) // the closed connection or the abort, whichever came first
		failed(t, f, f.below(d, "baton-decode", "decode"), room.Code(d.Text(otel.Cause)))
	})
	t.Run("decode worker killed", func(t *testing.T) {
		a, f := request(t, r, s.URL(), 3, 1000, s.Decodes[0].Kill, "baton-prefill")
		if a.Cause == nil || a.Cause.Code != room.CodePeerLost {
			t.Fatalf("%v", a)
		}
		attempt, _, dleg := f.legs()
		for _, sp := range []oteltest.Span{f.root, attempt, dleg} {
			failed(t, f, sp, room.CodePeerLost)
		}
		if err := s.Decodes[0].Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		usable(t, s)
	})
	t.Run("prefill worker killed", func(t *testing.T) {
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			if err := poll(t.Context(), settleTime, func(ctx context.Context) error {
				i, err := inspect(ctx, s.Decodes[0])
				if err == nil && i.State.Transfer != 1 {
					err = fmt.Errorf("nothing is on its way: %+v", i.State)
				}
				return err
			}); err != nil {
				t.Error(err)
			}
			s.Prefills[0].Kill()
		}()
		a, f := request(t, r, s.URL(), 4, 8, nil, "baton-decode")
		<-killed
		if a.Cause == nil || a.Cause.Code != room.CodePeerLost || a.Status != 502 {
			t.Fatalf("%v", a)
		}
		attempt, pleg, dleg := f.legs()
		d := f.below(dleg, "baton-decode", completions)
		for _, sp := range []oteltest.Span{f.root, attempt, pleg, dleg, d} {
			if !sp.Failed || sp.Text(otel.Cause) == "" {
				t.Errorf("%s of %s does not tell of the loss:\n%s", sp.Name, sp.Service, oteltest.Tree(f.all))
			}
		}
		failed(t, f, f.root, room.CodePeerLost)
		failed(t, f, pleg, room.CodePeerLost)
	})
}
