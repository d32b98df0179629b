package sglang

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/transfer/nixl"
)

// helperEnv makes the test binary a NIXL helper process.
const (
	helperEnv = "BATON_SGLANG_TEST_HELPER"
	helperArg = "nixl-test-helper"
)

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" && len(os.Args) == 2 && os.Args[1] == helperArg {
		os.Exit(nixl.Main())
	}
	_ = os.Setenv(helperEnv, "1") // for the processes that agents start
	goleak.VerifyTestMain(m)
}

// nixlConfig is for agents whose helper is this binary.
func nixlConfig() nixl.Config {
	self, _ := os.Executable()
	c := nixl.Config{Helper: []string{self, helperArg}, TLS: "tcp,self", Devices: "lo"}
	if os.Getenv(nixl.LibraryEnv) == "" {
		c.Library, _ = setup.LocateNIXL("")
	}
	return c
}

// needNIXL skips a test on machines without the library.
func needNIXL(t testing.TB) {
	t.Helper()
	if _, err := nixl.AgentFences(nixlConfig()); err != nil {
		absent(t)("needs the NIXL library: %v", err)
	}
}

// absent is how a test says that what it needs is not here: in CI that is a failure.
func absent(t testing.TB) func(string, ...any) {
	if os.Getenv("BATON_NEED_PEER") != "" {
		return t.Fatalf
	}
	return t.Skipf
}
