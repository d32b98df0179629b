package ending

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var errOne, errTwo = errors.New("one"), errors.New("two")

// patience is how long what must happen may take.
const patience = 20 * time.Second

func await(t *testing.T, what string, c <-chan struct{}) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(patience):
		t.Fatalf("%s: nothing after %v", what, patience)
	}
}

// TestEnd: the first End counts, for everybody who asks, before or after it.
func TestEnd(t *testing.T) {
	var c Context
	early := c.Done()
	select {
	case <-early:
		t.Fatal("it has ended by itself")
	default:
	}
	if c.Err() != nil || context.Cause(&c) != nil {
		t.Fatal(c.Err())
	}
	c.End(errOne)
	c.End(errTwo)
	await(t, "early", early)
	await(t, "late", c.Done())
	if c.Err() != errOne || context.Cause(&c) != errOne {
		t.Errorf("%v, %v", c.Err(), context.Cause(&c))
	}
	var late Context
	late.End(errTwo)
	await(t, "asked after the end", late.Done())
}

// TestHooks: each runs once, unless it was taken back, wherever it stood among the others.
func TestHooks(t *testing.T) {
	for _, away := range [][]int{{}, {0}, {1}, {2}, {0, 2}, {2, 1}, {0, 1, 2}} {
		var c Context
		var wg sync.WaitGroup
		var mu sync.Mutex
		ran := [3]int{}
		hooks := [3]Hook{}
		wg.Add(len(hooks) - len(away))
		for i := range hooks {
			hooks[i].Run = func() {
				mu.Lock()
				ran[i]++
				mu.Unlock()
				wg.Done()
			}
			c.Watch(&hooks[i])
		}
		want := [3]int{1, 1, 1}
		for _, i := range away {
			want[i] = 0
			if !c.Unwatch(&hooks[i]) || c.Unwatch(&hooks[i]) {
				t.Errorf("%v: hook %d can be taken back once", away, i)
			}
		}
		c.End(errOne)
		c.End(errTwo)
		wg.Wait()
		for i := range hooks {
			if c.Unwatch(&hooks[i]) {
				t.Errorf("%v: hook %d was taken back after the end", away, i)
			}
		}
		mu.Lock()
		if ran != want {
			t.Errorf("%v: %v, want %v", away, ran, want)
		}
		mu.Unlock()
	}
	var c Context
	c.End(errOne)
	ran := make(chan struct{})
	c.Watch(&Hook{Run: func() { close(ran) }})
	await(t, "a hook after the end", ran)
}

// TestContexts: package context's own hear of the end, with its cause.
func TestContexts(t *testing.T) {
	var c Context
	child, cancel := context.WithTimeout(&c, time.Hour)
	defer cancel()
	left, leave := context.WithCancel(&c)
	leave()
	ran := make(chan struct{})
	context.AfterFunc(&c, func() { close(ran) })
	stop := context.AfterFunc(&c, func() { t.Error("it was stopped") })
	if !stop() {
		t.Error("not stopped")
	}
	c.End(errOne)
	await(t, "the child", child.Done())
	await(t, "the function", ran)
	if context.Cause(child) != errOne || context.Cause(left) != context.Canceled {
		t.Errorf("%v, %v", context.Cause(child), context.Cause(left))
	}
}

// TestConcurrent: hooks that come and go while the context ends run once or were taken back.
func TestConcurrent(t *testing.T) {
	for range 50 {
		var c Context
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				ran := make(chan struct{})
				h := Hook{Run: func() { close(ran) }}
				c.Watch(&h)
				if !c.Unwatch(&h) {
					<-ran
				}
			})
		}
		wg.Go(func() { c.End(errOne) })
		wg.Wait()
	}
}
