package model

import (
	"fmt"
	"slices"
)

// Fault breaks the world's shells in one place, to show that the explorer finds it.
type Fault uint8

const (
	// FaultNone: the shells as they are.
	FaultNone Fault = iota
	// FaultEarlyAck: an abort is acked at once, though writes are outstanding.
	FaultEarlyAck
	// FaultNoTombstone: an abort that comes before its room is forgotten.
	FaultNoTombstone
	// FaultFreeOnDeadline: a deadline frees pages.
	FaultFreeOnDeadline
	// FaultFreeOnLost: the end of a session frees pages.
	FaultFreeOnLost
	// FaultNoGeneration: messages find rooms by the room id alone.
	FaultNoGeneration
	// FaultAnySession: the decode side believes messages of any session.
	FaultAnySession
	// FaultSkipLast: the last chunk is skipped, and no drop event says so.
	FaultSkipLast
	// FaultNoDeadline: deadlines never come.
	FaultNoDeadline
	// FaultKeepParked: an abort leaves a parked grant where it is, without its timer.
	FaultKeepParked
	// FaultNoDigest: a grant for another prompt is taken.
	FaultNoDigest
	// FaultNoChecksum: a chunk's bytes are believed.
	FaultNoChecksum
	// FaultNoRevoke: a grant is not revoked when its room ends.
	FaultNoRevoke
	// FaultLyingFence: a transport says that a revoke fenced when it did not.
	FaultLyingFence
	// FaultSilentRefusal: a grant that can not be served is dropped without a word.
	FaultSilentRefusal
	// FaultKeepIndex: a forgotten room stays in the index of grants.
	FaultKeepIndex
)

// faultNames are the words of the command line.
var faultNames = [...]string{
	FaultNone: "none", FaultEarlyAck: "early-ack", FaultNoTombstone: "no-tombstone", FaultFreeOnDeadline: "free-on-deadline",
	FaultFreeOnLost: "free-on-lost-peer", FaultNoGeneration: "no-generation", FaultAnySession: "any-session", FaultSkipLast: "skip-last-chunk",
	FaultNoDeadline: "no-deadline", FaultKeepParked: "keep-parked-grant", FaultNoDigest: "no-digest", FaultNoChecksum: "no-checksum",
	FaultNoRevoke: "no-revoke", FaultLyingFence: "lying-fence", FaultSilentRefusal: "silent-refusal", FaultKeepIndex: "keep-index",
}

// String survives unknown values.
func (f Fault) String() string {
	if int(f) < len(faultNames) {
		return faultNames[f]
	}
	return fmt.Sprintf("fault(%d)", uint8(f))
}

// FaultNames are those that ParseFault knows.
func FaultNames() []string { return faultNames[:] }

// ParseFault reads a name.
func ParseFault(name string) (Fault, error) {
	i := slices.Index(faultNames[:], name)
	if i < 0 {
		return FaultNone, fmt.Errorf("no fault %q; there are %v", name, faultNames)
	}
	return Fault(i), nil
}
