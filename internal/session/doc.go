// Package session is the control channel between a decode worker ([Client]) and a
// prefill worker ([Server]): one gRPC bidirectional stream, one generation of the peer.
// It carries hello (version, fingerprint, memory descriptors), grants, failures, aborts
// and abort acks. The messages are in proto/baton/v1.
//
// # What it promises
//
// A message accepted by a Send method is handled by the peer, once and in order, or the
// session ends. The end of a session is an event for every room of it: the
// handler's Down is called exactly once, after every other call, with the first
// cause. Send methods never block; a send queue that overflows ends the session.
//
// A peer that is gone, stopped, stuck or cut off is noticed within a bound: a
// message that is not handled for AckTimeout ends the session, and so does silence for
// KeepaliveTime + KeepaliveTimeout. Each message is acked after its handler has
// returned, so a hung handler counts as a dead peer. gRPC's own keepalive runs too, but
// a client's cannot be shorter than 10 s, and it is answered by a process whose
// handlers hang.
//
// No bytes from the wire end a loop or the process. What breaks the protocol ends its
// session with CodeProtocol; a grant with unacceptable values is answered by a
// failure of its room only. A panic in a handler ends its session with CodeInternal.
//
// # Generations and blame
//
// A session is one life of one pair: after a restart, at the same address or
// another, the next [Client.Get] makes a new one with a new id. A failure is remembered
// only to space out attempts; it never refuses one (see Get).
//
// # Who owns what
//
// A live session has three goroutines on each side: one owns the send side of the
// stream, one receives and calls the handler, one watches the deadlines. The
// bookkeeping they share is pure and under one short lock (ledger). Client.Close and
// Server.Close end all sessions, tell the peers why, and wait for every goroutine and
// handler. The server owns the data peer it got from Connect and closes it after Down
// has returned, so that Down can still settle outstanding writes.
//
// # What it does not promise
//
// There is no encryption and no authentication: the port belongs on a trusted network.
// A handler that never returns holds up the end of its session and Close.
package session
