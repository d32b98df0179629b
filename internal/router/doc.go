// Package router is the edge of a Baton fleet: it gives each request a room, sends it to a
// prefill and a decode worker, and forwards the decode worker's answer. It
// drives the workers of Baton, SGLang and vLLM, and servers that do both halves themselves.
//
// # The promise
//
// Every request ends by its deadline plus half a second, whatever the workers do: with its
// answer, or with an error that names leg, worker, phase and room. The first failure
// of either leg ends the other; the client's leaving ends both. A leg that is ended early is
// released twice over: its connection is closed, and POST /abort_request names it.
// Before the first byte an error is an HTTP status, and the request may be tried on another
// pair of workers under a new room and a new id; after it, an error is one event and an aborted
// connection. A stream that was not finished never ends like one that was.
//
// # Parts
//
//   - [Router] and its handler: routes, admission, the loop over attempts (router.go, serve.go).
//   - call: one client's request; body editing that keeps unknown fields byte for byte (call.go, body.go).
//   - attempt: one pair of legs and the first cause that ends them (attempt.go, legs.go, failure.go; package wire carries legs,
//     package ending has the contexts).
//   - stream: an incremental reader of server-sent events that knows whether the answer
//     was finished, and never lets half an event through (sse.go, verdict.go); answers are read without building them in memory (quick.go).
//   - queue: who goes first when all places are taken, and what chooses the pair (queue.go, choose.go, load.go; packages
//     admission and policy).
//   - worker: where a worker is, whether it can be used, and the probes that find out (worker.go); fleet: which workers
//     there are, from sources and the API (fleet.go, fleet_api.go; package discovery).
//   - backend: the kinds of servers, how they are told apart, and what each is sent (backend.go).
//   - outlier: workers that fail requests although their probes succeed, refusals that only one worker makes, and requests
//     that wait for a hung worker (outlier.go); stall: streams that fall silent (stall.go); prefillWatch: the same for
//     prefill legs (prefillwatch.go).
//   - thread: what a client has of a stream, so that another pair can go on with it (resume.go).
//   - record: what happened to each request, for the access log and the page (recorded.go, ui.go; packages record, accesslog and
//     webui), metrics (metrics.go and *_metrics.go) and traces (spans.go; package otel).
//   - gate: who may come in, what of its header goes on, and how long it may take to read its answer (gate.go, package edge); readiness: whether
//     there is a pair that could serve (readiness.go).
//   - release: the background group that tells workers of ended attempts (release.go).
//
// # Ownership and concurrency
//
// The handler's goroutine owns the client's connection and reads the decode leg. One goroutine
// reads the prefill leg. Whoever fails first cancels the attempt's context with the
// cause; a context's cause is set once, so no other bookkeeping decides who was first.
// Goroutines that outlive a handler belong to the Router's group, which Close waits for.
//
// # What it does not promise
//
// The order of requests that do not wait. An answer which the client has begun to read survives the loss of a worker only with
// Config.Resume, and where the workers can (resume.go).
package router
