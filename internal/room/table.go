package room

// This file is the whole life of a room: every (node, event) pair of either side
// has its rows here, and nothing else moves a state. Terminal states have rows
// only to themselves. Rows of one pair stand together and are tried in order.

// The nodes of both machines.
var (
	boot     = Node{StateBootstrapping, DrainLive}
	waiting  = Node{StateWaitingForInput, DrainLive}
	moving   = Node{StateTransferring, DrainLive}
	pending  = Node{StateFailed, DrainPending}
	owing    = Node{StateFailed, DrainOwing}
	failed   = Node{StateFailed, DrainDone}
	orphan   = Node{StateFailed, DrainOrphan}
	debtor   = Node{StateFailed, DrainOrphanOwing}
	gone     = Node{StateFailed, DrainGone}
	success  = Node{StateSuccess, DrainDone}
	finished = Node{StateSuccess, DrainGone}
)

// Reasons that are the same for many pairs.
const (
	whyFirstCause  = "the first cause stays; this one is only counted"
	whyForeign     = "not an event of this side"
	whySticks      = "a terminal state never changes"
	whySkip        = "the room has ended, so the chunk must not be written; the state does not change"
	whyNoWrite     = "no such write is outstanding; a callback of another life changes nothing"
	whyTwice       = "released before"
	whyGone        = "the room is forgotten"
	whyReleased    = "the owner let go of the room before it had ended"
	whyDropped     = "a chunk that will never be sent means that the room cannot complete"
	whyDeadline    = "the request's deadline or the bound of this state passed"
	whyPeerLost    = "the session to the other worker ended"
	whyCancelled   = "ended on this worker"
	whyAborted     = "the decode worker ended the room"
	whyWriteFailed = "a chunk's write was not applied at the destination"
	whyOrder       = "chunks must begin once each and in order"
	whyRemote      = "the prefill worker's side of the room failed"
	whyUnasked     = "an abort was acked that nobody sent"
	whyComplete    = "the last chunk is applied, so the sender has nothing outstanding: complete and drained"
	whyLandOrder   = "chunks must land once each, in order, with the last one marked"
	whyFenced      = "the session was fenced under a live room"
	whyLostGrant   = "the session to the other worker ended; that is no fence, so the pages stay"
	whyNoGrant     = "the room has ended: its pages are not granted any more"
	whyLateLand    = "bytes of an ended room are never delivered"
)

