package doctor

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// defaults are what operators get.
var defaults = Config{StuckAfter: DefaultStuckAfter, MaxRoomAge: DefaultMaxRoomAge}

// world is one case: targets by name, their rows, and what is to be found.
type world struct {
	name    string
	every   time.Duration // default 10 s
	scrapes int           // default 10
	about   map[string]About
	targets map[string]string
	want    []string // rule@target
	doubts  string   // part of a doubt
	notes   string   // part of a note
}

func (w world) report(t *testing.T, c Config) *Report {
	t.Helper()
	if w.every == 0 {
		w.every = 10 * time.Second
	}
	if w.scrapes == 0 {
		w.scrapes = 10
	}
	var scrapes []Scrape
	for name, rows := range w.targets {
		scrapes = append(scrapes, synth(t, name, w.every, w.scrapes, rows)...)
	}
	return Diagnose(build(t, scrapes, w.about), nil, c)
}

func (w world) check(t *testing.T) {
	t.Helper()
	r := w.report(t, defaults)
	complete(t, r)
	want := slices.Clone(w.want)
	slices.Sort(want)
	if got := found(r); !slices.Equal(got, want) {
		var b strings.Builder
		r.WriteText(&b)
		t.Errorf("found %v, want %v\n%s", got, want, b.String())
	}
	for text, remarks := range map[string][]Remark{w.doubts: r.Doubts, w.notes: r.Notes} {
		if text != "" && !strings.Contains(fmt.Sprint(remarks), text) {
			t.Errorf("%v has nothing with %q", remarks, text)
		}
	}
	verdict := Healthy
	switch {
	case len(w.want) > 0:
		verdict = Findings
	case w.doubts != "":
		verdict = Unknown
	}
	if r.Verdict != verdict {
		t.Errorf("verdict %s, want %s; doubts %v", r.Verdict, verdict, r.Doubts)
	}
}

func run(t *testing.T, worlds []world) {
	t.Helper()
	for _, w := range worlds {
		t.Run(w.name, w.check)
	}
}

const (
	inflight   = "sglang:num_prefill_inflight_queue_reqs{P}"
	sent       = `sglang:per_stage_req_latency_seconds_count{P,stage="prefill_transfer_kv_cache"}`
	sentSum    = `sglang:per_stage_req_latency_seconds_sum{P,stage="prefill_transfer_kv_cache"}`
	transferQ  = "sglang:num_decode_transfer_queue_reqs{D}"
	landed     = `sglang:per_stage_req_latency_seconds_count{D,stage="decode_transferred"}`
	decodeIdle = "sglang:num_running_reqs{D} 0\nsglang:num_queue_reqs{D} 0\n" + transferQ + " 0\n"
)

