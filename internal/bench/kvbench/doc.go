// Package kvbench measures transports: the source in this process, the target in
// another one, over the same interface the workers use; and other systems on the same work.
//
// # The work
//
// The target registers a pool and splits it evenly over the rooms, each with a grant of
// its own. A round writes every block of the pool once, source block i to a place
// of its own (pages are scattered, as those of a paged KV cache are), in writes of many
// segments, a bounded number at a time in each room. The rate is the round's bytes over the
// time from the first Post to the last Done, and Done means applied at the destination. After
// each round the target compares every byte with what it must be.
//
// The latency is that of one block with a notification, one after the other: from before
// Post to the Sink's Landed in the other process, on the clock both share (CLOCK_MONOTONIC).
//
// # Side by side
//
// All systems of a run are there at once, each with its processes and memory, and take turns round by round
// ([Bench.Run]): what a shared machine does for a second or two meets all of them, and a median sees past it. What
// memory a process has got it keeps, so where a few per cent count all are started anew some times. A host may
// also move a virtual machine's two cores away from each other, after which a cache line takes four times as long
// from one to the other and everything that uses both is half as fast. Rounds of such moments are repeated.
package kvbench

import (
	"encoding/binary"
	"math/rand/v2"

	"golang.org/x/sys/unix"
)

// Row is one measured combination.
type Row struct {
	Transport  string `json:"transport"`
	BlockBytes int    `json:"block_bytes"`
	// GBPerS is the median of the rounds, in 10^9 bytes a second.
	GBPerS float64 `json:"gb_per_s"`
	// P50US is the one-way latency of one block with a notification, in microseconds; 0: not measured.
	P50US float64 `json:"p50_us"`
	// Verified: every byte of every round was right.
	Verified bool    `json:"verified"`
	MinGBPS  float64 `json:"gb_per_s_min"`
	MaxGBPS  float64 `json:"gb_per_s_max"`
	P99US    float64 `json:"p99_us"`
	// CPUPerGB is CPU seconds of both processes for 10^9 bytes.
	CPUPerGB float64 `json:"cpu_s_per_gb"`
	Rooms    int     `json:"rooms"`
	Rounds   int     `json:"rounds"`
	// Repeated is how many rounds were done again because the two cores were apart.
	Repeated int `json:"repeated"`
	// CoreNS is the longest way of a cache line from core to core, in nanoseconds, before or after a
	// round that counts; 0: not measured.
	CoreNS float64 `json:"core_to_core_ns"`
}

// now is CLOCK_MONOTONIC in nanoseconds, the same in every process of the machine.
func now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // cannot fail for this clock
	return t.Nano()
}

// cpu is the CPU time of this process in seconds.
func cpu() float64 {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u) // cannot fail for SELF
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// fill writes block i's bytes of round seed.
func fill(b []byte, seed uint64, i int) {
	x := seed*0x9e3779b97f4a7c15 + uint64(i)*0xd6e8feb86659fd93 + 1
	for ; len(b) >= 8; b = b[8:] {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b, x)
	}
	for k := range b {
		b[k] = byte(x >> (8 * k))
	}
}

// wrong reports whether b differs from what fill writes.
func wrong(b []byte, seed uint64, i int) bool {
	x := seed*0x9e3779b97f4a7c15 + uint64(i)*0xd6e8feb86659fd93 + 1
	for ; len(b) >= 8; b = b[8:] {
		x = x*6364136223846793005 + 1442695040888963407
		if binary.LittleEndian.Uint64(b) != x {
			return true
		}
	}
	for k := range b {
		if b[k] != byte(x>>(8*k)) {
			return true
		}
	}
	return false
}

// places is where source block i goes: n blocks are split evenly over the rooms (what is left over
// is not used), and permuted within each. The same in both processes.
func places(n, rooms int) []int {
	per := n / rooms
	out := make([]int, per*rooms)
	r := rand.New(rand.NewPCG(uint64(n), uint64(rooms)))
	for room := range rooms {
		for i, p := range r.Perm(per) {
			out[room*per+i] = room*per + p
		}
	}
	return out
}
