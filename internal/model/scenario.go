package model

import (
	"embed"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

//go:embed scenarios/*.world
var worldFiles embed.FS

// Transport says what a revoked grant means at the target.
type Transport string

const (
	// TransportFence: no byte is stored after Revoke (tcp).
	TransportFence Transport = "fence"
	// TransportDrain: a writer that is inside a grant stores what it began, then says
	// that it has left; no other can enter (shm).
	TransportDrain Transport = "drain"
	// TransportWild: the target can refuse nothing; what was posted may store until it
	// completes or its process dies (RDMA without revocable keys, such as nixl).
	TransportWild Transport = "wild"
)

// Scenario is one bounded world: its shape, and how often each fault may strike. Counts
// are upper bounds: a fault may also strike less often.
type Scenario struct {
	Name string
	// For says what the world is meant to show.
	For string
	// Large worlds take minutes; small ones are explored by every test run.
	Large bool

	Transport Transport
	// Datagram: messages are lost, doubled and reordered one by one. Otherwise a session is a
	// stream: in order, and lost only with its end.
	Datagram, Reorder bool
	Rooms             int // 1..2, told apart by nobody
	Chunks            int // of each room, one page each
	Pages             int
	// Reuse further requests, each with the room id of an earlier one: ReuseGeneration
	// under a generation of its own, else under the same key. OtherPrompt: its tokens differ.
	Reuse           int
	ReuseGeneration bool
	OtherPrompt     bool
	// EarlyReuse: a tombstone may expire while the other side's room of the key still lives.
	EarlyReuse bool
	// Deadlines: each room's deadline may come at any time. Without them everything must
	// end by what the two sides tell each other.
	Deadlines bool

	budgets [numBudgets]uint8
}

// budgetKeys are the words of the budgets in a scenario file.
var budgetKeys = [numBudgets]string{
	budAbort: "aborts", budRelease: "releases", budDrop: "drops", budError: "write_errors", budDamage: "damages", budAbsent: "absent",
	budBreak: "session_ends", budDataBreak: "data_ends", budCrashS: "prefill_crashes", budCrashR: "decode_crashes",
	budLoss: "losses", budDup: "duplicates", budExpiry: "tombstones_expire",
}

// Scenarios are those that come with the package, by name.
func Scenarios() []*Scenario {
	files, err := worldFiles.ReadDir("scenarios")
	if err != nil {
		panic(err) // embedded
	}
	var out []*Scenario
	for _, f := range files {
		text, err := worldFiles.ReadFile("scenarios/" + f.Name())
		if err != nil {
			panic(err) // embedded
		}
		sc, err := ParseScenario(strings.TrimSuffix(f.Name(), ".world"), string(text))
		if err != nil {
			panic(err) // a test parses each
		}
		out = append(out, sc)
	}
	return out
}

// Find is the embedded scenario of this name.
func Find(name string) (*Scenario, bool) {
	all := Scenarios()
	i := slices.IndexFunc(all, func(sc *Scenario) bool { return sc.Name == name })
	if i < 0 {
		return nil, false
	}
	return all[i], true
}

// ScenarioName is the name of a scenario in the file at p.
func ScenarioName(p string) string { return strings.TrimSuffix(path.Base(p), ".world") }

// ParseScenario reads the text of a .world file: a line "key = value" each, "#" begins a
// comment. Every key at most once; what is not named is 0, "no", one room, one chunk,
// as many pages as chunks. Errors name file, line and key.
func ParseScenario(name, text string) (*Scenario, error) {
	sc := &Scenario{Name: name, Transport: TransportFence, Rooms: 1, Chunks: 1, Deadlines: true}
	seen := make(map[string]bool)
	for n, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); line == "" {
			continue
		}
		key, value, ok := strings.Cut(line, "=")
		key, value = strings.TrimSpace(key), strings.TrimSpace(value)
		switch {
		case !ok || key == "" || value == "":
			return nil, fmt.Errorf("scenario %s, line %d: %q is not \"key = value\"", name, n+1, line)
		case seen[key]:
			return nil, fmt.Errorf("scenario %s, line %d: %s is set twice", name, n+1, key)
		}
		seen[key] = true
		if err := sc.set(key, value); err != nil {
			return nil, fmt.Errorf("scenario %s, line %d: %s: %w", name, n+1, key, err)
		}
	}
	if sc.Pages == 0 {
		sc.Pages = sc.Rooms * sc.Chunks
	}
	if err := sc.validate(seen); err != nil {
		return nil, fmt.Errorf("scenario %s: %w", name, err)
	}
	return sc, nil
}

