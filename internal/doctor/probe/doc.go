// Package probe asks a live prefill worker, as a decode worker would, about rooms of the
// probe's own, and reports which of its promises it does not keep: an abort is acknowledged, before
// and after a grant and again, a grant that nobody wants ends, and nothing is written that was not allowed.
//
// It is safe on a worker that serves: every room id is of [doctor.ProbeRoom], of a random
// generation, and no message names any other; no request is made, so nothing is computed; every
// message is one that any decode worker may send at any time. [Baton] and [SGLang] are the protocols. What it leaves behind is what any
// aborted request leaves: tombstones for a minute, and its session in the worker's log and counters.
package probe
