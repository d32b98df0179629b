package probe

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/transfer"
)

// Baton asks a prefill worker in Baton's session protocol.
type Baton struct {
	// Transports make the data plane that the worker dials; each probe opens and closes them.
	Transports []transfer.Transport
	// As is the decode worker to stand for: a worker that refuses its fingerprint is a finding. nil: the
	// probe takes on whatever the worker asks for.
	As *session.Identity
	// Patience is how long each answer may take; > 0.
	Patience time.Duration
	Log      *slog.Logger // of the session; nil: none
	// TLS is how to speak to the worker; nil: plain. See [session.ClientConfig].
	TLS func() *tls.Config
}

// The probe's memory: pages that nobody may write to.
const (
	pageBytes = 4096
	pages     = 8
	canary    = 0xA5
)

// Wire implements doctor.Prober.
func (b Baton) Wire() string { return "baton" }

// Probe implements doctor.Prober.
func (b Baton) Probe(ctx context.Context, addr string) doctor.ProbeResult {
	r := &run{cfg: b, addr: addr, events: make(chan event, 256),
		out: doctor.ProbeResult{Addr: addr, Wire: b.Wire(), Steps: []doctor.ProbeStep{}, Findings: []doctor.Finding{}, Doubts: []doctor.Remark{}}}
	if r.cfg.Log == nil {
		r.cfg.Log = slog.New(slog.DiscardHandler)
	}
	if err := r.open(); err != nil {
		r.doubt("the probe could not open its own memory and transports: %v", err)
	} else if s := r.hello(ctx); s != nil {
		r.ask(ctx, s)
	}
	r.close()
	return r.out
}

// run is one probe.
type run struct {
	cfg    Baton
	addr   string
	out    doctor.ProbeResult
	pool   *kv.Pool
	ends   []transfer.Target
	client *session.Client
	events chan event
}

// event is one call of the session's handler.
type event struct {
	kind  string // "ack", "failed", "down"
	key   room.Key
	grant transfer.GrantID
	cause *room.Cause
}

func (r *run) doubt(format string, args ...any) {
	r.out.Doubts = append(r.out.Doubts, doctor.Remark{Target: r.addr, Text: fmt.Sprintf(format, args...)})
}

func (r *run) step(name string, ok bool, began time.Time, format string, args ...any) {
	r.out.Steps = append(r.out.Steps, doctor.ProbeStep{Name: name, OK: ok, Took: time.Since(began), Detail: fmt.Sprintf(format, args...)})
}

func (r *run) find(f doctor.Finding) {
	f.Target = r.addr
	r.out.Findings = append(r.out.Findings, f)
}

// open makes the memory and lets transports listen for it.
func (r *run) open() error {
	pool, err := kv.Open(kv.Config{Name: "probe", PageBytes: pageBytes, Pages: pages, Log: r.cfg.Log})
	if err != nil {
		return err
	}
	r.pool = pool
	mem, fd := pool.Memory()
	for i := range mem {
		mem[i] = canary
	}
	for _, t := range r.cfg.Transports {
		end, err := t.Listen(transfer.Memory{Bytes: mem, FD: fd}, nobody{})
		if err != nil {
			return fmt.Errorf("transport %s: %w", t.Kind(), err)
		}
		r.ends = append(r.ends, end)
	}
	return nil
}

// nobody is a Sink: no write is ever allowed.
type nobody struct{}

func (nobody) Landed(transfer.GrantID, []byte) {}
func (nobody) Fenced(transfer.SessionID)       {}
func (nobody) Revoked(transfer.GrantID)        {}

// close ends session and transports, and looks at the memory.
func (r *run) close() {
	if r.client != nil {
		_ = r.client.Close() // never fails
	}
	for _, e := range r.ends {
		if err := e.Close(); err != nil {
			r.doubt("the probe's own transport did not close: %v", err)
		}
	}
	if r.pool == nil {
		return
	}
	mem, _ := r.pool.Memory()
	if !clean(mem) {
		r.find(doctor.Finding{Rule: "probe-stray-write", Severity: doctor.Critical, Title: "it wrote into memory that it was never allowed to",
			Evidence: []string{fmt.Sprintf("the probe's %d bytes are not what they were; no write was ever allowed", len(mem))},
			Cause:    "a bug in the worker's transport: the grant is not checked before bytes are stored",
			Action:   "keep its log, stop it, report it"})
	}
	if err := r.pool.Close(); err != nil {
		r.doubt("the probe's own memory did not close: %v", err)
	}
}

// clean reports whether every byte is the canary.
func clean(mem []byte) bool {
	for _, b := range mem {
		if b != canary {
			return false
		}
	}
	return true
}

