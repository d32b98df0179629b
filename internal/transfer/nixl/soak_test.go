package nixl

import (
	"fmt"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/grants"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

// idle: the only session has its connection and nothing else.
func idle(tgt transfer.Target) error {
	tg := tgt.(*target)
	if n := tg.Counts(); n != (grants.Counts{Sessions: 1, Unfenced: 1}) {
		return fmt.Errorf("left: %+v", n)
	}
	for _, c := range tg.Conns() {
		c.mu.Lock()
		n := len(c.entries)
		c.mu.Unlock()
		if n > 0 {
			return fmt.Errorf("%d writes are still inside", n)
		}
	}
	return nil
}

func TestSoakReturnsToBaseline(t *testing.T) {
	needLibrary(t)
	transfertest.Soak(t, New(testConfig()), idle)
}
