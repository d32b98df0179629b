package sglang

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/baton-pd/baton/internal/room"
)

// bootClient speaks to bootstrap servers.
type bootClient struct {
	http *http.Client
	d    *Dialect
}

// httpTimeout bounds one request to a bootstrap server.
const httpTimeout = 5 * time.Second

func newBootClient() *bootClient {
	tr := &http.Transport{DialContext: (&net.Dialer{Timeout: 2 * time.Second}).DialContext, MaxIdleConnsPerHost: 2, IdleConnTimeout: 30 * time.Second}
	return &bootClient{http: &http.Client{Transport: tr}, d: &Supported}
}

func (b *bootClient) close() { b.http.CloseIdleConnections() }

// statusError is an answer other than 200.
type statusError struct {
	status int
	text   string
}

func (e *statusError) Error() string { return fmt.Sprintf("HTTP %d: %.200s", e.status, e.text) }

// do returns the body of a 200 answer, at most 1 MiB of it.
func (b *bootClient) do(ctx context.Context, method, url string, body []byte, timeout time.Duration) ([]byte, http.Header, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, url, bytes.NewReader(body))
	if err != nil {
		return nil, nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := b.http.Do(req)
	if err != nil {
		return nil, nil, err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = &statusError{resp.StatusCode, string(text)}
	}
	return text, resp.Header, err
}

// register puts a rank: five tries with back-off, as the real prefill does; unlike it, the end is an error.
func (b *bootClient) register(ctx context.Context, addr string, r *Route) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	for pause := time.Second; ; pause *= 2 {
		if _, _, err = b.do(ctx, http.MethodPut, "http://"+addr+"/route", body, httpTimeout); err == nil {
			return nil
		}
		var refused *statusError
		if errors.As(err, &refused) && refused.status == http.StatusBadRequest || pause > 8*time.Second {
			return fmt.Errorf("sglang: register at bootstrap server %s: %w", addr, err)
		}
		if err := wait(ctx, time.Duration(float64(pause)*(0.75+rand.Float64()/4))); err != nil {
			return fmt.Errorf("sglang: register at bootstrap server %s: %w", addr, err)
		}
	}
}

// wait sleeps unless ctx ends first.
func wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-t.C:
		return nil
	}
}

const wholeFleet = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

// topology asks until the fleet is complete or ctx ends. A *room.Cause says why not.
func (b *bootClient) topology(ctx context.Context, addr string) (*Topology, error) {
	for {
		body, head, err := b.do(ctx, http.MethodGet, "http://"+addr+wholeFleet, nil, httpTimeout)
		if err == nil {
			return b.parseTopology(body, head.Get("Server"))
		}
		var refused *statusError
		if errors.As(err, &refused) && refused.status < 500 {
			return nil, &room.Cause{Code: room.CodeMismatch, Detail: fmt.Sprintf("%s does not answer as a bootstrap server: %v", addr, err)}
		}
		if wait(ctx, time.Second) != nil {
			return nil, &room.Cause{Code: room.CodeUnavailable, Retryable: true, Detail: fmt.Sprintf("the bootstrap server %s was not ready in time: %v", addr, err)}
		}
	}
}

func (b *bootClient) parseTopology(body []byte, server string) (*Topology, error) {
	var keys map[string]json.RawMessage
	bad := func(err error) error {
		return &room.Cause{Code: room.CodeProtocol, Detail: fmt.Sprintf("the topology of the prefill fleet can not be read: %v", err)}
	}
	if err := json.Unmarshal(body, &keys); err != nil {
		return nil, bad(err)
	}
	var names []string
	for k := range keys {
		names = append(names, k)
	}
	if c := b.d.checkTopology(names, server); c != nil {
		return nil, c
	}
	for _, k := range []string{"attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room"} {
		if !slices.Contains(names, k) {
			return nil, bad(fmt.Errorf("no key %s", k))
		}
	}
	t := &Topology{Policy: policyEarly}
	if err := json.Unmarshal(body, t); err != nil {
		return nil, bad(err)
	}
	return t, nil
}

// serverInfo asks the prefill's HTTP server for its version; "" if it does not say.
func (b *bootClient) serverInfo(ctx context.Context, addr string, port int) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return ""
	}
	body, _, err := b.do(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, strconv.Itoa(port))+"/server_info", nil, httpTimeout)
	var info struct {
		Version string `json:"version"`
	}
	if err != nil || json.Unmarshal(body, &info) != nil {
		return ""
	}
	return info.Version
}

// rank asks for the address of one rank.
func (b *bootClient) rank(ctx context.Context, addr string, dp int) (RankAddr, error) {
	url := fmt.Sprintf("http://%s/route?prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", addr, dp)
	var r RankAddr
	body, _, err := b.do(ctx, http.MethodGet, url, nil, httpTimeout)
	if err == nil {
		err = json.Unmarshal(body, &r)
	}
	if err == nil && (r.IP == "" || r.Port < 1 || r.Port > 65535) {
		err = fmt.Errorf("address %q port %d", r.IP, r.Port)
	}
	if err != nil {
		return r, &room.Cause{Code: room.CodeUnavailable, Retryable: true, Detail: fmt.Sprintf("the bootstrap server %s does not know prefill rank %d: %v", addr, dp, err)}
	}
	return r, nil
}

// dpRank asks which rank has a room, until it is known or ctx ends.
func (b *bootClient) dpRank(ctx context.Context, addr string, id uint64) (int, error) {
	q, _ := json.Marshal(map[string]any{"bootstrap_rooms": []uint64{id}})
	key := strconv.FormatUint(id, 10)
	for {
		body, _, err := b.do(ctx, http.MethodPost, "http://"+addr+"/query_dp_ranks", q, httpTimeout)
		var ranks map[string]int
		if err == nil {
			err = json.Unmarshal(body, &ranks)
		}
		if r, ok := ranks[key]; err == nil && ok {
			return r, nil
		}
		if wait(ctx, 100*time.Millisecond) != nil {
			return 0, &room.Cause{Code: room.CodeUnavailable, Retryable: true, Detail: fmt.Sprintf("no prefill rank at %s has taken the room in time (%v)", addr, err)}
		}
	}
}

// healthy is one heartbeat.
func (b *bootClient) healthy(ctx context.Context, addr string, timeout time.Duration) error {
	_, _, err := b.do(ctx, http.MethodGet, "http://"+addr+"/health", nil, timeout)
	return err
}
