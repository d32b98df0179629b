// Package sglang speaks the wire of SGLang's NIXL backend for disaggregated serving, release 0.5.23, on Baton's own room
// machines: [Prefill] and [Decode] are the two managers, [Bootstrap] is the discovery server. docs/sglang.md describes
// the wire, what is different here and why.
//
// # Channels
//
// Discovery and heartbeat are HTTP (route.go, client.go). Control messages are ZeroMQ, one PULL socket a manager
// (package zmtp); their frames are encoded and decoded in codec.go, which is pure and total. Bytes go by one-sided NIXL writes
// from the prefill rank into the decode manager's memory, by helper processes (package nixl).
//
// # Frames and events
//
//	metadata         -> EvGrant (prefill)       FxSendGrant  -> metadata (decode)
//	KV_STATUS 4      -> EvLanded, the only one  success      -> KV_STATUS 4 (prefill)
//	KV_STATUS 0      -> EvRemoteFailed          FxSendFailed -> KV_STATUS 0, once drained (prefill)
//	ABORT            -> EvAbort                 FxSendAbort  -> ABORT, with a generation if pages were offered (decode)
//	ABORT_ACK        -> EvAck                   FxSendAck    -> ABORT_ACK (prefill)
//	write complete   -> EvSettle                FxWrite      -> NIXL write (prefill)
//	link ended       -> EvPeerLost, and after the death of its helper process EvFenced
//
// # Memory
//
// This wire has no grants: a registered prefill rank can write to all of the memory. So a decode manager gives each rank a
// helper process and registration of its own (link.go), and the end of that process is the fence. Pages of a failed room stay in
// quarantine until the ack of its abort or that fence. An abort that is not acked in time retires the link: it takes no new
// rooms and is fenced when its last live room has ended.
//
// # Who owns what
//
// A link's and a way's goroutine (run) owns its connection and helper. Close of a manager waits for all. Lock order: room,
// manager, agent, then Receiving and Sending, pools and connections. Effects run under the room's lock and only queue.
//
// # What is not promised
//
// The wire has no authentication, no receipt, and no generation but in ABORT: a KV_STATUS of an earlier life of a room number
// can only be told from one of the present life by the tombstone that keeps the number from being used again.
package sglang