func (sc *Scenario) set(key, value string) (err error) {
	number := func(into *int, low, high int) error {
		v, err := strconv.Atoi(value)
		if err != nil || v < low || v > high {
			return fmt.Errorf("%q is not a number from %d to %d", value, low, high)
		}
		*into = v
		return nil
	}
	choice := func(into *bool, no, yes string) error {
		if value != no && value != yes {
			return fmt.Errorf("%q is neither %s nor %s", value, no, yes)
		}
		*into = value == yes
		return nil
	}
	switch key {
	case "for":
		sc.For = value
	case "size":
		return choice(&sc.Large, "small", "large")
	case "net":
		return choice(&sc.Datagram, "session", "datagram")
	case "reorder":
		return choice(&sc.Reorder, "no", "yes")
	case "transport":
		sc.Transport = Transport(value)
		if !slices.Contains([]Transport{TransportFence, TransportDrain, TransportWild}, sc.Transport) {
			return fmt.Errorf("%q is none of fence, drain, wild", value)
		}
	case "rooms":
		return number(&sc.Rooms, 1, 2)
	case "chunks":
		return number(&sc.Chunks, 1, maxChunks)
	case "pages":
		return number(&sc.Pages, 1, maxPages)
	case "reuse":
		return number(&sc.Reuse, 0, 2)
	case "reuse_key":
		return choice(&sc.ReuseGeneration, "same", "generation")
	case "reuse_prompt":
		return choice(&sc.OtherPrompt, "same", "other")
	case "reuse_early":
		return choice(&sc.EarlyReuse, "no", "yes")
	case "deadlines":
		return choice(&sc.Deadlines, "no", "yes")
	default:
		i := slices.Index(budgetKeys[:], key)
		if i < 0 {
			return fmt.Errorf("no such key; budgets are %s", strings.Join(budgetKeys[:], ", "))
		}
		var v int
		err = number(&v, 0, 9)
		sc.budgets[i] = uint8(v)
	}
	return err
}

func (sc *Scenario) validate(seen map[string]bool) error {
	ends := sc.sessions()
	switch {
	case sc.For == "":
		return fmt.Errorf("no \"for\": say what the world is to show")
	case !seen["size"]:
		return fmt.Errorf("no \"size\": small or large")
	case sc.Rooms+sc.Reuse > maxLives:
		return fmt.Errorf("%d rooms and %d reused ids: at most %d together", sc.Rooms, sc.Reuse, maxLives)
	case sc.Pages < sc.Chunks:
		return fmt.Errorf("%d pages are too few for a room of %d chunks", sc.Pages, sc.Chunks)
	case ends > maxSessions:
		return fmt.Errorf("so many ends make %d sessions; at most %d", ends, maxSessions)
	case !sc.Datagram && (sc.Reorder || sc.budgets[budLoss]+sc.budgets[budDup] > 0):
		return fmt.Errorf("a session neither loses, doubles nor reorders messages; use net = datagram")
	case sc.budgets[budDataBreak] > 0 && sc.Transport != TransportFence:
		return fmt.Errorf("data_ends needs transport = fence: elsewhere the data plane ends with the process or the session")
	}
	return nil
}

// sessions that can be needed: one, and one more for each end of one.
func (sc *Scenario) sessions() int {
	b := sc.budgets
	return 1 + int(b[budBreak]+b[budDataBreak]+b[budCrashS]+b[budCrashR]+b[budLoss])
}
