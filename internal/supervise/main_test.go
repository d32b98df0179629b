package supervise

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"
)

// childRole makes this test binary play a child (or a supervisor of one).
const childRole = "BATON_SUPERVISE_TEST_ROLE"

func TestMain(m *testing.M) {
	if role := os.Getenv(childRole); role != "" {
		if err := play(role); err != nil {
			fmt.Fprintln(os.Stderr, "child failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// play runs one role to its end.
func play(role string) error {
	kind, arg, _ := strings.Cut(role, " ")
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	switch kind {
	case "serve": // answers /health, reports ready, ends on SIGTERM
		return serve(ctx, false)
	case "sick": // ready, but /health says 503
		return serve(ctx, true)
	case "crash":
		fmt.Fprintln(os.Stderr, "cannot load", arg)
		os.Exit(7)
	case "mute": // never ready
		<-ctx.Done()
		return nil
	case "deaf": // ready, and deaf to SIGTERM
		signal.Ignore(syscall.SIGTERM)
		if err := Ready(ReadyInfo{}); err != nil {
			return err
		}
		select {}
	case "lines": // prints, also a line without an end
		fmt.Print("one\n\nthree")
		return nil
	case "hold": // keeps a FIFO open for as long as it lives, by whatever means it is told to end
		return hold(ctx, arg)
	case "lifeline": // as hold, but ends only by the lifeline
		return lifeline(arg)
	case "supervisor": // supervises two holders of the FIFO, until killed
		return superviseHolders(arg)
	}
	return fmt.Errorf("no such role: %q", role)
}

func serve(ctx context.Context, sick bool) error {
	watched, stop := WatchParent(ctx)
	defer stop()
	l, err := net.Listen("tcp", os.Getenv("LISTEN"))
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if sick {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})}
	go func() { _ = srv.Serve(l) }()
	if err := Ready(ReadyInfo{Role: "test", HTTP: l.Addr().String()}); err != nil {
		return err
	}
	<-watched.Done()
	return srv.Close()
}

func hold(ctx context.Context, fifo string) error {
	f, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(f, "%d\n", os.Getpid()); err != nil {
		return err
	}
	<-ctx.Done()
	return f.Close()
}

func lifeline(fifo string) error {
	ctx, stop := WatchParent(context.Background())
	defer stop()
	if err := hold(ctx, fifo); err != nil {
		return err
	}
	if !errors.Is(context.Cause(ctx), ErrParentGone) {
		return fmt.Errorf("ended by %v", context.Cause(ctx))
	}
	return nil
}

func superviseHolders(fifo string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	spec := func(name string) Spec {
		return Spec{Name: name, Path: self, Env: []string{childRole + "=hold " + fifo}}
	}
	s, err := New(Config{Specs: []Spec{spec("a"), spec("b")}})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}
