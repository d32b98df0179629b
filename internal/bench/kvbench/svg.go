package kvbench

import (
	"cmp"
	"fmt"
	"html"
	"io"
	"math"
	"slices"
	"strings"
)

// Plot geometry in SVG user units.
const (
	plotW, plotH             = 760, 420
	left, right, top, bottom = 60, 150, 44, 48
)

// colours of lines, as many as baton bench transfer --peers has; further lines are dashed.
var colours = []string{"#1668c7", "#c4461a", "#2c8a3d", "#8a3fc0", "#9a7b00", "#00808a", "#c02c6d", "#555555", "#e08a00"}

// SVG draws GB/s over block size, a line a transport, as a self-contained picture.
func SVG(w io.Writer, rows []Row) error {
	if len(rows) == 0 {
		return fmt.Errorf("kvbench: nothing to draw")
	}
	lines := map[string][]Row{}
	var names []string
	lo, hi, most := rows[0].BlockBytes, rows[0].BlockBytes, 0.0
	for _, r := range rows {
		if lines[r.Transport] == nil {
			names = append(names, r.Transport)
		}
		lines[r.Transport] = append(lines[r.Transport], r)
		lo, hi, most = min(lo, r.BlockBytes), max(hi, r.BlockBytes), max(most, r.MaxGBPS)
	}
	span := max(math.Log2(float64(hi)/float64(lo)), 1)
	x := func(block int) float64 {
		return left + math.Log2(float64(block)/float64(lo))/span*(plotW-left-right)
	}
	step := math.Max(1, math.Ceil(most/8))
	ceil := math.Max(step, math.Ceil(most/step)*step)
	y := func(v float64) float64 { return plotH - bottom - v/ceil*(plotH-top-bottom) }

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="system-ui, sans-serif" font-size="12">`+"\n", plotW, plotH)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="#fff"/>`+"\n", plotW, plotH)
	fmt.Fprintf(&b, `<text x="%d" y="24" font-size="15" fill="#222">KV transfer between two processes, GB/s by block size (median, min to max)</text>`+"\n", left)
	for v := 0.0; v <= ceil; v += step {
		fmt.Fprintf(&b, `<path d="M%d %.1fH%d" stroke="#ddd"/><text x="%d" y="%.1f" text-anchor="end" fill="#555">%g</text>`+"\n",
			left, y(v), plotW-right, left-8, y(v)+4, v)
	}
	var ticks []int
	for _, r := range rows {
		ticks = append(ticks, r.BlockBytes)
	}
	slices.Sort(ticks)
	for _, t := range slices.Compact(ticks) {
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle" fill="#555">%s</text>`+"\n", x(t), plotH-bottom+20, bytesText(t))
	}
	last := make([]float64, len(names)) // where the lines end
	for k, name := range names {
		slices.SortFunc(lines[name], func(a, b Row) int { return a.BlockBytes - b.BlockBytes })
		last[k] = y(lines[name][len(lines[name])-1].GBPerS)
	}
	labels := spread(last, 14, top, plotH-bottom-6)
	for k, name := range names {
		c, ls := colours[k%len(colours)], lines[name]
		dash := ""
		if k >= len(colours) {
			dash = ` stroke-dasharray="5 3"`
		}
		var path strings.Builder
		for i, r := range ls {
			fmt.Fprintf(&path, "%c%.1f %.1f", "ML"[min(i, 1)], x(r.BlockBytes), y(r.GBPerS))
			fmt.Fprintf(&b, `<path d="M%.1f %.1fV%.1f" stroke="%s" stroke-opacity=".4"/><circle cx="%.1[1]f" cy="%.1[5]f" r="3" fill="%[4]s"/>`+"\n",
				x(r.BlockBytes), y(r.MinGBPS), y(r.MaxGBPS), c, y(r.GBPerS))
		}
		fmt.Fprintf(&b, `<path d="%s" fill="none" stroke="%s" stroke-width="2"%s/><text x="%.1f" y="%.1f" fill="%s">%s</text>`+"\n",
			path.String(), c, dash, x(ls[len(ls)-1].BlockBytes)+10, labels[k]+4, c, html.EscapeString(name))
	}
	b.WriteString("</svg>\n")
	_, err := io.WriteString(w, b.String())
	return err
}

// spread moves places apart that are closer than gap, keeps their order, and keeps them between lo and hi if they fit.
func spread(at []float64, gap, lo, hi float64) []float64 {
	order := make([]int, len(at))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(at[a], at[b]) })
	out := slices.Clone(at)
	below := lo - gap
	for _, i := range order {
		out[i] = max(out[i], below+gap)
		below = out[i]
	}
	above := hi + gap
	for _, i := range slices.Backward(order) {
		out[i] = min(out[i], above-gap)
		above = out[i]
	}
	return out
}