func TestStuckQueue(t *testing.T) {
	one := func(rows string) map[string]string { return map[string]string{"p": rows} }
	run(t, []world{
		{name: "a pin", targets: one(inflight + " 1\n" + sent + " 7"), want: []string{"stuck-queue@p"}},
		{name: "a pin without any counter yet", targets: one(inflight + " 1"), want: []string{"stuck-queue@p"}},
		{name: "others pile up behind it", targets: one(inflight + " 1 1 2 2 3 3 3 4 4 4\n" + sent + " 7"), want: []string{"stuck-queue@p"}},
		{name: "two scrapes far apart", every: 10 * time.Minute, scrapes: 2, targets: one(inflight + " 1\n" + sent + " 7"), want: []string{"stuck-queue@p"}},
		{name: "empty", targets: one(inflight + " 0\n" + sent + " 7")},
		{name: "something leaves", targets: one(inflight + " 1\n" + sent + " 7 8 8 8 9 9 9 10 10 11")},
		{name: "failures leave too", targets: one(inflight + " 1\nsglang:num_transfer_failed_reqs_total{P} 0 0 0 1 1 1 2 2 2 3")},
		{name: "low traffic: seen by chance, but it was empty between", targets: one(inflight + " 1 1 0 1 1 1 0 1 1 1\n" + sent + " 7")},
		{name: "low traffic: always one, always another", targets: one(inflight + " 1\n" + sent + " 1 2 3 4 5 6 7 8 9 10")},
		{name: "one long request, shorter than the limit", targets: one(inflight + " 0 0 0 1 1 1 1 1 1 0\n" + sent + " 7 7 7 7 7 7 7 7 7 8")},
		{name: "one long request, just begun", targets: one(inflight + " 0 0 0 0 1 1 1 1 1 1\n" + sent + " 7")},
		{name: "exactly at the limit", targets: one(inflight + " 0 0 0 1 1 1 1 1 1 1\n" + sent + " 7"), want: []string{"stuck-queue@p"}},
		{name: "stuck, then ended", targets: one(inflight + " 1 1 1 1 1 1 1 1 0 0\n" + sent + " 7"), want: []string{"~stuck-queue@p"}},
		{name: "the scheduler was idle meanwhile: an old gauge", targets: one(inflight + " 1\n" + sent + " 7\nsglang:scheduler_idle_seconds_total{P} 1 1 5 9 9 9 20 30 40 50")},
		{name: "shares of priorities are no requests of their own", targets: one(inflight + " 0\nsglang:num_prefill_inflight_queue_reqs{P,priority=\"3\"} 1")},
		{name: "window too short to tell", scrapes: 4, targets: one(inflight + " 1\n" + sent + " 7"), doubts: "take a longer window"},
		{name: "one scrape", scrapes: 1, targets: one(inflight + " 1"), doubts: "one scrape only"},
		{name: "decode transfer", targets: map[string]string{"d": transferQ + " 2\n" + landed + " 5\nsglang:realtime_tokens_total{D} 1 2 3 4 5 6 7 8 9 10"}, want: []string{"stuck-queue@d"}},
		{name: "bootstrap waits for memory, within SGLang's own limit", targets: one("sglang:num_prefill_bootstrap_queue_reqs{P} 3")},
		{name: "bootstrap past SGLang's own limit", every: time.Minute, targets: one("sglang:num_prefill_bootstrap_queue_reqs{P} 3"), want: []string{"stuck-queue@p"}},
		{name: "prealloc waits behind long answers", every: time.Minute,
			targets: map[string]string{"d": "sglang:num_decode_prealloc_queue_reqs{D} 3\nsglang:realtime_tokens_total{D} 1 2 3 4 5 6 7 8 9 10"}},
		{name: "vllm", targets: one(`vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 1` + "\n" +
			`vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 0`), want: []string{"stuck-queue@p"}},
		{name: "vllm waits for capacity only", targets: one(`vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="deferred"} 0` + "\n" +
			`vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 4`)},
		{name: "baton's undrained rooms", targets: one(`baton_rooms_undrained{side="prefill"} 1` + "\n" + `baton_rooms{side="prefill",state="failed"} 1`), want: []string{"stuck-queue@p"}},
		{name: "baton's undrained rooms, others drain", targets: one(`baton_rooms_undrained{side="prefill"} 1` + "\n" + `baton_kv_pages_freed_total{pool="staging",proof="drained"} 1 2 3 4 5 6 7 8 9 9`)},
	})
}

