package transfertest

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/transfer"
)

// Run runs the whole suite as subtests of t.
func Run(t *testing.T, o Options) {
	t.Helper()
}

// Main is the TestMain of a transport's tests. In the test process it runs the
// tests and fails on leaked goroutines. In a process that the suite started as a
// writer it dials with newSource and writes until it is told to end. It does not return.
func Main(m *testing.M, newSource func() transfer.Transport) {
	goleak.VerifyTestMain(m)
}
