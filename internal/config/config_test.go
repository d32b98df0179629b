package config

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
)

func TestDivideCores(t *testing.T) {
	for _, c := range []struct {
		total, prefills, decodes int
		want                     []int
		over                     bool
		note                     string
	}{
		{2, 1, 1, []int{1, 1}, false, "2 cores: prefill 1 thread, decode 1 thread"},
		{3, 1, 1, []int{2, 1}, false, "3 cores: prefill 2 threads, decode 1 thread"},
		{8, 1, 2, []int{3, 3, 2}, false, "8 cores: prefill 3 threads, decode 3+2 threads"},
		{4, 0, 1, []int{4}, false, "4 cores: decode 4 threads"},
		{4, 2, 0, []int{2, 2}, false, "4 cores: prefill 2+2 threads"},
		{1, 0, 0, nil, false, "1 core, no workers"},
		{0, 0, 1, []int{1}, false, "1 core: decode 1 thread"},
		{2, -1, 1, []int{2}, false, "2 cores: decode 2 threads"},
		{2, 2, 1, []int{1, 1, 1}, true, "2 cores: prefill 1+1 threads, decode 1 thread; oversubscribed"},
	} {
		got, note, over := DivideCores(c.total, c.prefills, c.decodes)
		if !slices.Equal(got, c.want) || over != c.over {
			t.Errorf("DivideCores(%d, %d, %d) = %v, %v; want %v, %v", c.total, c.prefills, c.decodes, got, over, c.want, c.over)
		}
		if note != c.note && !(c.over && strings.HasPrefix(note, c.note)) {
			t.Errorf("DivideCores(%d, %d, %d) says %q; want %q", c.total, c.prefills, c.decodes, note, c.note)
		}
	}
}

// Over all small machines: no core is lost or given twice, and no worker gets nothing.
func TestDivideCoresSums(t *testing.T) {
	for total := 1; total <= 9; total++ {
		for p := 0; p <= 4; p++ {
			for d := 0; d <= 4; d++ {
				threads, _, over := DivideCores(total, p, d)
				sum := 0
				for _, n := range threads {
					if sum += n; n < 1 {
						t.Errorf("%d cores, %d+%d workers: a worker without a thread: %v", total, p, d, threads)
					}
				}
				if over != (p+d > total) || !over && p+d > 0 && sum != total {
					t.Errorf("%d cores, %d+%d workers: %v, oversubscribed %v", total, p, d, threads, over)
				}
			}
		}
	}
}

func TestFreePorts(t *testing.T) {
	ports, err := FreePorts(8)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(ports)
	if len(slices.Compact(slices.Clone(ports))) != 8 {
		t.Fatalf("FreePorts(8) = %v; want 8 distinct ports", ports)
	}
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0]))
	if err != nil {
		t.Fatalf("a free port cannot be used: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}