func TestPinnedUnderTraffic(t *testing.T) {
	busy := func(sum string) string {
		return sent + " 0 10 20 30 40 50 60 70 80 90 100 110\n" + sentSum + sum + "\nsglang:scheduler_idle_seconds_total{P} 3"
	}
	const quick, slow = " 0 .4 .8 1.2 1.6 2 2.4 2.8 3.2 3.6 4 4.4", " 0 9 18 27 36 45 54 63 72 81 90 99"
	p := func(gauge, rest string) map[string]string {
		return map[string]string{"p": "sglang:num_prefill_inflight_queue_reqs{P}" + gauge + "\n" + rest}
	}
	run(t, []world{
		{name: "quick ones pass, one stays", scrapes: 12, targets: p(" 1 2 1 1 3 1 1 1 1 2 1 1", busy(quick)), want: []string{"pinned-under-traffic@p"}},
		{name: "the queue is used that much", scrapes: 12, targets: p(" 1 2 1 1 3 1 1 1 1 2 1 1", busy(slow))},
		{name: "empty once", scrapes: 12, targets: p(" 1 2 1 0 3 1 1 1 1 2 1 1", busy(quick))},
		{name: "too few scrapes", scrapes: 9, targets: p(" 1 2 1 1 3 1 1 1 1", busy(quick))},
		{name: "gauges may be old: idle between", scrapes: 12, targets: p(" 1", strings.Replace(busy(quick), "} 3", "} 3 3 3 4", 1))},
		{name: "gauges may be old: no idle counter", scrapes: 12, targets: p(" 1", strings.Replace(busy(quick), "sglang:scheduler_idle_seconds_total{P} 3", "", 1))},
		{name: "the process began anew", scrapes: 12, targets: p(" 1", busy(quick)+"\nsglang:num_requests_total{P} 5 5 5 5 5 1\nsglang:kv_transfer_latency_ms_count{P} 900 900 900 900 900 1"), want: []string{"~restart@p"}},
		{name: "baton", scrapes: 12, targets: p(" 0", "baton_num_prefill_inflight_queue_reqs 1\nbaton_kv_transfer_writes_total{kind=\"tcp\"} 1 2 3 4 5 6 7 8 9 10 11 12\n"+
			"baton_kv_transfer_chunk_seconds_count{side=\"prefill\"} 1 2 3 4 5 6 7 8 9 10 11 12\nbaton_kv_transfer_chunk_seconds_sum{side=\"prefill\"} .1 .2 .3\nbaton_rooms{side=\"prefill\",state=\"transferring\"} 1"),
			want: []string{"pinned-under-traffic@p"}},
	})
}

func TestHiddenPin(t *testing.T) {
	base := inflight + " 0\nsglang:scheduler_process_cpu_seconds_total{P} 1 2 3 4 5 6 7 8 9 10\n"
	run(t, []world{
		{name: "never idle, nothing computed, gauges frozen at 0", targets: map[string]string{"p": base + "sglang:scheduler_idle_seconds_total{P} 44"}, want: []string{"busy-without-work@p"}},
		{name: "idle", targets: map[string]string{"p": base + "sglang:scheduler_idle_seconds_total{P} 44 54 64 74 84 94 104 114 124 134"}},
		{name: "working", targets: map[string]string{"p": base + "sglang:scheduler_idle_seconds_total{P} 44\nsglang:realtime_tokens_total{P,mode=\"prefill_compute\"} 1 2 3 4 5 6 7 8 9 10"}},
		{name: "stopped: not even its loop runs", targets: map[string]string{"p": inflight + " 0\nsglang:scheduler_process_cpu_seconds_total{P} 5\nsglang:scheduler_idle_seconds_total{P} 44"}},
		{name: "a gauge says it already", targets: map[string]string{"p": strings.Replace(base, "} 0", "} 1", 1) + "sglang:scheduler_idle_seconds_total{P} 44"}, want: []string{"stuck-queue@p"}},
		{name: "for half a minute only", targets: map[string]string{"p": base + "sglang:scheduler_idle_seconds_total{P} 40 41 42 43 44 45 45 45 45"}},
	})
}

func TestDisagreement(t *testing.T) {
	run(t, []world{
		{name: "prefill holds what no decode worker knows", targets: map[string]string{"p": inflight + " 1\n" + sent + " 7", "d": decodeIdle},
			want: []string{"stuck-queue@p", "disagreement@p"}},
		{name: "a decode worker has it", targets: map[string]string{"p": inflight + " 1\n" + sent + " 7", "d": transferQ + " 1\n" + landed + " 3"},
			want: []string{"stuck-queue@p", "stuck-queue@d"}},
		{name: "one of two decode workers was busy for a moment", targets: map[string]string{"p": inflight + " 1\n" + sent + " 7", "d": decodeIdle,
			"d2": strings.Replace(decodeIdle, "reqs{D} 0", "reqs{D} 0 0 0 0 1 0", 1)}, want: []string{"stuck-queue@p"}},
		{name: "no decode worker in sight", targets: map[string]string{"p": inflight + " 1\n" + sent + " 7"}, want: []string{"stuck-queue@p"}},
		{name: "decode waits for a status that prefill has sent", targets: map[string]string{"p": inflight + " 0\nsglang:num_running_reqs{P} 0", "d": transferQ + " 1\n" + landed + " 3"},
			want: []string{"stuck-queue@d", "disagreement@d"}},
		{name: "baton", targets: map[string]string{"p": "baton_rooms{side=\"prefill\",state=\"transferring\"} 1\nbaton_num_prefill_inflight_queue_reqs 1",
			"d": "baton_rooms{side=\"decode\",state=\"transferring\"} 0\nbaton_num_decode_transfer_queue_reqs 0"}, want: []string{"stuck-queue@p", "disagreement@p"}},
	})
}

