package tcp

import (
	"fmt"
	"net"
	"testing"

	"golang.org/x/sys/unix"

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
	return nil
}

func TestSoakReturnsToBaseline(t *testing.T) {
	transfertest.Soak(t, New(Config{Queue: 32, FrameBytes: 4096}), idle)
}

func TestConnectionsLeaveNothingBehind(t *testing.T) {
	transfertest.Connections(t, New(Config{}), idle)
}

func TestSteadyStateDoesNotAllocate(t *testing.T) {
	transfertest.SteadyAllocations(t, New(Config{}))
}

func TestAllocationsDoNotGrowWithSegments(t *testing.T) {
	transfertest.SegmentAllocations(t, New(Config{}))
}

func TestRunsOfSegmentsAreStoredExactly(t *testing.T) {
	transfertest.Runs(t, New(Config{FrameBytes: 64 << 10}), 1<<20, 150<<10)
}

func BenchmarkWrite(b *testing.B) { transfertest.BenchmarkWrite(b, New(Config{})) }

// TestKernelHoldsLittle: little that is not sent waits in the source's kernel before a short write, and the
// target's buffers are what the configuration says.
func TestKernelHoldsLittle(t *testing.T) {
	p := listen(t, Config{ReceiveBuffer: 100 << 10}, 4096)
	pe := p.dial(t).(*peer)
	get := func(c *net.TCPConn, level, name int) (v int) {
		rc, err := c.SyscallConn()
		if err == nil {
			err = rc.Control(func(fd uintptr) { v, _ = unix.GetsockoptInt(int(fd), level, name) })
		}
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := get(pe.quick.tcp, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT); v != unsentBytes {
		t.Errorf("source keeps %d unsent bytes", v)
	}
	tg := p.tgt.(*target)
	for _, c := range tg.Conns() {
		if v := get(c.tcp, unix.SOL_SOCKET, unix.SO_RCVBUF); v != 200<<10 { // the kernel doubles it
			t.Errorf("target's buffer has %d bytes", v)
		}
	}
}
