package transfertest

import (
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/baton-pd/baton/internal/transfer"
)

// Run runs the whole suite as subtests of t.
func Run(t *testing.T, o Options) {
	t.Helper()
	for _, c := range []struct {
		name string
		run  func(*testing.T, Options)
		skip string // why the transport cannot run it; empty: it can
	}{
		{"Describe", testDescribe, ""},
		{"Scatter", testScatter, ""},
		{"ManySegments", testManySegments, ""},
		{"Refusals", testRefusals, ""},
		{"AllowRefusals", testAllowRefusals, ""},
		{"NothingToStore", testNothingToStore, ""},
		{"TooLarge", testTooLarge, ""},
		{"CompleteAfterApply", testCompleteAfterApply, ""},
		{"GrantOrder", testGrantOrder, ""},
		{"PostFromDone", testPostFromDone, ""},
		{"ManyWriters", testManyWriters, ""},
		{"FullQueue", testFullQueue, ""},
		{"RevokeWhileWriting", testRevokeWhileWriting, ""},
		{"RevokeUnknown", testRevokeUnknown, ""},
		{"Sessions", testSessions, ""},
		{"CloseSessionWhileWriting", testCloseSessionWhileWriting, ""},
		{"PeerClose", testPeerClose, ""},
		{"PeerCloseWhilePosting", testPeerCloseWhilePosting, ""},
		{"PeerCloseStalled", testPeerCloseStalled, ""},
		{"TargetClose", testTargetClose, ""},
		{"DialDead", testDialDead, ""},
		{"DialSilent", testDialSilent, unless(o.Silent != nil, "nothing can be silent")},
		{"Garbage", testGarbage, unless(o.Garbage != nil, "no port to throw garbage at")},
		{"WriterKilled", testWriterKilled, unless(o.KillPeer, "writer lives in this process")},
		{"WriterStoppedRevoke", testWriterStoppedRevoke, unless(o.KillPeer, "writer lives in this process")},
		{"WriterStoppedClose", testWriterStoppedClose, unless(o.KillPeer, "writer lives in this process")},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.skip != "" {
				t.Skip(c.skip)
			}
			c.run(t, o)
		})
	}
}

func unless(ok bool, why string) string {
	if ok {
		return ""
	}
	return why
}

// Main is the TestMain of a transport's tests. In the test process it runs the
// tests and fails on leaked goroutines. In a process that the suite started as a
// writer it dials with newSource and writes until it is told to end. It does not return.
func Main(m *testing.M, newSource func() transfer.Transport) {
	if job := os.Getenv(jobEnv); job != "" {
		os.Exit(writerMain(job, newSource()))
	}
	goleak.VerifyTestMain(m)
}
