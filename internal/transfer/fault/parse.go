package fault

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// actionsOf says which actions an operation knows; see the package comment.
var actionsOf = map[op][]action{
	opPost:   {actStall, actHalfway, actDrop, actError, actBusy, actCorrupt, actRate},
	opDone:   {actHold, actDrop, actError},
	opLanded: {actStall, actDrop},
	opFenced: {actStall},
	opRevoke: {actUnfenced},
	opDial:   {actStall, actError},
}

// Parse reads rules, one a line. The error names every bad line.
func Parse(text string) (*Rules, error) {
	r := &Rules{gates: make(map[string]*gate)}
	var errs []error
	for i, line := range strings.Split(text, "\n") {
		u, err := parseRule(line)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("fault: line %d: %w", i+1, err))
		case u != nil:
			u.line = i + 1
			r.rules = append(r.rules, u)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return r, nil
}

// MustParse is Parse for texts that are constants of a test; it panics.
func MustParse(text string) *Rules {
	r, err := Parse(text)
	if err != nil {
		panic(err)
	}
	return r
}

// word is key, key=value or key="value".
type word struct {
	key, value string
	has        bool // there was a "="
}

// split cuts a line into words and drops the comment.
func split(line string) ([]word, error) {
	var ws []word
	rest := strings.TrimSpace(line)
	for rest != "" && rest[0] != '#' {
		end := strings.IndexAny(rest, " \t\r=")
		if end < 0 {
			end = len(rest)
		}
		w := word{key: rest[:end]}
		rest = rest[end:]
		if strings.HasPrefix(rest, "=") {
			w.has = true
			rest = rest[1:]
			if strings.HasPrefix(rest, `"`) {
				quoted, err := strconv.QuotedPrefix(rest)
				if err != nil {
					return nil, fmt.Errorf("%s=%s: quotes do not end", w.key, rest)
				}
				w.value, _ = strconv.Unquote(quoted) // QuotedPrefix has checked it
				rest = rest[len(quoted):]
				if rest != "" && !strings.ContainsRune(" \t\r#", rune(rest[0])) {
					return nil, fmt.Errorf("%s=%s: need a space after the quotes", w.key, quoted)
				}
			} else {
				end := strings.IndexAny(rest, " \t\r")
				if end < 0 {
					end = len(rest)
				}
				w.value, rest = rest[:end], rest[end:]
			}
			if w.value == "" && w.key != "error" {
				return nil, fmt.Errorf("%s= has no value", w.key)
			}
		}
		if w.key == "" {
			return nil, fmt.Errorf("a word begins with %q", "=")
		}
		ws = append(ws, w)
		rest = strings.TrimLeft(rest, " \t\r")
	}
	return ws, nil
}

// parseRule reads one line; nil if it is empty.
func parseRule(line string) (*rule, error) {
	ws, err := split(line)
	if err != nil || len(ws) == 0 {
		return nil, err
	}
	u := &rule{op: op(ws[0].key), prob: -1, perRoom: make(map[room.Key]uint64)}
	if _, ok := actionsOf[u.op]; !ok || ws[0].has {
		return nil, fmt.Errorf("unknown operation %q, want post, done, landed, fenced, revoke or dial", ws[0].key)
	}
	seen := make(map[string]bool)
	for _, w := range ws[1:] {
		if seen[w.key] {
			return nil, fmt.Errorf("%s is given twice", w.key)
		}
		seen[w.key] = true
		set := u.selector
		if !w.has || w.key == "error" || w.key == "delay" || w.key == "rate" {
			set = u.action
		}
		if err := set(w); err != nil {
			return nil, err
		}
	}
	return u, u.check(seen)
}

