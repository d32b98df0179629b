package bench

import (
	"strings"
	"testing"
	"time"
)

// TestWindow: tokens count from the moment when the last stream has begun until the first has ended.
func TestWindow(t *testing.T) {
	begin := time.Unix(0, 0)
	stream := func(from int) Trace { // four events, 100 ms apart
		var tr Trace
		for i := range 4 {
			tr.Marks = append(tr.Marks, begin.Add(time.Duration(from+100*i)*time.Millisecond))
		}
		return tr
	}
	// From 150 to 300 ms: 200 and 300 of the first, 250 of the second, two tokens each.
	if rate, gap := window([]Trace{stream(0), stream(150)}, 8); rate < 39.9 || rate > 40.1 || gap != 100 {
		t.Errorf("%v tokens/s, gaps of %v ms; want 40 and 100", rate, gap)
	}
	if rate, _ := window([]Trace{stream(0), stream(1000)}, 8); rate != 0 {
		t.Errorf("%v tokens/s of streams that never ran together", rate)
	}
}

// TestDecodeOfShortStreams: a rate that cannot be measured is an error, no 0 in a table.
func TestDecodeOfShortStreams(t *testing.T) {
	_, err := Decode(t.Context(), []*Target{newPair("one event", 0).target(t, "pd")}, []int{1}, 16, 1)
	if err == nil || !strings.Contains(err.Error(), "16 tokens a stream are too few") {
		t.Errorf("error %v", err)
	}
}
