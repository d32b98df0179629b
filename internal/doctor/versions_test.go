package doctor

import (
	"strings"
	"testing"
)

func TestVersions(t *testing.T) {
	p := map[string]string{"p": inflight + " 0"}
	at := func(v, backend string) map[string]About { return map[string]About{"p": {Version: v, Backend: backend}} }
	both := map[string]string{"p": inflight + " 0", "d": decodeIdle}
	pair := func(a, b string) map[string]About { return map[string]About{"p": {Version: a}, "d": {Version: b}} }
	run(t, []world{
		{name: "resurrects", targets: p, about: at("0.5.12", "nixl"), want: []string{"~version@p"}},
		{name: "control thread dies", targets: p, about: at("0.5.15.post2", ""), want: []string{"~version@p"}},
		{name: "no ack", targets: p, about: at("v0.5.18", ""), want: []string{"~version@p"}},
		{name: "ack without generation", targets: p, about: at("0.5.21", ""), want: []string{"~version@p"}},
		{name: "last of the old completion", targets: p, about: at("0.5.22", ""), notes: "no deadline"},
		{name: "the one described", targets: p, about: at("0.5.23", "nixl"), notes: "no deadline"},
		{name: "newer than the table", targets: p, about: at("0.6.0", ""), notes: "newer than the table"},
		{name: "unknown", targets: p, notes: "not known"},
		{name: "no version", targets: p, about: at("main", ""), notes: "no version of three numbers"},
		{name: "another backend", targets: p, about: at("0.5.12", "mooncake"), notes: "about nixl"},
		{name: "from a label", targets: map[string]string{"p": `sglang:num_prefill_inflight_queue_reqs{P,version="0.5.15"} 0`}, want: []string{"~version@p"}},
		{name: "new decode behind old prefill", targets: both, about: pair("0.5.22", "0.5.23"), want: []string{"version-mix@p,d"}},
		{name: "old decode behind new prefill", targets: both, about: pair("0.5.23", "0.5.22"), want: []string{"version-mix@p,d"}},
		{name: "both new", targets: both, about: pair("0.5.23", "0.5.23")},
	})
}

func TestParseRelease(t *testing.T) {
	for text, want := range map[string]string{
		"0.5.23": "0.5.23", "v0.5.23": "0.5.23", "0.5.23.post1": "0.5.23", "0.5.23rc0": "0.5.23", "0.5.23.dev5+gabc": "0.5.23", " 1.2.3-4 ": "1.2.3",
		"": "", "dev": "", "0.5": "", "a.b.c": "", "0.5.x": "", "0.5.": "",
	} {
		r, err := parseRelease(text)
		if (err == nil) != (want != "") || err == nil && r.String() != want {
			t.Errorf("%q is %v, %v; want %q", text, r, err, want)
		}
	}
}

// TestTableIsWhole: rows touch each other and are in order, so that each release up to the last is in one.
func TestTableIsWhole(t *testing.T) {
	for i, r := range table {
		if r.last.less(r.first) || (r.fault == "") == (r.weakness == "") || r.completion == "" || r.fault != "" && r.action == "" {
			t.Errorf("row %s is not whole: %+v", r.name(), r)
		}
		if i > 0 {
			if next := (release{table[i-1].last[0], table[i-1].last[1], table[i-1].last[2] + 1}); r.first != next {
				t.Errorf("row %s does not follow %s", r.name(), table[i-1].name())
			}
		}
		if got := lookup(r.last); got == nil || got.name() != r.name() {
			t.Errorf("%s is not found in its own row", r.last)
		}
	}
	if lookup(release{0, 5, 24}) != nil {
		t.Error("a release after the last is found")
	}
	if !strings.Contains(incompatible(release{0, 5, 22}, release{0, 5, 23}), "300 s") || incompatible(release{0, 5, 20}, release{0, 5, 22}) != "" {
		t.Error("the measured mixed fleets are judged otherwise")
	}
}
