package wire

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
)

// Switch is a network of hosts, each in a namespace of its own; see the package comment.
type Switch struct {
	fabric *fabric
	hub    *namespace // holds the other ends of the pairs
	hosts  map[string]*Host
	wg     sync.WaitGroup
}

// Host is one of a Switch's. It implements stack.Host.
type Host struct {
	ns   *namespace
	addr netip.Addr
	dev  *os.File // raw frames of the pair's other end
}

// Addr is the host's address, known to the other hosts alone.
func (h *Host) Addr() string { return h.addr.String() }

// Do runs f on a thread inside the host's namespace: sockets and processes that f makes belong to it.
// Goroutines that f starts do not run there.
func (h *Host) Do(f func() error) error { return h.ns.do(f) }

// frameBytes is the MTU of the links. Larger than Ethernet's, so that KV takes fewer packets.
const frameBytes = 9000

// OpenSwitch makes the hosts. Random decisions are drawn from seed, in the order in which packets come.
// The error says what is missing where the process may not make namespaces.
func OpenSwitch(seed uint64, names ...string) (*Switch, error) {
	s := &Switch{fabric: newFabric(seed), hosts: map[string]*Host{}}
	var err error
	if s.hub, err = newNamespace(); err != nil {
		return nil, fmt.Errorf("wire: %w; it needs root", err)
	}
	s.wg.Go(s.fabric.deliver)
	for i, name := range names {
		if err := s.add(name, i); err != nil {
			return nil, errors.Join(fmt.Errorf("wire: host %s: %w", name, err), s.Close())
		}
	}
	return s, nil
}

func (s *Switch) add(name string, i int) error {
	const inside = "eth0"
	outside := fmt.Sprintf("port%d", i)
	addr := [4]byte{10, 77, 0, byte(i + 1)}
	ns, err := newNamespace()
	if err != nil {
		return err
	}
	h := &Host{ns: ns, addr: netip.AddrFrom4(addr)}
	s.hosts[name] = h
	err = s.hub.do(func() error {
		if err := addPair(outside, inside, ns); err != nil {
			return err
		}
		if err := errors.Join(linkMTU(outside, frameBytes), linkUp(outside, 0)); err != nil {
			return err
		}
		h.dev, err = openDevice(outside)
		return err
	})
	if err != nil {
		return err
	}
	const noARP = 0x80 // IFF_NOARP: the switch finds the way by IP address
	var mac net.HardwareAddr
	err = ns.do(func() error {
		if err := errors.Join(wholeChecksums(inside), linkMTU(inside, frameBytes), linkAddress(inside, addr), linkUp(inside, noARP)); err != nil {
			return err
		}
		dev, err := net.InterfaceByName(inside)
		if err == nil {
			mac = dev.HardwareAddr
		}
		return err
	})
	if err != nil {
		return err
	}
	o := outlet{name: name, mac: [6]byte(mac), out: func(frame []byte) {
		if _, err := h.dev.Write(frame); err != nil && !errors.Is(err, os.ErrClosed) {
			s.fabric.overflowed()
		}
	}}
	s.fabric.mu.Lock()
	s.fabric.hosts[addr] = o
	s.fabric.mu.Unlock()
	s.wg.Go(func() {
		buf := make([]byte, 64<<10)
		for {
			n, err := h.dev.Read(buf)
			if err != nil {
				return // closed
			}
			s.fabric.take(o, buf[:n])
		}
	})
	return nil
}

// Host finds a host; nil if there is none of that name.
func (s *Switch) Host(name string) *Host { return s.hosts[name] }

// Set gives one direction of a link its weather, from now on.
func (s *Switch) Set(from, to string, w Weather) { s.fabric.set(from, to, w) }

// Counts is what has become of packets so far.
func (s *Switch) Counts() Counts {
	s.fabric.mu.Lock()
	defer s.fabric.mu.Unlock()
	return s.fabric.counts
}

// Close ends the network: nothing passes any more. The namespaces go when the last process in
// them has ended.
func (s *Switch) Close() error {
	s.fabric.close()
	var errs []error
	for _, h := range s.hosts {
		if h.dev != nil {
			errs = append(errs, h.dev.Close())
		}
	}
	s.wg.Wait()
	for _, h := range s.hosts {
		errs = append(errs, h.ns.close())
	}
	return errors.Join(append(errs, s.hub.close())...)
}
