package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"unicode/utf8"
)

// Bounds of a body, so that parsing needs bounded stack and memory.
const (
	maxDepth   = 32   // nesting
	maxMembers = 4096 // names in one object
)

// member is one name and value of a JSON object, as written.
type member struct {
	key string
	raw []byte // the value without surrounding space; aliases the input
}

// splitObject checks the whole of body (grammar, UTF-8, depth, duplicate names at
// every level, NUL characters, lone surrogates, trailing bytes) and returns the top-level members
// in order. encoding/json alone accepts or repairs most of these.
func splitObject(body []byte) ([]member, error) {
	if !utf8.Valid(body) {
		return nil, fmt.Errorf("body is not valid UTF-8 at byte %d", firstInvalid(body))
	}
	s := &scanner{data: body}
	s.space()
	if s.pos == len(s.data) {
		return nil, fmt.Errorf("body is empty; a JSON object is expected")
	}
	if s.data[s.pos] != '{' {
		return nil, fmt.Errorf("body is not a JSON object")
	}
	var members []member
	if err := s.object(&members); err != nil {
		return nil, err
	}
	s.space()
	if s.pos != len(s.data) {
		return nil, s.fail("bytes after the JSON object")
	}
	return members, nil
}

// firstInvalid is the offset of the first byte that is not UTF-8.
func firstInvalid(b []byte) int {
	at := 0
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		if r == utf8.RuneError && n == 1 {
			return at
		}
		at, b = at+n, b[n:]
	}
	return at
}

type scanner struct {
	data  []byte
	pos   int
	depth int
}

func (s *scanner) fail(what string) error {
	return fmt.Errorf("invalid JSON at byte %d: %s", s.pos, what)
}

func (s *scanner) space() {
	for s.pos < len(s.data) {
		switch s.data[s.pos] {
		case ' ', '\t', '\n', '\r':
			s.pos++
		default:
			return
		}
	}
}

// value passes one value of any kind.
func (s *scanner) value() error {
	s.space()
	if s.pos == len(s.data) {
		return s.fail("unexpected end")
	}
	switch c := s.data[s.pos]; {
	case c == '{':
		return s.object(nil)
	case c == '[':
		return s.array()
	case c == '"':
		_, _, err := s.rawStr()
		return err
	case c == '-' || c >= '0' && c <= '9':
		return s.number()
	case c == 't':
		return s.literal("true")
	case c == 'f':
		return s.literal("false")
	case c == 'n':
		return s.literal("null")
	default:
		return s.fail("a value is expected")
	}
}

func (s *scanner) literal(word string) error {
	if !bytes.HasPrefix(s.data[s.pos:], []byte(word)) {
		return s.fail("a value is expected")
	}
	s.pos += len(word)
	return nil
}

func (s *scanner) enter() error {
	if s.depth++; s.depth > maxDepth {
		return s.fail(fmt.Sprintf("nested deeper than %d", maxDepth))
	}
	s.pos++
	return nil
}

// object passes an object and, if out is not nil, collects its members.
func (s *scanner) object(out *[]member) error {
	if err := s.enter(); err != nil {
		return err
	}
	defer func() { s.depth-- }()
	var seen names
	for first := true; ; first = false {
		s.space()
		if s.peek() == '}' && first {
			s.pos++
			return nil
		}
		if s.peek() != '"' {
			return s.fail("a quoted name is expected")
		}
		key, err := s.str()
		if err != nil {
			return err
		}
		if !seen.add(key) {
			return s.fail(fmt.Sprintf("duplicate name %q", clip(key)))
		}
		if seen.n > maxMembers {
			return s.fail(fmt.Sprintf("an object with more than %d names", maxMembers))
		}
		if s.space(); s.peek() != ':' {
			return s.fail("':' is expected")
		}
		s.pos++
		s.space()
		start := s.pos
		if err := s.value(); err != nil {
			return err
		}
		if out != nil {
			*out = append(*out, member{key: key, raw: s.data[start:s.pos]})
		}
		if end, err := s.next('}'); end || err != nil {
			return err
		}
	}
}

func (s *scanner) array() error {
	if err := s.enter(); err != nil {
		return err
	}
	defer func() { s.depth-- }()
	if s.space(); s.peek() == ']' {
		s.pos++
		return nil
	}
	for {
		if err := s.value(); err != nil {
			return err
		}
		if end, err := s.next(']'); end || err != nil {
			return err
		}
	}
}

