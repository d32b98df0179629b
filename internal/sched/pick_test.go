package sched

import (
	"context"
	"slices"
	"testing"
)

// job is a prompt of n chunks that nobody but pick looks at.
func job(n int) *prefillJob {
	ctx, stop := context.WithCancel(context.Background())
	return &prefillJob{life: &life{ctx: ctx, stop: stop}, bounds: make([]int, n+1)}
}

// order computes until no chunk is left and returns, for each chunk, which prompt it was of.
// Before chunk i, come(i) may add prompts.
func order(p *Prefill, jobs *[]*prefillJob, come func(chunk int)) []int {
	var got []int
	for {
		if come != nil {
			come(len(got))
		}
		p.active = *jobs
		j := p.pick()
		if j == nil {
			return got
		}
		j.computed++
		got = append(got, slices.Index(*jobs, j))
	}
}

func TestShortPromptsGoFirst(t *testing.T) {
	jobs := []*prefillJob{job(6), job(2), job(6), job(2)}
	got := order(&Prefill{}, &jobs, nil)
	want := []int{1, 1, 3, 0, 3, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2}
	if !slices.Equal(got, want) {
		t.Errorf("chunks of prompts %v, want %v", got, want)
	}
}

func TestShortPromptsCannotStopALongOne(t *testing.T) {
	jobs := []*prefillJob{job(10)}
	got := order(&Prefill{}, &jobs, func(chunk int) {
		if chunk < 100 {
			jobs = append(jobs, job(1)) // a new short one for every chunk computed
		}
	})
	at := 0
	for i, j := range got {
		if j == 0 {
			at = i
		}
	}
	if at >= 10*oldestEvery {
		t.Errorf("the long prompt of 10 chunks was ready after %d chunks of others", at)
	}
}

func TestDeadPromptsArePassedOver(t *testing.T) {
	jobs := []*prefillJob{job(3), job(2)}
	jobs[1].stop()
	if got, want := order(&Prefill{}, &jobs, nil), []int{0, 0, 0}; !slices.Equal(got, want) {
		t.Errorf("chunks of prompts %v, want %v", got, want)
	}
}
