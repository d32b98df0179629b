package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// zeros are the flags that take 0 although it is not their default, negatives those that take less. What they mean is in their help.
var (
	zeros = []string{
		"baton bench router --warmup", "baton bench transfer --latencies", "baton bench transfer --patience", "baton chaos --faults", "baton chat --temperature",
		"baton decode --shutdown-grace", "baton demo --shutdown-grace", "baton prefill --shutdown-grace", "baton up --shutdown-grace", "baton router --shutdown-grace",
		"baton router --client-stall-timeout", "baton router --max-queue",
		"baton decode --otlp-ratio", "baton demo --otlp-ratio", "baton prefill --otlp-ratio", "baton up --otlp-ratio", "baton router --otlp-ratio",
	}
	negatives = []string{"baton router --eject-after"}
)

// eachNumber calls do with each flag of each command that takes a number, as it is after `command --flag=value`.
func eachNumber(t *testing.T, value string, do func(name string, f *pflag.Flag)) {
	t.Helper()
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if numbers(f.Value) == nil && f.Value.Type() != "intSlice" {
				return
			}
			v := value
			if f.Value.Type() == "duration" {
				v += "s"
			}
			if f.Value.Type() == "uint64" && strings.HasPrefix(v, "-") {
				return // pflag refuses it
			}
			if err := f.Value.Set(v); err != nil {
				t.Fatalf("%s --%s=%s: %v", c.CommandPath(), f.Name, v, err)
			}
			do(c.CommandPath()+" --"+f.Name, f)
		})
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(newRoot())
}

// TestNumbersAreChecked: every flag of every command refuses a negative number, and 0 where that has no meaning of its own, but for those listed here.
func TestNumbersAreChecked(t *testing.T) {
	takes := map[string]bool{}
	count := 0
	eachNumber(t, "-1", func(name string, f *pflag.Flag) {
		count++
		if err := checkNumber(f); err == nil && f.Value.String() != f.DefValue {
			takes[name] = true
		} else if err != nil && (!errors.As(err, new(usageError)) || !strings.Contains(err.Error(), "--"+f.Name+" -1")) {
			t.Errorf("%s: %v", name, err)
		}
	})
	if count < 100 {
		t.Errorf("only %d flags take numbers", count)
	}
	if got := slices.Sorted(maps.Keys(takes)); !slices.Equal(got, negatives) {
		t.Errorf("negative numbers are taken by %q, want %q", got, negatives)
	}
	clear(takes)
	eachNumber(t, "0", func(name string, f *pflag.Flag) {
		if checkNumber(f) == nil && f.Value.String() != f.DefValue {
			takes[name] = true
		}
	})
	if got, want := slices.Sorted(maps.Keys(takes)), slices.Sorted(slices.Values(zeros)); !slices.Equal(got, want) {
		t.Errorf("0 is taken by\n%q, want\n%q", got, want)
	}
}

// TestNumbersAtTheStart: commands refuse such numbers before they do anything.
func TestNumbersAtTheStart(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel() // should one begin, it ends
	for _, line := range []string{
		"router --client-stall-timeout=-1s", "router --max-resumes=-1", "router --max-resumes=0", "router --shutdown-grace=-1ns", "router --max-connections=-1", "router --max-inflight=0",
		"router --eject-after=0", "decode --shutdown-grace=-1s", "prefill --keepalive-time=-1s", "up --stuck-after=-1s", "bench router --gap-streams=16,0", "chat --max-tokens=-5", "chaos --gap=-1s",
	} {
		args := strings.Fields(line)
		root := newRoot()
		root.SetArgs(args)
		root.SetOut(io.Discard)
		err := root.ExecuteContext(ended)
		flag, _, _ := strings.Cut(args[len(args)-1], "=")
		if !errors.As(err, new(usageError)) || !strings.HasPrefix(err.Error(), flag+" ") || !strings.Contains(err.Error(), ": must ") {
			t.Errorf("baton %s: %v", line, err)
		}
	}
}
