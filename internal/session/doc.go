// Package session is the control channel between a decode worker (client) and a
// prefill worker (server): one gRPC bidirectional stream, one generation of the
// peer. It carries hello (version, fingerprint, memory descriptors), grants, failures,
// aborts and abort acks. Messages are delivered in order or the session ends;
// the end of a session is an event for every room of it.
package session
