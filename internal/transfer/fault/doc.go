// Package fault is a transport that misbehaves on order: [Wrap] decorates any
// transfer.Transport with [Rules], parsed from text, that hold, lose, delay or fail
// single calls. Without a rule that fires the decorator changes nothing, which the
// conformance suite checks.
//
// # Rules
//
// One rule a line; "#" starts a comment. A rule is an operation, selectors, and one
// action:
//
//	post room=7 nth=2 stall until=go
//	post kind=tcp room=* nth=1 delay=50ms
//	post nth=3 error="link down"
//	post prob=0.1 seed=42 drop
//	done nth=1- hold until=ack
//
// Operations: post (a write is handed to the transport), done (its completion comes
// back), landed (a notification reaches the Sink), fenced (Sink.Fenced), revoke
// (Target.Revoke), dial.
//
// Selectors: kind=NAME of the transport; room=N and gen=N of the write, room=* for
// every room; nth=N, nth=N-M or nth=N- of the calls that the other selectors
// match. With room= the calls of each room are counted apart, without it all
// together. prob=P fires at random, drawn from seed=S, the room, and the number of
// the call in its room, so the order in which rooms come does not change it.
// Every rule counts every call that its selectors match; the first rule in the
// text that fires acts, the others do not.
//
// Actions, with the operations that know them:
//
//	stall    post, landed, fenced, dial   held until the gate of until=NAME opens, for
//	                                      the time of for=DURATION, or else for ever
//	delay=D  as stall for=D               also done
//	rate=N   post                         leaves at N bytes a second (50e6), one write after the
//	                                      other over all that the rule meets: a slow line; what
//	                                      has no bytes leaves with the bytes ahead of it
//	hold     done                         the write is applied, its completion is held
//	hold-applied  post                    the same, written as a rule of post
//	halfway  post                         one half is applied, the rest is held
//	drop     post, done, landed           never happens: the write is not sent; the
//	                                      completion or the notification is lost
//	error    post, done, dial             fails, also error="text"; errors.Is ErrInjected
//	busy     post                         Post answers transfer.ErrBusy
//	corrupt  post                         one byte of the payload arrives changed
//	unfenced revoke                       Revoke says false although it fences; Revoked
//	                                      follows with until= or for=, else never
//
// # Endings
//
// "For ever" ends with the connection: what is held or lost when the peer goes down
// completes with its error, and Close settles everything with transfer.ErrClosed. A held
// Landed blocks the transport's goroutine, as a Sink that hangs would; it is let go
// when the target closes, and so is a held Fenced. A held Revoked is never told once
// its session is fenced.
//
// # Gates
//
// Gates make tests free of sleeps: [Rules.Waiting] tells that something is held
// there, [Rules.Release] lets it go and everything that comes later pass.
package fault
