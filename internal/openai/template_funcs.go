package openai

import (
	"errors"
	"fmt"
	"sort"
	"strings"
	"time"

	"github.com/nikolalohinski/gonja/v2/exec"
	"github.com/nikolalohinski/gonja/v2/loaders"
)

// Inherit is needed for [loaders.Loader]; sub-templates are refused by Read.
func (s oneSource) Inherit(string) (loaders.Loader, error) { return s, nil }

// messageList is the messages as a template sees them. It exists because gonja finds nothing
// at index -1 of a list of one, which many templates ask for.
type messageList []any

// GetItem is messages[key].
func (m messageList) GetItem(key any) (*exec.Value, bool) {
	i, ok := key.(int)
	if ok && i < 0 {
		i += len(m)
	}
	if !ok || i < 0 || i >= len(m) {
		return exec.AsValue(nil), false
	}
	return exec.AsValue(m[i]), true
}

// maxRange bounds range() in a template; gonja's own starts a goroutine that outlives a break.
const maxRange = 10_000

func boundedRange(va *exec.VarArgs) (any, error) {
	var n []int
	for _, a := range va.Args {
		if !a.IsInteger() {
			return nil, errors.New("range takes whole numbers")
		}
		n = append(n, a.Integer())
	}
	start, stop, step := 0, 0, 1
	switch len(n) {
	case 1:
		stop = n[0]
	case 2:
		start, stop = n[0], n[1]
	case 3:
		start, stop, step = n[0], n[1], n[2]
	default:
		return nil, errors.New("range takes one to three numbers")
	}
	if step == 0 {
		return nil, errors.New("range with step 0")
	}
	out := []any{}
	for i := start; step > 0 && i < stop || step < 0 && i > stop; i += step {
		if len(out) == maxRange {
			return nil, fmt.Errorf("range with more than %d numbers", maxRange)
		}
		out = append(out, i)
	}
	return out, nil
}

// strftime formats t as C's function of that name does; an unknown letter is an error.
func strftime(t time.Time, format string) (string, error) {
	layouts := map[byte]string{
		'Y': "2006", 'y': "06", 'm': "01", 'd': "02", 'b': "Jan", 'B': "January", 'a': "Mon", 'A': "Monday",
		'H': "15", 'I': "03", 'M': "04", 'S': "05", 'p': "PM", 'j': "002", 'e': "_2", 'F': "2006-01-02", 'T': "15:04:05", 'Z': "MST", 'z': "-0700",
	}
	var b strings.Builder
	for i := 0; i < len(format); i++ {
		if format[i] != '%' {
			b.WriteByte(format[i])
			continue
		}
		if i++; i == len(format) {
			return "", errors.New("strftime_now: format ends in %")
		}
		c := format[i]
		layout, ok := layouts[c]
		switch {
		case c == '%':
			b.WriteByte('%')
		case !ok:
			return "", fmt.Errorf("strftime_now: unknown letter %%%c", c)
		default:
			b.WriteString(t.Format(layout))
		}
	}
	return b.String(), nil
}

// toJSON writes what Python's json.dumps(v, ensure_ascii=False) writes, as Hugging
// Face's filter does: a space after ',' and ':', nothing escaped for HTML.
func toJSON(_ *exec.Evaluator, in *exec.Value, params *exec.VarArgs) *exec.Value {
	if in.IsError() {
		return in
	}
	if len(params.Args) > 0 || len(params.KwArgs) > 0 {
		return exec.AsValue(errors.New("tojson: arguments are not supported"))
	}
	var b strings.Builder
	if err := pythonJSON(&b, in.ToGoSimpleType(false), 0); err != nil {
		return exec.AsValue(err)
	}
	return exec.AsSafeValue(b.String())
}

func pythonJSON(b *strings.Builder, v any, depth int) error {
	if depth > maxDepth {
		return errors.New("tojson: nested too deep")
	}
	switch v := v.(type) {
	case error:
		return v
	case map[string]any:
		keys := make([]string, 0, len(v))
		for k := range v {
			keys = append(keys, k)
		}
		sort.Strings(keys) // the order of insertion is lost; a fixed one keeps prompts equal
		b.WriteByte('{')
		for i, k := range keys {
			if i > 0 {
				b.WriteString(", ")
			}
			if err := pythonJSON(b, k, depth); err != nil {
				return err
			}
			b.WriteString(": ")
			if err := pythonJSON(b, v[k], depth+1); err != nil {
				return err
			}
		}
		b.WriteByte('}')
	case []any:
		b.WriteByte('[')
		for i, e := range v {
			if i > 0 {
				b.WriteString(", ")
			}
			if err := pythonJSON(b, e, depth+1); err != nil {
				return err
			}
		}
		b.WriteByte(']')
	default:
		raw, err := Marshal(v)
		if err != nil {
			return fmt.Errorf("tojson: %w", err)
		}
		b.Write(raw)
	}
	return nil
}