// next passes a comma (false) or the closing bracket (true).
func (s *scanner) next(closing byte) (end bool, err error) {
	s.space()
	switch s.peek() {
	case ',':
		s.pos++
		return false, nil
	case closing:
		s.pos++
		return true, nil
	default:
		return false, s.fail(fmt.Sprintf("',' or '%c' is expected", closing))
	}
}

// peek is the next byte, or 0 at the end (which no caller expects).
func (s *scanner) peek() byte {
	if s.pos == len(s.data) {
		return 0
	}
	return s.data[s.pos]
}

// names are those of one object. Few are looked through, which is quicker than a map.
type names struct {
	few  [8]string
	many map[string]bool // nil: there are few
	n    int
}

// add is false for a name that is there already.
func (ns *names) add(name string) bool {
	if ns.many == nil && ns.n < len(ns.few) {
		for _, o := range ns.few[:ns.n] {
			if o == name {
				return false
			}
		}
		ns.few[ns.n] = name
		ns.n++
		return true
	}
	if ns.many == nil {
		ns.many = make(map[string]bool, 2*len(ns.few))
		for _, o := range ns.few {
			ns.many[o] = true
		}
	}
	if ns.many[name] {
		return false
	}
	ns.many[name] = true
	ns.n++
	return true
}

// str passes a string and returns its value.
func (s *scanner) str() (string, error) {
	raw, escaped, err := s.rawStr()
	if err != nil {
		return "", err
	}
	if !escaped {
		return string(raw[1 : len(raw)-1]), nil
	}
	var v string
	err = json.Unmarshal(raw, &v)
	return v, err
}

// rawStr passes a string and returns it as written, with its quotes.
func (s *scanner) rawStr() (raw []byte, escaped bool, err error) {
	start := s.pos
	s.pos++
	for s.pos < len(s.data) {
		switch c := s.data[s.pos]; {
		case c == '"':
			s.pos++
			return s.data[start:s.pos], escaped, nil
		case c == '\\':
			escaped = true
			if err := s.escape(); err != nil {
				return nil, false, err
			}
		case c < 0x20:
			return nil, false, s.fail("control character in a string")
		default:
			s.pos++
		}
	}
	return nil, false, s.fail("unterminated string")
}

// escape passes one escape sequence. NUL and lone surrogates are refused: the
// first ends the engine's C strings, the second is no character.
func (s *scanner) escape() error {
	if s.pos+1 >= len(s.data) {
		return s.fail("unterminated string")
	}
	switch s.data[s.pos+1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.pos += 2
		return nil
	case 'u':
		r, ok := s.hex4(s.pos)
		switch {
		case !ok:
			return s.fail(`invalid \u escape`)
		case r == 0:
			return s.fail("NUL character in a string")
		case r >= 0xdc00 && r <= 0xdfff:
			return s.fail("lone surrogate in a string")
		case r >= 0xd800 && r <= 0xdbff:
			low, ok := s.hex4(s.pos + 6)
			if !ok || low < 0xdc00 || low > 0xdfff {
				return s.fail("lone surrogate in a string")
			}
			s.pos += 6
		}
		s.pos += 6
		return nil
	default:
		return s.fail("invalid escape")
	}
}

// hex4 reads the \uXXXX at offset at.
func (s *scanner) hex4(at int) (uint64, bool) {
	if at+6 > len(s.data) || s.data[at] != '\\' || s.data[at+1] != 'u' {
		return 0, false
	}
	for _, c := range s.data[at+2 : at+6] {
		if !(c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F') {
			return 0, false
		}
	}
	v, err := strconv.ParseUint(string(s.data[at+2:at+6]), 16, 32)
	return v, err == nil
}

func (s *scanner) number() error {
	if s.peek() == '-' {
		s.pos++
	}
	switch c := s.peek(); {
	case c == '0':
		s.pos++
	case c >= '1' && c <= '9':
		s.digits()
	default:
		return s.fail("a digit is expected")
	}
	if s.peek() == '.' {
		s.pos++
		if !s.digits() {
			return s.fail("a digit is expected")
		}
	}
	if c := s.peek(); c == 'e' || c == 'E' {
		s.pos++
		if c := s.peek(); c == '+' || c == '-' {
			s.pos++
		}
		if !s.digits() {
			return s.fail("a digit is expected")
		}
	}
	return nil
}

