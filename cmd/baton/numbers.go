package main

import (
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// What the help of a flag says of its unusual values is what the flag takes: "(0: ...)" or "0 for ...", and "(negative: ...)".
var (
	zeroMeans     = regexp.MustCompile(`\b0(:| for) `)
	negativeMeans = regexp.MustCompile(`\bnegative: `)
)

// checked makes a command refuse numbers and durations that mean nothing, before it begins: a limit of -1s, say, that would be no limit, or one of 0
// that would quietly be the default.
func checked(run func(*cobra.Command, []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) (err error) {
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if err == nil {
				err = checkNumber(f)
			}
		})
		if err != nil {
			return err
		}
		return run(c, args)
	}
}

// checkNumber refuses a number that is negative, and 0 where neither the default is 0 nor the help says what it means. The default itself is always taken.
func checkNumber(f *pflag.Flag) error {
	if f.Value.String() == f.DefValue {
		return nil
	}
	zero := isZero(f.DefValue) || zeroMeans.MatchString(f.Usage)
	for _, v := range numbers(f.Value) {
		switch negative := strings.HasPrefix(v, "-"); {
		case negative && !negativeMeans.MatchString(f.Usage) && zero:
			return usagef("--%s %s: must not be negative", f.Name, v)
		case negative && !negativeMeans.MatchString(f.Usage), isZero(v) && !zero:
			return usagef("--%s %s: must be more than 0", f.Name, v)
		}
	}
	return nil
}

// numbers are a flag's values, none if they are no numbers.
func numbers(v pflag.Value) []string {
	if s, ok := v.(pflag.SliceValue); ok && v.Type() == "intSlice" {
		return s.GetSlice()
	}
	switch v.Type() {
	case "int", "int64", "uint64", "float64", "duration":
		return []string{v.String()}
	}
	return nil
}

// isZero: text is a number or a duration of 0.
func isZero(text string) bool {
	if n, err := strconv.ParseFloat(text, 64); err == nil {
		return n == 0
	}
	d, err := time.ParseDuration(text)
	return err == nil && d == 0
}
