package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/sglang"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// SGLang asks every rank of an SGLang prefill server (NIXL backend) whether its control thread lives and
// acknowledges aborts.
//
// It never registers memory: a registration stays at the rank for good, and one that does not fit its model ends its
// control thread. Its metadata name two destinations of which only one ever comes, so no room of them is
// ever complete; the rank keeps the few bytes of each.
type SGLang struct {
	Release   string // of the server, if known; else it is asked for it
	Listen    string // host:port of the probe's own socket; "": any port of every interface
	Advertise string // IP under which ranks reach it; "": that of the way to the rank
	Patience  time.Duration
	Client    *http.Client // nil: http.DefaultClient
}

// maxRanks bounds what a topology can make the probe ask.
const maxRanks = 256

// Wire implements doctor.Prober.
func (SGLang) Wire() string { return "sglang" }

// Probe implements doctor.Prober.
func (s SGLang) Probe(ctx context.Context, addr string) doctor.ProbeResult {
	r := &sglangRun{run: run{addr: addr, out: doctor.ProbeResult{Addr: addr, Wire: s.Wire(), Steps: []doctor.ProbeStep{}, Findings: []doctor.Finding{}, Doubts: []doctor.Remark{}}}, cfg: s,
		acks: make(chan sglang.AbortAck, 64)}
	began := time.Now()
	top, err := r.topology(ctx)
	if err != nil {
		r.step("topology", false, began, "%v", err)
		r.doubt("what listens there does not answer as an SGLang bootstrap server: %v", err)
		return r.out
	}
	r.step("topology", true, began, "tp %d, pp %d, cp %d, dp %d", top.AttnTPSize, top.PPSize, top.AttnCPSize, top.DPSize)
	if !r.mayAsk(ctx, top) {
		return r.out
	}
	if err := r.ranks(ctx, top); err != nil {
		r.doubt("%v", err)
	}
	return r.out
}

// sglangRun is one probe. It shares the reporting of run, not its session.
type sglangRun struct {
	run
	cfg  SGLang
	keys map[string]json.RawMessage // of the topology
	acks chan sglang.AbortAck
	gen  uint64
}

func (r *sglangRun) get(ctx context.Context, url string, into any) error {
	ctx, stop := context.WithTimeoutCause(ctx, r.cfg.Patience, fmt.Errorf("no answer within %s", r.cfg.Patience))
	defer stop()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	c := r.cfg.Client
	if c == nil {
		c = http.DefaultClient
	}
	res, err := c.Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return cause
		}
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, 8<<20))
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("HTTP %d: %.100s", res.StatusCode, body)
	}
	if err != nil {
		return err
	}
	return json.Unmarshal(body, into)
}

func (r *sglangRun) topology(ctx context.Context) (*sglang.Topology, error) {
	if err := r.get(ctx, "http://"+r.addr+"/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1", &r.keys); err != nil {
		return nil, err
	}
	text, err := json.Marshal(r.keys)
	if err != nil {
		return nil, err
	}
	var t sglang.Topology
	if err := json.Unmarshal(text, &t); err != nil {
		return nil, err
	}
	if n := t.AttnTPSize * t.PPSize * t.AttnCPSize * t.DPSize; t.AttnTPSize < 1 || t.PPSize < 1 || t.AttnCPSize < 1 || t.DPSize < 1 || n > maxRanks {
		return nil, fmt.Errorf("its topology has %d x %d x %d x %d ranks; the probe asks 1 to %d", t.AttnTPSize, t.PPSize, t.AttnCPSize, t.DPSize, maxRanks)
	}
	return &t, nil
}

// mayAsk finds the release out. An abort kills the control thread of releases up to 0.5.15, and is not acknowledged, or not in a
// form that tells one abort from another, before 0.5.22; they are looked up and not asked.
func (r *sglangRun) mayAsk(ctx context.Context, t *sglang.Topology) bool {
	const name = "release"
	began, release := time.Now(), r.cfg.Release
	if release == "" && t.PrefillHTTP != nil {
		var info struct {
			Version string `json:"version"`
		}
		host, _, _ := net.SplitHostPort(r.addr)
		if err := r.get(ctx, "http://"+net.JoinHostPort(host, strconv.Itoa(*t.PrefillHTTP))+"/server_info", &info); err == nil {
			release = info.Version
		}
	}
	if release == "" && r.keys[sglang.Supported.TopologyKey] != nil {
		release = sglang.Supported.Release // or newer: the key is in no earlier one
	}
	if release == "" {
		r.step(name, false, began, "not known")
		r.doubt("its release is not known, and an abort kills the control thread of releases before 0.5.16; give it with --version")
		return false
	}
	asks, finding, err := doctor.MayAskSGLang(release)
	if err != nil {
		r.step(name, false, began, "%v", err)
		r.doubt("%v", err)
		return false
	}
	r.step(name, asks, began, "%s", release)
	if finding != nil {
		r.find(*finding)
	}
	if !asks && finding == nil {
		r.doubt("release %s is not asked", release)
	}
	return asks
}

