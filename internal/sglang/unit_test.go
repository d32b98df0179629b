package sglang

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// ask speaks plain HTTP to a bootstrap server.
func ask(t *testing.T, method, addr, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+addr+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	http.DefaultClient.CloseIdleConnections()
	return resp.StatusCode, string(b)
}

const fullRoute = `{"attn_tp_size":2,"attn_tp_rank":%d,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,"attn_dp_rank":0,"pp_size":1,"pp_rank":0,
"system_dp_size":2,"system_dp_rank":%d,"rank_ip":"10.0.0.%d","rank_port":7,"page_size":64,"kv_cache_dtype":"auto"}`

// TestBootstrapServer: every route of the protocol, and what must not pass.
func TestBootstrapServer(t *testing.T) {
	b := NewBootstrap()
	port, _ := serveBootstrap(t, b, 0)
	addr := loopback(port)
	expect := func(method, path, body string, status int, part string) {
		t.Helper()
		if got, text := ask(t, method, addr, path, body); got != status || !strings.Contains(text, part) {
			t.Errorf("%s %s %.60s: %d %q, want %d %q", method, path, body, got, text, status, part)
		}
	}
	rank := func(dp, tp int) string {
		return fmt.Sprintf("/route?prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=%d&target_pp_rank=0", dp, tp)
	}
	expect("GET", "/health", "", 200, "OK")
	expect("GET", wholeFleet, "", 503, "not fully registered")
	expect("DELETE", "/route", "", 405, "")
	expect("GET", "/nothing", "", 404, "")
	expect("GET", "/route?prefill_dp_rank=0", "", 400, "prefill_cp_rank")
	for _, bad := range []string{"", "[]", "{}", `{"attn_tp_size":"x"}`, fmt.Sprintf(fullRoute, 2, 0, 1), strings.Replace(fmt.Sprintf(fullRoute, 0, 0, 1), `"rank_port":7`, `"rank_port":0`, 1)} {
		expect("PUT", "/route", bad, 400, "")
	}
	for tp := range 2 {
		expect("PUT", "/route", fmt.Sprintf(fullRoute, tp, 0, tp), 200, "OK")
		expect("PUT", "/route", fmt.Sprintf(fullRoute, tp, 0, 10+tp), 200, "OK") // a restarted rank
	}
	expect("GET", wholeFleet, "", 503, "2 ranks") // four registrations are not four ranks
	for tp := range 2 {
		expect("PUT", "/route", fmt.Sprintf(fullRoute, tp, 1, 20+tp), 200, "OK")
	}
	expect("PUT", "/route", strings.TrimSuffix(fmt.Sprintf(fullRoute, 0, 0, 1), "}")+`,"decode_allocation_policy":"prefill_complete"}`, 400, "decode_allocation_policy")
	expect("GET", rank(0, 1), "", 200, `{"rank_ip":"10.0.0.11","rank_port":7}`)
	expect("GET", rank(1, 0), "", 200, "10.0.0.20")
	expect("GET", rank(3, 0), "", 404, "")
	_, text := ask(t, "GET", addr, wholeFleet, "")
	var keys map[string]any
	if err := json.Unmarshal([]byte(text), &keys); err != nil || len(keys) != 7 || keys["dp_size"] != 2.0 || keys["follow_bootstrap_room"] != true {
		t.Errorf("topology %s: only the mandatory keys, or other releases fail on it (%v)", text, err)
	}
	expect("POST", "/register_dp_rank", `{"bootstrap_room":9223372036854775807,"dp_rank":1}`, 200, "OK")
	expect("POST", "/register_dp_rank", `{"bootstrap_room":5}`, 400, "dp_rank")
	expect("POST", "/query_dp_ranks", `{"bootstrap_rooms":[1,9223372036854775807]}`, 200, `{"9223372036854775807":1}`)
	expect("POST", "/query_dp_ranks", strings.Repeat("x", 2<<20), 400, "")
}

// fakeBootstrap answers the topology as told.
func fakeBootstrap(t *testing.T, topology string, info string) string {
	t.Helper()
	m := http.NewServeMux()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	m.HandleFunc("/route", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, strings.ReplaceAll(topology, "PORT", strconv.Itoa(port)))
	})
	m.HandleFunc("/server_info", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, info) })
	s := &http.Server{Handler: m}
	done := make(chan struct{})
	go func() { defer close(done); _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close(); <-done })
	return loopback(port)
}

