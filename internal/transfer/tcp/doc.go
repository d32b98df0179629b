// Package tcp is the transport for workers on different machines: payload is sent by
// writev from the caller's memory and received by readv straight into the granted pages.
//
// # Two connections
//
// A peer has two connections: bulk for long writes, whose kernels may hold megabytes, and
// quick for those of at most [quickBytes], which so are never behind a long one in a kernel's
// queue. Writes of a grant keep their order: a grant changes the connection only when all its
// writes are settled. The target serves every connection alike, each with a goroutine of its own, and
// orders nothing between them. Either one's end is the peer's.
//
// A long write's sender and its reader at the target wait for the socket in poll(2), on a thread each, outside Go's poller
// ([line]; at most [maxLines] of a Transport, the others are like quick ones), and let the kernel run other threads after
// each frame and store while there are short writes.
//
// Readers look for bytes for up to 100 µs, of a long write up to 500 µs, before they sleep, where bytes have followed each other that closely
// ([lookout]), and are woken for a quarter of what is left of a long write, 64 KiB to 1 MiB.
//
// # Fencing
//
// The target's process does every store. Each store is one non-blocking readv (or a
// copy of bytes that came with a header) of at most [maxStore] bytes under the
// grant's lock, which is never held while waiting for the socket. Revoke takes that
// lock, so after it returns no byte is stored under the grant: tcp fences.
// What still arrives for a revoked grant is read into scratch memory and refused;
// the connection and its other rooms go on.
//
// # Wire
//
// Numbers are little-endian. The source says hello (32 bytes), the target answers
// (16 bytes); see [hello] and [welcome]. Then frames flow to the target:
//
//	open     header, segment table, notification, first bytes of the payload
//	data     header, more bytes of the payload
//	abandon  header: no more of this write will come, it was refused
//
// and answers (16 bytes: write number, code) flow back, one a write, after the
// notification was handed to the Sink. The open frame carries the whole segment
// table: grant, room, generation and every segment are checked before the first
// byte is stored. The frames of several writes may be interleaved, so that a long
// write does not hold up another room. A write has at most [maxSegments] segments.
//
// # Sessions
//
// The session id is the secret that lets a connection in. When the last connection
// of a session that had one ends, the session ends with it: its grants are
// revoked and Sink.Fenced follows. The peer then needs a new session.
//
// # Errors
//
// A connection that breaks the protocol is closed and counted ([Stats]); nothing
// else is affected. A peer that vanished is noticed by keepalive and
// TCP_USER_TIMEOUT. A peer that is stopped keeps its connection (until the user
// timeout, if bytes for it are pending); deadlines are the caller's.
package tcp
