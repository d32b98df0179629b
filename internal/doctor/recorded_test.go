package doctor

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestRecorded: scrapes of real Baton stacks on the sim engine (`baton doctor --save`, cut down to the
// metrics that the rules read), one of which was given a fault with --fault or kill -9.
func TestRecorded(t *testing.T) {
	for file, want := range map[string][]string{
		"baton-healthy.prom":   {},
		"baton-stalled.prom":   {"stuck-queue@decode-0", "stuck-queue@prefill-0"},
		"baton-undrained.prom": {"stuck-queue@prefill-0"},
		"baton-restart.prom":   {"~outage@prefill-0", "~restart@prefill-0"},
	} {
		t.Run(file, func(t *testing.T) {
			s := recorded(t, file)
			fleet := build(t, s.Scrapes, s.About)
			var who []string
			for _, f := range fleet {
				who = append(who, string(f.Engine)+" "+string(f.Role)+" "+f.Version)
			}
			if want := []string{"baton decode dev", "baton prefill dev", "baton router dev"}; !slices.Equal(who, want) {
				t.Errorf("targets are %q", who)
			}
			r := Diagnose(fleet, nil, Config{StuckAfter: 3 * time.Second, MaxRoomAge: DefaultMaxRoomAge})
			complete(t, r)
			if got := found(r); !slices.Equal(got, want) {
				t.Errorf("found %v, want %v", got, want)
			}
			// With the default limit the same 5 s tell nothing about queues.
			if r := Diagnose(fleet, nil, defaults); len(r.Doubts) == 0 || slices.ContainsFunc(r.Findings, func(f Finding) bool { return f.Rule == "stuck-queue" }) {
				t.Errorf("5 s are enough for a limit of 60 s: %+v", r)
			}
		})
	}
}

// TestNamesAreReal: every name of SGLang's that a rule reads is in the list of its release.
func TestNamesAreReal(t *testing.T) {
	text, err := os.ReadFile("testdata/sglang-0.5.23-names.txt")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) == 2 {
			kinds[f[0]] = f[1]
		}
	}
	n := 0
	for _, name := range MetricNames() {
		if !strings.HasPrefix(name, "sglang:") {
			continue
		}
		n++
		base := strings.TrimSuffix(strings.TrimSuffix(name, "_count"), "_sum")
		if kinds[name] == "" && (base == name || kinds[base] != "histogram") {
			t.Errorf("%s is no metric of SGLang 0.5.23", name)
		}
	}
	if n < 20 {
		t.Errorf("only %d names of SGLang's", n)
	}
}

// TestSavedForm: what Header writes is what ParseFile reads.
func TestSavedForm(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	text := Header("p-0", at, "0.5.23", "nixl") + "a{x=\"1\"} 1\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_bucket{le=\"+Inf\"} 3\nh_sum 4\nh_count 3\n" +
		FailedHeader("p-0", at.Add(time.Second), "connection\nrefused") + Header("p-0", at.Add(2*time.Second), "", "") + "a NaN\nb +Inf\n"
	s, err := ParseFile("x", strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Scrapes) != 3 || !s.Scrapes[0].Time.Equal(at) || s.Scrapes[1].Err != "connection refused" || s.About["p-0"] != (About{"0.5.23", "nixl"}) {
		t.Fatalf("read back: %+v", s)
	}
	if n := len(s.Scrapes[0].Samples); n != 3 {
		t.Errorf("%d samples, want a, h_sum and h_count: %+v", n, s.Scrapes[0].Samples)
	}
	if n := len(s.Scrapes[2].Samples); n != 1 {
		t.Errorf("%d samples, want b without the NaN", n)
	}
	if s, err := ParseFile("plain", strings.NewReader("a 1\n")); err != nil || len(s.Scrapes) != 1 || s.Scrapes[0].Target != "plain" || !s.Scrapes[0].Time.IsZero() {
		t.Errorf("a file without headers: %+v, %v", s, err)
	}
	for _, bad := range []string{"a b c\n", header + "target=x\n", header + "target=x time=yesterday\n", header + "foo\n", header + "target=x time=2026-01-02T03:04:05Z huh=1\n",
		FailedHeader("p", at, "x") + "a 1\n"} {
		if _, err := ParseFile("bad", strings.NewReader(bad)); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestReportForms(t *testing.T) {
	w := world{targets: map[string]string{"p": inflight + " 1\n" + sent + " 7", "gone": "down x"}}
	r := w.report(t, defaults)
	r.Probes = append(r.Probes, ProbeResult{Addr: "h:1", Wire: "baton", Steps: []ProbeStep{{Name: "hello", Took: time.Millisecond, Detail: "no"}}})
	var text bytes.Buffer
	r.WriteText(&text)
	for _, want := range []string{"CRITICAL  p  [stuck-queue]", "evidence  ", "likely    ", "do        ", "Could not tell:", "gone: no scrape", "FAIL hello", "1 findings"} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("the text lacks %q:\n%s", want, text.String())
		}
	}
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(b, &back); err != nil || back.Verdict != Findings || back.Schema != 1 || len(back.Findings) != 1 {
		t.Errorf("JSON does not come back: %v %s", err, b)
	}
	empty := Diagnose(nil, nil, defaults)
	if b, _ := json.Marshal(empty); bytes.Contains(b, []byte("null")) || empty.Verdict != Unknown {
		t.Errorf("nothing to look at is %s: %s", empty.Verdict, b)
	}
	for v, status := range map[Verdict]int{Healthy: 0, Findings: 1, Unknown: 2, "": 2} {
		if v.ExitStatus() != status {
			t.Errorf("%q exits with %d", v, v.ExitStatus())
		}
	}
}

func TestProbeRooms(t *testing.T) {
	for _, r := range []uint64{0, 1, 1 << 46, 1<<64 - 1} {
		if id := ProbeRoom(r); id&^(1<<47-1) != ProbeRooms || id&(1<<47-1) != r&(1<<47-1) || id >= 1<<63 {
			t.Errorf("%x makes room %x", r, id)
		}
	}
}

// FuzzParseFile: whatever a file holds, reading it and judging it ends.
func FuzzParseFile(f *testing.F) {
	f.Add(Header("p", began, "0.5.1", "nixl") + "sglang:num_prefill_inflight_queue_reqs 1\n" + FailedHeader("p", began.Add(time.Hour), "x"))
	f.Add("baton_rooms{side=\"prefill\"} 1 2\n")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseFile("f", strings.NewReader(text))
		if err != nil {
			return
		}
		if fleet, err := Build(s.Scrapes, s.About); err == nil {
			complete(t, Diagnose(fleet, nil, defaults))
		}
	})
}

// TestSGLangsOwnCollector: what the collector class of release 0.5.23 exposes (run by itself, its scheduler stubbed, cut down to what
// the rules read): a request that stays in the inflight queue, a decode worker that knows nothing of it and
// released KV by timeout.
func TestSGLangsOwnCollector(t *testing.T) {
	s := recorded(t, "sglang-pin.prom")
	r := Diagnose(build(t, s.Scrapes, s.About), nil, defaults)
	complete(t, r)
	if want := []string{"disagreement@prefill-0", "forced-release@decode-0", "stuck-queue@prefill-0"}; !slices.Equal(found(r), want) {
		t.Errorf("found %v, want %v", found(r), want)
	}
	if len(r.Targets) != 2 || r.Targets[0].Role != RoleDecode || r.Targets[1].Role != RolePrefill || r.Targets[1].Version != "0.5.23" || len(r.Doubts) != 0 {
		t.Errorf("%+v, doubts %v", r.Targets, r.Doubts)
	}
}
