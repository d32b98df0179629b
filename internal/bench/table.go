package bench

import (
	"fmt"
	"io"
	"text/tabwriter"
)

// Table prints rows for people.
func Table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "work\ttarget\tmetric\tmedian\tmin\tmax\tunit\tn")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%s\t%.2f\t%.2f\t%.2f\t%s\t%d\n", r.Work, r.Target, r.Metric, r.Value, r.Min, r.Max, r.Unit, r.N)
	}
	return t.Flush()
}

// Ratios compares the medians of one target with another's, row by row.
func Ratios(w io.Writer, rows []Row, a, b string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "work\tmetric\t%s / %s\n", a, b)
	for _, x := range rows {
		if x.Target != a {
			continue
		}
		for _, y := range rows {
			if y.Target == b && y.Work == x.Work && y.Metric == x.Metric && y.Value != 0 {
				fmt.Fprintf(t, "%s\t%s\t%.3f\n", x.Work, x.Metric, x.Value/y.Value)
			}
		}
	}
	return t.Flush()
}
