package e2e

import (
	"os"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/stack"
	"github.com/baton-pd/baton/internal/trace"
)

// checkTraces validates what the workers of a stack that has been closed recorded of their
// rooms, over all restarts.
func checkTraces(t *testing.T, s *stack.Stack) {
	t.Helper()
	var sources []trace.Source
	for _, name := range s.Traces() {
		f, err := os.Open(name)
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		sources = append(sources, trace.Source{Name: name, Reader: f})
	}
	rep, err := trace.Check(trace.Options{Whole: true}, sources...)
	if err != nil {
		t.Error(err)
		return
	}
	var b strings.Builder
	if err := rep.Print(&b, 20); err != nil {
		t.Error(err)
	}
	if !rep.OK() {
		keepTraces(t, s)
		t.Errorf("room traces:\n%s", b.String())
		return
	}
	t.Logf("room traces:\n%s", b.String())
}

// keepTraces copies the files to the directory $BATON_KEEP_TRACES, if that is set.
func keepTraces(t *testing.T, s *stack.Stack) {
	t.Helper()
	dir := os.Getenv("BATON_KEEP_TRACES")
	if dir == "" {
		t.Log("set BATON_KEEP_TRACES to a directory to keep the traces of a failing test")
		return
	}
	for _, name := range s.Traces() {
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(dir+"/"+strings.ReplaceAll(t.Name(), "/", "_")+"-"+name[strings.LastIndex(name, "/")+1:], b, 0o644)
		}
		if err != nil {
			t.Log(err)
		}
	}
}
