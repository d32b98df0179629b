// Package shm is the transport for workers on one machine: the source maps the
// target's memory and stores into it directly. No byte goes through the kernel;
// a unix socket carries the handshake and answers, a ring in shared memory notifications.
//
// # What is trusted
//
// The two ends must run as the same user. A source that has the mapping can store
// anywhere in it, so shm trusts the code of the source process: bounds and
// grants are checked by that code, before each store. What shm does protect against is
// a correct source at a bad moment: late, stopped (SIGSTOP), slow, killed, or with
// a stale grant. The target trusts nothing that could hurt its own process: messages
// are checked, what it needs of the shared table it keeps in private, and the control
// memory is sealed against resizing. A source survives a target that breaks the
// rules too: offsets are checked against the mapping, and a fault ends the connection,
// not the process.
//
// # Grants in shared memory
//
// Each connection has a control area, a second memfd that both ends map (layout in
// control.go): a table of grants with their spans and one atomic state word each. The
// writer works in slices of at most [maxSlice]. It enters a grant by a
// compare-and-swap that counts it in, which fails once the grant is revoked, copies
// one slice, and leaves. Revoke sets the revoked bit and sees in the same word whether
// a writer is inside:
//
//   - none: no byte will be stored under the grant any more. Revoke returns true.
//   - one: Revoke returns false. The writer, on leaving, finds the bit and says so on
//     the socket; the target then calls Revoked of a [transfer.RevokeSink]. If it never
//     leaves, because its process is stopped or dies, Sink.Fenced is what remains.
//
// # Completions
//
// A completion with its notification goes through a ring in the control area (ring.go). While
// completions come close together the target looks for the next one for a moment before it sleeps
// (spinFor), so that it is heard in a microsecond or two; a sleeping target is woken through the socket.
// A small write is stored by its poster's goroutine if no other of its grant is to be sent, also while another goroutine
// is inside a slice of a long one: so it does not wait for that, nor for a core that the kernel has taken from it.
//
// # When a session is fenced
//
// A source unmaps before it closes its socket, and the kernel tears down a dead
// process's memory before its files. So the end of the socket proves that no store
// can follow, and is the only thing that does: CloseSession tells the source to go, and
// Fenced follows when it has, however long that takes. Target.Close does not wait
// for a stopped source: it returns an [transfer.UnfencedError], the memory stays the pool's
// and must not be reused for something else in this process.
//
// # Files
//
// The socket lies in Config.Dir, readable for the user only. Sockets that dead
// processes left there are removed when a target starts. A descriptor names the machine
// by its boot id and the socket by device and inode, so that a process in another
// mount namespace does not take another file for it.
package shm