// selector takes key=value.
func (u *rule) selector(w word) (err error) {
	switch w.key {
	case "kind":
		u.kind = w.value
	case "room":
		if w.value == "*" {
			u.rooms = roomEach
			return nil
		}
		u.rooms = roomOne
		u.room, err = strconv.ParseUint(w.value, 10, 63)
	case "gen":
		var g uint64
		g, err = strconv.ParseUint(w.value, 10, 32)
		u.gen, u.genSet = uint32(g), true
	case "nth":
		return u.nth(w.value)
	case "prob":
		u.prob, err = strconv.ParseFloat(w.value, 64)
		if err == nil && !(u.prob >= 0 && u.prob <= 1) {
			return fmt.Errorf("prob=%s: want 0 to 1", w.value)
		}
	case "seed":
		u.seed, err = strconv.ParseUint(w.value, 10, 64)
	case "until":
		u.gate = w.value
	case "for":
		u.hold, err = positive(w.value)
	default:
		return fmt.Errorf("unknown selector %q, want kind, room, gen, nth, prob, seed, until or for", w.key)
	}
	if err != nil {
		return fmt.Errorf("%s=%s: %w", w.key, w.value, reason(err))
	}
	return nil
}

// reason is a strconv error without the function's name.
func reason(err error) error {
	var n *strconv.NumError
	if errors.As(err, &n) {
		return n.Err
	}
	return err
}

func positive(s string) (time.Duration, error) {
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, errors.New("not a duration such as 50ms")
	}
	if d <= 0 {
		return 0, errors.New("must be above 0")
	}
	return d, nil
}

// nth reads N, N-M or N-.
func (u *rule) nth(s string) error {
	from, to, ranged := strings.Cut(s, "-")
	var err error
	if u.first, err = strconv.ParseUint(from, 10, 64); err == nil {
		switch {
		case !ranged:
			u.last = u.first
		case to == "":
			u.last = math.MaxUint64
		default:
			u.last, err = strconv.ParseUint(to, 10, 64)
		}
	}
	if err != nil || u.first == 0 || u.last < u.first {
		return fmt.Errorf("nth=%s: want N, N-M or N-, counted from 1", s)
	}
	return nil
}

// action takes a word without a value, error="text" or delay=D.
func (u *rule) action(w word) error {
	if u.act != "" {
		return fmt.Errorf("second action %q", w.key)
	}
	a := action(w.key)
	switch {
	case a == "delay":
		if !w.has {
			return errors.New("delay needs a time, such as delay=50ms")
		}
		d, err := positive(w.value)
		if err != nil {
			return fmt.Errorf("delay=%s: %w", w.value, err)
		}
		u.hold, a = d, actStall
		if u.op == opDone {
			a = actHold
		}
	case a == actRate:
		r, err := strconv.ParseFloat(w.value, 64)
		if err != nil || !(r >= 1 && r <= 1e15) {
			return fmt.Errorf("rate=%s: want bytes a second, 1 to 1e15", w.value)
		}
		u.rate = r
	case a == "hold-applied" && u.op == opPost:
		// The number of a completion is that of its write, so the rule counts the same.
		u.op, a = opDone, actHold
	case a == actError:
		u.message = w.value
		if w.value == "" {
			u.message = string(u.op) + " failed"
		}
	}
	if !slices.Contains(actionsOf[u.op], a) {
		return fmt.Errorf("%s does not know %q, want one of %v", u.op, w.key, actionsOf[u.op])
	}
	u.act = a
	return nil
}

// check looks at the rule as a whole.
func (u *rule) check(seen map[string]bool) error {
	holds := u.act == actStall || u.act == actHold || u.act == actHalfway || u.act == actUnfenced
	switch {
	case u.act == "":
		return fmt.Errorf("%s has no action, want one of %v", u.op, actionsOf[u.op])
	case (seen["until"] || seen["for"]) && !holds:
		return fmt.Errorf("%s holds nothing, so until and for mean nothing", u.act)
	case u.hold > 0 && u.gate != "", seen["for"] && seen["delay"]:
		return errors.New("until, for and delay exclude each other")
	case seen["seed"] && u.prob < 0:
		return errors.New("seed means nothing without prob")
	case (u.op == opDial || u.op == opFenced) && (u.rooms != roomAny || u.genSet):
		return fmt.Errorf("%s is of no room, so room and gen mean nothing", u.op)
	}
	return nil
}
