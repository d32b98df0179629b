package kvbench

// Ratio compares one transport with the best of the others at one block size.
type Ratio struct {
	Transport  string
	BlockBytes int
	// Rate is its GB/s over the best GB/s of a rival; Latency its p50 over the best p50 of a
	// rival that has a notification. 0: nothing to compare with.
	Rate, Latency float64
	// Rivals that were best.
	RateRival, LatencyRival string
}

// Ratios compares transport ours with the rivals that match, at the block sizes which a rival has too.
func Ratios(rows []Row, ours string, rival func(string) bool) []Ratio {
	var out []Ratio
	for _, r := range rows {
		if r.Transport != ours {
			continue
		}
		x := Ratio{Transport: ours, BlockBytes: r.BlockBytes}
		var rate, p50 float64
		for _, o := range rows {
			if o.BlockBytes != r.BlockBytes || !rival(o.Transport) {
				continue
			}
			if o.GBPerS > rate {
				rate, x.RateRival = o.GBPerS, o.Transport
			}
			if o.P50US > 0 && (p50 == 0 || o.P50US < p50) {
				p50, x.LatencyRival = o.P50US, o.Transport
			}
		}
		if rate > 0 {
			x.Rate = r.GBPerS / rate
		}
		if p50 > 0 {
			x.Latency = r.P50US / p50
		}
		if rate > 0 || p50 > 0 {
			out = append(out, x)
		}
	}
	return out
}
