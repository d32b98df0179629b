package sched

import (
	"fmt"
	"sync/atomic"
)

// phase is where a request is. It only moves forward, except between decoding and
// preempted. Its name is the Phase of the request's cause.
type phase int32

const (
	// Prefill side.
	phaseBootstrap phase = iota // the room has no grant yet
	phaseWaiting                // granted, waiting for cells and a sequence
	phaseForward                // chunks are being computed
	phaseInflight               // every chunk is handed over, not all are applied
	// Decode side.
	phasePrealloc     // waiting for cells and sequences
	phaseConnecting   // room opened, grant not sent yet
	phaseTransferring // chunks land and are imported
	phaseLocal        // monolithic: the prompt is computed here
	phaseDecoding     // at least one choice is resident and runs or waits for a row
	phasePreempted    // every unfinished choice is swapped out

	phaseEnded // holds nothing
	numPhases
)

// String is the stable name used in causes and logs.
func (p phase) String() string {
	switch p {
	case phaseBootstrap, phaseConnecting:
		return "bootstrapping"
	case phaseWaiting:
		return "waiting"
	case phaseForward, phaseLocal:
		return "prefilling"
	case phaseInflight, phaseTransferring:
		return "transferring"
	case phasePrealloc:
		return "prealloc"
	case phaseDecoding:
		return "decoding"
	case phasePreempted:
		return "preempted"
	case phaseEnded:
		return "ended"
	default:
		return fmt.Sprintf("phase(%d)", int32(p))
	}
}

// doing says for people what a request in this phase waits for.
func (p phase) doing() string {
	switch p {
	case phaseBootstrap:
		return "waited for the decode worker's grant (its cells, session and landing pages)"
	case phaseWaiting, phasePrealloc:
		return "waited for KV cells that others held"
	case phaseForward, phaseLocal:
		return "had its prompt computed"
	case phaseInflight:
		return "waited for the last chunks to be applied at the decode worker"
	case phaseConnecting:
		return "waited for the session to the prefill worker, or for landing pages"
	case phaseTransferring:
		return "waited for the prompt's KV from the prefill worker"
	case phasePreempted:
		return "was swapped out for older requests"
	default:
		return "was " + p.String()
	}
}

// census counts live requests by phase. Written on every change of a phase under
// the request's lock, read by snapshots and gauges without one.
type census [numPhases]atomic.Int64

func (c *census) sum(ps ...phase) int {
	n := int64(0)
	for _, p := range ps {
		n += c[p].Load()
	}
	return int(n)
}
