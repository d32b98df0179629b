// Package model explores the life of rooms exhaustively: a prefill and a decode worker, the
// network and the data plane between them, and everything that can go wrong, in
// small worlds, with the production step functions of package room.
//
// # Use
//
// A [Scenario] is a small text file: how many rooms, chunks and pages, which kind of
// network and transport, and how often each fault may strike. [Scenarios] are those that
// come with the package. [Explore] visits every state its world can be in and checks the
// nine invariants; a violation is a shortest trace, in words, which [Replay] takes again.
//
// # What is real and what is modelled
//
// Real: [room.Sender] and [room.Receiver], stepped by their Step. Modelled: what the
// shells in internal/transfer/hub do with the effects (senders.go, receivers.go), the session
// and its end (wire.go), writes, pages and fences (store.go), and the owners of the rooms
// (owner.go). One step of the model is one critical section of the real code, so every
// interleaving of goroutines is some order of steps.
//
// # Invariants
//
// Each check is named after its number in the design (checks.go, [Invariant]): ends,
// sticks, tells, memory, returns, identity, truth, progress, robust. docs/explorer.md
// says how each is stated here and what is deliberately not modelled.
//
// # Proof that it finds faults
//
// A [Fault] breaks the world's shells in one place, [World.SetTables] gives it a wrong
// transition table. Tests hold that each is found.
package model
