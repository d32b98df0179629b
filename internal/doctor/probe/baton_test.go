package probe

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/hub"
	"github.com/baton-pd/baton/internal/transfer/mem"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// shards is a paged worker of 4 heads on 2 ranks.
var shards = kv.Shards{Model: kv.Model{Layers: 2, KVHeads: 4, HeadDim: 8, ElemBytes: 2}, Split: kv.Split{TP: 2, PP: 1, PageTokens: 16, HeadsFirst: true}}

// serve runs a prefill worker's session server for the length of the test.
func serve(t *testing.T, c session.ServerConfig) string {
	t.Helper()
	sessiontest.FillServer(&c)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := session.NewServer(c)
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-done); err != nil {
			t.Errorf("close the server: %v", err)
		}
	})
	return l.Addr().String()
}

// senders is the real shell of a prefill worker.
func senders(t *testing.T) *hub.Senders {
	t.Helper()
	pool, err := kv.Open(kv.Config{Name: "staging", PageBytes: 4096, Pages: 4})
	if err != nil {
		t.Fatal(err)
	}
	h := hub.NewSenders(hub.SendersConfig{Staging: pool, ParkTimeout: time.Minute, TombstoneTTL: time.Minute})
	t.Cleanup(func() {
		h.Close()
		if err := pool.Close(); err != nil {
			t.Error(err)
		}
	})
	return h
}

func prober(patience time.Duration) Baton {
	return Baton{Transports: []transfer.Transport{tcp.New(tcp.Config{Listen: "127.0.0.1:0"})}, Patience: patience}
}

// dial is what a prefill worker does with a tcp offer.
func dial(ctx context.Context, s transfer.SessionID, offers []transfer.Descriptor) (transfer.Peer, error) {
	return tcp.New(tcp.Config{}).Dial(ctx, offers[0], s)
}

func rules(r doctor.ProbeResult) (out []string) {
	for _, f := range r.Findings {
		if f.Title == "" || len(f.Evidence) == 0 || f.Cause == "" || f.Action == "" || f.Target == "" {
			out = append(out, "incomplete "+f.Rule)
		}
		out = append(out, f.Rule)
	}
	return out
}

// TestHealthy: the real shell keeps every promise, with opaque and with paged KV; the probe learns the
// fingerprint by asking, and leaves nothing behind.
func TestHealthy(t *testing.T) {
	for name, sh := range map[string]kv.Shards{"opaque": {}, "paged": shards} {
		t.Run(name, func(t *testing.T) {
			h := senders(t)
			id := sessiontest.Identity("prefill:1")
			if id.Shards = sh; sh != (kv.Shards{}) {
				id.KVLayout = sh.Model.String()
			}
			r := prober(600*time.Millisecond).Probe(t.Context(), serve(t, session.ServerConfig{Identity: id, Handler: h, Connect: dial}))
			if len(r.Findings)+len(r.Doubts) != 0 || len(r.Steps) != 6 || r.Worker != "prefill:1" {
				t.Errorf("%+v", r)
			}
			for _, s := range r.Steps {
				if !s.OK {
					t.Errorf("step %+v", s)
				}
			}
			h.Registry().Range(func(r *room.Room) bool { t.Errorf("room %s is left", r.Key()); return true })
		})
	}
}

// faulty is a prefill worker that breaks one promise.
type faulty struct {
	fault string
	keys  chan room.Key
	n     atomic.Int32
}

func (f *faulty) Grant(s *session.ServerSession, g session.Grant) {
	f.keys <- g.Key
	if f.fault == "no end" {
		return
	}
	_ = s.SendFailed(g.Key, g.ID, &room.Cause{Code: room.CodeDeadline})
}

func (f *faulty) Abort(s *session.ServerSession, key room.Key, g transfer.GrantID, _ *room.Cause) {
	f.keys <- key
	switch {
	case f.fault == "no ack", f.fault == "no second ack" && f.n.Add(1) == 3:
	case f.fault == "ack of another grant":
		_ = s.SendAck(key, g+1)
	case f.fault == "ack of another life":
		_ = s.SendAck(room.Key{Room: key.Room, Gen: key.Gen + 1}, g)
	case f.fault == "panic":
		panic("a bug")
	default:
		_ = s.SendAck(key, g)
	}
}

func (f *faulty) Down(*session.ServerSession, *room.Cause) {}

// TestBrokenPromises: each is found by its name, and every room that the worker heard of is the probe's own.
func TestBrokenPromises(t *testing.T) {
	for fault, want := range map[string][]string{
		"none":                 nil,
		"no ack":               {"probe-no-ack", "probe-no-ack", "probe-no-ack"},
		"no second ack":        {"probe-no-ack"},
		"ack of another grant": {"probe-no-ack", "probe-no-ack", "probe-no-ack"},
		"ack of another life":  {"probe-no-ack", "probe-no-ack", "probe-no-ack"},
		"no end":               {"probe-no-end", "probe-no-end"},
		"panic":                {"probe-session-lost"},
	} {
		t.Run(fault, func(t *testing.T) {
			t.Parallel()
			f := &faulty{fault: fault, keys: make(chan room.Key, 64)}
			r := prober(300*time.Millisecond).Probe(t.Context(), serve(t, session.ServerConfig{Handler: f, Connect: dial}))
			if got := rules(r); !slices.Equal(got, want) || len(r.Doubts) != 0 {
				t.Errorf("found %v, want %v; %+v", got, want, r)
			}
			if len(f.keys) == 0 {
				t.Error("the worker heard nothing")
			}
			for len(f.keys) > 0 {
				if k := <-f.keys; !isProbeRoom(k.Room) {
					t.Errorf("room %s is not the probe's", k)
				}
			}
		})
	}
}

