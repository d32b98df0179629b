package doctor

import (
	"slices"
	"strings"
	"time"
)

// dialect is what one engine calls things. Sources: docs/metrics.md for Baton;
// for SGLang release 0.5.23, srt/observability/metrics_collector.py (names, types, labels),
// req_time_stats.py (stages) and managers/scheduler.py (when gauges are shown); for vLLM's
// main branch of late 2026, v1/metrics/loggers.py and the NIXL connector's stats.py, whose
// Python client adds _total to the names of counters.
type dialect struct {
	engine Engine
	prefix string
	queues []queue
	// busy are gauges that are all 0 when a worker has nothing to do.
	busy []sel
	held []held
	// forced are counters of waits for memory that only time has ended.
	forced []forced
	// broken are counters that must stay 0 for ever.
	broken []sel
	// start is when the process was started, in seconds since 1970.
	start sel
	// resets are counters that show a new process by falling.
	resets []sel
	// idle counts the seconds without any request in any queue, if the engine has such a thing.
	idle sel
	// spins and work: the first moves while the scheduler's loop runs, the others while it computes.
	spins sel
	work  []sel
}

// queue is where a request waits for the other side.
type queue struct {
	name  string
	role  Role
	gauge sel
	// out are the counters of every way out, and of the progress of what is inside.
	out []sel
	// bound is how long waiting there can be honest although nothing moves: the engine's own
	// limit. 0: nothing may stand still for longer than [Config.StuckAfter].
	bound time.Duration
	// spent is the histogram of the time that a request spends there; unit is its unit.
	spent sel
	unit  time.Duration
	// handover: the other side has a part in it at the same time.
	handover bool
}

// held is memory that must be free when a worker is idle.
type held struct {
	name  string
	unit  string
	of    sel
	less  []sel         // held for a reason, to be taken off
	after time.Duration // of idleness, before which holding is honest
}

// forced is a counter of waits that ended without proof.
type forced struct {
	of    sel
	what  string
	cause string
	todo  string
}

func named(name string) sel { return sel{name: name} }

func with(name, label string, values ...string) sel {
	return sel{name: name, labels: map[string][]string{label: values}}
}

func stage(name string) sel {
	return with("sglang:per_stage_req_latency_seconds_count", "stage", name)
}

// Limits that the engines have themselves, with a margin for gauges that are shown late.
const (
	// sglangWait is SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and _WAITING_TIMEOUT, both 300 s by
	// default, and 30 s for gauges.
	sglangWait = 330 * time.Second
	// sglangRelease is SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT, 30 s, and 30 s for gauges.
	sglangRelease = 60 * time.Second
	// batonWait is the default --request-timeout, 300 s, and a margin.
	batonWait = 330 * time.Second
	// vllmLease is the longest default after which vLLM's prefill side gives up blocks that
	// nobody has read: 480 s of VLLM_NIXL_ABORT_REQUEST_TIMEOUT in older releases, and a margin.
	vllmLease = 500 * time.Second
)

var sglangIdle = named("sglang:scheduler_idle_seconds_total")

