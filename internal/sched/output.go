package sched

import (
	"bytes"
	"unicode/utf8"
)

// output turns the tokens of one choice into events: valid UTF-8, stop strings held
// back and cut, exactly one Finish. Pure.
//
// The text is a stream of bytes; where tokens begin and end makes no difference to
// it. It ends just before the stop string that is complete first (of those that end at
// the same byte, the longest). Bytes are held while they could be the start of a
// stop string or of a character. Each byte that is no part of a character becomes
// one U+FFFD.
//
// A token is released with the event that holds the last of its bytes. A token
// wholly behind the cut is never released, one across it is shortened. An
// end-of-generation token ends the choice and is not released.
//
// With whole set, text that ends inside a token waits for the rest of the token, so that lead is 0 between
// events. Then an output that begins anew goes on where this one is: all that was told is neither part of a stop
// string to come nor of a character.
type output struct {
	whole bool
	stops [][]byte
	limit int // tokens; >= 1
	count int // tokens pushed, the end-of-generation token included

	buf  []byte       // bytes not emitted yet
	toks []TokenEvent // tokens not released yet
	ends []int        // ends[i] is the offset in buf of the end of toks[i]; ascending
	lead int          // bytes of toks[0] that were emitted before; it begins at -lead
}

func newOutput(stops []string, limit int, whole bool) *output {
	o := &output{limit: limit, whole: whole}
	for _, s := range stops {
		if s != "" {
			o.stops = append(o.stops, []byte(s))
		}
	}
	return o
}

// push takes the next token. eog: it ends the generation; its bytes are ignored. ok is
// false if there is nothing to tell yet. After an event with Finish no push may follow.
func (o *output) push(t TokenEvent, eog bool) (ev Event, ok bool) {
	o.count++
	if eog {
		return o.emit(len(o.buf), FinishStop, ""), true
	}
	from := len(o.buf)
	o.buf = append(o.buf, t.Bytes...)
	o.toks, o.ends = append(o.toks, t), append(o.ends, len(o.buf))
	if stop, at := o.match(from); stop != nil {
		o.cut(at)
		return o.emit(len(o.buf), FinishStop, string(stop)), true
	}
	if o.count >= o.limit {
		return o.emit(len(o.buf), FinishLength, ""), true
	}
	ev = o.emit(len(o.buf)-o.held(), "", "")
	return ev, ev.Text != "" || len(ev.Tokens) > 0
}

// match finds the stop string that is complete first, at or after byte from.
func (o *output) match(from int) (stop []byte, at int) {
	for end := from + 1; end <= len(o.buf); end++ {
		for _, s := range o.stops {
			if bytes.HasSuffix(o.buf[:end], s) && len(s) > len(stop) {
				stop, at = s, end-len(s)
			}
		}
		if stop != nil {
			return stop, at
		}
	}
	return nil, 0
}

// held is the length of the longest suffix that a stop string could start with.
func (o *output) held() int {
	longest := 0
	for _, s := range o.stops {
		for n := min(len(s)-1, len(o.buf)); n > longest; n-- {
			if bytes.HasSuffix(o.buf, s[:n]) {
				longest = n
			}
		}
	}
	return longest
}

// cut drops everything from byte at on.
func (o *output) cut(at int) {
	o.buf = o.buf[:at]
	for i, begin := 0, -o.lead; i < len(o.toks); i++ {
		end := o.ends[i]
		if end > at {
			o.toks[i].Bytes = o.toks[i].Bytes[:max(at-begin, 0)]
			o.ends[i] = at
			if begin >= at {
				o.toks, o.ends = o.toks[:i], o.ends[:i]
				return
			}
		}
		begin = end
	}
}

// text decodes the bytes that can be told and says how many these are.
func (o *output) text(upto int, finish FinishReason) (text []byte, done int) {
	var border, length, tok int // the last border of tokens that done met, and the text up to there
	for done < upto {
		if finish == "" && !utf8.FullRune(o.buf[done:]) {
			break // the rest of the character may still come
		}
		r, n := utf8.DecodeRune(o.buf[done:])
		if done+n > upto && o.whole && finish == "" {
			break
		}
		text = utf8.AppendRune(text, r) // U+FFFD for a byte that is no character
		done += n
		for tok < len(o.ends) && o.ends[tok] < done {
			tok++
		}
		if tok < len(o.ends) && o.ends[tok] == done {
			border, length = done, len(text)
		}
	}
	if o.whole && finish == "" {
		return text[:length], border
	}
	return text, done
}

// emit releases the text that begins before byte upto, all of it if finish is set, and
// the tokens that go with it.
func (o *output) emit(upto int, finish FinishReason, stop string) Event {
	ev := Event{Finish: finish, MatchedStop: stop}
	text, done := o.text(upto, finish)
	ev.Text = string(text)
	n := 0
	for n < len(o.toks) && (o.ends[n] <= done || finish != "") {
		n++
	}
	if finish == "" && done == 0 {
		n = 0 // tokens without bytes go with the next text
	}
	ev.Tokens = append(ev.Tokens, o.toks[:n]...)
	begin := -o.lead
	if n > 0 {
		begin = o.ends[n-1]
	}
	o.lead = max(done-begin, 0)
	o.buf = append(o.buf[:0], o.buf[done:]...)
	o.toks, o.ends = append(o.toks[:0], o.toks[n:]...), append(o.ends[:0], o.ends[n:]...)
	for i := range o.ends {
		o.ends[i] -= done
	}
	return ev
}
