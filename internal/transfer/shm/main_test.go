package shm

import (
	"encoding/binary"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/transfertest"
)

func TestMain(m *testing.M) {
	transfertest.Main(m, func() transfer.Transport { return New(Config{}) })
}

// socketDir is a directory with a short path; t.TempDir is too long for a socket.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "shm")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

func TestConformance(t *testing.T) {
	for name, queue := range map[string]int{"default": 0, "small queue": 8} {
		t.Run(name, func(t *testing.T) {
			transfertest.Run(t, transfertest.Options{
				New: func(t *testing.T) (transfer.Transport, transfer.Transport) {
					c := Config{Dir: socketDir(t), Handshake: time.Second, Queue: queue}
					return New(c), New(Config{Queue: queue})
				},
				Caps:     transfer.Caps{NeedsDrain: true},
				KillPeer: true,
				Garbage:  throwGarbage,
				Silent: func(t *testing.T, d transfer.Descriptor) transfer.Descriptor {
					d.Addr = filepath.Join(socketDir(t), "silent")
					ln, err := net.Listen("unix", d.Addr) // its backlog takes connections
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { _ = ln.Close() })
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
	for _, n := range []int{0, 1, messageLen - 1, messageLen, messageLen + 1, 1 << 20, 16 << 20} {
		wg.Go(func() {
			c, err := net.Dial("unix", d.Addr)
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
