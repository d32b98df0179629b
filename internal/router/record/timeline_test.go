package record

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/openai"
)

// draw is a timeline in lines: lane, worker, and bars as kind:from-to, "..." for one that goes on.
func draw(lanes []Lane) string {
	var b strings.Builder
	for _, l := range lanes {
		fmt.Fprintf(&b, "%d %s %s", l.Attempt, l.Leg, l.Worker)
		for _, bar := range l.Bars {
			fmt.Fprintf(&b, " %s:%g-%g", bar.Kind, bar.From, bar.To)
			if bar.Open {
				b.WriteString("...")
			}
		}
		if len(l.Ticks) > 0 {
			fmt.Fprintf(&b, " ticks%v", l.Ticks)
		}
		if l.Failed {
			b.WriteString(" FAILED")
		}
		b.WriteString("\n")
	}
	return b.String()
}

func p(ms float64) *float64 { return &ms }

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func TestTimeline(t *testing.T) {
	one := func(a Attempt) []Attempt { a.Prefill, a.Decode = "p0", "d0"; return []Attempt{a} }
	prefill := &openai.RoomReport{GrantedMS: p(2), Chunks: [][2]float64{{3, 5}, {5, 8}}, ChunksTotal: 2, TransferredMS: p(9), EndedMS: p(9.5)}
	decode := &openai.RoomReport{GrantedMS: p(1), Chunks: [][2]float64{{6, 6}, {8.5, 8.5}}, ChunksTotal: 2, TransferredMS: p(9), FirstTokenMS: p(10), EndedMS: p(30)}
	for _, c := range []struct {
		name string
		rec  Record
		now  int
		p, d *openai.RoomReport
		want string
	}{
		{name: "queued", rec: Record{Waiting: true, End: Never}, now: 7, want: `0 router  queue:0-7...
`},
		{name: "turned away", rec: Record{End: ms(3), Outcome: Failed, Cause: &Cause{Side: "router"}}, want: `0 router  queue:0-3 FAILED
`},
		{name: "workers that tell nothing, waiting", rec: Record{End: Never, Attempts: one(Attempt{Room: 1, Start: ms(4), PrefillEnd: Never, FirstToken: Never, End: Never})}, now: 10,
			want: `0 router  queue:0-4
0 prefill p0 prefill:4-10...
0 decode d0 wait:4-10...
`},
		{name: "workers that tell nothing, answered", rec: Record{End: ms(40), Outcome: OK, Attempts: one(Attempt{Room: 1, PrefillEnd: ms(9), FirstToken: ms(11), End: ms(40)})},
			want: `0 router 
0 prefill p0 prefill:0-9
0 decode d0 wait:0-11 decode:11-40
`},
		{name: "baton, answered", rec: Record{End: ms(41), Outcome: OK, Attempts: one(Attempt{Room: 1, Start: ms(10), PrefillEnd: ms(19), FirstToken: ms(20), End: ms(41)})}, p: prefill, d: decode,
			want: `0 router  queue:0-10
0 prefill p0 wait:10-13 chunk:13-15 chunk:15-18 transfer:18-19
0 kv  transfer:15-18.5 ticks[16 18.5]
0 decode d0 wait:10-15 transfer:15-19 first:19-20 decode:20-40
`},
		{name: "baton, in the middle of the prompt", rec: Record{End: Never, Attempts: one(Attempt{Room: 1, PrefillEnd: Never, FirstToken: Never, End: Never})}, now: 7,
			p: &openai.RoomReport{GrantedMS: p(2), Chunks: [][2]float64{{3, 5}}, ChunksTotal: 2},
			d: &openai.RoomReport{GrantedMS: p(1), Chunks: [][2]float64{{6, 6}}, ChunksTotal: 2},
			want: `0 router 
0 prefill p0 wait:0-3 chunk:3-5
0 kv  transfer:5-7... ticks[6]
0 decode d0 wait:0-5 transfer:5-7...
`},
		{name: "baton, before the first chunk", rec: Record{End: Never, Attempts: one(Attempt{Room: 1, PrefillEnd: Never, FirstToken: Never, End: Never})}, now: 7,
			p: &openai.RoomReport{GrantedMS: p(2), ChunksTotal: 2}, d: &openai.RoomReport{GrantedMS: p(1), ChunksTotal: 2},
			want: `0 router 
0 prefill p0 wait:0-7...
0 decode d0 wait:0-7...
`},
		{name: "the decode worker died and told its last before", rec: Record{End: ms(20), Outcome: StreamError, Cause: &Cause{Side: "decode", Worker: "d0"},
			Attempts: one(Attempt{Room: 1, PrefillEnd: ms(9), FirstToken: ms(10), End: ms(20), Cause: &Cause{Side: "decode", Worker: "d0"}})},
			p: prefill, d: &openai.RoomReport{GrantedMS: p(1), Chunks: decode.Chunks, ChunksTotal: 2, TransferredMS: p(9), FirstTokenMS: p(10)},
			want: `0 router 
0 prefill p0 wait:0-3 chunk:3-5 chunk:5-8 transfer:8-9
0 kv  transfer:5-8.5 ticks[6 8.5]
0 decode d0 wait:0-5 transfer:5-9 first:9-10 decode:10-20 FAILED
`},
		{name: "two attempts", rec: Record{End: ms(30), Outcome: OK, Attempts: []Attempt{
			{Room: 1, Prefill: "p0", Decode: "d0", PrefillEnd: Never, FirstToken: Never, End: ms(10), Cause: &Cause{Side: "prefill", Worker: "p0"}},
			{Room: 2, Decode: "d1", Start: ms(12), PrefillEnd: Never, FirstToken: ms(15), End: ms(30)},
		}}, want: `0 router  queue:10-12
0 prefill p0 prefill:0-10 FAILED
0 decode d0 wait:0-10
1 decode d1 wait:12-15 decode:15-30
`},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.rec.Start = zero
			got := draw(Timeline(&c.rec, at(c.now), func(uint64) (*openai.RoomReport, *openai.RoomReport) { return c.p, c.d }))
			if got != c.want {
				t.Errorf("got\n%swant\n%s", got, c.want)
			}
		})
	}
}
