package tcp

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return New(Config{}) })
}

func TestConformance(t *testing.T) {
	for name, c := range map[string]Config{
		"default":              {Handshake: time.Second},
		"small frames, queues": {Handshake: time.Second, FrameBytes: 4096, Queue: 8},
	} {
		t.Run(name, func(t *testing.T) {
			transfertest.Run(t, transfertest.Options{
				New: func(*testing.T) (transfer.Transport, transfer.Transport) {
					return New(c), New(Config{FrameBytes: c.FrameBytes, Queue: c.Queue})
				},
				Caps:     transfer.Caps{Fences: true},
				KillPeer: true,
				Garbage:  throwGarbage,
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

// throwGarbage sends noise of several lengths and silence, all at once, and waits until
// the target has closed each connection.
func throwGarbage(t *testing.T, d transfer.Descriptor) {
	rnd := rand.New(rand.NewPCG(4, 4))
	noise := make([]byte, 16<<20)
	for i := 0; i < len(noise); i += 8 {
		binary.LittleEndian.PutUint64(noise[i:], rnd.Uint64())
	}
	var wg sync.WaitGroup
	for _, n := range []int{0, 1, helloLen - 1, helloLen, helloLen + 1, 1 << 20, 16 << 20} {
		wg.Go(func() {
			c, err := net.Dial("tcp", d.Addr)
			if err != nil {
				t.Errorf("dial: %v", err)
				return
			}
			defer c.Close()
			_, _ = c.Write(noise[:n]) // may fail: the target closes early
			_, _ = io.Copy(io.Discard, c)
		})
	}
	wg.Wait()
}
