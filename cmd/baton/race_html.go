package main

import (
	_ "embed"
	"html/template"
	"io"
	"strings"

	"github.com/baton-pd/baton/internal/model/legacy"
)

//go:embed race.html.tmpl
var raceTemplate string

var racePage = template.Must(template.New("race").Parse(raceTemplate))

// Geometry of the picture, in SVG units.
const (
	laneTop  = 56
	rowPitch = 46
	laneStep = 290
	laneLeft = 70
	roomX    = laneLeft + 3*laneStep - 20
	clientX  = roomX + 290
	pageWide = clientX + 250
)

// pageRow is one step in the picture.
type pageRow struct {
	legacy.Row
	Y, X, TextX int
	Lane        int
	Lines       []string // the step, broken to fit
	WhyLines    []string
	RoomLines   []string // only where the room has changed
	// ClientLines only where the client knows something new.
	ClientLines []string
	ClientKind  string
}

// pageLink joins two heights of one lane: consecutive steps, the ends of a write, a state's stay.
type pageLink struct {
	X, Y1, Y2 int
	Lane      int
	Bad       bool
	Kind      string // of a stay: live, bad, done
}

type racePageData struct {
	Timeline *legacy.Timeline
	Policy   legacy.Policy
	Variant  legacy.Variant
	Rows     []pageRow
	Links    []pageLink // of the three threads
	Writes   []pageLink
	Stays    []pageLink // of the room and the client in a state
	Lanes    []lane
	Explain  []string
	Faults   string
	Lock     string
	Wide, High, Bottom, Top,
	RoomX, ClientX int
}

type lane struct {
	Name, Sub string
	X         int
}

// writeTimelineHTML writes a page that needs nothing else: one SVG, its style inside.
func writeTimelineHTML(w io.Writer, t *legacy.Timeline, p legacy.Policy, v legacy.Variant) error {
	d := racePageData{Timeline: t, Policy: p, Variant: v, Explain: paragraphs(explain(t)), Faults: faultWords(t.Faults), Lock: "update_status is " + lockWord(t.Unlocked),
		Wide: pageWide, RoomX: roomX, ClientX: clientX, Top: laneTop}
	if p.Name == "baton" {
		d.Lock = "events are applied under the room's lock"
	}
	for i, l := range []lane{{Name: "worker", Sub: "transfer worker"}, {Name: "bootstrap", Sub: "hears the decode side"}, {Name: "scheduler", Sub: "polls, ends, clears"}} {
		l.X = laneLeft + i*laneStep
		d.Lanes = append(d.Lanes, l)
	}
	d.lay(t)
	return racePage.Execute(w, d)
}

// lay gives every step its place.
func (d *racePageData) lay(t *legacy.Timeline) {
	room, client := "", ""
	y := laneTop + 34
	var last [3]int
	roomAt, clientAt, writeAt := 0, 0, 0
	roomKind, clientKind := "", ""
	for _, r := range t.Rows {
		row := pageRow{Row: r, Y: y, Lane: laneOf(r.Thread)}
		row.X = laneLeft + row.Lane*laneStep
		row.TextX = row.X + 24
		row.Lines, row.WhyLines = wrap(r.Step, 33), wrap(r.Why, 37)
		if r.Bad { // bold
			row.Lines = wrap(r.Step, 30)
		}
		if r.Room != room {
			row.RoomLines = wrap(r.Room, 34)
			d.Stays = stay(d.Stays, roomX, roomAt, y, roomKind)
			room, roomAt, roomKind = r.Room, y, kindOfRoom(r)
		}
		if r.Client != client {
			row.ClientLines, row.ClientKind = wrap(r.Client, 30), kindOfClient(r.Client)
			d.Stays = stay(d.Stays, clientX, clientAt, y, clientKind)
			client, clientAt, clientKind = r.Client, y, row.ClientKind
		}
		if last[row.Lane] > 0 {
			d.Links = append(d.Links, pageLink{X: row.X, Y1: last[row.Lane], Y2: y, Lane: row.Lane})
		}
		last[row.Lane] = y
		if r.Begins {
			writeAt = y
		}
		if r.Completes {
			d.Writes = append(d.Writes, pageLink{X: row.X, Y1: writeAt, Y2: y, Bad: r.Bad})
		}
		d.Rows = append(d.Rows, row)
		y += max(rowPitch, 19+17*max(len(row.Lines)+len(row.WhyLines), len(row.RoomLines), len(row.ClientLines)))
	}
	d.Bottom = y - 10
	d.High = y + 10
	d.Stays = stay(d.Stays, roomX, roomAt, d.Bottom, roomKind)
	d.Stays = stay(d.Stays, clientX, clientAt, d.Bottom, clientKind)
}

// stay adds a state's stay between two changes; one without a kind is not drawn.
func stay(to []pageLink, x, y1, y2 int, kind string) []pageLink {
	if y1 == 0 || kind == "" {
		return to
	}
	return append(to, pageLink{X: x, Y1: y1, Y2: y2, Kind: kind})
}

func kindOfRoom(r legacy.Row) string {
	switch {
	case r.Failed:
		return "bad"
	case strings.HasPrefix(r.Room, "forgotten"), strings.HasPrefix(r.Room, "no status"):
		return ""
	default:
		return "live"
	}
}

func kindOfClient(client string) string {
	switch {
	case strings.Contains(client, "hangs"):
		return "bad"
	case strings.HasSuffix(client, "gauge 0"):
		return "done"
	default:
		return "live"
	}
}

// paragraphs joins the lines between empty ones.
func paragraphs(lines []string) []string {
	return strings.Split(strings.TrimSpace(strings.ReplaceAll(strings.Join(lines, "\n"), "\n\n", "\x00")), "\x00")
}

func laneOf(thread string) int {
	switch thread {
	case "worker":
		return 0
	case "bootstrap":
		return 1
	default:
		return 2
	}
}
