package llamacpp

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/engine"
)

// tooLate is far above the promised 50 ms, so that a busy machine does not fail the test;
// the latency itself is logged.
const tooLate = time.Second

// interruptAfter runs do under a deadline that ends in the middle of it.
func interruptAfter(t *testing.T, d time.Duration, what string, do func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	err := do(ctx)
	end, _ := ctx.Deadline()
	late := time.Since(end)
	if !errors.Is(err, engine.ErrInterrupted) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("%s: %v", what, err)
	}
	t.Logf("%s returned %v after its context had ended", what, late)
	if late > tooLate {
		t.Errorf("%s: %v late", what, late)
	}
}

func TestInterrupt(t *testing.T) {
	e := open(t, nil)
	text := prompt(t, e, 257)
	prefill(t, e, 0, text[:128])
	want, err := e.SwapOut(0)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		interruptAfter(t, 40*time.Millisecond, "prefill of 128 tokens", func(ctx context.Context) error {
			return e.Prefill(ctx, 0, text[128:256], 128)
		})
	}
	if e.UsedCells() != 128 {
		t.Errorf("%d cells used after interrupted prefills", e.UsedCells())
	}
	if got, err := e.SwapOut(0); err != nil || !slices.Equal(got, want) {
		t.Errorf("the sequence changed (%v)", err)
	}
	s := greedy(t, e)
	var rows []engine.Row
	for seq := range engine.Seq(8) {
		if seq > 0 {
			if err := e.CopySeq(0, seq); err != nil {
				t.Fatal(err)
			}
		}
		rows = append(rows, engine.Row{Seq: seq, Token: text[128], Pos: 128, Sampler: s})
	}
	for range 3 {
		interruptAfter(t, 3*time.Millisecond, "step of 8 rows", func(ctx context.Context) error {
			_, err := e.Step(ctx, rows)
			return err
		})
	}
	// The same calls succeed afterwards, with the right answer: a late wake-up of an
	// interrupted call stops no other.
	out, err := e.Step(t.Context(), rows)
	if err != nil {
		t.Fatal(err)
	}
	for i := range out {
		if out[i].Token != out[0].Token {
			t.Errorf("row %d: token %d, row 0 %d", i, out[i].Token, out[0].Token)
		}
	}
	for seq := range engine.Seq(8) {
		e.FreeSeq(seq)
	}
	prefill(t, e, 1, text[:128])
	if got := decode(t, e, 1, text[128], 128, 1)[0]; got != out[0].Token {
		t.Errorf("after interruptions token %d, without %d", out[0].Token, got)
	}
}

func TestEndedContextComputesNothing(t *testing.T) {
	e := openTiny(t, nil)
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("client gone")
	cancel(gone)
	if err := e.Prefill(ctx, 0, []engine.Token{5}, 0); !errors.Is(err, engine.ErrInterrupted) || !errors.Is(err, gone) {
		t.Errorf("prefill: %v", err)
	}
	if _, err := e.Step(ctx, []engine.Row{{Token: 5, Sampler: greedy(t, e)}}); !errors.Is(err, engine.ErrInterrupted) {
		t.Errorf("step: %v", err)
	}
	if e.UsedCells() != 0 {
		t.Errorf("%d cells", e.UsedCells())
	}
	if err := e.Prefill(t.Context(), 0, []engine.Token{5}, 0); err != nil {
		t.Errorf("prefill afterwards: %v", err)
	}
}

// TestLateWakeUp: a context that ends after its computation leaves the next alone.
func TestLateWakeUp(t *testing.T) {
	in, err := newInterrupt()
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := in.free(); err != nil {
			t.Error(err)
		}
	}()
	expect := func(want uint32, when string) {
		t.Helper()
		if got := in.word.Load(); got != want {
			t.Errorf("%s: the word is %d, not %d", when, got, want)
		}
	}
	first := in.next()
	in.fire(first)
	expect(1, "fired")
	in.next()
	expect(0, "ended")
	in.fire(first)
	expect(0, "fired too late")
	second := in.next()
	in.fire(first)
	expect(0, "fired during the next computation")
	in.fire(second)
	expect(1, "fired in time")
}
