package edge

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/baton-pd/baton/internal/httpbody"
	"github.com/baton-pd/baton/internal/openai"
	"github.com/baton-pd/baton/internal/room"
)

// Access is who may use a path.
type Access uint8

const (
	// Operator: whoever may see and change the fleet. The zero value, so that what is forgotten is closed.
	Operator Access = 0
	// Client: whoever has a key.
	Client Access = 1
	// Anyone: no key is looked at.
	Anyone Access = 2
)

// Error codes of refusals.
const (
	codeUnauthorized = "invalid_api_key"
	codeForbidden    = "forbidden"
	codeRateLimit    = "rate_limit_exceeded"
)

// Caller is who asks, as far as a [Guard] knows.
type Caller struct {
	Key      *Key // nil for the admin token
	Operator bool
}

// Name is the caller's for logs and the queue.
func (c *Caller) Name() string {
	if c.Key == nil {
		return "(admin token)"
	}
	return c.Key.Name
}

type callerKey struct{}

// From is who asks; nil where no keys are wanted, or nobody looked.
func From(ctx context.Context) *Caller {
	c, _ := ctx.Value(callerKey{}).(*Caller)
	return c
}

// Guard lets those with a key pass. Without Keys it lets everybody.
type Guard struct {
	Keys *Keys
	// AdminToken, if not empty, is an operator's.
	AdminToken string
	// Refused is told of each refusal [nobody].
	Refused func(Refusal)
}

// Refusal is a request that is answered with an error before anybody has looked at it.
type Refusal struct {
	Request *http.Request
	Reason  string      // one of the Reason... constants
	Name    string      // the client's, if it has one
	Arrived time.Time   // when its header had
	Header  http.Header // of the answer, as far as it is made
	Err     *openai.Error
}

// Wrap asks for a key before next where access wants it. The paths that access sees are as they came.
func (g *Guard) Wrap(access func(path string) Access, next http.Handler) http.Handler {
	if g.Keys == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		level := access(req.URL.Path)
		if level == Anyone {
			next.ServeHTTP(w, req)
			return
		}
		if c := g.check(w, req, level); c != nil {
			next.ServeHTTP(w, req.WithContext(context.WithValue(req.Context(), callerKey{}, c)))
		}
	})
}

// check finds out who asks; nil: it has been refused.
func (g *Guard) check(w http.ResponseWriter, req *http.Request, level Access) *Caller {
	secret := Secret(req.Header)
	if secret == "" {
		g.refuse(w, req, ReasonNoKey, "", openai.NewError(http.StatusUnauthorized, codeUnauthorized, "Authorization",
			"an API key is needed: send it as \"Authorization: Bearer KEY\""))
		return nil
	}
	c := &Caller{Key: g.Keys.Find(secret)}
	switch {
	case c.Key != nil:
		c.Operator = c.Key.Operator
	case g.AdminToken != "" && sameSecret(secret, g.AdminToken):
		c.Operator = true
	default:
		g.refuse(w, req, ReasonBadKey, "", openai.NewError(http.StatusUnauthorized, codeUnauthorized, "Authorization", "this API key is not known here"))
		return nil
	}
	if level == Operator && !c.Operator {
		g.refuse(w, req, ReasonOperator, c.Name(), openai.NewError(http.StatusForbidden, codeForbidden, "Authorization",
			"%.128s is for operators: the key of %s is not marked so", req.URL.Path, c.Name()))
		return nil
	}
	return c
}

// Secret is the key that a request carries, "" if it has none.
func Secret(h http.Header) string {
	if scheme, key, ok := strings.Cut(h.Get("Authorization"), " "); ok && strings.EqualFold(scheme, "Bearer") {
		return strings.TrimSpace(key)
	}
	return h.Get("X-Api-Key")
}

// sameSecret compares in a time that tells nothing, not even the length.
func sameSecret(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}

// Limit holds a client to its limits while next serves its request.
func (g *Guard) Limit(next http.HandlerFunc) http.HandlerFunc {
	if g.Keys == nil {
		return next
	}
	return func(w http.ResponseWriter, req *http.Request) {
		if c := From(req.Context()); c != nil && c.Key != nil {
			end, err := g.Keys.Begin(c.Key)
			if err != nil {
				g.refuseLimit(w, req, err)
				return
			}
			defer end()
		}
		next(w, req)
	}
}

func (g *Guard) refuseLimit(w http.ResponseWriter, req *http.Request, err error) {
	var limit *LimitError
	if !errors.As(err, &limit) {
		openai.WriteError(w, openai.FromErr(err))
		return
	}
	e := *openai.FromCause(&room.Cause{Code: room.CodeCapacity, Side: room.SideRouter, Phase: "admission", Retryable: true, Detail: limit.Error()})
	e.Status, e.Code = http.StatusTooManyRequests, codeRateLimit
	w.Header().Set("Retry-After", strconv.Itoa(max(int(math.Ceil(limit.After.Seconds())), 1)))
	g.refuse(w, req, limit.Reason, limit.Name, &e)
}

// refuse answers before the body has been read.
func (g *Guard) refuse(w http.ResponseWriter, req *http.Request, reason, name string, e *openai.Error) {
	arrived := time.Now()
	httpbody.Drain(w, req)
	h := w.Header()
	if g.Refused != nil {
		g.Refused(Refusal{req, reason, name, arrived, h, e})
	}
	if e.Status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", `Bearer realm="baton"`)
	}
	openai.WriteError(w, e)
}