// ranks asks each rank in turn.
func (r *sglangRun) ranks(ctx context.Context, t *sglang.Topology) error {
	listen := r.cfg.Listen
	if listen == "" {
		listen = "0.0.0.0:0"
	}
	pull, err := zmtp.Listen(listen, zmtp.Limits{}, func(_ net.Addr, m zmtp.Message) {
		if v, err := sglang.DecodeMessage(m); err == nil {
			if ack, ok := v.(*sglang.AbortAck); ok {
				select {
				case r.acks <- *ack:
				default: // more than any rank has a reason to send
				}
			}
		}
	})
	if err != nil {
		return err
	}
	defer pull.Close()
	r.gen = random() >> 2
	for dp := range t.DPSize {
		for cp := range t.AttnCPSize {
			for pp := range t.PPSize {
				for tp := range t.AttnTPSize {
					if err := r.rank(ctx, pull.Addr().Port, dp, cp, tp, pp); err != nil {
						return err
					}
				}
			}
		}
	}
	return nil
}

// rank asks one; only ctx's end is an error.
func (r *sglangRun) rank(ctx context.Context, port, dp, cp, tp, pp int) error {
	began, name := time.Now(), fmt.Sprintf("rank dp%d cp%d tp%d pp%d", dp, cp, tp, pp)
	var at sglang.RankAddr
	if err := r.get(ctx, fmt.Sprintf("http://%s/route?prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d", r.addr, dp, cp, tp, pp), &at); err != nil {
		r.step(name, false, began, "%v", err)
		r.doubt("%s: the bootstrap server does not know its address: %v", name, err)
		return ctx.Err()
	}
	to := net.JoinHostPort(at.IP, strconv.Itoa(at.Port))
	conn, err := (&net.Dialer{Timeout: r.cfg.Patience}).DialContext(ctx, "tcp", to)
	if err != nil {
		r.step(name, false, began, "%v", err)
		r.find(doctor.Finding{Rule: "probe-rank-gone", Severity: doctor.Critical, Title: name + " is registered and its control port does not answer",
			Evidence: []string{fmt.Sprintf("%s: %v", to, err)},
			Cause:    "the rank's process ended and the bootstrap server, which never forgets, still sends decode workers there",
			Action:   "restart the prefill server as a whole; a rank that comes back alone leaves the registered count wrong"})
		return ctx.Err()
	}
	own := r.cfg.Advertise
	if own == "" {
		own, _, _ = net.SplitHostPort(conn.LocalAddr().String())
	}
	_ = conn.Close()
	push := zmtp.Dial(to, zmtp.PushConfig{})
	defer push.Close(time.Second)
	return r.ask(ctx, push, sglang.Endpoint{IP: own, Port: port}, name)
}

// ask goes through the life of two rooms that no request has.
func (r *sglangRun) ask(ctx context.Context, push *zmtp.Push, own sglang.Endpoint, name string) error {
	unborn, granted := doctor.ProbeRoom(random()), doctor.ProbeRoom(random())
	abort := func(id uint64) error {
		r.gen++
		return push.Send((&sglang.Abort{Room: id, Endpoint: own, Gen: r.gen, HasGen: true}).Encode())
	}
	meta := sglang.Metadata{Room: granted, Endpoint: own, Agent: "baton-doctor", Required: 2, Dummy: true}
	for _, st := range []struct {
		name string
		id   uint64
		send func() error
	}{
		{"abort of an unknown room", unborn, func() error { return abort(unborn) }},
		{"metadata, then abort", granted, func() error { return errors.Join(push.Send(meta.Encode()), abort(granted)) }},
		{"the abort again", granted, func() error { return abort(granted) }},
	} {
		began := time.Now()
		err := st.send()
		if err == nil {
			err = r.awaitAck(ctx, st.id)
		}
		if err == nil {
			r.step(name+": "+st.name, true, began, "acked")
			continue
		}
		r.step(name+": "+st.name, false, began, "%v", err)
		if ctx.Err() != nil {
			return fmt.Errorf("the probe was cut short: %w", context.Cause(ctx))
		}
		r.find(doctor.Finding{Rule: "probe-no-ack", Severity: doctor.Critical, Title: name + " does not acknowledge an abort",
			Evidence: []string{fmt.Sprintf("%s (%s): %v", st.name, push.Addr(), err)},
			Cause:    "its control thread is dead (a foreign or malformed frame ends it for good: no request bootstraps there any more), or SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE is off there, or it can not reach the probe at " + own.Addr(),
			Action:   "look for `prefill bootstrap_thread died` in its log and restart the rank; else try again with --probe-advertise"})
		return nil // the next ones would wait as long
	}
	return nil
}

// awaitAck waits for the ack of the latest abort.
func (r *sglangRun) awaitAck(ctx context.Context, id uint64) error {
	timer := time.NewTimer(r.cfg.Patience)
	defer timer.Stop()
	for {
		select {
		case a := <-r.acks:
			if a.Room == id && a.Gen == r.gen {
				return nil
			}
		case <-timer.C:
			return fmt.Errorf("no answer within %s", r.cfg.Patience)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
