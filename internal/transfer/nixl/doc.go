// Package nixl is the transport over NVIDIA's NIXL library: one-sided writes by UCX, over
// tcp, RDMA or whatever else the library can use, between the processes of two workers.
//
// # Processes
//
// The library is never loaded into a worker. Each end of each connection has a helper
// process of its own ([Main]), which opens libnixl_capi.so by purego, owns one NIXL agent,
// and maps the memory by the descriptor that the worker gives it: the decode side's pool,
// or the prefill side's staging pool and a small copy buffer. The worker commands its
// helper over a socket pair (frame.go, command.go), pings it, and kills it when it does
// not answer. The kernel kills a helper when its worker dies. A crash or a hang inside the
// library costs one session, which ends with a cause.
//
// # A write
//
// NIXL knows no grants, so the target's worker is asked. The source sends an enter with
// grant and segments over a control connection (tcp); the target checks grant, room, session
// and bounds, counts the writer in and says yes, or refuses before a byte is stored. Then the
// source's helper writes, in pieces, and after the last one the library's own notification,
// which it delivers after the data. On it the target counts the writer out, calls
// Landed, in the order of the enters of a grant, and answers; the write is done when that
// answer and the helper's own completion are both there.
//
// # Revoke, drain, fence
//
// Revoke knows whether a writer is inside. None: fenced. One: it is told to leave, posts no
// further piece, and says so when its last piece is complete (Revoked). Giving up a
// request that is in flight does not stop it, so that is never used for an end; a writer that
// can not finish a piece ends its helper.
//
// The end of a session kills the target's helper for it and waits until it is reaped. With the
// transports of [DefaultTLS] that is a fence, also against a writer that is stopped or cut off: every
// store into host memory is made by the target's helper or, for RDMA, on its behalf. With
// others (cma, xpmem, knem: the writer's process stores by itself) it is not, and Fenced waits
// for the end of the control connection, which the writer's helper holds open too: it proves that
// both writer processes are gone. docs/nixl.md has the experiments.
//
// # What is trusted
//
// As with shm, the code of the source: somebody who has the target's metadata can write to
// all of the registered memory. The metadata only goes to the source of an open session.
// UCX's own ports are on the network like any other service's and not authenticated.
package nixl
