package nixl

import (
	"syscall"
	"testing"
	"time"
)

// quiet is how long nothing must be stored to say that nothing more comes.
const quiet = 150 * time.Millisecond

// targetStores and ownStores are the transports that the experiments are made with: those where the target's
// process makes the stores, and those where the writer's does.
var targetStores, ownStores = []string{"tcp", DefaultTLS}, "tcp,cma,self"

func (l *lab) act(r raw, k kind) {
	l.t.Helper()
	if says := r.act(l.t, k); says != "" {
		l.t.Logf("the library says: %s", says)
	}
}

// TestFenceTargetKilled: what ends a session in Baton. With the target's helper dead nothing is
// stored any more, whatever the source has under way, does later, or has been doing.
func TestFenceTargetKilled(t *testing.T) {
	needLibrary(t)
	for _, tls := range targetStores {
		t.Run(tls, func(t *testing.T) {
			t.Run("full pipe", func(t *testing.T) {
				l := newLab(t, tls, nil, nil)
				l.target.signal(t, syscall.SIGSTOP)
				l.posted()
				l.target.finish()
				if n := l.settled(quiet); n != 0 {
					t.Errorf("%d pages were stored after the target's helper was killed", n)
				}
			})
			t.Run("midway", func(t *testing.T) {
				l := newLab(t, tls, nil, nil)
				l.midway()
				l.target.finish()
				if n := l.late(); n != 0 {
					t.Errorf("%d pages were stored after the target's helper was killed", n)
				}
				l.underWay()
			})
		})
	}
}

// TestFenceSourceKilled: the source's death is no fence where the target stores (what it has
// sent already still lands), and is one where the source does.
func TestFenceSourceKilled(t *testing.T) {
	needLibrary(t)
	for _, tls := range targetStores {
		t.Run(tls, func(t *testing.T) {
			l := newLab(t, tls, nil, nil)
			l.target.signal(t, syscall.SIGSTOP)
			l.posted()
			l.own.finish()
			at := l.stored()
			l.target.signal(t, syscall.SIGCONT)
			n := l.settled(quiet)
			t.Logf("%d pages were stored after the source's helper was dead", n-at)
			if n == at {
				t.Error("nothing was stored after the source's death; docs/nixl.md says that it is no fence")
			}
		})
	}
	t.Run(ownStores, func(t *testing.T) {
		l := newLab(t, ownStores, nil, nil)
		l.midway()
		l.own.finish()
		if n := l.late(); n != 0 {
			t.Errorf("%d pages were stored by a dead writer", n)
		}
		l.underWay()
	})
}

// TestFenceWriterStores: with cma the writer needs nothing of the target's process, so Baton does not take
// the end of the target's helper for a fence then.
func TestFenceWriterStores(t *testing.T) {
	needLibrary(t)
	t.Run("target stopped", func(t *testing.T) {
		l := newLab(t, ownStores, nil, nil)
		l.target.signal(t, syscall.SIGSTOP)
		l.posted()
		if n := l.settled(quiet); n != pages {
			t.Errorf("%d of %d pages were stored into the memory of a stopped process", n, pages)
		}
	})
	for name, do := range map[string]func(*lab){
		"agent destroyed": func(l *lab) { l.act(l.target, cmdDestroy) },
		"target killed":   func(l *lab) { l.target.finish() },
	} {
		t.Run(name, func(t *testing.T) { // how much is chance, so it is only reported
			l := newLab(t, ownStores, nil, nil)
			l.midway()
			do(l)
			t.Logf("%d of %d pages were stored afterwards", l.late(), pages)
			l.underWay()
		})
	}
}

// TestNoFence: acts of the library that do not keep late writes out, so Baton uses none of them as a fence.
func TestNoFence(t *testing.T) {
	needLibrary(t)
	for _, tls := range targetStores {
		t.Run(tls, func(t *testing.T) {
			t.Run("request released", func(t *testing.T) {
				l := newLab(t, tls, nil, nil)
				l.target.signal(t, syscall.SIGSTOP)
				l.posted()
				l.act(l.own, cmdRelease)
				l.target.signal(t, syscall.SIGCONT)
				if n := l.settled(quiet); n == 0 {
					t.Error("nothing was stored after the release of the request; docs/nixl.md says otherwise")
				} else {
					t.Logf("%d of %d pages were stored after the release of the request", n, pages)
				}
			})
			t.Run("memory deregistered", func(t *testing.T) {
				l := newLab(t, tls, nil, nil)
				l.act(l.target, cmdDeregister)
				l.posted()
				if n := l.settled(quiet); n == 0 {
					t.Error("nothing was stored after the deregistration; docs/nixl.md says otherwise")
				} else {
					t.Logf("%d of %d pages were stored after the deregistration", n, pages)
				}
			})
			t.Run("metadata invalidated", func(t *testing.T) {
				l := newLab(t, tls, nil, nil)
				l.target.signal(t, syscall.SIGSTOP)
				l.posted()
				l.act(l.own, cmdInvalidate)
				l.target.signal(t, syscall.SIGCONT)
				if n := l.settled(quiet); n == 0 {
					t.Error("nothing was stored after the invalidation; docs/nixl.md says otherwise")
				} else {
					t.Logf("%d of %d pages were stored after the invalidation", n, pages)
				}
			})
		})
	}
}

// TestAgentDestroyed: where the target stores, ending its agent in an orderly way keeps late writes out too; it
// needs a library that still works, so Baton kills the process instead.
func TestAgentDestroyed(t *testing.T) {
	needLibrary(t)
	for _, tls := range targetStores {
		t.Run(tls, func(t *testing.T) {
			l := newLab(t, tls, nil, nil)
			l.act(l.target, cmdDestroy)
			l.write(labBytes, 2)
			if n := l.settled(quiet); n != 0 {
				t.Errorf("%d pages were stored after the target's agent was destroyed", n)
			}
		})
	}
}
