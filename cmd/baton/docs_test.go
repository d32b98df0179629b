package main

import (
	"fmt"
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

// docLines calls f for each line of README, docs and decisions.
func docLines(t *testing.T, f func(where, line string)) {
	t.Helper()
	files, _ := filepath.Glob("../../docs/*.md")
	decisions, _ := filepath.Glob("../../docs/decisions/*.md")
	if len(files) < 10 || len(decisions) < 10 {
		t.Fatalf("found %d files in docs and %d decisions", len(files), len(decisions))
	}
	for _, file := range append(append(files, decisions...), "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for i, line := range strings.Split(string(text), "\n") {
			f(fmt.Sprintf("%s:%d", filepath.Base(file), i+1), line)
		}
	}
}

var flagInText = regexp.MustCompile("(?:^|[\\s`(\\[=])--([a-z][a-z0-9-]+)")

// Flags that README and docs name exist.
func TestFlagsInDocsExist(t *testing.T) {
	known := map[string]bool{}
	everyFlag(newRoot(), func(_ *cobra.Command, f *pflag.Flag) { known[f.Name] = true })
	docLines(t, func(where, line string) {
		for _, m := range flagInText.FindAllStringSubmatch(line, -1) {
			if !known[m[1]] && !slices.Contains(foreignFlags, m[1]) {
				t.Errorf("%s names --%s, which no command has", where, m[1])
			}
		}
	})
}

// Commands that README and docs show exist, and have the flags that they are shown with.
func TestCommandsInDocsExist(t *testing.T) {
	shown := regexp.MustCompile("^ *(?:[0-9a-z./]*bin/)?baton ([a-z-][^`]*)|`baton ([^`]*)`")
	seen := 0
	docLines(t, func(where, line string) {
		for _, m := range shown.FindAllStringSubmatch(line, -1) {
			text, _, _ := strings.Cut(m[1]+m[2], " #")
			c, rest, err := newRoot().Find(strings.Fields(text))
			if err != nil || c == c.Root() && len(rest) > 0 && !strings.HasPrefix(rest[0], "-") {
				t.Errorf("%s shows `baton %s`, which is no command", where, text)
				continue
			}
			seen++
			c.InheritedFlags() // merges them in
			for _, f := range flagInText.FindAllStringSubmatch(" "+strings.Join(rest, " "), -1) {
				if strings.Contains(text, "-flag=--"+f[1]) || c.Flags().Lookup(f[1]) != nil || f[1] == "help" {
					continue
				}
				t.Errorf("%s shows `%s` with --%s, which it has not", where, c.CommandPath(), f[1])
			}
		}
	})
	if seen < 50 {
		t.Errorf("only %d commands found", seen)
	}
}