var senderRows = withForeign([]Row{
	// Bootstrapping: no grant yet, nothing was written.
	{From: boot, Event: EvGrant, To: waiting, Effects: FxGranted, Reason: "the decode worker's pages are known: chunks may be sent"},
	{From: boot, Event: EvBegin, To: failed, Effects: FxSkip | FxSendFailed | FxTerminal, Code: CodeInternal, Reason: "a chunk was begun before the grant"},
	{From: boot, Event: EvSettle, To: boot, Effects: FxStale, Reason: whyNoWrite},
	{From: boot, Event: EvSettleError, To: boot, Effects: FxStale, Reason: whyNoWrite},
	{From: boot, Event: EvDrop, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeChunkDropped, Reason: whyDropped},
	{From: boot, Event: EvAbort, To: failed, Effects: FxSendAck | FxTerminal, Code: CodeAborted, Reason: whyAborted},
	{From: boot, Event: EvCancel, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: boot, Event: EvDeadline, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: boot, Event: EvPeerLost, To: failed, Effects: FxTerminal, Code: CodePeerLost, Reason: whyPeerLost},
	{From: boot, Event: EvRelease, To: gone, Effects: FxSendFailed | FxTerminal | FxForget, Code: CodeAborted, Reason: whyReleased},

	// WaitingForInput: granted, nothing was written.
	{From: waiting, Event: EvGrant, To: waiting, Effects: FxDuplicate, Reason: "granted before"},
	{From: waiting, Event: EvBegin, When: WhenNext, To: moving, Effects: FxWrite, Counts: true, Reason: "the first chunk goes out"},
	{From: waiting, Event: EvBegin, To: failed, Effects: FxSkip | FxSendFailed | FxTerminal, Code: CodeInternal, Reason: whyOrder},
	{From: waiting, Event: EvSettle, To: waiting, Effects: FxStale, Reason: whyNoWrite},
	{From: waiting, Event: EvSettleError, To: waiting, Effects: FxStale, Reason: whyNoWrite},
	{From: waiting, Event: EvDrop, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeChunkDropped, Reason: whyDropped},
	{From: waiting, Event: EvAbort, To: failed, Effects: FxSendAck | FxTerminal, Code: CodeAborted, Reason: whyAborted},
	{From: waiting, Event: EvCancel, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: waiting, Event: EvDeadline, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: waiting, Event: EvPeerLost, To: failed, Effects: FxTerminal, Code: CodePeerLost, Reason: whyPeerLost},
	{From: waiting, Event: EvRelease, To: gone, Effects: FxSendFailed | FxTerminal | FxForget, Code: CodeAborted, Reason: whyReleased},

	// Transferring: some chunks began; between chunks nothing may be outstanding.
	{From: moving, Event: EvGrant, To: moving, Effects: FxDuplicate, Reason: "granted before"},
	{From: moving, Event: EvBegin, When: WhenNext, To: moving, Effects: FxWrite, Counts: true, Reason: "the next chunk goes out"},
	{From: moving, Event: EvBegin, When: WhenIdle, To: failed, Effects: FxSkip | FxSendFailed | FxTerminal, Code: CodeInternal, Reason: whyOrder},
	{From: moving, Event: EvBegin, To: pending, Effects: FxSkip | FxSendFailed | FxTerminal, Code: CodeInternal, Reason: whyOrder},
	{From: moving, Event: EvSettle, When: WhenUnknown, To: moving, Effects: FxStale, Reason: whyNoWrite},
	{From: moving, Event: EvSettle, When: WhenAll, To: success, Effects: FxTerminal, Counts: true, Reason: "every chunk is applied at the destination"},
	{From: moving, Event: EvSettle, To: moving, Counts: true, Reason: "more chunks are to come or outstanding"},
	{From: moving, Event: EvSettleError, When: WhenUnknown, To: moving, Effects: FxStale, Reason: whyNoWrite},
	{From: moving, Event: EvSettleError, When: WhenOnly, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeTransferFailed, Counts: true, Reason: whyWriteFailed},
	{From: moving, Event: EvSettleError, To: pending, Effects: FxSendFailed | FxTerminal, Code: CodeTransferFailed, Counts: true, Reason: whyWriteFailed},
	{From: moving, Event: EvDrop, When: WhenIdle, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeChunkDropped, Reason: whyDropped},
	{From: moving, Event: EvDrop, To: pending, Effects: FxSendFailed | FxTerminal, Code: CodeChunkDropped, Reason: whyDropped},
	{From: moving, Event: EvAbort, When: WhenIdle, To: failed, Effects: FxSendAck | FxTerminal, Code: CodeAborted, Reason: whyAborted},
	{From: moving, Event: EvAbort, To: owing, Effects: FxTerminal, Code: CodeAborted, Reason: whyAborted},
	{From: moving, Event: EvCancel, When: WhenIdle, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: moving, Event: EvCancel, To: pending, Effects: FxSendFailed | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: moving, Event: EvDeadline, When: WhenIdle, To: failed, Effects: FxSendFailed | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: moving, Event: EvDeadline, To: pending, Effects: FxSendFailed | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: moving, Event: EvPeerLost, When: WhenIdle, To: failed, Effects: FxTerminal, Code: CodePeerLost, Reason: whyPeerLost},
	{From: moving, Event: EvPeerLost, To: pending, Effects: FxTerminal, Code: CodePeerLost, Reason: whyPeerLost},
	{From: moving, Event: EvRelease, When: WhenIdle, To: gone, Effects: FxSendFailed | FxTerminal | FxForget, Code: CodeAborted, Reason: whyReleased},
	{From: moving, Event: EvRelease, To: orphan, Effects: FxSendFailed | FxTerminal, Code: CodeAborted, Reason: whyReleased},

	// Failed, writes outstanding, owner holds the room, nobody waits for an ack.
	{From: pending, Event: EvGrant, To: pending, Effects: FxStale, Reason: "the decode side was told when the room failed"},
	{From: pending, Event: EvBegin, To: pending, Effects: FxSkip, Reason: whySkip},
	{From: pending, Event: EvSettle, When: WhenUnknown, To: pending, Effects: FxStale, Reason: whyNoWrite},
	{From: pending, Event: EvSettle, When: WhenOnly, To: failed, Counts: true, Reason: "the last outstanding write is over: drained"},
	{From: pending, Event: EvSettle, To: pending, Counts: true, Reason: "other writes are still outstanding"},
	{From: pending, Event: EvSettleError, When: WhenUnknown, To: pending, Effects: FxStale, Reason: whyNoWrite},
	{From: pending, Event: EvSettleError, When: WhenOnly, To: failed, Effects: FxLateCause, Counts: true, Reason: "the last outstanding write is over: drained"},
	{From: pending, Event: EvSettleError, To: pending, Effects: FxLateCause, Counts: true, Reason: "other writes are still outstanding"},
	{From: pending, Event: EvDrop, To: pending, Effects: FxLateCause, Reason: whyFirstCause},
	{From: pending, Event: EvAbort, To: owing, Effects: FxLateCause, Reason: "an ack is owed, and sent when the last write is over"},
	{From: pending, Event: EvCancel, To: pending, Effects: FxLateCause, Reason: whyFirstCause},
	{From: pending, Event: EvDeadline, To: pending, Effects: FxLateCause, Reason: whyFirstCause},
	{From: pending, Event: EvPeerLost, To: pending, Effects: FxLateCause, Reason: whyFirstCause},
	{From: pending, Event: EvRelease, To: orphan, Reason: "the outstanding writes outlive the owner"},

	// Failed, writes outstanding, owner holds the room, an ack is owed.
	{From: owing, Event: EvGrant, To: owing, Effects: FxStale, Reason: "the decode side ended the room itself"},
	{From: owing, Event: EvBegin, To: owing, Effects: FxSkip, Reason: whySkip},
	{From: owing, Event: EvSettle, When: WhenUnknown, To: owing, Effects: FxStale, Reason: whyNoWrite},
	{From: owing, Event: EvSettle, When: WhenOnly, To: failed, Effects: FxSendAck, Counts: true, Reason: "drained: only now the ack is true"},
	{From: owing, Event: EvSettle, To: owing, Counts: true, Reason: "other writes are still outstanding: no ack yet"},
	{From: owing, Event: EvSettleError, When: WhenUnknown, To: owing, Effects: FxStale, Reason: whyNoWrite},
	{From: owing, Event: EvSettleError, When: WhenOnly, To: failed, Effects: FxSendAck | FxLateCause, Counts: true, Reason: "drained, though by an error: only now the ack is true"},
	{From: owing, Event: EvSettleError, To: owing, Effects: FxLateCause, Counts: true, Reason: "other writes are still outstanding: no ack yet"},
	{From: owing, Event: EvDrop, To: owing, Effects: FxLateCause, Reason: whyFirstCause},
	{From: owing, Event: EvAbort, To: owing, Effects: FxDuplicate, Reason: "one ack answers every abort before it"},
	{From: owing, Event: EvCancel, To: owing, Effects: FxLateCause, Reason: whyFirstCause},
	{From: owing, Event: EvDeadline, To: owing, Effects: FxLateCause, Reason: whyFirstCause},
	{From: owing, Event: EvPeerLost, To: pending, Effects: FxLateCause, Reason: "nobody is left to be sent the ack"},
	{From: owing, Event: EvRelease, To: debtor, Reason: "the outstanding writes and the ack outlive the owner"},

	// Failed and drained, owner holds the room.
	{From: failed, Event: EvGrant, To: failed, Effects: FxSendFailed | FxStale, Reason: "a room that failed before its grant could tell nobody; now it knows whom"},
	{From: failed, Event: EvBegin, To: failed, Effects: FxSkip, Reason: whySkip},
	{From: failed, Event: EvSettle, To: failed, Effects: FxStale, Reason: whyNoWrite},
	{From: failed, Event: EvSettleError, To: failed, Effects: FxStale, Reason: whyNoWrite},
	{From: failed, Event: EvDrop, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvAbort, To: failed, Effects: FxSendAck | FxLateCause, Reason: "nothing is outstanding: every abort is acked at once, a repeated one again"},
	{From: failed, Event: EvCancel, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvDeadline, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvPeerLost, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvRelease, To: gone, Effects: FxForget, Reason: "drained and released: an ended tombstone answers what still comes"},

	// Failed, writes outstanding, owner has let go, nobody waits for an ack.
	{From: orphan, Event: EvGrant, To: orphan, Effects: FxStale, Reason: "the decode side was told when the room failed"},
	{From: orphan, Event: EvBegin, To: orphan, Effects: FxSkip, Reason: whySkip},
	{From: orphan, Event: EvSettle, When: WhenUnknown, To: orphan, Effects: FxStale, Reason: whyNoWrite},
	{From: orphan, Event: EvSettle, When: WhenOnly, To: gone, Effects: FxForget, Counts: true, Reason: "drained and released"},
	{From: orphan, Event: EvSettle, To: orphan, Counts: true, Reason: "other writes are still outstanding"},
	{From: orphan, Event: EvSettleError, When: WhenUnknown, To: orphan, Effects: FxStale, Reason: whyNoWrite},
	{From: orphan, Event: EvSettleError, When: WhenOnly, To: gone, Effects: FxLateCause | FxForget, Counts: true, Reason: "drained and released"},
	{From: orphan, Event: EvSettleError, To: orphan, Effects: FxLateCause, Counts: true, Reason: "other writes are still outstanding"},
	{From: orphan, Event: EvDrop, To: orphan, Effects: FxLateCause, Reason: whyFirstCause},
	{From: orphan, Event: EvAbort, To: debtor, Effects: FxLateCause, Reason: "an ack is owed, and sent when the last write is over"},
	{From: orphan, Event: EvCancel, To: orphan, Effects: FxLateCause, Reason: whyFirstCause},
	{From: orphan, Event: EvDeadline, To: orphan, Effects: FxLateCause, Reason: whyFirstCause},
	{From: orphan, Event: EvPeerLost, To: orphan, Effects: FxLateCause, Reason: whyFirstCause},
	{From: orphan, Event: EvRelease, To: orphan, Effects: FxDuplicate, Reason: whyTwice},

	// Failed, writes outstanding, owner has let go, an ack is owed.
	{From: debtor, Event: EvGrant, To: debtor, Effects: FxStale, Reason: "the decode side ended the room itself"},
	{From: debtor, Event: EvBegin, To: debtor, Effects: FxSkip, Reason: whySkip},
	{From: debtor, Event: EvSettle, When: WhenUnknown, To: debtor, Effects: FxStale, Reason: whyNoWrite},
	{From: debtor, Event: EvSettle, When: WhenOnly, To: gone, Effects: FxSendAck | FxForget, Counts: true, Reason: "drained and released: the ack is the last thing said"},
	{From: debtor, Event: EvSettle, To: debtor, Counts: true, Reason: "other writes are still outstanding: no ack yet"},
	{From: debtor, Event: EvSettleError, When: WhenUnknown, To: debtor, Effects: FxStale, Reason: whyNoWrite},
	{From: debtor, Event: EvSettleError, When: WhenOnly, To: gone, Effects: FxSendAck | FxLateCause | FxForget, Counts: true, Reason: "drained and released: the ack is the last thing said"},
	{From: debtor, Event: EvSettleError, To: debtor, Effects: FxLateCause, Counts: true, Reason: "other writes are still outstanding: no ack yet"},
	{From: debtor, Event: EvDrop, To: debtor, Effects: FxLateCause, Reason: whyFirstCause},
	{From: debtor, Event: EvAbort, To: debtor, Effects: FxDuplicate, Reason: "one ack answers every abort before it"},
	{From: debtor, Event: EvCancel, To: debtor, Effects: FxLateCause, Reason: whyFirstCause},
	{From: debtor, Event: EvDeadline, To: debtor, Effects: FxLateCause, Reason: whyFirstCause},
	{From: debtor, Event: EvPeerLost, To: orphan, Effects: FxLateCause, Reason: "nobody is left to be sent the ack"},
	{From: debtor, Event: EvRelease, To: debtor, Effects: FxDuplicate, Reason: whyTwice},

	// Failed and forgotten.
	{From: gone, Event: EvGrant, To: gone, Effects: FxSendFailed | FxStale, Reason: "the decode side must learn that its grant came too late"},
	{From: gone, Event: EvBegin, To: gone, Effects: FxSkip, Reason: whySkip},
	{From: gone, Event: EvSettle, To: gone, Effects: FxStale, Reason: whyNoWrite},
	{From: gone, Event: EvSettleError, To: gone, Effects: FxStale, Reason: whyNoWrite},
	{From: gone, Event: EvDrop, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvAbort, To: gone, Effects: FxSendAck | FxStale, Reason: "nothing is or will be outstanding for a forgotten room"},
	{From: gone, Event: EvCancel, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvDeadline, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvPeerLost, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvRelease, To: gone, Effects: FxDuplicate, Reason: whyTwice},

	// Success, owner holds the room. Every chunk has settled, so nothing is outstanding.
	{From: success, Event: EvGrant, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvBegin, To: success, Effects: FxSkip, Reason: whySkip},
	{From: success, Event: EvSettle, To: success, Effects: FxStale, Reason: whyNoWrite},
	{From: success, Event: EvSettleError, To: success, Effects: FxStale, Reason: whyNoWrite},
	{From: success, Event: EvDrop, To: success, Effects: FxStale, Reason: "every chunk is at its destination; dropping one now means nothing"},
	{From: success, Event: EvAbort, To: success, Effects: FxSendAck, Reason: "nothing is outstanding: acked at once; Success stays"},
	{From: success, Event: EvCancel, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvDeadline, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvPeerLost, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvRelease, To: finished, Effects: FxForget, Reason: "the normal end"},

	// Success and forgotten.
	{From: finished, Event: EvGrant, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvBegin, To: finished, Effects: FxSkip, Reason: whySkip},
	{From: finished, Event: EvSettle, To: finished, Effects: FxStale, Reason: whyNoWrite},
	{From: finished, Event: EvSettleError, To: finished, Effects: FxStale, Reason: whyNoWrite},
	{From: finished, Event: EvDrop, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvAbort, To: finished, Effects: FxSendAck | FxStale, Reason: "nothing is or will be outstanding for a forgotten room"},
	{From: finished, Event: EvCancel, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvDeadline, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvPeerLost, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvRelease, To: finished, Effects: FxDuplicate, Reason: whyTwice},
}, EvGranted, EvLanded, EvRemoteFailed, EvFenced, EvAck)