// TestUnknownReleases: a prefill fleet of another release, or one that does not fit, is refused before any page is offered, and says why.
func TestUnknownReleases(t *testing.T) {
	needNIXL(t)
	d, m := newDecode(t, peerLayout(), nil)
	const base = `{"attn_tp_size":1,"attn_cp_size":1,"dp_size":1,"pp_size":1,"page_size":1,"kv_cache_dtype":"bfloat16","follow_bootstrap_room":true`
	const of23 = base + `,"enable_kv_cache_sharding":false`
	for name, c := range map[string]struct {
		topology, info, want string
		code                 room.Code
	}{
		"0.5.22":       {base + `}`, "", "0.5.22 or older", room.CodeMismatch},
		"newer":        {of23 + `,"new_thing":1}`, "", "unknown keys (new_thing)", room.CodeMismatch},
		"says 0.5.24":  {of23 + `,"prefill_http_port":PORT}`, `{"version":"0.5.24"}`, "SGLang 0.5.24", room.CodeMismatch},
		"page size":    {strings.Replace(of23, `"page_size":1`, `"page_size":64`, 1) + `}`, "", "64 tokens", room.CodeMismatch},
		"dtype":        {strings.Replace(of23, `bfloat16`, `fp8`, 1) + `}`, "", "fp8", room.CodeMismatch},
		"tensor ranks": {strings.Replace(of23, `"attn_tp_size":1`, `"attn_tp_size":2`, 1) + `}`, "", "sizes are 2, 1, 1", room.CodeMismatch},
		"policy":       {of23 + `,"decode_allocation_policy":"prefill_complete"}`, "", "prefill_complete", room.CodeMismatch},
		"sharded":      {base + `,"enable_kv_cache_sharding":true}`, "", "shards", room.CodeMismatch},
		"no dp_size":   {strings.Replace(of23, `"dp_size":1,`, ``, 1) + `}`, "", "no key dp_size", room.CodeProtocol},
		"not JSON":     {`hello`, "", "can not be read", room.CodeProtocol},
		"wrong JSON":   {strings.Replace(of23, `"dp_size":1`, `"dp_size":"x"`, 1) + `}`, "", "can not be read", room.CodeProtocol},
	} {
		r := open(t, d, OpenReceive{Room: 1 + uint64(len(name)*131) + uint64(name[0]), Addr: fakeBootstrap(t, c.topology, c.info), Pages: 1})
		if err := ended(t, r.Done(), r.Err); causeCode(err) != c.code || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
		r.Release()
	}
	if s := m.SlotStats(); s.Allocs != 0 {
		t.Errorf("pages were taken for peers of other releases: %+v", s)
	}
	for v, ok := range map[string]bool{"": true, "0.5.23": true, "0.5.23.post1": true, "0.5.23+cu12": true, "0.5.230": false, "0.5.22": false, "1.0": false} {
		if c := Supported.checkVersion(v); (c == nil) != ok {
			t.Errorf("version %q: %v", v, c)
		}
	}
	// Baton's own bootstrap server names itself, with the mandatory keys alone.
	b := NewBootstrap()
	route, _ := parseRoute([]byte(strings.NewReplacer(`"attn_tp_size":2`, `"attn_tp_size":1`, `"system_dp_size":2`, `"system_dp_size":1`).Replace(fmt.Sprintf(fullRoute, 0, 0, 1))))
	if err := b.Register(route); err != nil {
		t.Fatal(err)
	}
	port, _ := serveBootstrap(t, b, 0)
	c := newBootClient()
	defer c.close()
	if tp, err := c.topology(context.Background(), loopback(port)); err != nil || *tp.PageSize != 64 {
		t.Error(tp, err)
	}
}

// TestOtherReleasesRegister: a decode manager whose registration has another form, does not fit or can not be read is told so when it
// offers pages, and its room's request ends with the same cause.
func TestOtherReleasesRegister(t *testing.T) {
	needNIXL(t)
	p, _, _ := newPrefill(t, peerLayout(), nil)
	at, ch := capture(t)
	push := zmtp.Dial(loopback(p.pull.Addr().Port), zmtp.PushConfig{})
	defer push.Close(0)
	good := golden(t)["registration"]
	change := func(agent string, f func(zmtp.Message) zmtp.Message) zmtp.Message {
		m := append(zmtp.Message{}, good...)
		m[2], m[3], m[4] = []byte(at.IP), []byte(strconv.Itoa(at.Port)), []byte(agent)
		return f(m)
	}
	for i, c := range []struct {
		name, want string
		reg        func(zmtp.Message) zmtp.Message
	}{
		{"0.5.22", "24 frames, as SGLang 0.5.19 to 0.5.22", func(m zmtp.Message) zmtp.Message { return m[:24] }},
		{"0.5.14", "19 frames, as SGLang 0.5.15 or older", func(m zmtp.Message) zmtp.Message { return m[:19] }},
		{"newer", "26 frames, as SGLang newer", func(m zmtp.Message) zmtp.Message { return append(m, []byte("x")) }},
		{"unreadable", "has not registered", func(m zmtp.Message) zmtp.Message { m[10] = []byte("x"); return m }},
		{"tensor ranks", "tensor size 2", func(m zmtp.Message) zmtp.Message { m[10] = []byte("2"); return m }},
		{"fewer buffers", "2 KV buffers, here 4", func(m zmtp.Message) zmtp.Message {
			m[6], m[18], m[19] = m[6][:16], []byte("DRAM,DRAM"), m[19][:16]
			return m
		}},
		{"VRAM", "is VRAM", func(m zmtp.Message) zmtp.Message { m[18] = nil; return m }},
		{"no address", "address 0x0", func(m zmtp.Message) zmtp.Message { m[6] = make([]byte, 32); return m }},
		{"past the end", "is at address", func(m zmtp.Message) zmtp.Message { m[6] = []byte(strings.Repeat("\xff", 32)); return m }},
	} {
		id := uint64(10 + i)
		s := openSend(t, p, OpenSend{Room: id, Chunks: []int{1}})
		_ = push.Send(change(c.name, c.reg))
		_ = push.Send((&Metadata{Room: id, Endpoint: at, Agent: c.name, Pages: []int32{1}, Required: 1}).Encode())
		v, err := DecodeMessage(receive(t, ch))
		if err != nil {
			t.Fatal(err)
		}
		if st := v.(*Status); st.Room != id || st.Status != 0 || !strings.Contains(st.Reason, c.want) {
			t.Errorf("%s: told %+v, want %q", c.name, st, c.want)
		}
		if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeMismatch {
			t.Errorf("%s: %v", c.name, err)
		}
		s.Release()
	}
}

