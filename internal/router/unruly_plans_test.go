package router

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"time"
)

// plan is how an unruly worker answers one request.
type plan struct {
	name  string // "": as it should
	steps []any
	keep  bool // the connection may be used again
	ended bool // the worker has said that the request is over, so nobody has to tell it
}

const (
	streamHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
	wholeHead  = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
	chunkEnd   = "0\r\n\r\n"
)

// plan chooses one. Under the worker's lock.
func (u *unruly) plan(w want) plan {
	g := &gen{Rand: u.rng, want: w}
	if u.rng.Float64() >= u.bad {
		return g.sound(time.Duration(u.rng.IntN(300)) * time.Millisecond)
	}
	faults := anyFaults
	if w.stream {
		faults = append(faults[:len(faults):len(faults)], streamFaults...)
	} else {
		faults = append(faults[:len(faults):len(faults)], wholeFaults...)
	}
	f := faults[u.rng.IntN(len(faults))]
	p := f.make(g)
	p.name = f.name
	p.steps = append([]any{time.Duration(u.rng.IntN(200)) * time.Millisecond}, p.steps...)
	return p
}

// gen makes answers to one request.
type gen struct {
	*rand.Rand
	want
}

// sound is the answer as it should be.
func (g *gen) sound(wait time.Duration) plan {
	if !g.stream {
		b := g.whole("stop")
		return plan{steps: []any{wait, fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", wholeHead, len(b), b)}, keep: true, ended: true}
	}
	return plan{steps: g.body(wait, strings.Join(g.events(), ""), chunkEnd), keep: true, ended: true}
}

// body is a chunked stream with this text, cut anywhere, and what follows.
func (g *gen) body(wait time.Duration, text string, then ...any) []any {
	steps := []any{wait, streamHead}
	for len(text) > 0 {
		n := min(1+g.IntN(120), len(text))
		steps = append(steps, chunk(text[:n]))
		if text = text[n:]; g.IntN(4) == 0 {
			steps = append(steps, time.Duration(g.IntN(40))*time.Millisecond)
		}
	}
	return append(steps, then...)
}

// some are the first events, fewer than finish anything of one choice.
func (g *gen) some() []string {
	ev := g.events()
	return ev[:g.IntN(g.choices*(len(tokensOf(0))-1)+1)]
}

// fault is a way to break the rules.
type fault struct {
	name string
	make func(g *gen) plan
}

// streamOf is a plan of these events and what follows.
func streamOf(g *gen, ev []string, then ...any) plan {
	return plan{steps: g.body(0, strings.Join(ev, ""), then...)}
}

func ended(p plan) plan {
	p.ended = true
	return p
}

// replies answers with a status and a body.
func replies(code int, header, body string) plan {
	return ended(plan{steps: []any{fmt.Sprintf("HTTP/1.1 %d X\r\n%sContent-Length: %d\r\n\r\n%s", code, header, len(body), body)}, keep: true})
}

// anyFaults need no stream.
var anyFaults = []fault{
	{"silent", func(*gen) plan { return plan{steps: []any{nil}} }},
	{"reset at once", func(*gen) plan { return plan{steps: []any{errBreak}} }},
	{"status", func(g *gen) plan {
		code := []int{400, 404, 422, 429, 500, 502, 503, 504, 302, 418, 599}[g.IntN(11)]
		body := []string{`{"error":{"message":"m"}}`, `{"object":"error","message":"m"}`, "<html>", "", `{"detail":[1]}`}[g.IntN(5)]
		return replies(code, "Retry-After: 3\r\n", body)
	}},
	{"status and no body", func(g *gen) plan {
		return plan{steps: []any{fmt.Sprintf("HTTP/1.1 %d X\r\nContent-Length: 100\r\n\r\n{", []int{200, 400, 500, 503}[g.IntN(4)]), nil}}
	}},
	{"not HTTP", func(*gen) plan { return plan{steps: []any{"SSH-2.0-x\r\n\r\n", nil}} }},
	{"HTTP/2", func(*gen) plan { return plan{steps: []any{"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", nil}} }},
	{"half a header", func(*gen) plan { return plan{steps: []any{"HTTP/1.1 200 OK\r\nContent-Ty", nil}} }},
	{"a dripping header", func(*gen) plan {
		return plan{steps: []any{"HTTP/1.1 200 OK\r\n", []any{"X-A: b\r\n", 100 * time.Millisecond}}}
	}},
	{"a giant header", func(*gen) plan {
		return plan{steps: []any{"HTTP/1.1 200 OK\r\nX-A: " + strings.Repeat("x", 300<<10) + "\r\n\r\n", nil}}
	}},
	{"1xx for ever", func(*gen) plan {
		return plan{steps: []any{[]any{"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n", 50 * time.Millisecond}}}
	}},
	{"another protocol", func(*gen) plan {
		return plan{steps: []any{"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", nil}}
	}},
	{"no content", func(*gen) plan { return ended(plan{steps: []any{"HTTP/1.1 204 No Content\r\n\r\n"}, keep: true}) }},
	{"empty", func(*gen) plan { return replies(200, "Content-Type: application/json\r\n", "") }},
	{"empty stream", func(*gen) plan { return replies(200, "Content-Type: text/event-stream\r\n", "") }},
	{"finish abort in a whole answer", func(g *gen) plan { return replies(200, "Content-Type: application/json\r\n", g.want.whole("abort")) }},
	{"an error with 200", func(*gen) plan {
		return replies(200, "Content-Type: application/json\r\n", `{"error":{"message":"oom"}}`)
	}},
	{"garbage with 200", func(*gen) plan { return replies(200, "Content-Type: text/html\r\n", "<html>\xff") }},
	{"a bad chunk size", func(*gen) plan { return plan{steps: []any{streamHead, "zz\r\n", nil}} }},
	{"a chunk without end", func(*gen) plan {
		return plan{steps: []any{streamHead, "fffffff\r\n", []any{": x\n\n", 100 * time.Millisecond}}}
	}},
	{"two lengths", func(*gen) plan {
		return plan{steps: []any{wholeHead + "Content-Length: 2\r\nContent-Length: 3\r\n\r\n{} ", nil}}
	}},
}

// wholeFaults are of answers that are not streams.
var wholeFaults = []fault{
	{"cut", func(g *gen) plan {
		b := g.want.whole("stop")
		return plan{steps: []any{fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", wholeHead, len(b), b[:g.IntN(len(b))]), errBreak}}
	}},
	{"cut unseen", func(g *gen) plan {
		b := g.want.whole("stop")
		return plan{steps: []any{wholeHead + "Connection: close\r\n\r\n" + b[:g.IntN(len(b))], errBreak}}
	}},
	{"stalled", func(g *gen) plan {
		b := g.want.whole("stop")
		return plan{steps: []any{fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", wholeHead, len(b), b[:g.IntN(len(b))]), nil}}
	}},
	{"dripping", func(g *gen) plan {
		steps := []any{wholeHead + "Transfer-Encoding: chunked\r\n\r\n"}
		all := g.want.whole("stop")
		for i := range len(all) {
			steps = append(steps, chunk(all[i:i+1]), 60*time.Millisecond)
		}
		return plan{steps: append(steps, chunkEnd)}
	}},
	{"trailers for ever", func(g *gen) plan {
		return plan{steps: []any{wholeHead + "Transfer-Encoding: chunked\r\n\r\n", chunk(g.want.whole("stop")), "0\r\n", []any{"X-A: b\r\n", 100 * time.Millisecond}}}
	}},
	{"finish error", func(g *gen) plan { return replies(200, "Content-Type: application/json\r\n", g.want.whole("error")) }},
	{"no finish", func(g *gen) plan {
		b := strings.NewReplacer(`"finish_reason":"stop"`, `"finish_reason":null`, `"finish_reason":{"message":"m","type":"stop"}`, `"finish_reason":null`).Replace(g.want.whole("stop"))
		return replies(200, "Content-Type: application/json\r\n", b)
	}},
	{"a choice is missing", func(g *gen) plan {
		w := g.want
		w.choices--
		if w.choices == 0 {
			return replies(200, "Content-Type: application/json\r\n", `{"choices":[]}`)
		}
		return replies(200, "Content-Type: application/json\r\n", w.whole("stop"))
	}},
	{"too long", func(g *gen) plan {
		return plan{steps: []any{wholeHead + "Transfer-Encoding: chunked\r\n\r\n", chunk(strings.Repeat(" ", 3<<20)), chunk(g.want.whole("stop")), chunkEnd}, keep: true, ended: true}
	}},
	{"a stream instead", func(g *gen) plan { return ended(streamOf(g, g.events(), chunkEnd)) }},
}

// streamFaults are of streams. Those with a name in soundFaults are none.
var streamFaults = []fault{
	{"ends without finish", func(g *gen) plan { return ended(streamOf(g, g.some(), chunkEnd)) }},
	{"done without finish", func(g *gen) plan { return ended(streamOf(g, append(g.some(), done), chunkEnd)) }},
	{"cut", func(g *gen) plan {
		all := strings.Join(g.events(), "")
		return plan{steps: g.body(0, all[:g.IntN(len(all))], chunkEnd), ended: true}
	}},
	{"resets", func(g *gen) plan {
		all := strings.Join(g.events(), "")
		return plan{steps: g.body(0, all[:g.IntN(len(all))], errBreak)}
	}},
	{"stalls", func(g *gen) plan {
		all := strings.Join(g.events(), "")
		return plan{steps: g.body(0, all[:g.IntN(len(all))], nil)}
	}},
	{"stalls with pings", func(g *gen) plan { return streamOf(g, g.some(), []any{chunk(": ping\n\n"), 150 * time.Millisecond}) }},
	{"stalls with fields", func(g *gen) plan {
		return streamOf(g, g.some(), []any{chunk("event: x\nid: 1\nretry: 5\n\n"), 150 * time.Millisecond})
	}},
	{"stalls in an event", func(g *gen) plan {
		return streamOf(g, append(g.some(), "data: {\"cho"), []any{chunk(" "), 150 * time.Millisecond})
	}},
	{"not JSON", func(g *gen) plan { return streamOf(g, append(g.some(), "data: {\"choices\":[\n\n"), nil) }},
	{"JSON of another kind", func(g *gen) plan {
		bad := []string{"data: 7\n\n", "data: []\n\n", "data: {\"choices\":7}\n\n", "data: null x\n\n", "data: {\"choices\":[{\"index\":0,\"finish_reason\":7}]}\n\n"}
		return streamOf(g, append(g.some(), bad[g.IntN(len(bad))]), nil)
	}},
	{"half a character", func(g *gen) plan {
		return streamOf(g, append(g.some(), strings.Replace(g.event(0, "€", ""), "€", "\xe2\x82", 1), "data: \"\xac\"\n\n"), nil)
	}},
	{"finish abort", func(g *gen) plan {
		return ended(streamOf(g, append(g.some(), g.event(0, "", "abort"), done), chunkEnd))
	}},
	{"finish error", func(g *gen) plan {
		return ended(streamOf(g, append(g.some(), g.event(0, "x", "error"), done), chunkEnd))
	}},
	{"an error event", func(g *gen) plan {
		bad := []string{`{"error":{"message":"oom"}}`, `{"error":"oom"}`, `{"object":"error","message":"oom"}`, `{"choices":[],"error":{"message":"oom","code":500}}`}
		p := streamOf(g, append(g.some(), "data: "+bad[g.IntN(len(bad))]+"\n\n"), nil)
		return ended(p)
	}},
	{"two finishes", func(g *gen) plan {
		ev := g.events()
		last := g.event(g.IntN(g.choices), "", "length")
		return ended(streamOf(g, append(ev[:len(ev)-1:len(ev)-1], last, last, done), chunkEnd))
	}},
	{"text after the finish", func(g *gen) plan {
		ev := g.events()
		return ended(streamOf(g, append(ev[:len(ev)-1:len(ev)-1], g.event(0, "more", ""), done), chunkEnd))
	}},
	{"an error after the finish", func(g *gen) plan {
		ev := g.events()
		bad := []string{"data: {\"error\":{\"message\":\"oom\"}}\n\n", "data: {\n\n", g.event(0, "", "abort"), "data: \xff\n\n"}
		return ended(streamOf(g, append(ev[:len(ev)-1:len(ev)-1], bad[g.IntN(len(bad))], done), chunkEnd))
	}},
	{"resets after the finish", func(g *gen) plan {
		ev := g.events()
		return streamOf(g, append(ev[:len(ev)-1:len(ev)-1], "data: {\"cho"[:g.IntN(11)]), errBreak)
	}},
	{"silent after the finish", func(g *gen) plan {
		ev := g.events()
		return streamOf(g, append(ev[:len(ev)-1:len(ev)-1], "data: {\"cho"[:g.IntN(11)]), nil)
	}},
	{"more after done", func(g *gen) plan {
		return ended(streamOf(g, append(g.events(), g.event(0, "more", ""), "data: {\"error\":{\"message\":\"x\"}}\n\n", done), []any{chunk("data: {}\n\n"), 10 * time.Millisecond}))
	}},
	{"no done", func(g *gen) plan {
		ev := g.events()
		return ended(streamOf(g, ev[:len(ev)-1], chunkEnd))
	}},
	{"an event without end", func(g *gen) plan {
		big := chunk(strings.Repeat("x", 256<<10))
		return streamOf(g, append(g.some(), "data: {\"choices\":[{\"text\":\""), []any{big, 5 * time.Millisecond})
	}},
	{"a large event", func(g *gen) plan { // is none
		return ended(plan{steps: []any{streamHead, chunk(strings.Replace(strings.Join(g.events(), ""), "{", `{"pad":"`+strings.Repeat("p", 300<<10)+`",`, 1)), chunkEnd}, keep: true})
	}},
	{"CR LF", func(g *gen) plan { // is none
		return ended(streamOf(g, []string{strings.ReplaceAll(strings.Join(g.events(), ""), "\n", "\r\n")}, chunkEnd))
	}},
	{"no space, many fields", func(g *gen) plan { // is none
		return ended(streamOf(g, []string{strings.ReplaceAll(strings.Join(g.events(), ""), "data: ", ":c\nevent: message\nid: 7\ndata:")}, chunkEnd))
	}},
	{"HTTP/1.0", func(g *gen) plan { // is none
		return ended(plan{steps: []any{"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + strings.Join(g.events(), ""), errBreak}})
	}},
	{"trailers for ever", func(g *gen) plan { // is none: the answer is there
		p := streamOf(g, g.events(), "0\r\n", []any{"X-A: b\r\n", 100 * time.Millisecond})
		return ended(p)
	}},
	{"dripping", func(g *gen) plan {
		steps := []any{streamHead}
		all := strings.Join(g.events(), "")
		for i := range len(all) { // also inside a character
			steps = append(steps, chunk(all[i:i+1]), 40*time.Millisecond)
		}
		return plan{steps: append(steps, chunkEnd)}
	}},
	{"a whole answer instead", func(g *gen) plan { return replies(200, "Content-Type: application/json\r\n", g.want.whole("stop")) }},
}

// soundFaults are answers that a client has to get as if nothing were.
var soundFaults = map[string]bool{"": true, "a large event": true, "CR LF": true, "no space, many fields": true, "HTTP/1.0": true, "more after done": true, "no done": true}
