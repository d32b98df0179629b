package sglang

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// Route registers one prefill rank at a bootstrap server.
type Route struct {
	AttnTPSize    int     `json:"attn_tp_size"`
	AttnTPRank    int     `json:"attn_tp_rank"`
	AttnCPSize    int     `json:"attn_cp_size"`
	AttnCPRank    int     `json:"attn_cp_rank"`
	AttnDPSize    int     `json:"attn_dp_size"`
	AttnDPRank    int     `json:"attn_dp_rank"`
	PPSize        int     `json:"pp_size"`
	PPRank        int     `json:"pp_rank"`
	SystemDPSize  int     `json:"system_dp_size"`
	SystemDPRank  int     `json:"system_dp_rank"`
	RankIP        string  `json:"rank_ip"`
	RankPort      int     `json:"rank_port"`
	PageSize      int     `json:"page_size"`
	KVCacheDType  *string `json:"kv_cache_dtype"`
	KVLayout      *string `json:"kv_layout"`
	PrefillHTTP   *int    `json:"prefill_http_port"`
	SpecLayout    any     `json:"dsv41_spec_layout"`
	Policy        string  `json:"decode_allocation_policy"`
	LoadBalance   string  `json:"load_balance_method"`
	LayerSplit    bool    `json:"enable_dsa_cache_layer_split"`
	CacheSharding bool    `json:"enable_kv_cache_sharding"`
}

// mandatory keys of a registration.
var mandatory = []string{"attn_tp_size", "attn_tp_rank", "attn_cp_size", "attn_cp_rank", "attn_dp_size", "attn_dp_rank", "pp_size", "pp_rank",
	"system_dp_size", "system_dp_rank", "rank_ip", "rank_port", "page_size", "kv_cache_dtype"}

const (
	policyEarly  = "early"
	followRoom   = "follow_bootstrap_room"
	maxFleet     = 1 << 16 // ranks of a fleet
	maxDPEntries = 1 << 17
	dpEntryTTL   = 120 * time.Second
)

// parseRoute reads a registration; it says which key is wrong.
func parseRoute(b []byte) (*Route, error) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(b, &keys); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	for _, k := range mandatory {
		if _, ok := keys[k]; !ok {
			return nil, fmt.Errorf("key %s is missing", k)
		}
	}
	r := &Route{Policy: policyEarly, LoadBalance: followRoom}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, err
	}
	for _, c := range []struct {
		name       string
		rank, size int
	}{{"attn_tp", r.AttnTPRank, r.AttnTPSize}, {"attn_cp", r.AttnCPRank, r.AttnCPSize}, {"attn_dp", r.AttnDPRank, r.AttnDPSize},
		{"pp", r.PPRank, r.PPSize}, {"system_dp", r.SystemDPRank, r.SystemDPSize}} {
		if c.size < 1 || c.size > maxFleet || c.rank < 0 || c.rank >= c.size {
			return nil, fmt.Errorf("%s_rank %d of %s_size %d", c.name, c.rank, c.name, c.size)
		}
	}
	if r.RankIP == "" || r.RankPort < 1 || r.RankPort > 65535 {
		return nil, fmt.Errorf("rank address %q port %d", r.RankIP, r.RankPort)
	}
	if r.fleet() > maxFleet {
		return nil, fmt.Errorf("a fleet of %d ranks", r.fleet())
	}
	return r, nil
}

func (r *Route) dpSize() int {
	if r.SystemDPSize == 1 {
		return r.AttnDPSize
	}
	return r.SystemDPSize
}

func (r *Route) fleet() int { return r.dpSize() * r.AttnCPSize * r.AttnTPSize * r.PPSize }

// rankKey names a rank: dp group, cp, tp, pp.
type rankKey [4]int

func (r *Route) key() rankKey {
	dp := r.AttnDPRank
	if r.SystemDPSize != 1 {
		dp = r.SystemDPRank
	}
	return rankKey{dp, r.AttnCPRank, r.AttnTPRank, r.PPRank}
}