func TestForcedRelease(t *testing.T) {
	const total = "sglang:decode_deferred_kv_release_total{D,outcome="
	run(t, []world{
		{name: "by timeout", targets: map[string]string{"d": decodeIdle + total + `"timeout"} 0 0 1 1 1 2`}, want: []string{"forced-release@d"}},
		{name: "by timeout, the first ever", targets: map[string]string{"d": decodeIdle + total + `"timeout"} _ _ _ 1`}, want: []string{"forced-release@d"}},
		{name: "drained", targets: map[string]string{"d": decodeIdle + total + `"drained"} 0 0 1 1 1 2`}},
		{name: "long ago", targets: map[string]string{"d": decodeIdle + total + `"timeout"} 4`}, notes: "before the window there were 4"},
		{name: "held for longer than the timeout", targets: map[string]string{"d": decodeIdle + "sglang:num_decode_deferred_kv_release_reqs{D} 1"}, want: []string{"stuck-queue@d"}},
		{name: "held for a moment", targets: map[string]string{"d": decodeIdle + "sglang:num_decode_deferred_kv_release_reqs{D} 0 0 1 1 1 0"}},
		{name: "vllm's leases", targets: map[string]string{"prefill": `vllm:num_requests_waiting_by_reason{reason="deferred"} 0` + "\nvllm:nixl_num_kv_expired_reqs_total{engine=\"0\"} 1 1 2"}, want: []string{"forced-release@prefill"}},
	})
}

