package model

// Fault breaks the world's shells in one place, to show that the explorer finds it.
type Fault uint8

const (
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
