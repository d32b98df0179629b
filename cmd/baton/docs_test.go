package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// everyFlag calls f for each flag of each command.
func everyFlag(c *cobra.Command, f func(*cobra.Command, *pflag.Flag)) {
	c.InitDefaultHelpFlag()
	c.InitDefaultVersionFlag()
	visit := func(flag *pflag.Flag) { f(c, flag) }
	c.LocalFlags().VisitAll(visit)
	c.PersistentFlags().VisitAll(visit)
	for _, sub := range c.Commands() {
		everyFlag(sub, f)
	}
}

// Back quotes in a flag's usage name its value; they are no quotation marks.
func TestFlagsValuesAreOneWord(t *testing.T) {
	everyFlag(newRoot(), func(c *cobra.Command, f *pflag.Flag) {
		if value, _ := pflag.UnquoteUsage(f); strings.Contains(value, " ") {
			t.Errorf("%s --%s has a value called %q in the help", c.CommandPath(), f.Name, value)
		}
	})
}

// foreignFlags are of other programs that the docs name: sglang-router, smg, etcdctl.
var foreignFlags = []string{"pd-disaggregation", "disable-retries", "retry-max-retries", "disable-load-monitoring", "mini-lb", "lease"}

// Flags that README and docs name exist.
func TestFlagsInDocsExist(t *testing.T) {
	known := map[string]bool{}
	everyFlag(newRoot(), func(_ *cobra.Command, f *pflag.Flag) { known[f.Name] = true })
	files, _ := filepath.Glob("../../docs/*.md")
	decisions, _ := filepath.Glob("../../docs/decisions/*.md")
	if len(files) < 10 || len(decisions) < 10 {
		t.Fatalf("found %d files in docs and %d decisions", len(files), len(decisions))
	}
	flag := regexp.MustCompile("(?:^|[\\s`(\\[=])--([a-z][a-z0-9-]+)")
	for _, file := range append(append(files, decisions...), "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			for _, m := range flag.FindAllStringSubmatch(line, -1) {
				if !known[m[1]] && !slices.Contains(foreignFlags, m[1]) {
					t.Errorf("%s:%d names --%s, which no command has", filepath.Base(file), i+1, m[1])
				}
			}
		}
	}
}
