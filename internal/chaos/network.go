package chaos

import (
	"errors"
	"fmt"
	"os"

	"github.com/baton-pd/baton/internal/chaos/wire"
	"github.com/baton-pd/baton/internal/stack"
)

// network is what connects the processes.
type network struct {
	about   string // for people
	wide    bool   // see History.Wide
	set     func(from, to string, w wire.Weather)
	counts  func() wire.Counts
	close   func() error
	host    func(name string) stack.Host // nil: no hosts
	via     func(name, what, addr string) (string, error)
	reached map[string]string // address in the router's log -> process; filled by via
}

// openNetwork makes namespaces, or proxies where it must not or may not.
func openNetwork(seed uint64, w World, proxies bool) (*network, error) {
	names, prefills := w.processes()
	if !proxies {
		s, err := wire.OpenSwitch(seed, names...)
		if err == nil {
			return &network{about: "network namespaces", set: s.Set, counts: s.Counts, close: s.Close, reached: map[string]string{},
				host: func(name string) stack.Host { return s.Host(name) }}, nil
		}
		if !errors.Is(err, os.ErrPermission) && !errors.Is(err, errors.ErrUnsupported) {
			return nil, err
		}
		n := proxyNetwork(seed, names, prefills)
		n.about = fmt.Sprintf("proxies only, because there are no network namespaces here: %v", err)
		return n, nil
	}
	n := proxyNetwork(seed, names, prefills)
	n.about = "proxies only, as asked"
	return n, nil
}

func proxyNetwork(seed uint64, names, prefills []string) *network {
	p := wire.NewProxies(seed)
	n := &network{wide: true, set: p.Set, counts: p.Counts, close: p.Close, reached: map[string]string{}}
	peers := map[string][]string{"http": {router}, "bootstrap": names[len(prefills) : len(names)-1], "data": prefills}
	n.via = func(name, what, addr string) (string, error) {
		to, err := p.Via(name, addr, peers[what]...)
		if what == "http" {
			n.reached[to] = name
		}
		return to, err
	}
	return n
}

// weather is what a fault does to its link: onward from its first end to its second, and back. ports are the
// data and session ports of both ends.
func weather(f Fault, ports map[string][]uint16) (onward, back wire.Weather) {
	var w wire.Weather
	switch f.Kind {
	case Partition:
		w.Drop = 1
	case HalfOpen:
		return wire.Weather{Drop: 1}, wire.Weather{}
	case Drop:
		w.Drop = f.P
	case Delay:
		w.Delay, w.Jitter = f.Delay, f.Delay
	case Reorder:
		w.Reorder = f.P
	case Duplicate:
		w.Duplicate = f.P
	case Reset:
		w.Reset = 1
	case Corrupt:
		w.Corrupt, w.Ports = f.P, ports[f.Port]
	}
	return w, w
}
