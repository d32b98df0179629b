package httpbody

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"testing"
	"testing/iotest"
)

func TestRead(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{0, 1, firstPiece - 1, firstPiece, firstPiece + 1, 5 * firstPiece, maxPiece, 3*maxPiece + 7} {
		want := make([]byte, n)
		for i := range want {
			want[i] = byte(r.Uint32())
		}
		for name, from := range map[string]io.Reader{
			"whole": bytes.NewReader(want), "halves": iotest.HalfReader(bytes.NewReader(want)), "data with end": iotest.DataErrReader(bytes.NewReader(want)),
		} {
			if got, err := Read(from); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes, %s: %d bytes, %v", n, name, len(got), err)
			}
		}
	}
	broken := errors.New("broken")
	if got, err := Read(io.MultiReader(bytes.NewReader(make([]byte, 100)), iotest.ErrReader(broken))); !errors.Is(err, broken) || got != nil {
		t.Errorf("broken reader: %d bytes, %v", len(got), err)
	}
}

// zeros gives n zero bytes, then an error.
type zeros struct {
	n   int
	err error
}

func (z *zeros) Read(p []byte) (int, error) {
	if z.n == 0 {
		return 0, z.err
	}
	n := min(len(p), z.n)
	clear(p[:n])
	z.n -= n
	return n, nil
}

// TestReadMemory: what is allocated for a body that is refused is little more than the body.
func TestReadMemory(t *testing.T) {
	const size = 32 << 20
	for name, s := range map[string]struct {
		end  error
		most uint64
	}{"refused": {errors.New("too large"), size + size/8}, "taken": {io.EOF, 2*size + size/8}} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, _ = Read(&zeros{size, s.end})
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > s.most {
			t.Errorf("%s: %d bytes were allocated for %d", name, got, size)
		}
	}
}

// TestDrain: a client that sends all of its refused body before it reads gets the answer; one that asks
// first need not send it.
func TestDrain(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		Drain(w, r)
		w.Header().Set("Connection", "close")
		http.Error(w, "too large", http.StatusRequestEntityTooLarge)
	}))
	defer srv.Close()
	const size = 32 << 20 // more than all buffers on the way
	for _, expect := range []string{"", "Expect: 100-continue\r\n"} {
		c, err := net.Dial("tcp", srv.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n%s\r\n", size, expect)
		if expect == "" {
			if _, err := c.Write(make([]byte, size)); err != nil {
				t.Fatalf("the connection was closed while the body was sent: %v", err)
			}
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.Body.Close(); res.StatusCode != http.StatusRequestEntityTooLarge {
			t.Errorf("status %s", res.Status)
		}
	}
}
