package nixl

import (
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

// TestConformance runs the suite over what Baton uses by default, where the target's helper
// makes every store, and over a writer that stores into the target by itself.
func TestConformance(t *testing.T) {
	needLibrary(t)
	for _, c := range []struct{ name, tls string }{{"target stores", ""}, {"writer stores", "tcp,cma,self"}} {
		t.Run(c.name, func(t *testing.T) {
			if c.tls != "" { // the writer process of the suite takes it from there
				t.Setenv("UCX_TLS", c.tls)
			}
			cfg := testConfig()
			transfertest.Run(t, transfertest.Options{
				New: func(t *testing.T) (transfer.Transport, transfer.Transport) {
					target := cfg
					if strings.HasSuffix(t.Name(), "/Garbage") { // which waits for it
						target.Handshake = 10 * time.Second
					}
					target.CloseGrace = 20 * time.Second
					return New(target), New(cfg)
				},
				Caps:           transfer.Caps{NeedsDrain: true},
				FencesSessions: New(cfg).SessionFences(),
				KillPeer:       true,
				GoesOn:         true, // the writer's helper
				Garbage:        throwGarbage,
				Silent: func(t *testing.T, d transfer.Descriptor) transfer.Descriptor {
					ln, err := net.Listen("tcp", "127.0.0.1:0") // its backlog takes connections
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = ln.Close() })
					d.Addr = ln.Addr().String()
					return d
				},
			})
		})
	}
}

// throwGarbage sends noise of several lengths, frames out of place and silence to the control
// port, all at once, and waits until the target has closed each connection.
func throwGarbage(t *testing.T, d transfer.Descriptor) {
	rnd := rand.New(rand.NewPCG(4, 4))
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(rnd.Uint32())
	}
	huge := appendFrame(nil, ctlHello, 1<<30)
	var wg sync.WaitGroup
	for _, b := range [][]byte{nil, noise[:1], noise[:headerLen-1], noise[:headerLen], noise, huge, appendWords(nil, ctlLeft, 1),
		appendWords(nil, ctlHello, 1, 2), appendWords(nil, ctlHello, 12345), appendFrame(nil, ctlEnter, maxBody)} {
		wg.Go(func() {
			c, err := net.Dial("tcp", d.Addr)
			if err != nil {
				t.Errorf("dial: %v", err)
				return
			}
			defer c.Close()
			_, _ = c.Write(b) // may fail: the target closes early
			_, _ = io.Copy(io.Discard, c)
		})
	}
	wg.Wait()
}
