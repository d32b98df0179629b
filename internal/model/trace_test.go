package model

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/model/explore"
)

// TestTrace: a printed counterexample is read again and breaks the same invariant.
func TestTrace(t *testing.T) {
	sc := scenario(t, "smallest")
	w := NewWorld(sc)
	w.SetFault(FaultNoRevoke)
	r := explore.Run[State](context.Background(), w, explore.Limits{})
	if r.Violation == nil {
		t.Fatal("the fault is not found")
	}
	var printed strings.Builder
	printed.WriteString("something before\n")
	WriteTrace(&printed, sc, FaultNoRevoke, r.Violation)
	printed.WriteString("\n1 of 1 scenarios broken\n")
	tr, err := ParseTrace(printed.String())
	if err != nil || tr.Scenario != "smallest" || tr.Fault != FaultNoRevoke || len(tr.Steps) != len(r.Violation.Lines) {
		t.Fatalf("%+v, %v\n%s", tr, err, printed.String())
	}
	var again strings.Builder
	err = Replay(&again, sc, tr)
	var b *BrokenError
	if !errors.As(err, &b) || b.Error() != r.Violation.Err.Error() {
		t.Errorf("replayed: %v, want %v", err, r.Violation.Err)
	}
	if last := r.Violation.Lines[len(r.Violation.Lines)-1]; !strings.Contains(again.String(), last.Step+"\n        "+last.State) {
		t.Errorf("no %q in\n%s", last.Step, again.String())
	}
	tr.Fault = FaultNone // without the fault nothing is wrong, or the steps are others
	if err := Replay(&again, sc, tr); errors.As(err, &b) {
		t.Errorf("without the fault: %v", err)
	}
}

func TestTraceRefuses(t *testing.T) {
	sc := scenario(t, "smallest")
	for _, text := range []string{"", "scenario: smallest\n", "  1 [0] x\n", "scenario: smallest\n  1 [x] y\n", "scenario: smallest\nfault: of-mine\n  1 [0] y\n"} {
		if _, err := ParseTrace(text); err == nil {
			t.Errorf("%q was read", text)
		}
	}
	for _, tr := range []*Trace{{Steps: []int{99}}, {Steps: []int{-1}}, {Init: 1, Steps: []int{0}}, {Steps: []int{0}, Words: []string{"something else"}}} {
		if err := Replay(&strings.Builder{}, sc, tr); err == nil {
			t.Errorf("%+v was replayed", tr)
		}
	}
}

func TestFaultNames(t *testing.T) {
	for i, name := range FaultNames() {
		f, err := ParseFault(name)
		if err != nil || int(f) != i || f.String() != name || name == "" {
			t.Errorf("%d: %q, %v, %v", i, name, f, err)
		}
	}
	if _, err := ParseFault("x"); err == nil || Fault(200).String() != "fault(200)" {
		t.Error(err)
	}
}