func TestLeak(t *testing.T) {
	const idle = "sglang:num_running_reqs{D} 0\n" + transferQ + " 0\n"
	run(t, []world{
		{name: "idle and holding", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 640"}, want: []string{"~kv-leak@d"}},
		{name: "an older name", targets: map[string]string{"d": idle + "sglang:num_used_tokens{D} 640"}, want: []string{"~kv-leak@d"}},
		{name: "more each time", scrapes: 12, targets: map[string]string{"d": "sglang:num_running_reqs{D} 0 0 1 0 0 0 0 0 0 0 0 0\n" + transferQ + " 0\nsglang:kv_used_tokens{D} 64 64 900 128\nsglang:prompt_tokens_total{D} 1 1 2"}, want: []string{"kv-leak@d"}},
		{name: "idle and empty", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 0"}},
		{name: "what may be evicted is not used", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 0\nsglang:kv_evictable_tokens{D} 5000"}},
		{name: "sessions hold it", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 640\nsglang:streaming_session_held_tokens{D} 640"}},
		{name: "requests come between the scrapes", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 640\nsglang:prompt_tokens_total{D} 1 2 3 4 5 6 7 8 9 10"}},
		{name: "it drains", targets: map[string]string{"d": idle + "sglang:kv_used_tokens{D} 640 500 400 300 200 100 90 80 70 60"}},
		{name: "baton", targets: map[string]string{"d": "baton_rooms{side=\"decode\",state=\"failed\"} 0\nbaton_num_decode_transfer_queue_reqs 0\nbaton_kv_pages{pool=\"landing\",owner=\"request\"} 1\nbaton_kv_pages{pool=\"landing\",owner=\"free\"} 99"}, want: []string{"kv-leak@d"}},
		{name: "vllm within its lease", targets: map[string]string{"prefill": "vllm:num_requests_running{} 0\nvllm:num_requests_waiting{} 0\nvllm:num_requests_waiting_by_reason{reason=\"deferred\"} 0\nvllm:kv_cache_usage_perc{} 0.25"}},
		{name: "vllm past it", every: time.Minute, targets: map[string]string{"prefill": "vllm:num_requests_running{} 0\nvllm:num_requests_waiting{} 0\nvllm:num_requests_waiting_by_reason{reason=\"deferred\"} 0\nvllm:kv_cache_usage_perc{} 0.25"}, want: []string{"~kv-leak@prefill"}},
	})
}

func TestRestartsAndOutages(t *testing.T) {
	run(t, []world{
		{name: "another start time", targets: map[string]string{"p": inflight + " 0\nprocess_start_time_seconds 1000 1000 1000 1090"}, want: []string{"~restart@p"}},
		{name: "the same start time, read a little otherwise", targets: map[string]string{"p": inflight + " 0\nprocess_start_time_seconds 1000.01 1000.02"}},
		{name: "a counter that fell", targets: map[string]string{"p": inflight + " 0\nsglang:num_requests_total{P} 5 6 7 1"}, want: []string{"~restart@p"}},
		{name: "away for a while", targets: map[string]string{"p": inflight + " 0\ndown . . x x ."}, want: []string{"~outage@p"}},
		{name: "away all the time", targets: map[string]string{"p": "down x"}, doubts: "no scrape was answered"},
		{name: "something else", targets: map[string]string{"p": "up 1"}, doubts: "no metric of Baton, SGLang or vLLM"},
		{name: "not apart", targets: map[string]string{"p": `sglang:num_running_reqs{engine_type="unified"} 0`}, doubts: "none of sglang's queue gauges"},
		{name: "a router has no rooms", targets: map[string]string{"r": "baton_router_worker_up{leg=\"prefill\",worker=\"a:1\"} 1"}},
	})
}

func TestBatonsOwn(t *testing.T) {
	base := "baton_rooms{side=\"decode\",state=\"failed\"} 0\nbaton_num_decode_transfer_queue_reqs 0\n"
	run(t, []world{
		{name: "a room older than any request", targets: map[string]string{"d": base + "baton_room_oldest_age_seconds{side=\"decode\",state=\"transferring\"} 3600 3700"}, want: []string{"room-age@d"}},
		{name: "an ended room may be old", targets: map[string]string{"d": base + "baton_room_oldest_age_seconds{side=\"decode\",state=\"failed\"} 9999"}},
		{name: "pages without a proof", targets: map[string]string{"d": base + "baton_kv_quarantine_oldest_seconds{pool=\"landing\"} 0 61 71"}, want: []string{"quarantine@d"}},
		{name: "pages that wait for a moment", targets: map[string]string{"d": base + "baton_kv_quarantine_oldest_seconds{pool=\"landing\"} 9 59 60"}},
		{name: "a broken invariant", targets: map[string]string{"d": base + "baton_kv_invariant_faults_total{pool=\"landing\",kind=\"poison\"} 1"}, want: []string{"invariant@d"}},
	})
}

// TestOrderDoesNotMatter: the report is a function of the scrapes, not of the order in which they came.
func TestOrderDoesNotMatter(t *testing.T) {
	a := synth(t, "p", 10*time.Second, 10, inflight+" 1\n"+sent+" 7")
	b := slices.Clone(a)
	slices.Reverse(b)
	x, y := Diagnose(build(t, a, nil), nil, defaults), Diagnose(build(t, b, nil), nil, defaults)
	if fmt.Sprint(*x) != fmt.Sprint(*y) {
		t.Errorf("%v\n%v", x, y)
	}
	if _, err := Build(append(a, a[3]), nil); err == nil {
		t.Error("two scrapes of one moment are accepted")
	}
}

func TestConfigValidate(t *testing.T) {
	for _, c := range []Config{{}, {StuckAfter: time.Second}, {MaxRoomAge: time.Second}, {StuckAfter: -1, MaxRoomAge: 1}} {
		if c.Validate() == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
	if err := defaults.Validate(); err != nil {
		t.Error(err)
	}
}
