// Package edge is what stands between the network and the handlers of routers and workers: API keys and their limits, which browsers'
// pages may ask, request ids, certificates that change, and servers that do not wait for slow clients.
//
// # Keys
//
// A key is 256 random bits ([NewKey]), so a plain SHA-256 of it is as good a secret's shadow as there is: nobody can try
// all keys, and slow password hashes exist for secrets that people choose. [Keys] holds the hashes of a file; [Guard]
// compares in constant time and puts who asks into the request's context ([From]). Keys themselves are in no log, no
// metric and no error.
//
// # What changes while it runs
//
// Files are read whole, again and again, and compared ([Watch]). A file that has become wrong changes nothing: the last
// good contents stay, and the error is told once. Requests that run are never touched by a change.
//
// The package has no goroutine of its own: [Watch] runs in its caller's.
package edge
