package nixl

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// network is two network namespaces, each with a veth to a bridge in a third: the ends see
// their links up while nothing passes.
type network struct {
	t    *testing.T
	name string
}

func (n *network) ip(args ...string) {
	n.t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.t.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func newNetwork(t *testing.T) *network {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("needs the ip command")
	}
	n := &network{t: t, name: fmt.Sprintf("bnx%d", os.Getpid())}
	if out, err := exec.Command("ip", "netns", "add", n.ns("s")).CombinedOutput(); err != nil {
		t.Skipf("needs network namespaces: %v: %s", err, out)
	}
	t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.ns("s")).Run() })
	n.ip("-n", n.ns("s"), "link", "add", "name", "sw0", "type", "bridge")
	n.ip("-n", n.ns("s"), "link", "set", "sw0", "up")
	for i, end := range []string{"a", "b"} {
		n.ip("netns", "add", n.ns(end))
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "del", n.ns(end)).Run() })
		n.ip("-n", n.ns("s"), "link", "add", "port"+end, "type", "veth", "peer", "name", "eth0", "netns", n.ns(end))
		n.ip("-n", n.ns("s"), "link", "set", "port"+end, "master", "sw0", "up")
		n.ip("-n", n.ns(end), "addr", "add", fmt.Sprintf("10.231.77.%d/24", i+1), "dev", "eth0")
		n.ip("-n", n.ns(end), "link", "set", "lo", "up")
		n.ip("-n", n.ns(end), "link", "set", "eth0", "up")
	}
	return n
}

func (n *network) ns(end string) string { return n.name + end }

// in is a command line that runs another in a namespace.
func (n *network) in(end string) []string { return []string{"ip", "netns", "exec", n.ns(end)} }

// pass lets everything or nothing pass.
func (n *network) pass(yes bool) {
	n.t.Helper()
	state := "0"
	if yes {
		state = "3"
	}
	if out, err := exec.Command("bridge", "-n", n.ns("s"), "link", "set", "dev", "porta", "state", state).CombinedOutput(); err != nil {
		n.t.Fatalf("bridge link set: %v: %s", err, out)
	}
}

// TestPartition: a write that a partition has caught is neither refused nor given up: it goes on when the network
// does, so no time that passes is a proof. With the target's helper killed meanwhile, nothing lands.
func TestPartition(t *testing.T) {
	needLibrary(t)
	watch := 2 * time.Second
	if d, err := time.ParseDuration(os.Getenv("BATON_NIXL_PARTITION")); err == nil {
		watch = d
	}
	for _, kill := range []bool{false, true} {
		t.Run(fmt.Sprintf("target killed %v", kill), func(t *testing.T) {
			n := newNetwork(t)
			n.pass(true)
			l := newLab(t, "tcp", n.in("a"), n.in("b"))
			l.midway()
			n.pass(false)
			at := l.settled(quiet)
			began := time.Now()
			select {
			case err := <-l.own.ended:
				t.Fatalf("the source's library has given up after %v: %v", time.Since(began), err)
			case <-time.After(watch):
				t.Logf("in progress after %v of partition, %d of %d pages stored", watch, at, pages)
			}
			if kill {
				l.target.finish()
			}
			clear(l.mem)
			n.pass(true)
			late := time.Now().Add(20*time.Second + watch)
			stored := 0
			for stored == 0 && !kill && time.Now().Before(late) {
				stored = l.settled(quiet)
			}
			if kill {
				stored = l.settled(3 * time.Second)
			}
			t.Logf("%d pages were stored after the network was whole again", stored)
			if (stored == 0) != kill {
				t.Errorf("stored %d pages, target killed: %v", stored, kill)
			}
			l.underWay()
		})
	}
}
