package repotest

import (
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// graph says which of the other packages, and which foreign modules, each package may
// import. What is not listed is not allowed. Imports point down: cmd, then worker, httpapi
// and router, then sched, then hub and session, then transfer and kv, then room.
//
// Transports import transfer and what is below it, never each other. openai and room are
// at the bottom: everybody speaks their words.
const graph = `
internal/room:
internal/model:                        internal/model/explore internal/room
internal/model/explore:
internal/model/legacy:                 internal/model/explore internal/room
internal/kv:                           prometheus golang.org/x/sys
internal/transfer:                     internal/kv internal/room
internal/transfer/door:
internal/transfer/grants:              internal/transfer
internal/transfer/postq:               internal/transfer
internal/transfer/mem:                 internal/transfer internal/transfer/grants
internal/transfer/tcp:                 internal/transfer internal/transfer/door internal/transfer/grants internal/transfer/postq internal/room golang.org/x/sys
internal/transfer/shm:                 internal/transfer internal/transfer/door internal/transfer/grants internal/transfer/postq internal/room golang.org/x/sys
internal/transfer/nixl:                internal/transfer internal/transfer/door internal/transfer/grants internal/room internal/dynlib purego golang.org/x/sys
internal/transfer/fault:               internal/transfer internal/room
internal/transfer/meter:               internal/transfer prometheus
internal/transfer/transfertest:        internal/transfer internal/room internal/kv go.uber.org/goleak
internal/session:                      internal/transfer internal/kv internal/room proto/baton/v1 grpc protobuf prometheus
internal/session/sessiontest:          internal/session internal/transfer internal/room grpc
internal/trace:                        internal/room golang.org/x/sys
internal/transfer/hub:                 internal/session internal/transfer internal/kv internal/room prometheus
proto/baton/v1:                        grpc protobuf

internal/dynlib:                       purego
internal/dynlib/needffi:               purego
internal/engine:                       internal/kv
internal/engine/sim:                   internal/engine internal/kv
internal/engine/llamacpp:              internal/engine internal/engine/llamacpp/gguf internal/dynlib internal/dynlib/needffi purego yzma
internal/engine/llamacpp/gguf:
internal/engine/llamacpp/gguftest:
internal/sched:                        internal/engine internal/transfer internal/kv internal/room prometheus

internal/openai:                       internal/engine internal/room gonja
internal/httpbody:
internal/httpapi:                      internal/sched internal/openai internal/httpbody internal/otel internal/engine internal/room prometheus
internal/otel:                         go.opentelemetry.io/otel prometheus
internal/otel/oteltest:                grpc go.opentelemetry.io/proto/otlp
internal/router:                       internal/router/policy internal/router/admission internal/router/record internal/router/accesslog internal/webui internal/edge internal/router/ending internal/router/wire internal/openai internal/httpbody internal/otel internal/room prometheus
internal/router/policy:
internal/router/wire:                  internal/router/ending
internal/router/ending:
internal/router/admission:
internal/webui:
internal/webui/browser:
internal/router/record:                internal/openai
internal/router/accesslog:             internal/router/record prometheus
internal/edge:                         internal/openai internal/httpbody internal/room
internal/edge/edgetest:                internal/edge
internal/discovery:
internal/discovery/etcd:               internal/discovery etcd
internal/discovery/kubernetes:         internal/discovery kubernetes
internal/worker:                       internal/edge internal/httpapi internal/otel internal/sched internal/trace internal/transfer/hub internal/session internal/transfer internal/kv internal/engine internal/room prometheus

internal/sglang:                       internal/sglang/zmtp internal/transfer/nixl internal/transfer internal/kv internal/room
internal/sglang/zmtp:

internal/config:
internal/supervise:                    golang.org/x/sys
internal/setup:                        internal/dynlib internal/dynlib/needffi
internal/stack:                        internal/kv
internal/chaos:                        internal/chaos/wire internal/stack internal/trace internal/openai internal/engine internal/engine/sim internal/room
internal/chaos/wire:                   golang.org/x/sys go.uber.org/goleak
internal/bench:                        internal/room openai-go
internal/bench/kvbench:                internal/transfer internal/kv internal/room golang.org/x/sys
internal/bench/routerbench:            golang.org/x/sys
internal/doctor:                       github.com/prometheus/common
internal/doctor/collect:               internal/doctor
internal/doctor/probe:                 internal/doctor internal/sglang internal/sglang/zmtp internal/session internal/transfer internal/kv internal/room
internal/repotest:
internal/e2e:

cmd/baton:                             *
`

// modules are short names of foreign modules in graph.
var modules = map[string]string{
	"prometheus": "github.com/prometheus/client_golang",
	"grpc":       "google.golang.org/grpc",
	"protobuf":   "google.golang.org/protobuf",
	"purego":     "github.com/ebitengine/purego",
	"yzma":       "github.com/hybridgroup/yzma",
	"gonja":      "github.com/nikolalohinski/gonja/v2",
	"etcd":       "go.etcd.io/etcd",
	"kubernetes": "k8s.io",
	"openai-go":  "github.com/openai/openai-go/v3",
}

// allowed parses graph.
func allowed(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for line := range strings.SplitSeq(graph, "\n") {
		pkg, list, ok := strings.Cut(line, ":")
		if !ok {
			continue
		}
		if _, twice := out[pkg]; twice {
			t.Fatalf("graph lists %s twice", pkg)
		}
		out[pkg] = strings.Fields(list)
	}
	return out
}

// within reports whether import p is of the module or package named m.
func within(p, m string) bool { return p == m || strings.HasPrefix(p, m+"/") }

func importsOf(s *source) []string {
	var out []string
	for _, im := range s.file.Imports {
		p, _ := strconv.Unquote(im.Path.Value) // parsed: it is a string
		out = append(out, p)
	}
	return out
}

// standard reports whether p belongs to Go's own library: no dot in its first element.
func standard(p string) bool {
	first, _, _ := strings.Cut(p, "/")
	return !strings.Contains(first, ".")
}

func TestImportGraph(t *testing.T) {
	rules := allowed(t)
	seen := map[string]bool{}
	for _, s := range sources(t) {
		seen[s.dir] = true
		list, known := rules[s.dir]
		if !known {
			t.Errorf("%s: package %s is not in the graph; say there what it may import", s.name, s.dir)
			rules[s.dir] = []string{"*"} // once is enough
			continue
		}
		if s.test { // tests may look around, but nothing imports a command
			for _, p := range importsOf(s) {
				if within(p, module+"/cmd") {
					t.Errorf("%s imports a command", s.name)
				}
			}
			continue
		}
		for _, p := range importsOf(s) {
			if standard(p) || slices.Contains(list, "*") {
				continue
			}
			own, isOwn := strings.CutPrefix(p, module+"/")
			ok := isOwn && slices.Contains(list, own)
			for _, m := range list {
				if full := modules[m]; full != "" {
					m = full
				}
				ok = ok || !isOwn && within(p, m)
			}
			if !ok {
				t.Errorf("%s imports %s, which %s may not", s.name, p, s.dir)
			}
		}
	}
	for pkg := range rules {
		if !seen[pkg] {
			t.Errorf("the graph lists %s, which does not exist", pkg)
		}
	}
}

// TestGraphPointsDown: no cycle could be built even by accident, because allowed
// imports are a strict order, and the transports do not know each other.
func TestGraphPointsDown(t *testing.T) {
	rules := allowed(t)
	state := map[string]int{} // 1: being visited, 2: done
	var visit func(pkg string, way []string)
	visit = func(pkg string, way []string) {
		switch state[pkg] {
		case 1:
			t.Errorf("the graph has a cycle: %s", strings.Join(append(way, pkg), " -> "))
			return
		case 2:
			return
		}
		state[pkg] = 1
		for _, next := range rules[pkg] {
			if _, own := rules[next]; own {
				visit(next, append(way, pkg))
			}
		}
		state[pkg] = 2
	}
	for pkg := range rules {
		visit(pkg, nil)
	}
	transports := []string{"internal/transfer/mem", "internal/transfer/tcp", "internal/transfer/shm", "internal/transfer/nixl"}
	for _, a := range transports {
		for _, b := range transports {
			if slices.Contains(rules[a], b) {
				t.Errorf("the graph lets transport %s import transport %s", a, b)
			}
		}
	}
}

// TestPureCore: the two machines see no clock, no network, no goroutine and no chance, or
// exploring orders of events would not explore the real code.
func TestPureCore(t *testing.T) {
	pure := map[string][]string{
		"internal/room/machine.go":          nil,
		"internal/room/table.go":            nil,
		"internal/room/event.go":            {"fmt", "strings"},
		"internal/room/room.go":             {"fmt", "strconv"},
		"internal/room/cause.go":            {"errors", "fmt"},
		"internal/sched/budget.go":          {module + "/internal/engine"},
		"internal/router/policy/policy.go":  {"fmt", "math/rand/v2", "slices", "strings", "time"}, // durations, and chance from a seed
		"internal/router/policy/hash.go":    {"encoding/binary", "math", "math/bits"},
		"internal/router/policy/cost.go":    nil,
		"internal/router/policy/prefix.go":  nil,
		"internal/router/policy/tree.go":    {"slices"},
		"internal/router/admission/fair.go": {"container/heap", "slices", "time"}, // durations
		"internal/session/ledger.go": {"fmt", "time", // durations; the clock is an argument
			module + "/proto/baton/v1"},
	}
	found := 0
	for _, s := range sources(t) {
		may, is := pure[s.name]
		if !is {
			continue
		}
		found++
		for _, p := range importsOf(s) {
			if !slices.Contains(may, p) {
				t.Errorf("%s imports %s; it is pure and may import only %v", s.name, p, may)
			}
		}
		if bytesOf := string(s.text); strings.Contains(bytesOf, "time.Now(") || strings.Contains(bytesOf, "\tgo ") {
			t.Errorf("%s reads the clock or starts a goroutine; it is pure", s.name)
		}
	}
	if found != len(pure) {
		t.Errorf("%d of %d pure files exist", found, len(pure))
	}
}

// TestOpenAIIsPure: shapes do no I/O. net/http is there for headers and status numbers.
func TestOpenAIIsPure(t *testing.T) {
	for _, s := range sources(t) {
		if s.dir != "internal/openai" || s.test {
			continue
		}
		for _, p := range importsOf(s) {
			if p == "os" || p == "net" || p == "log/slog" || path.Dir(p) == "os" {
				t.Errorf("%s imports %s", s.name, p)
			}
		}
		for _, w := range []string{"http.Client", "http.Server", "http.Get(", "http.Post(", "http.ListenAndServe", "http.DefaultClient", "time.Now(", "\tgo func"} {
			if strings.Contains(string(s.text), w) {
				t.Errorf("%s uses %s", s.name, w)
			}
		}
	}
}
