package kvbench

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"
)

// Table prints rows for people.
func Table(w io.Writer, rows []Row) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "transport\tblock\trooms\tGB/s\tmin\tmax\tp50 µs\tp99 µs\tCPU s/GB\tverified\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%s\t%d\t%.2f\t%.2f\t%.2f\t%.1f\t%.1f\t%.2f\t%v\t\n",
			r.Transport, bytesText(r.BlockBytes), r.Rooms, r.GBPerS, r.MinGBPS, r.MaxGBPS, r.P50US, r.P99US, r.CPUPerGB, r.Verified)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	repeated, longest := 0, 0.0
	for _, r := range rows {
		repeated, longest = repeated+r.Repeated, max(longest, r.CoreNS)
	}
	if longest > 0 {
		fmt.Fprintf(w, "a cache line took at most %.0f ns from one core to the other; %d rounds in which it took over %d ns were repeated\n", longest, repeated, apartNS)
	}
	return nil
}

func bytesText(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}

// RatioTable prints ratios for people.
func RatioTable(w io.Writer, ratios []Ratio) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "transport\tblock\tGB/s ratio\tof the best peer\tp50 ratio\tof the best peer")
	for _, r := range ratios {
		latency := "" // memcpy has none
		if r.LatencyRival != "" {
			latency = fmt.Sprintf("%.2f", r.Latency)
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t%s\t%s\t%s\n", r.Transport, bytesText(r.BlockBytes), r.Rate, r.RateRival, latency, r.LatencyRival)
	}
	return t.Flush()
}

// FairTable prints rows for people.
func FairTable(w io.Writer, rows []FairRow) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "transport\t64 KiB alone: p50 µs\tmax\tbeside 1 GiB: p50 µs\tp99\tmax\tn\t")
	for _, r := range rows {
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%d\t\n",
			r.Transport, r.AloneP50US, r.AloneMaxUS, r.BesideP50US, r.BesideP99US, r.BesideMaxUS, r.Beside)
	}
	return t.Flush()
}

// JSON writes rows as an array.
func JSON[R Row | FairRow](w io.Writer, rows []R) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(rows)
}
