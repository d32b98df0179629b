package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/baton-pd/baton/internal/model/legacy"
)

// palette holds the escapes of one way to print; all empty without a terminal.
type palette struct{ bold, dim, bad, good, off string }

// colours are used on a terminal only, and not when NO_COLOR asks for none.
func colours(w io.Writer) palette {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return palette{}
	}
	if st, err := f.Stat(); err != nil || st.Mode()&os.ModeCharDevice == 0 {
		return palette{}
	}
	return palette{bold: "\x1b[1m", dim: "\x1b[2m", bad: "\x1b[31m", good: "\x1b[32m", off: "\x1b[0m"}
}

// columns of the timeline, with their widths in characters.
var columns = []struct {
	title string
	width int
}{{"", 2}, {"worker", 27}, {"bootstrap", 25}, {"scheduler", 25}, {"room after it", 23}, {"client", 16}}

// printTimeline writes one execution as a table, and what to think of it.
func printTimeline(w io.Writer, t *legacy.Timeline, p legacy.Policy, v legacy.Variant, c palette) {
	fmt.Fprintf(w, "%s%s, policy %s%s: %s\n%s\n\n", c.bold, v.Name, p.Name, c.off, p.Does, v.Tells)
	var head, rule []string
	for _, col := range columns {
		head = append(head, pad(col.title, col.width))
		rule = append(rule, strings.Repeat("─", col.width))
	}
	fmt.Fprintf(w, "%s%s%s\n%s\n", c.bold, strings.TrimRight(strings.Join(head, "  "), " "), c.off, strings.Join(rule, "──"))
	room := ""
	for _, r := range t.Rows {
		cells := make([]string, len(columns))
		if r.Number > 0 {
			cells[0] = fmt.Sprint(r.Number)
		}
		at := 1
		for i, col := range columns {
			if col.title == r.Thread {
				at = i
			}
		}
		cells[at] = r.Step
		if r.Why != "" {
			cells[at] += " (" + r.Why + ")"
		}
		if r.Room != room {
			cells[4] = r.Room
			room = r.Room
		} else {
			cells[4] = "″"
		}
		cells[5] = r.Client
		printCells(w, cells, r.Bad, c)
	}
	fmt.Fprintln(w)
	for _, line := range explain(t) {
		fmt.Fprintln(w, line)
	}
}

// printCells writes one row, as many lines as its longest cell needs.
func printCells(w io.Writer, cells []string, bad bool, c palette) {
	var wrapped [][]string
	lines := 0
	for i, cell := range cells {
		ws := wrap(cell, columns[i].width)
		wrapped = append(wrapped, ws)
		lines = max(lines, len(ws))
	}
	for n := range lines {
		var parts []string
		for i, ws := range wrapped {
			text := ""
			if n < len(ws) {
				text = ws[n]
			}
			text = pad(text, columns[i].width)
			if bad && i > 0 && i < 4 && strings.TrimSpace(text) != "" {
				text = c.bad + text + c.off
			}
			if i == 5 {
				text = c.dim + text + c.off
			}
			parts = append(parts, text)
		}
		fmt.Fprintln(w, strings.TrimRight(strings.Join(parts, "  "), " "))
	}
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(0, width-utf8.RuneCountInString(s)))
}

