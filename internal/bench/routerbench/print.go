package routerbench

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// JSON writes rows as a list.
func JSON(w io.Writer, rows []Row) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(rows)
}

// find is the row of that name, if it is there.
func find(rows []Row, like Row, target, metric string) (Row, bool) {
	for _, r := range rows {
		if r.Work == like.Work && r.Conns == like.Conns && r.Target == target && r.Metric == metric {
			return r, true
		}
	}
	return Row{}, false
}

// Table prints rows for people: a line for each work, number of connections and target.
func Table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "work\tc\ttarget\trequests/s (spread)\tp50 ms\tp99 ms\tCPU s/1k: router\tfakes\tgenerator\tRSS MiB")
	for _, r := range rows {
		if r.Metric != MetricRate {
			continue
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%.0f (%.0f-%.0f)", r.Work, r.Conns, r.Target, r.Value, r.Min, r.Max)
		for _, m := range []struct{ name, form string }{
			{MetricP50, "%.3f"}, {MetricP99, "%.3f"}, {MetricCPU, "%.3f"}, {MetricCPUFakes, "%.3f"}, {MetricCPULoad, "%.3f"}, {MetricRSS, "%.0f"},
		} {
			if v, ok := find(rows, r, r.Target, m.name); ok {
				fmt.Fprintf(t, "\t"+m.form, v.Value)
			} else {
				fmt.Fprint(t, "\t")
			}
		}
		fmt.Fprintln(t)
	}
	fmt.Fprintln(t)
	for _, r := range rows {
		if r.Work == WorkGaps || r.Work == WorkOpen {
			fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%.3f %s (%.3f-%.3f)\n", r.Work, r.Conns, r.Target, r.Metric, r.Value, r.Unit, r.Min, r.Max)
		}
	}
	return t.Flush()
}

// Added prints what the targets add to a decode worker's own median latency, with one connection.
func Added(w io.Writer, rows []Row) {
	for _, r := range rows {
		if r.Metric != MetricP50 || r.Conns != 1 || r.Target == Direct {
			continue
		}
		if d, ok := find(rows, r, Direct, MetricP50); ok {
			fmt.Fprintf(w, "added p50 at c=1, %s, %s: %.3f ms\n", r.Work, r.Target, r.Value-d.Value)
		}
	}
}

// AddedGaps prints by how much the gap between two tokens is longer behind each router than without one, and by how much the latter itself differs from round to
// round: what is less than that has not been measured.
func AddedGaps(w io.Writer, rows []Row) error {
	if !slices.ContainsFunc(rows, func(r Row) bool { return r.Work == WorkGaps }) {
		return nil
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "gaps\tstreams\ttarget\tadded ms\tspread of direct, ms")
	for _, r := range rows {
		if r.Work != WorkGaps || r.Target == Direct || r.Metric != MetricGapP50 && r.Metric != MetricGapP99 && r.Metric != MetricGapMean {
			continue
		}
		if d, ok := find(rows, r, Direct, r.Metric); ok {
			fmt.Fprintf(t, "%s\t%d\t%s\t%+.3f\t%.3f\n", r.Metric, r.Conns, r.Target, r.Value-d.Value, d.Max-d.Min)
		}
	}
	return t.Flush()
}

// Ratios prints ours divided by each of the other routers, by work and number of connections.
func Ratios(w io.Writer, rows []Row, ours string) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "work\tc\tmetric\tratio")
	for _, r := range rows {
		if r.Target != ours || r.Metric != MetricRate && r.Metric != MetricCPU && r.Metric != MetricStreamRSS {
			continue
		}
		for _, o := range rows {
			if o.Target != ours && o.Target != Direct && o.Work == r.Work && o.Conns == r.Conns && o.Metric == r.Metric && o.Value > 0 {
				fmt.Fprintf(t, "%s\t%d\t%s\t%s / %s = %.2f\n", r.Work, r.Conns, r.Metric, ours, o.Target, r.Value/o.Value)
			}
		}
	}
	return t.Flush()
}