// Failed, AbortAck and Down implement session.ClientHandler. Events beyond what any
// worker has a reason to send are dropped: the session never waits for the probe.
func (r *run) Failed(_ transfer.SessionID, key room.Key, _ transfer.GrantID, c *room.Cause) {
	r.hear(event{kind: "failed", key: key, cause: c})
}

// AbortAck is an event.
func (r *run) AbortAck(_ transfer.SessionID, key room.Key, g transfer.GrantID) {
	r.hear(event{kind: "ack", key: key, grant: g})
}

// Down closes the data plane of the session.
func (r *run) Down(s transfer.SessionID, _ string, c *room.Cause) {
	for _, e := range r.ends {
		e.CloseSession(s)
	}
	r.hear(event{kind: "down", cause: c})
}

func (r *run) hear(e event) {
	select {
	case r.events <- e:
	default:
	}
}

// offer opens the session at every transport.
func (r *run) offer(s transfer.SessionID) ([]transfer.Descriptor, error) {
	var out []transfer.Descriptor
	for i, e := range r.ends {
		if err := e.OpenSession(s); err != nil {
			for _, open := range r.ends[:i] {
				open.CloseSession(s)
			}
			return nil, err
		}
		out = append(out, e.Descriptor())
	}
	return out, nil
}

// hello opens a session, in as many attempts as the worker's fingerprint has fields if none is given.
func (r *run) hello(ctx context.Context) *session.ClientSession {
	const name = "hello"
	began := time.Now()
	id, given := session.Identity{Fingerprint: session.Fingerprint{Engine: "?", ModelDigest: "?", KVLayout: "?", Attention: "?", ChunkTokens: 1}}, false
	if r.cfg.As != nil {
		id, given = *r.cfg.As, true
	}
	id.WorkerID, id.Epoch = "baton-doctor", session.NewEpoch()
	learned := 0
	for {
		s, err := r.get(ctx, id)
		if err == nil {
			r.out.Worker = s.Peer().WorkerID
			r.step(name, true, began, "worker %s, transport %s, engine %q, %d fields of its fingerprint learned by asking", s.Peer().WorkerID, s.Transport(), s.Peer().Engine, learned)
			return s
		}
		c := room.CauseOf(err)
		if c.Code == room.CodeMismatch && !given && learned < 16 && takeOn(&id, c.Detail) {
			learned++
			continue
		}
		r.refused(name, began, c, given)
		return nil
	}
}

// get makes one attempt with a client of its own, which replaces the last one.
func (r *run) get(ctx context.Context, id session.Identity) (*session.ClientSession, error) {
	if r.client != nil {
		_ = r.client.Close() // never fails
	}
	r.client = session.NewClient(session.ClientConfig{Identity: id, Offer: r.offer, Handler: r, Log: r.cfg.Log, TLS: r.cfg.TLS,
		Tuning: session.Tuning{DialTimeout: r.cfg.Patience, AckTimeout: r.cfg.Patience}})
	ctx, stop := context.WithTimeout(ctx, 2*r.cfg.Patience)
	defer stop()
	s, err := r.client.Get(ctx, r.addr)
	for len(r.events) > 0 { // of attempts before
		<-r.events
	}
	return s, err
}

// refused sorts out why there is no session.
func (r *run) refused(name string, began time.Time, c *room.Cause, given bool) {
	r.step(name, false, began, "%s", c.Detail)
	switch {
	case session.Untrusted(c):
		r.doubt("the probe gets no session (--probe tls://, --tls-ca, --tls-cert): %s", c.Detail)
	case c.Code == room.CodeMismatch && given:
		r.find(doctor.Finding{Rule: "probe-mismatch", Severity: doctor.Critical, Title: "it refuses decode workers with this fingerprint",
			Evidence: []string{c.Detail},
			Cause:    "the two workers run different builds, models or settings, so every request of the pair fails with `mismatch`",
			Action:   "start both with the same build, model, KV layout, attention flags and chunk size; docs/layouts.md says which ranks fit"})
	case c.Code == room.CodeMismatch:
		r.doubt("it refuses the probe, and what it asks for could not be read from its answer: %s", c.Detail)
	case c.Code == room.CodeProtocol:
		r.doubt("what listens there does not speak Baton's session protocol (for SGLang's use --probe-wire sglang): %s", c.Detail)
	default:
		r.doubt("no session: %s", c.Detail)
	}
}

