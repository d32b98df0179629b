package wire

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"
)

// TestAnswerBeforeRequest: what a server said as soon as it was connected to is heard, although nothing comes after the request.
func TestAnswerBeforeRequest(t *testing.T) {
	const busy = "HTTP/1.1 503 Busy\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy"
	said, taken := make(chan struct{}), make(chan error, 1)
	addr := script(t, func(_ int, c net.Conn, br *bufio.Reader) {
		_, _ = io.WriteString(c, busy)
		close(said)
		taken <- take(br)
		_, _ = io.Copy(io.Discard, br) // until the client closes it
	})
	c := newClient(t, addr)
	c.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		nc, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			<-said
		}
		return nc, err
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	resp, err := c.Post(ctx, &Request{Path: "/", Header: http.Header{}})
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if resp.StatusCode != 503 || string(b) != "busy" || err != nil {
		t.Errorf("%d %q, %v", resp.StatusCode, b, err)
	}
	if err := <-taken; err != nil {
		t.Error(err)
	}
}