// wrap breaks s between words into lines of at most width characters; a longer word stands alone.
func wrap(s string, width int) []string {
	var lines []string
	line := ""
	for _, word := range strings.Fields(s) {
		switch {
		case line == "":
			line = word
		case utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) <= width:
			line += " " + word
		default:
			lines = append(lines, line)
			line = word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// explain is what a reader should take from a timeline.
func explain(t *legacy.Timeline) []string {
	var out []string
	say := func(lines ...string) { out = append(out, lines...) }
	if t.Faults == 0 {
		say("Nothing went wrong: every request ended, each failure with its first cause, and no byte was stored after an ack.")
	} else {
		say("What went wrong: " + faultWords(t.Faults) + ".")
	}
	if t.Policy == "legacy" && t.Faults&legacy.Pinned != 0 && t.Variant == legacy.Variants()[0].Name && !t.Unlocked {
		say("",
			"The status is merged with max(), and Failed is the lowest number: a worker that began its chunk before the ABORT",
			"writes Transferring after it, and the failure is forgotten (10). The ABORT had also dropped the transfer information,",
			"so the last chunk, whose end would have written Success, is skipped without a word (11). Nobody will write a status",
			"again, and the queue that waits for one has no deadline (12): the client hangs and the gauge stays at 1.",
			"And the ack went out while c0 was being written: its bytes land in pages that may belong to somebody else (9).")
	}
	if t.Policy == "baton" {
		say("",
			"In Baton a worker asks before it writes (begin), and only the room's table answers; no thread writes a state. A",
			"terminal state has no way out, a chunk of a failed room is answered with \"skip\", and the ack waits until the last",
			"write has settled.")
	}
	return append(out, "", "All interleavings of every policy: baton race --explore. The story: docs/race.md.")
}

// printReports writes the table of one variant.
func printReports(w io.Writer, v legacy.Variant, unlocked bool, reports []*legacy.Report) {
	fmt.Fprintf(w, "%s (update_status %s): %s\n\n", v.Name, lockWord(unlocked), v.Tells)
	head := []string{"policy", "states", "executions", "pinned", "written after ack", "wrong success", "lost cause"}
	rows := [][]string{head}
	for _, r := range reports {
		row := []string{r.Policy, fmt.Sprint(r.States), r.Executions.String()}
		for _, f := range legacy.Faults() {
			n := r.Count(f)
			if n.Zero() {
				row = append(row, "none")
			} else {
				row = append(row, n.String())
			}
		}
		rows = append(rows, row)
	}
	printTable(w, rows)
}

// printSummary writes which faults each policy leaves open in each variant: a letter each.
func printSummary(w io.Writer, all [][]*legacy.Report) {
	fmt.Fprintf(w, "\nwhat is left open: P pinned, A written after ack, W wrong success, L lost cause\n\n")
	rows := [][]string{{"variant"}}
	for _, r := range all[0] {
		rows[0] = append(rows[0], r.Policy)
	}
	for _, reports := range all {
		row := []string{reports[0].Variant}
		for _, r := range reports {
			cell := []byte("----")
			for i, f := range legacy.Faults() {
				if !r.Count(f).Zero() {
					cell[i] = "PAWL"[i]
				}
			}
			row = append(row, string(cell))
		}
		rows = append(rows, row)
	}
	printTable(w, rows)
}

// printTable writes the first column to the left and the others to the right.
func printTable(w io.Writer, rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, row := range rows {
		line := pad(row[0], widths[0])
		for i, cell := range row[1:] {
			line += "  " + strings.Repeat(" ", widths[i+1]-len(cell)) + cell
		}
		fmt.Fprintln(w, line)
	}
}

func lockWord(unlocked bool) string {
	if unlocked {
		return "unlocked"
	}
	return "locked"
}

// printExamples writes the shortest counterexamples. One that is the same for another policy
// is told once.
func printExamples(w io.Writer, reports []*legacy.Report) {
	told := map[string]string{}
	for _, r := range reports {
		for _, e := range r.Examples {
			var b strings.Builder
			for i, l := range e.Lines {
				fmt.Fprintf(&b, "  %2d  %-9s  %-62s  %s\n", i+1, l.Thread, l.Step, l.Room)
			}
			title := fmt.Sprintf("%s, %s", r.Policy, faultWords(e.Fault))
			key := e.Fault.String() + b.String()
			if as, ok := told[key]; ok {
				fmt.Fprintf(w, "\n%s: as %s\n", title, as)
				continue
			}
			told[key] = title
			fmt.Fprintf(w, "\n%s, the shortest (%d steps):\n%s", title, len(e.Lines), b.String())
		}
	}
}
