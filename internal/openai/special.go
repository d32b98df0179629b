package openai

import (
	"errors"
	"sort"
	"strconv"
	"strings"
)

// specials finds the texts of special tokens in user text. A chat template needs
// them to become tokens, user text must never make them: "<|im_end|>" typed by a
// user would otherwise end the user's turn. Each occurrence in message content is
// replaced by a sentinel before rendering; after it the output is cut at the
// sentinels and the original texts are tokenized as ordinary text. The rest is
// rendered and tokenized jointly, as without the guard.
type specials struct {
	byFirst [256][]int // indexes into texts by first byte, longest text first
	texts   []string
}

func newSpecials(texts []string) *specials {
	s := &specials{}
	for _, t := range texts {
		if t != "" {
			s.texts = append(s.texts, t)
		}
	}
	sort.Strings(s.texts)
	sort.SliceStable(s.texts, func(i, j int) bool { return len(s.texts[i]) > len(s.texts[j]) })
	for i, t := range s.texts {
		s.byFirst[t[0]] = append(s.byFirst[t[0]], i)
	}
	return s
}

// at is the index of the longest special text at the start of text, or -1.
func (s *specials) at(text string) int {
	for _, i := range s.byFirst[text[0]] {
		if strings.HasPrefix(text, s.texts[i]) {
			return i
		}
	}
	return -1
}

// A sentinel is nonce, index, sentinelEnd. All of it survives trimming, changes of
// case and escaping, since it is private-use characters and digits.
const (
	sentinelMark = "\uE0B1"
	sentinelEnd  = "\uE0B2"
)

// freshNonce is a text that neither the template nor any message holds.
func freshNonce(source string, msgs []Message) (string, bool) {
	for n := 1; n <= 8; n++ {
		nonce := strings.Repeat(sentinelMark, n) + "\uE0B3"
		used := strings.Contains(source, nonce)
		for i := 0; i < len(msgs) && !used; i++ {
			used = strings.Contains(msgs[i].Content, nonce)
		}
		if !used {
			return nonce, true
		}
	}
	return "", false
}

// guard replaces each special text in content, leftmost and longest first.
func (s *specials) guard(content, nonce string) string {
	var b strings.Builder
	from := 0
	for i := 0; i < len(content); {
		k := s.at(content[i:])
		if k < 0 {
			i++
			continue
		}
		b.WriteString(content[from:i])
		b.WriteString(nonce)
		b.WriteString(strconv.Itoa(k))
		b.WriteString(sentinelEnd)
		i += len(s.texts[k])
		from = i
	}
	if from == 0 {
		return content
	}
	b.WriteString(content[from:])
	return b.String()
}

// part is a stretch of the prompt; literal parts are user text that must not become special.
type part struct {
	text    string
	literal bool
}

var errCutSentinel = errors.New("the chat template cuts or changes text that holds special tokens")

// split undoes guard on the rendered text.
func (s *specials) split(rendered, nonce string) ([]part, error) {
	pieces := strings.Split(rendered, nonce)
	parts := []part{{text: pieces[0]}}
	for _, p := range pieces[1:] {
		num, rest, ok := strings.Cut(p, sentinelEnd)
		k, err := strconv.Atoi(num)
		if !ok || err != nil || k < 0 || k >= len(s.texts) {
			return nil, errCutSentinel
		}
		parts = append(parts, part{text: s.texts[k], literal: true}, part{text: rest})
	}
	out := parts[:0]
	for i, p := range parts {
		if p.text != "" || i == 0 {
			out = append(out, p)
		}
	}
	return out, nil
}
