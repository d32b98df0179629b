// Package trace records what happens to the rooms of a worker ([Writer], `--room-trace
// FILE`) and checks such a record against the machines it should have come from
// ([Check], `baton race --check-trace FILE`).
//
// # Format
//
// A trace is a file of JSON lines. Each process that writes to it begins with a [Header],
// so a file holds one incarnation after another of the same worker; all other lines are
// records ([Record]). A line is well formed only if it is, byte for byte, what the writer makes of
// its values: there is one way to write a record. The end record says that the process
// closed its trace; without it the trace was cut, by kill -9 for example. The line at which
// it was cut may be torn, which is counted; any other malformed line is an error.
//
// Times are nanoseconds of the machine's monotonic clock, which all processes of one boot
// share, so that records of different workers can be put in order. The wall clock beside
// them is for people and is not checked.
//
// # What a trace costs
//
// A record is taken under its room's lock and put into a bounded buffer; one goroutine
// writes. A full buffer never makes a room wait: the record is dropped and counted, and a
// trace with drops is reported as incomplete, never as valid. The file is bounded as well,
// and what does not fit is dropped too.
//
// # What is checked
//
// Each room's records replay exactly through room.Sender or room.Receiver; besides, and
// whatever the table says, a terminal state and its cause stay, an ack is sent without
// outstanding writes, pages are freed once and with a proof, a forgotten room changes no
// more. Rooms end by their deadlines, keys are not reused early, nothing is live at the end.
// With the traces of both sides, what one worker heard must have happened at the other
// before: see [Check].
package trace