// ask goes through the life of rooms that no request has.
func (r *run) ask(ctx context.Context, s *session.ClientSession) {
	id := randomGrant()
	mine := func() room.Key { return room.Key{Room: doctor.ProbeRoom(random()), Gen: uint32(random())} }
	grant := func(k room.Key, g transfer.GrantID, wait time.Duration) session.Grant {
		return session.Grant{Key: k, ID: g, Pages: []uint32{0}, PageBytes: pageBytes, Chunks: []int{pageBytes}, Digest: random(), Timeout: wait}
	}
	unborn, granted, alone := mine(), mine(), mine()
	acked := func(k room.Key, g transfer.GrantID) func(event) bool {
		return func(e event) bool { return e.kind == "ack" && e.key == k && e.grant == g }
	}
	failed := func(k room.Key) func(event) bool {
		return func(e event) bool { return e.kind == "failed" && e.key == k }
	}
	why := &room.Cause{Code: room.CodeAborted, Side: room.SideReceiver, Detail: "a room of baton doctor's"}
	wait := r.cfg.Patience
	steps := []struct {
		name string
		send func() error
		want func(event) bool
		lost doctor.Finding
	}{
		{"abort of a room never heard of", func() error { return s.SendAbort(unborn, 0, why) }, acked(unborn, 0), noAck},
		{"grant for that room afterwards", func() error { return s.SendGrant(grant(unborn, id, wait/2)) }, failed(unborn), noEnd},
		{"grant without a request, then abort", func() error {
			return errors.Join(s.SendGrant(grant(granted, id+1, wait)), s.SendAbort(granted, id+1, why))
		}, acked(granted, id+1), noAck},
		{"the same abort again", func() error { return s.SendAbort(granted, id+1, why) }, acked(granted, id+1), noAck},
		{"grant without a request, left alone", func() error { return s.SendGrant(grant(alone, id+2, wait/2)) }, failed(alone), noEnd},
	}
	for _, st := range steps {
		began := time.Now()
		err := st.send()
		var e event
		if err == nil {
			e, err = r.await(ctx, st.want)
		}
		if err != nil {
			r.step(st.name, false, began, "%v", err)
			if ctx.Err() != nil {
				r.doubt("the probe was cut short: %v", context.Cause(ctx))
				return
			}
			f := st.lost
			f.Evidence = []string{fmt.Sprintf("%s: %v", st.name, err)}
			if c := s.Cause(); c != nil {
				f = sessionLost
				f.Evidence = []string{fmt.Sprintf("%s: %v", st.name, c)}
				r.find(f)
				return
			}
			r.find(f)
			continue
		}
		detail := "acked"
		if e.cause != nil {
			detail = fmt.Sprintf("ended: %s, %s", e.cause.Code, e.cause.Detail)
		}
		r.step(st.name, true, began, "%s", detail)
	}
	// What was left parked is taken back, whatever came of it.
	_ = s.SendAbort(alone, id+2, why)
}

// await is the next event that is wanted. Others are of rooms that are through.
func (r *run) await(ctx context.Context, want func(event) bool) (event, error) {
	timer := time.NewTimer(r.cfg.Patience)
	defer timer.Stop()
	for {
		select {
		case e := <-r.events:
			if want(e) {
				return e, nil
			}
			if e.kind == "down" {
				return e, fmt.Errorf("the session ended: %v", e.cause)
			}
		case <-timer.C:
			return event{}, fmt.Errorf("no answer within %s", r.cfg.Patience)
		case <-ctx.Done():
			return event{}, context.Cause(ctx)
		}
	}
}

// What a step that gets no answer means.
var (
	noAck = doctor.Finding{Rule: "probe-no-ack", Severity: doctor.Critical, Title: "an abort is not acknowledged",
		Cause:  "the worker's session handler does not run, or it holds the room for undrained: decode workers keep the pages of aborted requests for ever",
		Action: "read its log for the room id; look at baton_rooms_undrained and baton_session_messages_total; restart it"}
	noEnd = doctor.Finding{Rule: "probe-no-end", Severity: doctor.Critical, Title: "a grant whose request never comes does not end",
		Cause:  "grants without a request, or for a room that was aborted before, have no deadline there: such a room waits for ever",
		Action: "look at --park-timeout and baton_room_tombstones; report it; decode workers' own deadlines must end such requests"}
	sessionLost = doctor.Finding{Rule: "probe-session-lost", Severity: doctor.Critical, Title: "the session ended in the middle of the probe",
		Cause:  "the worker ended, was stopped, or does not answer pings and messages any more",
		Action: "look at its process and log; its /health should be 503"}
)

func random() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // does not fail
	return binary.LittleEndian.Uint64(b[:])
}

// randomGrant leaves room to count up from it, and is never 0.
func randomGrant() transfer.GrantID { return transfer.GrantID(random()>>1 | 1) }
