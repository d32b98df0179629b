// Package transfertest is the conformance suite of [transfer.Transport]. Every
// transport runs it from its own tests:
//
//	func TestMain(m *testing.M) { transfertest.Main(m, newSource) }
//	func TestConformance(t *testing.T) { transfertest.Run(t, transfertest.Options{...}) }
//
// Both ends live in the test's process, except in the tests of a killed or
// stopped peer: there the test binary runs itself again as the writer (see
// [Main]), so that the signals hit a real process.
//
// Nothing in the suite sleeps. Every wait is for an event that the contract
// promises, bounded by [patience], after which the test fails saying what never came.
package transfertest

import (
	"os"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
)

// patience bounds every wait for something the contract promises. A machine that is
// slower than that sets PatienceEnv.
var patience = func() time.Duration {
	if d, err := time.ParseDuration(os.Getenv(PatienceEnv)); err == nil && d > 0 {
		return d
	}
	return 30 * time.Second
}()

// PatienceEnv is the environment variable that changes how long the suite waits for what
// is promised, as a duration such as 2m.
const PatienceEnv = "BATON_TRANSFERTEST_PATIENCE"

// Options describes the transport under test.
type Options struct {
	// New makes the two ends: target listens, source dials. They may be one value.
	New func(t *testing.T) (target transfer.Transport, source transfer.Transport)
	// Memory makes n bytes that can be registered and frees them when the test has
	// ended; nil: a memfd mapping, which suits every transport.
	Memory func(t *testing.T, n int) transfer.Memory
	// Caps that the transport must report and keep.
	Caps transfer.Caps
	// FencesSessions: CloseSession fences also a writer that is stopped, as with Caps.Fences,
	// although Revoke alone does not.
	FencesSessions bool
	// KillPeer: the transport reaches other processes, so the tests of a killed and
	// of a stopped writer run. The test binary must call Main.
	KillPeer bool
	// GoesOn: another process may finish what a writer that is stopped has begun, so that Revoked may come meanwhile.
	GoesOn bool
	// Garbage throws malformed bytes at the target, in as many ways as it has ports
	// and files, and returns when they were read or refused. nil: there is nothing to
	// throw at. The target must stay usable.
	Garbage func(t *testing.T, d transfer.Descriptor)
	// Silent makes an address that takes connections but never answers, derived
	// from a live descriptor; nil: none. Dialling it must end with its context.
	Silent func(t *testing.T, d transfer.Descriptor) transfer.Descriptor
}