var dialects = []dialect{
	{
		engine: EngineBaton, prefix: "baton_",
		queues: []queue{
			{name: "prefill inflight queue", role: RolePrefill, gauge: named("baton_num_prefill_inflight_queue_reqs"), handover: true,
				out:   []sel{with("baton_rooms_ended_total", "side", "prefill"), named("baton_kv_transfer_writes_total"), named("baton_kv_transfer_errors_total"), named("baton_requests_total")},
				spent: named("baton_kv_transfer_chunk_seconds"), unit: time.Second},
			{name: "prefill bootstrap queue", role: RolePrefill, gauge: named("baton_num_prefill_bootstrap_queue_reqs"), bound: batonWait,
				out: []sel{with("baton_rooms_ended_total", "side", "prefill"), with("baton_session_messages_total", "kind", "grant"), named("baton_requests_total")}},
			{name: "decode prealloc queue", role: RoleDecode, gauge: named("baton_num_decode_prealloc_queue_reqs"), bound: batonWait,
				out: []sel{with("baton_rooms_ended_total", "side", "decode"), with("baton_session_messages_total", "kind", "grant"), named("baton_requests_total"), named("baton_generation_tokens_total")}},
			{name: "decode transfer queue", role: RoleDecode, gauge: named("baton_num_decode_transfer_queue_reqs"), handover: true,
				out:   []sel{with("baton_rooms_ended_total", "side", "decode"), named("baton_kv_transfer_landed_total"), named("baton_requests_total")},
				spent: named("baton_kv_transfer_room_seconds"), unit: time.Second},
			{name: "rooms that failed and do not drain", gauge: named("baton_rooms_undrained"),
				out: []sel{named("baton_kv_pages_freed_total"), named("baton_kv_transfer_writes_total"), named("baton_kv_transfer_errors_total")}},
		},
		busy: []sel{named("baton_rooms"), named("baton_num_running_reqs"), named("baton_num_queue_reqs"), named("baton_num_prefill_bootstrap_queue_reqs"),
			named("baton_num_prefill_inflight_queue_reqs"), named("baton_num_decode_prealloc_queue_reqs"), named("baton_num_decode_transfer_queue_reqs"),
			named("baton_http_requests_in_flight")},
		held:   []held{{name: "KV pages", unit: "pages", of: with("baton_kv_pages", "owner", "request", "granted")}},
		broken: []sel{named("baton_kv_invariant_faults_total")},
		start:  named("process_start_time_seconds"),
		resets: []sel{named("baton_rooms_ended_total"), named("baton_requests_total"), named("baton_router_requests_total"), named("baton_session_messages_total")},
	},
	{
		engine: EngineSGLang, prefix: "sglang:",
		queues: []queue{
			{name: "prefill inflight queue", role: RolePrefill, gauge: named("sglang:num_prefill_inflight_queue_reqs"), handover: true,
				out:   []sel{stage("prefill_transfer_kv_cache"), named("sglang:kv_transfer_latency_ms_count"), named("sglang:num_transfer_failed_reqs_total"), sglangIdle},
				spent: with("sglang:per_stage_req_latency_seconds", "stage", "prefill_transfer_kv_cache"), unit: time.Second},
			{name: "prefill bootstrap queue", role: RolePrefill, gauge: named("sglang:num_prefill_bootstrap_queue_reqs"), bound: sglangWait,
				out: []sel{stage("prefill_bootstrap"), named("sglang:kv_transfer_bootstrap_ms_count"), named("sglang:num_bootstrap_failed_reqs_total"), sglangIdle}},
			{name: "decode prealloc queue", role: RoleDecode, gauge: named("sglang:num_decode_prealloc_queue_reqs"), bound: sglangWait,
				out: []sel{stage("decode_bootstrap"), named("sglang:num_bootstrap_failed_reqs_total"), named("sglang:num_transfer_failed_reqs_total"),
					named("sglang:generation_tokens_total"), named("sglang:realtime_tokens_total"), sglangIdle}},
			{name: "decode transfer queue", role: RoleDecode, gauge: named("sglang:num_decode_transfer_queue_reqs"), handover: true,
				out:   []sel{stage("decode_transferred"), named("sglang:num_transfer_failed_reqs_total"), sglangIdle},
				spent: with("sglang:per_stage_req_latency_seconds", "stage", "decode_transferred"), unit: time.Second},
			{name: "deferred KV releases", role: RoleDecode, gauge: named("sglang:num_decode_deferred_kv_release_reqs"), bound: sglangRelease,
				out: []sel{named("sglang:decode_deferred_kv_release_total")}},
		},
		busy: []sel{named("sglang:num_running_reqs"), named("sglang:num_queue_reqs"), named("sglang:num_grammar_queue_reqs"),
			named("sglang:num_prefill_bootstrap_queue_reqs"), named("sglang:num_prefill_inflight_queue_reqs"), named("sglang:num_decode_prealloc_queue_reqs"),
			named("sglang:num_decode_transfer_queue_reqs"), named("sglang:num_decode_deferred_kv_release_reqs")},
		held: []held{
			{name: "KV tokens", unit: "tokens", of: named("sglang:kv_used_tokens"), less: []sel{named("sglang:streaming_session_held_tokens")}},
			{name: "KV tokens", unit: "tokens", of: named("sglang:num_used_tokens"), less: []sel{named("sglang:streaming_session_held_tokens")}},
		},
		forced: []forced{{of: with("sglang:decode_deferred_kv_release_total", "outcome", "timeout", "error"),
			what:  "deferred KV releases ended by timeout or error, not by the prefill side's word that it has drained",
			cause: "the prefill side does not answer ABORT with ABORT_ACK: it is gone or stopped, an older release, or a write of it never settles. Its late write may land in pages that belong to another request by then",
			todo:  "look at the prefill workers of that time (restarts, stopped processes, releases before 0.5.22); treat answers of that time from this decode worker as doubtful; raise SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT only after that"}},
		resets: []sel{named("sglang:num_requests_total"), named("sglang:prompt_tokens_total"), named("sglang:kv_transfer_latency_ms_count"), sglangIdle},
		start:  named("process_start_time_seconds"), // not shown by the multiprocess collector of today
		idle:   sglangIdle, spins: named("sglang:scheduler_process_cpu_seconds_total"),
		work: []sel{named("sglang:realtime_tokens_total"), named("sglang:forward_execution_seconds_total"), named("sglang:generation_tokens_total"), named("sglang:prompt_tokens_total"),
			stage("prefill_transfer_kv_cache"), stage("decode_transferred"), stage("prefill_bootstrap"), stage("decode_bootstrap")},
	},
	{
		engine: EngineVLLM, prefix: "vllm:",
		queues: []queue{
			{name: "requests that wait for remote KV (deferred)", gauge: with("vllm:num_requests_waiting_by_reason", "reason", "deferred"), handover: true,
				out: []sel{named("vllm:nixl_xfer_time_seconds_count"), named("vllm:nixl_num_failed_transfers_total"), named("vllm:request_success_total")}},
		},
		busy: []sel{named("vllm:num_requests_running"), named("vllm:num_requests_waiting")},
		held: []held{{name: "KV cache", unit: "of the cache", of: named("vllm:kv_cache_usage_perc"), after: vllmLease}},
		forced: []forced{{of: named("vllm:nixl_num_kv_expired_reqs_total"),
			what:  "requests whose KV expired at the prefill side before the decode side had read it",
			cause: "the decode side never came for the blocks (it died, was aborted, or has no connection), or came later than the lease",
			todo:  "compare with the decode workers' restarts and aborts at that time; if they were only slow, raise kv_lease_duration in --kv-transfer-config"}},
		resets: []sel{named("vllm:request_success_total"), named("vllm:prompt_tokens_total"), named("vllm:generation_tokens_total")},
		start:  named("process_start_time_seconds"),
	},
}

// Rules that are Baton's own read these.
var (
	batonOldest     = "baton_room_oldest_age_seconds"
	batonQuarantine = "baton_kv_quarantine_oldest_seconds"
)

// MetricNames are all names that the rules read, for asking Prometheus.
func MetricNames() []string {
	out := []string{batonOldest, batonQuarantine, "baton_router_worker_up"}
	add := func(list ...sel) {
		for _, s := range list {
			if s.name != "" {
				out = append(out, s.name)
			}
		}
	}
	for _, d := range dialects {
		for _, q := range d.queues {
			add(q.gauge)
			add(q.out...)
			if q.spent.name != "" {
				out = append(out, q.spent.name+"_sum", q.spent.name+"_count")
			}
		}
		for _, h := range d.held {
			add(h.of)
			add(h.less...)
		}
		for _, f := range d.forced {
			add(f.of)
		}
		add(d.busy...)
		add(d.broken...)
		add(d.resets...)
		add(d.work...)
		add(d.start, d.idle, d.spins)
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Ours reports whether a metric is one of an engine that has a dialect.
func Ours(name string) bool {
	return slices.ContainsFunc(dialects, func(d dialect) bool { return strings.HasPrefix(name, d.prefix) })
}
