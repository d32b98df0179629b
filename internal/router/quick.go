package router

import (
	"encoding/json"
	"strconv"
	"unicode/utf8"
)

// maxQuickDepth is the nesting that quick follows.
const maxQuickDepth = 64

// decodeAnswer is json.Unmarshal of an answer or event, several times as quick for the common forms. What it keeps of data aliases it.
func decodeAnswer(data []byte, a *answer) error {
	q := quick{b: data}
	if q.answer(a) {
		return nil
	}
	a.clear()
	return json.Unmarshal(data, a)
}

// clear empties a and keeps its room.
func (a *answer) clear() {
	clear(a.Choices)
	*a = answer{Choices: a.Choices[:0]}
}

// decodeUsage is json.Unmarshal of a usage.
func decodeUsage(data []byte, u *usage) error {
	q := quick{b: data}
	var f fields
	if q.object(0, func(name []byte) bool {
		switch string(name) {
		case "prompt_tokens":
			return f.once(0) && q.integer(&u.Prompt)
		case "completion_tokens":
			return f.once(1) && q.integer(&u.Completion)
		}
		return q.other(name, 1)
	}) && q.end() {
		return nil
	}
	*u = usage{}
	return json.Unmarshal(data, u)
}

// validJSON is json.Valid.
func validJSON(data []byte) bool {
	q := quick{b: data}
	return q.skip(0) && q.end() || json.Valid(data)
}

// quick reads JSON of forms that it knows. Its methods return false for whatever is wrong *or* uncommon (names that
// encoding/json would match although their case differs, doubled names, numbers that are no small integers, deep nesting): encoding/json then decides. So it must
// accept nothing that encoding/json refuses or reads otherwise; FuzzQuick compares the two.
type quick struct {
	b []byte
	i int
}

func (q *quick) space() {
	for q.i < len(q.b) {
		switch q.b[q.i] {
		case ' ', '\t', '\n', '\r':
			q.i++
		default:
			return
		}
	}
}

// peek is the next byte that is no space, 0 at the end.
func (q *quick) peek() byte {
	q.space()
	if q.i == len(q.b) {
		return 0
	}
	return q.b[q.i]
}

// end: nothing but space is left.
func (q *quick) end() bool {
	q.space()
	return q.i == len(q.b)
}

// take passes c.
func (q *quick) take(c byte) bool {
	if q.peek() != c || c == 0 {
		return false
	}
	q.i++
	return true
}

// word passes a literal.
func (q *quick) word(w string) bool {
	if len(q.b)-q.i < len(w) || string(q.b[q.i:q.i+len(w)]) != w {
		return false
	}
	q.i += len(w)
	return true
}

// null passes null if that is next.
func (q *quick) null() bool { return q.peek() == 'n' && q.word("null") }

// str passes a string and returns it with its quotes; plain: without escapes.
func (q *quick) str() (raw []byte, plain, ok bool) {
	if !q.take('"') {
		return nil, false, false
	}
	start := q.i - 1
	plain = true
	for i := q.i; i < len(q.b); i++ {
		switch c := q.b[i]; {
		case c == '"':
			q.i = i + 1
			return q.b[start:q.i], plain, true
		case c < 0x20:
			return nil, false, false
		case c == '\\':
			plain = false
			if i++; i == len(q.b) {
				return nil, false, false
			}
			switch q.b[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				if len(q.b)-i < 5 {
					return nil, false, false
				}
				for _, h := range q.b[i+1 : i+5] {
					if !(h >= '0' && h <= '9' || h >= 'a' && h <= 'f' || h >= 'A' && h <= 'F') {
						return nil, false, false
					}
				}
				i += 4
			default:
				return nil, false, false
			}
		}
	}
	return nil, false, false
}

// digits passes at least one.
func (q *quick) digits() bool {
	start := q.i
	for q.i < len(q.b) && q.b[q.i] >= '0' && q.b[q.i] <= '9' {
		q.i++
	}
	return q.i > start
}

// at: the next byte, which may be no space, is one of two.
func (q *quick) at(c, d byte) bool { return q.i < len(q.b) && (q.b[q.i] == c || q.b[q.i] == d) }

// number passes a number.
func (q *quick) number() bool {
	if q.at('-', '-') {
		q.i++
	}
	if q.at('0', '0') {
		q.i++
	} else if !q.digits() {
		return false
	}
	if q.at('.', '.') {
		q.i++
		if !q.digits() {
			return false
		}
	}
	if q.at('e', 'E') {
		q.i++
		if q.at('+', '-') {
			q.i++
		}
		return q.digits()
	}
	return true
}

// skip passes any value.
func (q *quick) skip(depth int) bool {
	switch c := q.peek(); {
	case c == '"':
		_, _, ok := q.str()
		return ok
	case c == '{':
		return q.object(depth, func([]byte) bool { return q.skip(depth + 1) })
	case c == '[':
		return q.array(depth, func() bool { return q.skip(depth + 1) })
	case c == 't':
		return q.word("true")
	case c == 'f':
		return q.word("false")
	case c == 'n':
		return q.word("null")
	default:
		return q.number()
	}
}

