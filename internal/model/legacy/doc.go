// Package legacy is the fault that Baton was born from, small enough to be looked at whole:
// the sender side of one prefill worker with its three threads, one shared-memory access a
// step, under the rules of another system ([Policy]) or under the production step function
// of package room. [Explore] walks every interleaving of a [Variant] and counts what goes
// wrong; [Replay] tells one interleaving step by step.
//
// # Threads
//
//   - The transfer worker takes chunks from its queue, writes them into the decode side's
//     pages and keeps the room's status up to date.
//   - The bootstrap thread receives what the decode side says: transfer information (where its
//     pages are) and ABORT, which it answers with ABORT_ACK.
//   - The scheduler creates the sender, hands over the chunks, polls the status, ends the
//     request on Failed or Success and then clears the room. A poll that sees a state that
//     is not terminal changes nothing and is no step.
//
// # What is counted
//
// An execution is a complete path: a sequence of steps after which no thread has one left. It is
//
//   - pinned, when a request has not ended after it,
//   - written after ack, when bytes are stored in pages whose ABORT_ACK was sent before: the
//     decode side may have given them to somebody else,
//   - a wrong success, when a request ends as success after its room had failed, or although
//     a chunk of it was never stored in its pages,
//   - a lost cause, when a request ends as failed and what it is told is not the first reason
//     for which its room failed.
//
// # Where the rules come from
//
// The habits are those of SGLang's NIXL and mooncake backends, read in its public releases 0.5.12 to
// 0.5.19; docs/race.md says which one is where. No code is taken from there.
package legacy