// TestOffersThatDoNotFit: pages that do not exist, or of another number, end the room with a cause on both sides.
func TestOffersThatDoNotFit(t *testing.T) {
	needNIXL(t)
	p, _, _ := newPrefill(t, peerLayout(), func(c *PrefillConfig) { c.BootstrapTimeout = patience })
	at, ch := capture(t)
	push := zmtp.Dial(loopback(p.pull.Addr().Port), zmtp.PushConfig{})
	defer push.Close(0)
	reg := append(zmtp.Message{}, golden(t)["registration"]...)
	reg[2], reg[3], reg[4] = []byte(at.IP), []byte(strconv.Itoa(at.Port)), []byte("d")
	p.mu.Lock() // known, but without a life: no library is needed to refuse
	v, _ := DecodeMessage(reg)
	p.take(v.(*Registration), nil)
	p.mu.Unlock()
	for i, m := range []Metadata{
		{Pages: []int32{1}}, {Pages: []int32{1, 2, 3}}, {Pages: []int32{1, 64}}, {Pages: []int32{1, 2}, Required: 2}, {Pages: []int32{1, 2}, Dummy: true},
		{Pages: []int32{1}, Prefix: 3}, {Pages: []int32{1, 2}, Aux: 1 << 30},
	} {
		m.Room, m.Endpoint, m.Agent = uint64(10+i), at, "d"
		if m.Required == 0 {
			m.Required = 1
		}
		s := openSend(t, p, OpenSend{Room: m.Room, Chunks: []int{2}})
		_ = push.Send(m.Encode())
		if err := ended(t, s.Done(), s.Err); err == nil {
			t.Errorf("%+v was taken", m)
		}
		v, _ := DecodeMessage(receive(t, ch))
		if st := v.(*Status); st.Room != m.Room || st.Status != 0 || st.Reason == "" {
			t.Errorf("%+v", st)
		}
		s.Release()
	}
}

// TestEveryWaitIsBounded: with nobody on the other side, each state of each side ends by itself and says what it waited for.
func TestEveryWaitIsBounded(t *testing.T) {
	needNIXL(t)
	p, _, port := newPrefill(t, peerLayout(), nil)
	d, m := newDecode(t, peerLayout(), nil)
	soon := func() time.Time { return time.Now().Add(300 * time.Millisecond) }
	s := openSend(t, p, OpenSend{Room: 1, Chunks: []int{1}, Deadline: soon()})
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeDeadline || !strings.Contains(err.Error(), "the decode worker's grant") {
		t.Error(err)
	}
	s.Release()
	r := open(t, d, OpenReceive{Room: 2, Addr: loopback(freePort(t)), Pages: 1, Deadline: soon()})
	if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeUnavailable && causeCode(err) != room.CodeDeadline {
		t.Error(err)
	}
	r.Release()
	// Both sides of Baton's own over this wire: the prefill's request comes, its chunks do not.
	first := open(t, d, OpenReceive{Room: 9, Addr: loopback(port), Pages: 1}) // makes the link, which takes its time
	<-first.Granted()
	first.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
	back(t, d, m, first)
	s = openSend(t, p, OpenSend{Room: 3, Chunks: []int{1}})
	r = open(t, d, OpenReceive{Room: 3, Addr: loopback(port), Pages: 1, Deadline: time.Now().Add(time.Second)})
	if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
		t.Error(err)
	}
	if err := ended(t, s.Done(), s.Err); causeCode(err) != room.CodeAborted {
		t.Error(err)
	}
	s.Release()
	back(t, d, m, r)
	if st := m.SlotStats(); st.FreedDrained != 2 {
		t.Errorf("%+v", st)
	}
}
