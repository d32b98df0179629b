package nixl

import (
	"os"
	"testing"

	"github.com/baton-pd/baton/internal/setup"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

// helperEnv makes the test binary a helper process.
const helperEnv = "BATON_NIXL_TEST_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(helperEnv) != "" && len(os.Args) == 2 && os.Args[1] == helperArg {
		os.Exit(experimentMain())
	}
	_ = os.Setenv(helperEnv, "1") // for the processes that tests and transports start
	transfertest.Main(m, func() transfer.Transport { return New(testConfig()) })
}

const helperArg = "nixl-test-helper"

func testConfig() Config {
	self, _ := os.Executable()
	return Config{Helper: []string{self, helperArg}, Library: testLibrary()}
}

// testLibrary is the library that `baton setup --with nixl` has fetched, or one of the machine's, or "".
func testLibrary() string {
	if path := os.Getenv(LibraryEnv); path != "" {
		return path
	}
	path, _ := setup.LocateNIXL("")
	return path
}

// needLibrary skips a test on machines without the library.
func needLibrary(t testing.TB) {
	t.Helper()
	if err := New(testConfig()).Err(); err != nil {
		t.Skipf("needs the NIXL library: %v", err)
	}
}
