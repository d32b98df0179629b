// Package hub holds the two shells that drive the room machines: [Senders] on a
// prefill worker and [Receivers] on a decode worker. They own the registries, turn
// session messages and transport callbacks into room events, and execute the
// effects: writes, grants, aborts, acks, page releases.
//
// # One room, end to end
//
// Receivers.Open makes the receiver, gets the session to the prefill worker,
// takes pages (in turn, see [prealloc]), allows the grant at the transport and
// sends it. Senders hears the grant (perhaps before the request: it is parked
// then), closes Granted, and posts each chunk that the scheduler hands over.
// The transport stores the chunk and calls Landed at the decode side with the
// chunk's notification (see [chunkNote]), or with one for each part that it leaves in
// (see [partNote]), whose bytes are summed then (see [arrival]); when all is there and the
// checksum of the whole is right the chunk is delivered. The last chunk makes both sides Success.
//
// # Who lets go of pages, and when
//
// A decode side's lease has two owners. The request lets go at Release. The
// transfer lets go after Revoke plus one of: success (the sender has nothing
// outstanding after its last chunk), the abort ack, or a fence. Revokes run on
// one goroutine of the hub, never inside a transport's callback.
//
// # Locks
//
// Order: receiving.landing -> room lock (registry) -> hub.mu -> session, pool, transport locks, and
// hub.mu -> sending.mu -> outQueue.mu.
// Execute runs under the room lock; it only enqueues, never waits. hub.mu is never
// held while an event is applied.
package hub
