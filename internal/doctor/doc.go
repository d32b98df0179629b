// Package doctor finds rooms that never end in a live fleet of workers with prefill and
// decode apart: Baton's, SGLang's or vLLM's.
//
// # Words
//
// A target is one worker's metrics over a window: a matrix of series by the moments at
// which it was scraped. A dialect says what an engine calls its queues, and by which
// counters a request leaves one. A stretch is a run of scrapes in which a queue held
// something and nothing left it. A finding is a fault with its evidence, likely cause and
// what to do; a doubt is why the doctor could not tell; a note changes nothing.
//
// # What it claims
//
// The rules need no threshold on latency. A request can leave a queue only by ways that
// are counted, so a queue that is not empty at both ends of a stretch, while none of those
// counters has moved, holds the same request all the time, however rare the scrapes
// are. What the rules can not see is in docs/doctor.md.
//
// # Parts
//
// This package is pure: no clock, no network, no files. Package collect brings scrapes,
// package probe asks a prefill worker in its own protocol.
package doctor
