package session_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/session"
	"github.com/baton-pd/baton/internal/session/sessiontest"
)

// childEnv makes the test binary a prefill worker's server and nothing else.
const childEnv = "BATON_SESSION_TEST_CHILD"

// serveAsChild prints its address and serves until its standard input ends.
func serveAsChild() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	var c session.ServerConfig
	sessiontest.FillServer(&c)
	srv := session.NewServer(c)
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		_ = srv.Close()
	}()
	fmt.Println(l.Addr())
	_ = srv.Serve(l)
}

// TestProcessKilledOrStopped uses a real process: a kill is seen at once, a stop within
// KeepaliveTime + KeepaliveTimeout although its kernel keeps acknowledging TCP.
func TestProcessKilledOrStopped(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		t.Run(sig.String(), func(t *testing.T) {
			ctx := testContext(t)
			cmd := exec.CommandContext(ctx, os.Args[0])
			cmd.Env = append(os.Environ(), childEnv+"=1")
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = in.Close()
				_ = cmd.Process.Kill()
				_ = cmd.Wait() // killed
			}()
			addr, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatalf("child did not start: %v", err)
			}
			addr = strings.TrimSpace(addr)
			ch := sessiontest.NewClientHandler()
			tune := session.Tuning{KeepaliveTime: 100 * time.Millisecond, KeepaliveTimeout: 400 * time.Millisecond, DialTimeout: time.Second}
			client := startClient(t, session.ClientConfig{Handler: ch, Tuning: tune})
			s := get(t, ctx, client, addr)
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			at := time.Now()
			d := ch.Wait(ctx, t, "down", 1)
			if d.Cause.Code != room.CodePeerLost || d.Session != s.ID() {
				t.Errorf("cause %v", d.Cause)
			}
			if took := time.Since(at); took > 5*time.Second {
				t.Errorf("noticed after %v: %v", took, d.Cause)
			}
			// Neither lets a Get hang: a stopped process accepts connections and says nothing.
			getCause(t, ctx, client, addr, room.CodeUnavailable)
			if sig == syscall.SIGSTOP {
				if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
				if again := get(t, ctx, client, addr); again.Peer() != s.Peer() || again.ID() == s.ID() {
					t.Errorf("after SIGCONT: session %d to %+v", again.ID(), again.Peer())
				}
			}
		})
	}
}