// Topology is what a decode manager learns of a prefill fleet.
type Topology struct {
	AttnTPSize int     `json:"attn_tp_size"`
	AttnCPSize int     `json:"attn_cp_size"`
	DPSize     int     `json:"dp_size"`
	PPSize     int     `json:"pp_size"`
	PageSize   *int    `json:"page_size"`
	DType      *string `json:"kv_cache_dtype"`
	FollowRoom bool    `json:"follow_bootstrap_room"`

	KVLayout    *string `json:"kv_layout,omitempty"`
	PrefillHTTP *int    `json:"prefill_http_port,omitempty"`
	Policy      string  `json:"decode_allocation_policy,omitempty"`
	LayerSplit  bool    `json:"enable_dsa_cache_layer_split,omitempty"`
	Sharding    bool    `json:"enable_kv_cache_sharding,omitempty"`
	SpecLayout  any     `json:"dsv41_spec_layout,omitempty"`
}

// RankAddr is where one prefill rank's PULL socket listens.
type RankAddr struct {
	IP   string `json:"rank_ip"`
	Port int    `json:"rank_port"`
}

// Bootstrap is the bootstrap server's table and its HTTP handler. Its state is in memory; it has
// no goroutines. Safe for concurrent use.
type Bootstrap struct {
	mu    sync.Mutex
	first *Route // defines the topology
	ranks map[rankKey]RankAddr
	dp    map[uint64]dpEntry
	swept time.Time
}

type dpEntry struct {
	rank int
	at   time.Time
}

// NewBootstrap has no ranks yet.
func NewBootstrap() *Bootstrap {
	return &Bootstrap{ranks: make(map[rankKey]RankAddr), dp: make(map[uint64]dpEntry)}
}

var errOtherFleet = errors.New("differs from that of an earlier rank")

// Register takes a rank, or replaces its address. Readiness counts ranks, not registrations: a restarted
// rank does not stand for one that never came.
func (s *Bootstrap) Register(r *Route) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f := s.first; f != nil {
		same := func(a, b any) bool { x, _ := json.Marshal(a); y, _ := json.Marshal(b); return string(x) == string(y) }
		switch {
		case r.Policy != f.Policy:
			return fmt.Errorf("decode_allocation_policy %q %w, %q", r.Policy, errOtherFleet, f.Policy)
		case !same(r.SpecLayout, f.SpecLayout):
			return fmt.Errorf("dsv41_spec_layout %w", errOtherFleet)
		}
		if k := r.key(); k[0] >= f.dpSize() || k[1] >= f.AttnCPSize || k[2] >= f.AttnTPSize || k[3] >= f.PPSize {
			return fmt.Errorf("rank %v: the fleet's shape %w", k, errOtherFleet)
		}
	} else {
		s.first = r
	}
	s.ranks[r.key()] = RankAddr{r.RankIP, r.RankPort}
	return nil
}

// Handler serves the routes of the protocol.
func (s *Bootstrap) Handler() http.Handler {
	m := http.NewServeMux()
	m.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { say(w, http.StatusOK, "OK") })
	m.HandleFunc("PUT /route", s.put)
	m.HandleFunc("GET /route", s.get)
	m.HandleFunc("POST /register_dp_rank", s.registerDP)
	m.HandleFunc("POST /query_dp_ranks", s.queryDP)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Server", batonServer)
		r.Body = http.MaxBytesReader(w, r.Body, 1<<20)
		m.ServeHTTP(w, r)
	})
}

func say(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text))
}

