// Package chaos runs real processes under load, lets things happen to them and to their
// network on a schedule, and judges how every single request ended.
//
// # Parts
//
//   - [Fault] and [Draw]: what happens when; drawn from a seed, printed, parsed (fault.go, draw.go). Pure.
//   - [Work]: what is asked, and what the right answer is (work.go, request.go).
//   - [Judge]: all that was sent, done and logged, against the promise (judge.go, explain.go). Pure: it sees a
//     [History] and nothing else, so that a fabricated one shows that it can tell right from wrong.
//   - [Reduce]: the smallest part of a schedule that still fails (reduce.go). Pure.
//   - [Run]: the shell. It starts the stack on a network of package wire, asks, disturbs, collects (run.go,
//     client.go, disturb.go, collect.go).
//
// # Ownership
//
// Run owns every goroutine and process that it starts, and has waited for all of them when it returns, also when
// its context ends early.
//
// # What it does not promise
//
// The same seed gives the same requests and faults at the same times, not the same interleaving: processes and
// kernels have clocks of their own. Repeat a failing run a few times before you believe that it is gone.
package chaos
