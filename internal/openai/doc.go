// Package openai is the shapes of Baton's HTTP side, for workers and router
// alike, and nothing else: it does no I/O, reads no clock, starts no goroutine.
//
//   - [ParseChat], [ParseCompletion] and [ParseGenerate] turn a body into a
//     checked [Request]. They are strict: an unknown or unsupported field, a value
//     out of range, a duplicate key, a NUL character or invalid UTF-8 is an *[Error]
//     with status 400 that names the field. Nothing a client asks for is ignored.
//     null counts as absent.
//   - [ChatCompletion], [TextCompletion], [Generated] and their chunks are the answers.
//   - [Error] is a failure as clients see it; one table (errors.go) gives every
//     [room.Code] its HTTP status, and [ParseError] is the way back.
//   - [Template] renders a model's own chat template and keeps special tokens in
//     user text from becoming special.
//   - [AppendEvent] and [EventReader] are the two ends of a server-sent event stream.
//   - [Rewrite] replaces top-level fields of a body and leaves the rest as it came.
package openai