// TestStrayWrite: a worker whose transport stores without a grant.
func TestStrayWrite(t *testing.T) {
	tr := &leaky{Transport: mem.New(mem.NewRegistry())}
	addr := serve(t, session.ServerConfig{Handler: &faulty{keys: make(chan room.Key, 64)}})
	r := Baton{Transports: []transfer.Transport{tr}, Patience: time.Second}.Probe(t.Context(), addr)
	if got := rules(r); !slices.Equal(got, []string{"probe-stray-write"}) {
		t.Errorf("found %v: %+v", got, r)
	}
}

// leaky stores a byte into every memory that it is given.
type leaky struct{ transfer.Transport }

func (l *leaky) Listen(m transfer.Memory, s transfer.Sink) (transfer.Target, error) {
	m.Bytes[len(m.Bytes)-1]++
	return l.Transport.Listen(m, s)
}

// TestNoSession: what keeps the probe from asking is a doubt, but a wrong fingerprint is a finding.
func TestNoSession(t *testing.T) {
	fits := sessiontest.Identity("decode:1")
	other := fits
	other.ModelDigest = "another"
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	gone := closed.Addr().String()
	_ = closed.Close()
	unreachable := func(context.Context, transfer.SessionID, []transfer.Descriptor) (transfer.Peer, error) {
		return nil, errors.New("no way back")
	}
	for _, tc := range []struct {
		name, addr string
		as         *session.Identity
		rules      []string
		doubt      string
	}{
		{name: "nobody there", addr: gone, doubt: "connection refused"},
		{name: "somebody silent", addr: silent.Addr().String(), doubt: "no session"},
		{name: "no address", addr: "x y", doubt: "not the address"},
		{name: "no way back", addr: serve(t, session.ServerConfig{Connect: unreachable}), doubt: "no way back"},
		{name: "fits", addr: serve(t, session.ServerConfig{Handler: &faulty{keys: make(chan room.Key, 64)}, Connect: dial}), as: &fits},
		{name: "does not fit", addr: serve(t, session.ServerConfig{}), as: &other, rules: []string{"probe-mismatch"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := prober(300 * time.Millisecond)
			b.As = tc.as
			r := b.Probe(t.Context(), tc.addr)
			if got := rules(r); !slices.Equal(got, tc.rules) {
				t.Errorf("found %v, want %v: %+v", got, tc.rules, r)
			}
			text := ""
			for _, d := range r.Doubts {
				text += d.Text
			}
			if (tc.doubt == "") != (text == "") || !strings.Contains(text, tc.doubt) {
				t.Errorf("doubts %q, want one with %q", text, tc.doubt)
			}
			if tc.rules != nil && !strings.Contains(r.Findings[0].Evidence[0], "model_digest differs") {
				t.Errorf("the finding does not name the field: %+v", r.Findings)
			}
		})
	}
}

// TestCutShort: an ended context is a doubt and no finding.
func TestCutShort(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	f := &faulty{fault: "no ack", keys: make(chan room.Key, 64)}
	addr := serve(t, session.ServerConfig{Handler: f, Connect: dial})
	go func() { <-f.keys; cancel() }()
	r := prober(30*time.Second).Probe(ctx, addr)
	if len(r.Findings) != 0 || len(r.Doubts) != 1 || !strings.Contains(r.Doubts[0].Text, "cut short") {
		t.Errorf("%+v", r)
	}
}

func TestParseShards(t *testing.T) {
	for _, s := range []kv.Shards{shards, {Model: kv.Model{Layers: 3, KVHeads: 1, HeadDim: 5, ElemBytes: 1, Latent: true}, Split: kv.Split{TP: 4, PP: 3, PageTokens: 7}}} {
		if got, err := parseShards(s.String()); err != nil || got != s {
			t.Errorf("%s is read as %s, %v", s, got, err)
		}
	}
	for _, bad := range []string{"", "none", "paged kv layers=2", strings.Replace(shards.String(), "tp=2", "tp=3", 1)} {
		if _, err := parseShards(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// FuzzTakeOn: whatever a worker refuses with, the probe reads it or gives up.
func FuzzTakeOn(f *testing.F) {
	f.Add(`engine differs: the prefill worker has "a\"b", the decode worker has "?"`)
	f.Add(`kv_layout differs: the prefill worker has "` + shards.String() + `", the decode worker has "none"`)
	f.Add(`chunk_tokens differs: the prefill worker has "x", the decode worker has "1"`)
	f.Fuzz(func(t *testing.T, text string) {
		id := session.Identity{}
		before := id
		if ok := takeOn(&id, text); !ok && id != before {
			t.Errorf("%q changed %+v without success", text, id)
		}
	})
}

func TestParseIdentity(t *testing.T) {
	good := `{"engine":{"engine":"sim 1","model_digest":"d","kv_layout":"l","kv_shards":"` + shards.String() + `","attention":"a","chunk_tokens":16}}`
	id, err := ParseIdentity([]byte(good))
	if err != nil || id.Shards != shards || id.Engine != "sim 1" || id.ChunkTokens != 16 {
		t.Errorf("%+v, %v", id, err)
	}
	for _, bad := range []string{"", "{}", `{"engine":{}}`, `{"engine":"x"}`, strings.Replace(good, "tp=2", "tp=x", 1)} {
		if _, err := ParseIdentity([]byte(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// isProbeRoom: id is in the range of probes, and neither half of it is zero.
func isProbeRoom(id uint64) bool {
	const random = 1<<47 - 1
	return id&^random == doctor.ProbeRooms && id&random != 0
}
