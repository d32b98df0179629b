package doctor

import (
	"maps"
	"math"
	"slices"
	"strings"
	"time"
)

// Engine is whose metrics a target has.
type Engine string

// The engines whose names are known. EngineNone is anything else.
const (
	EngineNone   Engine = ""
	EngineBaton  Engine = "baton"
	EngineSGLang Engine = "sglang"
	EngineVLLM   Engine = "vllm"
)

// Role is a worker's side of a hand-over.
type Role string

// The roles. RoleNone: not known, or neither.
const (
	RoleNone    Role = ""
	RolePrefill Role = "prefill"
	RoleDecode  Role = "decode"
	RoleRouter  Role = "router"
)

// Miss is a scrape that failed.
type Miss struct {
	Time time.Time
	Why  string
}

// Target is one worker over a window. Built by [Build], then only read.
type Target struct {
	Name string
	About
	Engine Engine
	Role   Role
	Times  []time.Time // of scrapes that were answered; ascending
	Missed []Miss      // ascending

	series map[string][]*series // by name
	index  map[string]*series   // by name and labels
}

// series is one metric with one set of labels. len(values) <= len(Times); a value that is
// NaN, or beyond the end, was not there.
type series struct {
	labels map[string]string
	values []float64
}

// add appends a scrape, which is later than all before it.
func (t *Target) add(s Scrape) {
	if s.Err != "" {
		t.Missed = append(t.Missed, Miss{s.Time, s.Err})
		return
	}
	at := len(t.Times)
	t.Times = append(t.Times, s.Time)
	for _, sample := range s.Samples {
		se := t.find(sample.Name, sample.Labels)
		for len(se.values) <= at {
			se.values = append(se.values, math.NaN())
		}
		se.values[at] = sample.Value
	}
}

func (t *Target) find(name string, labels map[string]string) *series {
	var key strings.Builder
	key.WriteString(name)
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		key.WriteString("\xff" + k + "\xff" + labels[k])
	}
	se := t.index[key.String()]
	if se == nil {
		se = &series{labels: labels}
		t.index[key.String()] = se
		t.series[name] = append(t.series[name], se)
	}
	return se
}

// value at scrape i, NaN if it was not there.
func (s *series) value(i int) float64 {
	if i >= len(s.values) {
		return math.NaN()
	}
	return s.values[i]
}

// recognize sets engine and role from the names and labels of the metrics. A worker without either
// kind of label has the role that its target's name begins with.
func (t *Target) recognize() {
	count := map[Engine]int{}
	for name, list := range t.series {
		for _, d := range dialects {
			if strings.HasPrefix(name, d.prefix) {
				count[d.engine] += len(list)
			}
		}
	}
	for _, d := range dialects {
		if count[d.engine] > count[t.Engine] {
			t.Engine = d.engine
		}
	}
	for _, r := range []Role{RolePrefill, RoleDecode, RoleRouter} {
		switch {
		case t.Engine == EngineBaton && r == RoleRouter && len(t.series["baton_router_worker_up"]) > 0,
			t.Engine == EngineBaton && t.has("baton_rooms", "side", string(r)),
			t.Engine == EngineSGLang && t.labelled("engine_type", string(r)),
			t.Role == RoleNone && strings.HasPrefix(t.Name, string(r)):
			t.Role = r
		}
	}
	if t.Version == "" {
		t.Version = t.versionLabel()
	}
}

// labelled reports whether any series has label k with value v.
func (t *Target) labelled(k, v string) bool {
	for name := range t.series {
		if t.has(name, k, v) {
			return true
		}
	}
	return false
}

func (t *Target) has(name, k, v string) bool {
	return slices.ContainsFunc(t.series[name], func(s *series) bool { return s.labels[k] == v })
}

// versionLabel is a label "version" of the engine's own metrics: SGLang's
// --extra-metric-labels puts there what operators want.
func (t *Target) versionLabel() string {
	for _, name := range slices.Sorted(maps.Keys(t.series)) {
		if d := t.dialect(); d == nil || !strings.HasPrefix(name, d.prefix) {
			continue
		}
		for _, se := range t.series[name] {
			if v := se.labels["version"]; v != "" {
				return v
			}
		}
	}
	return ""
}

// dialect of the target's engine; nil if it is not known.
func (t *Target) dialect() *dialect {
	for i := range dialects {
		if dialects[i].engine == t.Engine {
			return &dialects[i]
		}
	}
	return nil
}

// line is a value at each of a target's scrapes.
type line []float64

// known reports whether the line has any value.
func (l line) known() bool {
	return slices.ContainsFunc(l, func(v float64) bool { return !math.IsNaN(v) })
}

// sum adds all series that s selects, at each scrape; NaN where there is none.
func (t *Target) sum(s sel) line {
	out := make(line, len(t.Times))
	for i := range out {
		out[i] = math.NaN()
		for _, se := range t.series[s.name] {
			v := se.value(i)
			if math.IsNaN(v) || !s.matches(se.labels) {
				continue
			}
			if math.IsNaN(out[i]) {
				out[i] = 0
			}
			out[i] += v
		}
	}
	return out
}

// counters adds up several counters. One that is not there has not been counted yet: the
// Python client makes a labelled counter at its first increment.
func (t *Target) counters(list []sel) line {
	out := make(line, len(t.Times))
	for _, s := range list {
		for i, v := range t.sum(s) {
			if !math.IsNaN(v) {
				out[i] += v
			}
		}
	}
	return out
}

// sel selects series: by name, and by labels that must have one of the values given.
type sel struct {
	name   string
	labels map[string][]string
}

func (s sel) matches(labels map[string]string) bool {
	// With priority scheduling SGLang shows each priority's share besides the total, whose
	// priority is empty (metrics_collector.py, _log_gauge_queue_count).
	if labels["priority"] != "" && strings.HasPrefix(s.name, "sglang:num_") && !strings.HasSuffix(s.name, "_total") {
		return false
	}
	for k, vs := range s.labels {
		if !slices.Contains(vs, labels[k]) {
			return false
		}
	}
	return true
}