func (s *scanner) digits() bool {
	start := s.pos
	for s.peek() >= '0' && s.peek() <= '9' {
		s.pos++
	}
	return s.pos > start
}

// splitArray returns the elements of a checked JSON array, at most one more than most,
// so that the caller can tell. ok is false if raw is not an array.
func splitArray(raw []byte, most int) (elems [][]byte, ok bool) {
	s := &scanner{data: raw}
	if s.peek() != '[' {
		return nil, false
	}
	s.pos++
	if s.space(); s.peek() == ']' {
		return nil, true
	}
	for len(elems) <= most {
		s.space()
		start := s.pos
		if s.value() != nil {
			return nil, false
		}
		elems = append(elems, raw[start:s.pos])
		if end, err := s.next(']'); end || err != nil {
			break
		}
	}
	return elems, true
}

func isNull(raw []byte) bool { return string(raw) == "null" }

// clip shortens client text for messages.
func clip(s string) string {
	const most = 64
	if len(s) <= most {
		return s
	}
	cut := most
	for cut > 0 && !utf8.RuneStart(s[cut]) {
		cut--
	}
	return s[:cut] + "..."
}

// Marshal is json.Marshal without HTML escaping: '<' stays '<' in special-looking text.
func Marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Members checks body as the parsers do and returns its top-level members by name. The values alias body.
func Members(body []byte) (map[string]json.RawMessage, error) {
	members, err := splitObject(body)
	if err != nil {
		return nil, invalid("", "%v", err)
	}
	return byName(members), nil
}

func byName(members []member) map[string]json.RawMessage {
	out := make(map[string]json.RawMessage, len(members))
	for _, m := range members {
		out[m.key] = m.raw
	}
	return out
}

// Take is [Members], and body without the members that drop names, as [Rewrite] makes it.
func Take(body []byte, drop func(name string) bool) (rest []byte, members map[string]json.RawMessage, err error) {
	list, err := splitObject(body)
	if err != nil {
		return nil, nil, invalid("", "%v", err)
	}
	rest = append(make([]byte, 0, len(body)+16), '{')
	for _, m := range list {
		if !drop(m.key) {
			rest = appendMember(rest, m.key, m.raw)
		}
	}
	return append(rest, '}'), byName(list), nil
}

// appendMember adds a name and a value to an object.
func appendMember(out []byte, name string, raw []byte) []byte {
	if len(out) > 1 {
		out = append(out, ',')
	}
	return append(append(appendString(out, name), ':'), raw...)
}

// appendString adds s as JSON, as [Marshal] writes it.
func appendString(out []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < 0x20 || c >= 0x7f || c == '"' || c == '\\' {
			raw, _ := Marshal(s) // a string always marshals
			return append(out, raw...)
		}
	}
	return append(append(append(out, '"'), s...), '"')
}

// Elements returns the elements of a list that is sound JSON, but only the first most+1 of a longer
// one. They alias raw. ok is false if it is no list.
func Elements(raw json.RawMessage, most int) (elems [][]byte, ok bool) { return splitArray(raw, most) }

// Field is one top-level member to set with [Rewrite]; a nil Value removes it.
type Field struct {
	Name  string
	Value any
}

// Rewrite returns body (a JSON object) with the given top-level fields replaced,
// added or removed. The other fields keep their bytes and their order.
func Rewrite(body []byte, set ...Field) ([]byte, error) {
	members, err := splitObject(body)
	if err != nil {
		return nil, invalid("", "%v", err)
	}
	out := make([]byte, 0, len(body)+64*len(set))
	out = append(out, '{')
	put := func(name string, raw []byte) { out = appendMember(out, name, raw) }
	replaced := map[string]bool{}
	for _, f := range set {
		replaced[f.Name] = true
	}
	for _, m := range members {
		if !replaced[m.key] {
			put(m.key, m.raw)
		}
	}
	for _, f := range set {
		if f.Value == nil {
			continue
		}
		raw, err := Marshal(f.Value)
		if err != nil {
			return nil, fmt.Errorf("marshal field %s: %w", f.Name, err)
		}
		put(f.Name, raw)
	}
	return append(out, '}'), nil
}