func sayJSON(w http.ResponseWriter, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		say(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_, _ = w.Write(b)
}

// readJSON decodes a bounded body, or answers 400.
func readJSON(w http.ResponseWriter, r *http.Request, decode func([]byte) error) bool {
	var raw json.RawMessage
	err := json.NewDecoder(r.Body).Decode(&raw)
	if err == nil {
		err = decode(raw)
	}
	if err != nil {
		say(w, http.StatusBadRequest, err.Error())
	}
	return err == nil
}

func (s *Bootstrap) put(w http.ResponseWriter, r *http.Request) {
	var route *Route
	if !readJSON(w, r, func(b []byte) (err error) { route, err = parseRoute(b); return err }) {
		return
	}
	if err := s.Register(route); err != nil {
		say(w, http.StatusBadRequest, err.Error())
		return
	}
	say(w, http.StatusOK, "OK")
}

func (s *Bootstrap) get(w http.ResponseWriter, r *http.Request) {
	var k rankKey
	for i, name := range []string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		v, err := strconv.Atoi(r.URL.Query().Get(name))
		if err != nil {
			say(w, http.StatusBadRequest, "Missing or wrong "+name)
			return
		}
		k[i] = v
	}
	s.mu.Lock()
	first, addr, known := s.first, s.ranks[k], false
	if _, known = s.ranks[k]; first == nil || len(s.ranks) < first.fleet() {
		n := len(s.ranks)
		s.mu.Unlock()
		say(w, http.StatusServiceUnavailable, fmt.Sprintf("Prefill server not fully registered yet: %d ranks", n))
		return
	}
	s.mu.Unlock()
	switch {
	case k == rankKey{-1, -1, -1, -1}:
		sayJSON(w, first.topology())
	case !known:
		say(w, http.StatusNotFound, "Unknown rank")
	default:
		sayJSON(w, addr)
	}
}

// topology has the mandatory keys and those that are not at their defaults.
func (r *Route) topology() Topology {
	t := Topology{AttnTPSize: r.AttnTPSize, AttnCPSize: r.AttnCPSize, DPSize: r.dpSize(), PPSize: r.PPSize, PageSize: &r.PageSize,
		DType: r.KVCacheDType, FollowRoom: r.LoadBalance == followRoom, KVLayout: r.KVLayout, PrefillHTTP: r.PrefillHTTP,
		LayerSplit: r.LayerSplit, Sharding: r.CacheSharding, SpecLayout: r.SpecLayout}
	if r.Policy != policyEarly {
		t.Policy = r.Policy
	}
	return t
}

func (s *Bootstrap) registerDP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Room *uint64 `json:"bootstrap_room"`
		Rank *int    `json:"dp_rank"`
	}
	if !readJSON(w, r, func(b []byte) error {
		if err := json.Unmarshal(b, &body); err != nil {
			return err
		}
		if body.Room == nil || body.Rank == nil {
			return errors.New("bootstrap_room and dp_rank are needed")
		}
		return nil
	}) {
		return
	}
	now := time.Now()
	s.mu.Lock()
	if now.Sub(s.swept) > dpEntryTTL/4 || len(s.dp) >= maxDPEntries {
		s.swept = now
		for k, e := range s.dp {
			if now.Sub(e.at) > dpEntryTTL {
				delete(s.dp, k)
			}
		}
	}
	full := len(s.dp) >= maxDPEntries
	if !full {
		s.dp[*body.Room] = dpEntry{*body.Rank, now}
	}
	s.mu.Unlock()
	if full {
		say(w, http.StatusServiceUnavailable, "too many rooms")
		return
	}
	say(w, http.StatusOK, "OK")
}

func (s *Bootstrap) queryDP(w http.ResponseWriter, r *http.Request) {
	var body struct {
		Rooms []uint64 `json:"bootstrap_rooms"`
	}
	if !readJSON(w, r, func(b []byte) error { return json.Unmarshal(b, &body) }) {
		return
	}
	out := make(map[string]int)
	s.mu.Lock()
	for _, room := range body.Rooms {
		if e, ok := s.dp[room]; ok {
			out[strconv.FormatUint(room, 10)] = e.rank
		}
	}
	s.mu.Unlock()
	sayJSON(w, out)
}

// Ready reports whether every rank has registered.
func (s *Bootstrap) Ready() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.first != nil && len(s.ranks) >= s.first.fleet()
}
