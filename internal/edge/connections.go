package edge

import (
	"context"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/baton-pd/baton/internal/httpbody"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// surplus is how many connections over the limit are held at a time: enough to tell clients so, and for who asks after the server's health.
const surplus = 64

// Connections counts the open connections of a server and bounds them. Those over the limit are accepted, for a closed port tells nothing and hides the
// server's health: of them only what always is answered; anything else is refused with 503, and the connection closed. They can not take over either: there
// are 64 at most, and for one more the oldest of them is closed. Its methods are safe for concurrent use.
type Connections struct {
	most int
	// Always says which paths are answered on connections over the limit [none].
	Always func(path string) bool
	// Refused is told of each refusal [nobody].
	Refused func(Refusal)

	mu   sync.Mutex
	open map[net.Conn]bool // true: within the limit
	over []net.Conn        // the others, oldest first
}

// NewConnections makes a limit of most, at least 1.
func NewConnections(most int) *Connections {
	return &Connections{most: most, open: map[net.Conn]bool{}}
}

// DefaultConnections is half of the files that the process may have open, since a request has connections to workers, too, and 65,536 at most.
func DefaultConnections() int {
	const largest = 65536
	var l syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &l); err != nil {
		return largest
	}
	return int(max(min(l.Cur/2, largest), 1))
}

// Most is the limit.
func (c *Connections) Most() int { return c.most }

// Open is how many connections there are, with those over the limit.
func (c *Connections) Open() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.open)
}

type surplusKey struct{}

// attach makes srv count its connections here.
func (c *Connections) attach(srv *http.Server) {
	srv.ConnContext = func(ctx context.Context, nc net.Conn) context.Context {
		if c.enter(nc) {
			return ctx
		}
		return context.WithValue(ctx, surplusKey{}, true)
	}
	srv.ConnState = func(nc net.Conn, s http.ConnState) {
		if s == http.StateClosed || s == http.StateHijacked {
			c.leave(nc)
		}
	}
}

// enter counts a connection and says whether it is within the limit.
func (c *Connections) enter(nc net.Conn) (within bool) {
	c.mu.Lock()
	within = len(c.open)-len(c.over) < c.most
	c.open[nc] = within
	var gone net.Conn
	if !within {
		if c.over = append(c.over, nc); len(c.over) > surplus {
			gone = c.remove(0)
		}
	}
	c.mu.Unlock()
	if gone != nil {
		_ = gone.Close() // the server finds it closed
	}
	return within
}

// remove forgets a connection over the limit. Under mu.
func (c *Connections) remove(i int) net.Conn {
	nc := c.over[i]
	c.over = append(c.over[:i], c.over[i+1:]...)
	delete(c.open, nc)
	return nc
}

func (c *Connections) leave(nc net.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch within, ok := c.open[nc]; {
	case !ok: // it had to go for another
	case within:
		delete(c.open, nc)
	default:
		for i := range c.over {
			if c.over[i] == nc {
				c.remove(i)
				return
			}
		}
	}
}

// Wrap refuses what comes on connections over the limit, unread.
func (c *Connections) Wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Context().Value(surplusKey{}) == nil {
			next.ServeHTTP(w, req)
			return
		}
		h := w.Header()
		h.Set("Connection", "close") // the next may be within
		if c.Always != nil && c.Always(req.URL.Path) {
			next.ServeHTTP(w, req)
			return
		}
		e := openai.FromCause(&room.Cause{Code: room.CodeCapacity, Side: room.SideRouter, Phase: "connections", Retryable: true,
			Detail: "there are too many connections; ask again later"})
		e.Status = http.StatusServiceUnavailable
		h.Set("Retry-After", "1")
		arrived := time.Now()
		httpbody.Drain(w, req)
		if c.Refused != nil {
			c.Refused(Refusal{Request: req, Reason: ReasonConnections, Arrived: arrived, Header: h, Err: e})
		}
		openai.WriteError(w, e)
	})
}
