// Package wire is networks whose links misbehave on order, for processes under test.
//
// [Switch] is the real thing: each host is a network namespace with one end of a veth pair; the other ends
// are in a namespace of their own, where this process reads every frame and decides whether, when, how
// often and how damaged it goes on. So the kernel's TCP on both sides sees what a bad network does:
// packets that are lost, late, doubled, overtaken, damaged with a right checksum, or answered by a forged reset,
// in one direction or both. It needs root (CAP_NET_ADMIN, CAP_NET_RAW and CAP_SYS_ADMIN).
//
// [Proxies] is what is left without root: TCP proxies on the loopback device that hold, delay, damage
// and reset the streams that go through them. Packets can not be reordered or doubled there.
//
// Both obey [Weather], set for each direction of each link.
//
// # Nothing is left behind
//
// Namespaces have no name: a descriptor of this process and the processes inside keep them. When both are gone,
// also after kill -9, the kernel removes them with their links, addresses and routes. The namespace of
// this process is never changed: nothing here needs a free subnet or an interface name.
//
// # Ownership
//
// A Switch has one goroutine a host, which reads its frames, and one that delivers delayed ones; Proxies have one
// a listener and two a connection. Close ends and waits for them all.
package wire

import "time"

// Weather is what happens to what travels on a link in one direction. The zero value is fair weather.
// Chances are of one packet and between 0 and 1.
type Weather struct {
	// Drop is the chance that a packet is lost; 1 is a partition. Proxies, which can lose no byte of a
	// stream, hold it instead: for ever at 1, else for 200 ms as a retransmission would.
	Drop float64
	// Delay and up to Jitter more are added to the way; the order is kept.
	Delay, Jitter time.Duration
	// Reorder is the chance that a packet is held 5 to 30 ms more and overtaken.
	Reorder float64
	// Duplicate is the chance that a packet arrives twice.
	Duplicate float64
	// Corrupt is the chance that a byte of a packet's payload is changed and the checksum made right
	// again, so that nobody but the receiving program can notice.
	Corrupt float64
	// Reset is the chance that a packet is swallowed and both ends of its connection get a reset.
	Reset float64
	// Ports limits the weather to connections of which one end has one of these ports; nil: all.
	Ports []uint16
}

// hits reports whether the weather is for a connection between these ports.
func (w *Weather) hits(a, b uint16) bool {
	if len(w.Ports) == 0 {
		return true
	}
	for _, p := range w.Ports {
		if p == a || p == b {
			return true
		}
	}
	return false
}

// Counts is what a network has done to packets (Proxies: to pieces of streams) since it was opened.
type Counts struct {
	Passed, Dropped, Delayed, Reordered, Duplicated, Corrupted, Reset uint64
	// Overflowed are frames that were lost for want of room, which nobody ordered.
	Overflowed uint64
}