var receiverRows = withForeign([]Row{
	// Bootstrapping: pages may be held, but no grant left: there is nothing to drain.
	{From: boot, Event: EvGranted, To: waiting, Effects: FxSendGrant, Reason: "pages are held: the sender may write into them"},
	{From: boot, Event: EvLanded, To: failed, Effects: FxSendAbort | FxTerminal, Code: CodeProtocol, Reason: "a chunk landed before any grant was sent"},
	{From: boot, Event: EvRemoteFailed, To: failed, Effects: FxSendAbort | FxTerminal, Code: CodeAborted, Reason: whyRemote},
	{From: boot, Event: EvFenced, To: boot, Effects: FxStale, Reason: "nothing was granted, so the fence is about another life"},
	{From: boot, Event: EvAck, To: failed, Effects: FxSendAbort | FxTerminal, Code: CodeProtocol, Reason: whyUnasked},
	{From: boot, Event: EvCancel, To: failed, Effects: FxSendAbort | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: boot, Event: EvDeadline, To: failed, Effects: FxSendAbort | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: boot, Event: EvPeerLost, To: failed, Effects: FxTerminal, Code: CodePeerLost, Reason: whyPeerLost},
	{From: boot, Event: EvRelease, To: gone, Effects: FxSendAbort | FxTerminal | FxForget, Code: CodeAborted, Reason: whyReleased},

	// WaitingForInput: the grant is out, no chunk has landed.
	{From: waiting, Event: EvGranted, To: waiting, Effects: FxSkip | FxDuplicate, Reason: "granted before; these pages were never offered"},
	{From: waiting, Event: EvLanded, When: WhenLastNext, To: success, Effects: FxLanded | FxRevoke | FxFreeTransfer | FxTerminal, Counts: true, Reason: whyComplete},
	{From: waiting, Event: EvLanded, When: WhenNext, To: moving, Effects: FxLanded, Counts: true, Reason: "the first chunk is applied"},
	{From: waiting, Event: EvLanded, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeProtocol, Reason: whyLandOrder},
	{From: waiting, Event: EvRemoteFailed, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyRemote},
	{From: waiting, Event: EvFenced, To: failed, Effects: FxRevoke | FxFreeTransfer | FxTerminal, Code: CodePeerLost, Reason: whyFenced},
	{From: waiting, Event: EvAck, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeProtocol, Reason: whyUnasked},
	{From: waiting, Event: EvCancel, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: waiting, Event: EvDeadline, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: waiting, Event: EvPeerLost, To: pending, Effects: FxRevoke | FxTerminal, Code: CodePeerLost, Reason: whyLostGrant},
	{From: waiting, Event: EvRelease, To: orphan, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyReleased},

	// Transferring: at least one chunk has landed, and not the last.
	{From: moving, Event: EvGranted, To: moving, Effects: FxSkip | FxDuplicate, Reason: "granted before; these pages were never offered"},
	{From: moving, Event: EvLanded, When: WhenLastNext, To: success, Effects: FxLanded | FxRevoke | FxFreeTransfer | FxTerminal, Counts: true, Reason: whyComplete},
	{From: moving, Event: EvLanded, When: WhenNext, To: moving, Effects: FxLanded, Counts: true, Reason: "the next chunk is applied"},
	{From: moving, Event: EvLanded, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeProtocol, Reason: whyLandOrder},
	{From: moving, Event: EvRemoteFailed, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyRemote},
	{From: moving, Event: EvFenced, To: failed, Effects: FxRevoke | FxFreeTransfer | FxTerminal, Code: CodePeerLost, Reason: whyFenced},
	{From: moving, Event: EvAck, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeProtocol, Reason: whyUnasked},
	{From: moving, Event: EvCancel, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyCancelled},
	{From: moving, Event: EvDeadline, To: pending, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeDeadline, Reason: whyDeadline},
	{From: moving, Event: EvPeerLost, To: pending, Effects: FxRevoke | FxTerminal, Code: CodePeerLost, Reason: whyLostGrant},
	{From: moving, Event: EvRelease, To: orphan, Effects: FxSendAbort | FxRevoke | FxTerminal, Code: CodeAborted, Reason: whyReleased},

	// Failed, the grant was out, neither ack nor fence came; the owner holds the room.
	{From: pending, Event: EvGranted, To: pending, Effects: FxSkip, Reason: whyNoGrant},
	{From: pending, Event: EvLanded, To: pending, Effects: FxStale, Reason: whyLateLand},
	{From: pending, Event: EvRemoteFailed, To: pending, Effects: FxLateCause, Reason: "that the sender failed is no proof that it has drained"},
	{From: pending, Event: EvFenced, To: failed, Effects: FxFreeTransfer, Reason: "fenced: no late write can land"},
	{From: pending, Event: EvAck, To: failed, Effects: FxFreeTransfer, Reason: "drained: the sender has nothing outstanding"},
	{From: pending, Event: EvCancel, To: pending, Effects: FxLateCause, Reason: whyFirstCause},
	{From: pending, Event: EvDeadline, To: pending, Effects: FxLateCause, Reason: "a timeout is no proof of anything; the pages stay"},
	{From: pending, Event: EvPeerLost, To: pending, Effects: FxLateCause, Reason: "a lost session is no fence; the pages stay"},
	{From: pending, Event: EvRelease, To: orphan, Reason: "the request lets go; the transfer still holds the pages"},

	// Failed and drained, fenced or never granted; the owner holds the room.
	{From: failed, Event: EvGranted, To: failed, Effects: FxSkip, Reason: whyNoGrant},
	{From: failed, Event: EvLanded, To: failed, Effects: FxStale, Reason: whyLateLand},
	{From: failed, Event: EvRemoteFailed, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvFenced, To: failed, Reason: "the transfer holds nothing any more"},
	{From: failed, Event: EvAck, To: failed, Reason: "the expected answer to an abort whose room holds nothing any more"},
	{From: failed, Event: EvCancel, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvDeadline, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvPeerLost, To: failed, Effects: FxLateCause, Reason: whyFirstCause},
	{From: failed, Event: EvRelease, To: gone, Effects: FxForget, Reason: "both owners of the pages have let go"},

	// Failed, the grant was out, neither ack nor fence came; the owner has let go.
	{From: orphan, Event: EvGranted, To: orphan, Effects: FxSkip, Reason: whyNoGrant},
	{From: orphan, Event: EvLanded, To: orphan, Effects: FxStale, Reason: whyLateLand},
	{From: orphan, Event: EvRemoteFailed, To: orphan, Effects: FxLateCause, Reason: "that the sender failed is no proof that it has drained"},
	{From: orphan, Event: EvFenced, To: gone, Effects: FxFreeTransfer | FxForget, Reason: "fenced: no late write can land"},
	{From: orphan, Event: EvAck, To: gone, Effects: FxFreeTransfer | FxForget, Reason: "drained: the sender has nothing outstanding"},
	{From: orphan, Event: EvCancel, To: orphan, Effects: FxLateCause, Reason: whyFirstCause},
	{From: orphan, Event: EvDeadline, To: orphan, Effects: FxLateCause, Reason: "a timeout is no proof of anything; the pages stay"},
	{From: orphan, Event: EvPeerLost, To: orphan, Effects: FxLateCause, Reason: "a lost session is no fence; the pages stay"},
	{From: orphan, Event: EvRelease, To: orphan, Effects: FxDuplicate, Reason: whyTwice},

	// Failed and forgotten.
	{From: gone, Event: EvGranted, To: gone, Effects: FxSkip, Reason: whyNoGrant},
	{From: gone, Event: EvLanded, To: gone, Effects: FxStale, Reason: whyLateLand},
	{From: gone, Event: EvRemoteFailed, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvFenced, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvAck, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvCancel, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvDeadline, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvPeerLost, To: gone, Effects: FxStale, Reason: whyGone},
	{From: gone, Event: EvRelease, To: gone, Effects: FxDuplicate, Reason: whyTwice},

	// Success, owner holds the room; the transfer let go with the last chunk.
	{From: success, Event: EvGranted, To: success, Effects: FxSkip, Reason: whyNoGrant},
	{From: success, Event: EvLanded, To: success, Effects: FxStale, Reason: "every chunk was delivered once"},
	{From: success, Event: EvRemoteFailed, To: success, Effects: FxStale, Reason: "the data is complete here, whatever the sender learned of it"},
	{From: success, Event: EvFenced, To: success, Reason: "the transfer holds nothing any more"},
	{From: success, Event: EvAck, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvCancel, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvDeadline, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvPeerLost, To: success, Effects: FxStale, Reason: whySticks},
	{From: success, Event: EvRelease, To: finished, Effects: FxForget, Reason: "the normal end"},

	// Success and forgotten.
	{From: finished, Event: EvGranted, To: finished, Effects: FxSkip, Reason: whyNoGrant},
	{From: finished, Event: EvLanded, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvRemoteFailed, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvFenced, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvAck, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvCancel, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvDeadline, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvPeerLost, To: finished, Effects: FxStale, Reason: whyGone},
	{From: finished, Event: EvRelease, To: finished, Effects: FxDuplicate, Reason: whyTwice},
}, EvGrant, EvBegin, EvSettle, EvSettleError, EvDrop, EvAbort)

// withForeign adds a stale row for each of the other side's events to every node of rows.
func withForeign(rows []Row, foreign ...EventKind) []Row {
	seen := make(map[Node]bool)
	for _, r := range rows {
		if seen[r.From] {
			continue
		}
		seen[r.From] = true
		for _, k := range foreign {
			rows = append(rows, Row{From: r.From, Event: k, To: r.From, Effects: FxStale, Reason: whyForeign})
		}
	}
	return rows
}

var (
	senderIndex   = newIndex(SideSender, senderRows)
	receiverIndex = newIndex(SideReceiver, receiverRows)
)
