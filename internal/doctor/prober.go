package doctor

import (
	"context"
	"time"
)

// Prober asks one prefill worker in its own protocol, as a decode worker would, about rooms that
// the prober has made itself and about no others.
type Prober interface {
	// Wire names the protocol: "baton" or "sglang".
	Wire() string
	// Probe asks the worker whose bootstrap port is addr (host:port). It ends by itself when every
	// step has had its time, or with ctx. What went wrong is in the result.
	Probe(ctx context.Context, addr string) ProbeResult
}

// ProbeResult is what a probe saw.
type ProbeResult struct {
	Addr     string      `json:"addr"`
	Wire     string      `json:"wire"`
	Worker   string      `json:"worker"` // as it calls itself; "" if it did not say
	Steps    []ProbeStep `json:"steps"`
	Findings []Finding   `json:"findings"`
	Doubts   []Remark    `json:"doubts"`
}

// ProbeStep is one question and its answer.
type ProbeStep struct {
	Name   string        `json:"name"`
	OK     bool          `json:"ok"`
	Took   time.Duration `json:"took_ns"`
	Detail string        `json:"detail"`
}

// ProbeRooms is where probes take their room ids from: the upper 16 of an id's 63 bits are this. The others and
// the generation are random, so that no probe meets another; one in 65,536 of a router's random ids
// lies in the range, and that one would also have to have the same 47 bits and generation.
const ProbeRooms = uint64(0x7d0c) << 47

// probeRoomBits are the random ones.
const probeRoomBits = 47

// ProbeRoom makes an id of the range from random bits.
func ProbeRoom(random uint64) uint64 {
	return ProbeRooms | random&(1<<probeRoomBits-1)
}
