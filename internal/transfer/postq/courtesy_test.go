package postq

import "testing"

func TestCourtesy(t *testing.T) {
	var c Courtesy
	for i, step := range []struct {
		shorts uint64
		left   int // after Give
	}{{0, 0}, {1, 2}, {1, 1}, {3, 2}, {3, 1}, {3, 0}, {3, 0}, {4, 2}} {
		c.See(step.shorts, 3)
		c.Give()
		if c.Left != step.left {
			t.Errorf("step %d: %d left, want %d", i, c.Left, step.left)
		}
	}
}