// object passes an object; member passes the value of each name, which comes without quotes.
func (q *quick) object(depth int, member func(name []byte) bool) bool {
	if depth >= maxQuickDepth || !q.take('{') {
		return false
	}
	if q.take('}') {
		return true
	}
	for {
		q.space()
		name, _, ok := q.str()
		if !ok || !q.take(':') || !member(name[1:len(name)-1]) {
			return false
		}
		if !q.take(',') {
			return q.take('}')
		}
	}
}

// array passes an array; element passes each of its values.
func (q *quick) array(depth int, element func() bool) bool {
	if depth >= maxQuickDepth || !q.take('[') {
		return false
	}
	if q.take(']') {
		return true
	}
	for {
		if !element() {
			return false
		}
		if !q.take(',') {
			return q.take(']')
		}
	}
}

// raw passes any value and returns it.
func (q *quick) raw(depth int, to *json.RawMessage) bool {
	q.space()
	start := q.i
	if !q.skip(depth) {
		return false
	}
	*to = q.b[start:q.i:q.i]
	return true
}

// text passes a string, or null, which changes nothing.
func (q *quick) text(to *string) bool {
	if q.null() {
		return true
	}
	raw, plain, ok := q.str()
	switch {
	case !ok:
		return false
	case plain && utf8.Valid(raw):
		*to = string(raw[1 : len(raw)-1])
		return true
	}
	return json.Unmarshal(raw, to) == nil
}

// integer passes a whole number of at most 15 digits, or null, which changes nothing.
func (q *quick) integer(to *int) bool {
	if q.null() {
		return true
	}
	start := q.i
	if !q.number() || q.i-start > 15 {
		return false
	}
	n, err := strconv.Atoi(string(q.b[start:q.i]))
	if err == nil {
		*to = n
	}
	return err == nil
}

// fields tells known names that came already.
type fields uint16

// once: field n has not come before.
func (f *fields) once(n int) bool {
	bit := fields(1) << n
	seen := *f&bit != 0
	*f |= bit
	return !seen
}

// other passes the value of a name that is not known, unless encoding/json might take it for a known one.
func (q *quick) other(name []byte, depth int) bool {
	for _, c := range name {
		if c >= 'A' && c <= 'Z' || c >= 0x80 || c == '\\' {
			return false
		}
	}
	return q.skip(depth)
}

// answer passes an answer and nothing after it.
func (q *quick) answer(a *answer) bool {
	var f fields
	return q.object(0, func(name []byte) bool {
		switch string(name) {
		case "object":
			return f.once(0) && q.text(&a.Object)
		case "error":
			return f.once(1) && q.raw(1, &a.Error)
		case "choices":
			return f.once(2) && (q.null() || q.array(1, func() bool { return q.choice(a) }))
		case "index":
			return f.once(3) && q.integer(&a.Index)
		case "text":
			return f.once(4) && q.text(&a.Text)
		case "output_ids":
			return f.once(5) && (q.null() || q.array(1, func() bool {
				n := 0
				ok := q.integer(&n)
				a.OutputIDs = append(a.OutputIDs, n)
				return ok
			}))
		case "meta_info":
			return f.once(6) && (q.null() || q.meta(a))
		case "usage":
			return f.once(7) && q.raw(1, &a.Usage)
		}
		return q.other(name, 1)
	}) && q.end()
}

// choice passes one choice; null is an empty one.
func (q *quick) choice(a *answer) bool {
	a.Choices = append(a.Choices, choiceOf{})
	c := &a.Choices[len(a.Choices)-1]
	if q.null() {
		return true
	}
	var f fields
	return q.object(2, func(name []byte) bool {
		switch string(name) {
		case "index":
			return f.once(0) && q.integer(&c.Index)
		case "finish_reason":
			return f.once(1) && q.raw(3, &c.Finish)
		case "text":
			return f.once(2) && q.text(&c.Text)
		case "delta":
			return f.once(3) && (q.null() || q.delta(c))
		}
		return q.other(name, 3)
	})
}

func (q *quick) delta(c *choiceOf) bool {
	var f fields
	return q.object(3, func(name []byte) bool {
		switch string(name) {
		case "content":
			return f.once(0) && q.text(&c.Delta.Content)
		case "reasoning_content":
			return f.once(1) && q.text(&c.Delta.Reasoning)
		case "tool_calls":
			return f.once(2) && q.raw(4, &c.Delta.Tools)
		}
		return q.other(name, 4)
	})
}

func (q *quick) meta(a *answer) bool {
	a.Meta = &metaOf{}
	var f fields
	return q.object(1, func(name []byte) bool {
		switch string(name) {
		case "finish_reason":
			return f.once(0) && q.raw(2, &a.Meta.Finish)
		case "prompt_tokens":
			return f.once(1) && q.raw(2, &a.Meta.Prompt)
		case "completion_tokens":
			return f.once(2) && q.raw(2, &a.Meta.Completion)
		}
		return q.other(name, 2)
	})
}
