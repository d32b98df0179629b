package probe

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/kv"
	"github.com/baton-pd/baton/internal/session"
)

// differs is how a worker names the field of the fingerprint in which two of them differ.
var differs = regexp.MustCompile(`^(\w+) differs: the prefill worker has ("(?:[^"\\]|\\.)*"), the decode worker has`)

// takeOn makes id equal to what the refusal says of the prefill worker; false if that can not be read.
func takeOn(id *session.Identity, refusal string) bool {
	m := differs.FindStringSubmatch(refusal)
	if m == nil {
		return false
	}
	theirs, err := strconv.Unquote(m[2])
	if err != nil {
		return false
	}
	// Whole KV shards come under the same name as their model.
	if shards, err := parseShards(theirs); err == nil && m[1] == "kv_layout" {
		id.Shards = shards
		return true
	}
	return setField(id, m[1], theirs)
}

func setField(id *session.Identity, field, value string) bool {
	switch field {
	case "engine":
		id.Engine = value
	case "model_digest":
		id.ModelDigest = value
	case "kv_layout":
		id.KVLayout = value
	case "attention":
		id.Attention = value
	case "chunk_tokens":
		n, err := strconv.Atoi(value)
		if err != nil {
			return false
		}
		id.ChunkTokens = n
	default:
		return false
	}
	return true
}

// parseShards reads what kv.Shards prints.
func parseShards(text string) (kv.Shards, error) {
	var s kv.Shards
	var kind, order string
	if _, err := fmt.Sscanf(text, "paged %s layers=%d heads=%d dim=%d elem=%d tp=%d pp=%d page=%d order=%s",
		&kind, &s.Layers, &s.KVHeads, &s.HeadDim, &s.ElemBytes, &s.TP, &s.PP, &s.PageTokens, &order); err != nil {
		return kv.Shards{}, fmt.Errorf("%q is no KV layout of ranks: %w", text, err)
	}
	s.Latent, s.HeadsFirst = kind == "latent", order == "hnd"
	if err := s.Validate(); err != nil {
		return kv.Shards{}, err
	}
	return s, nil
}

// ParseIdentity reads the fingerprint of a Baton worker from its /server_info.
func ParseIdentity(serverInfo []byte) (session.Identity, error) {
	var info struct {
		Engine *struct {
			Engine      string `json:"engine"`
			ModelDigest string `json:"model_digest"`
			KVLayout    string `json:"kv_layout"`
			Shards      string `json:"kv_shards"`
			Attention   string `json:"attention"`
			ChunkTokens int    `json:"chunk_tokens"`
		} `json:"engine"`
	}
	if err := json.Unmarshal(serverInfo, &info); err != nil {
		return session.Identity{}, fmt.Errorf("server_info: %w", err)
	}
	e := info.Engine
	if e == nil || e.Engine == "" || e.ChunkTokens < 1 {
		return session.Identity{}, fmt.Errorf("server_info has no engine with a fingerprint: is it a Baton worker?")
	}
	id := session.Identity{Fingerprint: session.Fingerprint{Engine: e.Engine, ModelDigest: e.ModelDigest, KVLayout: e.KVLayout, Attention: e.Attention, ChunkTokens: e.ChunkTokens}}
	if s := strings.TrimSpace(e.Shards); s != "" && s != "none" {
		shards, err := parseShards(s)
		if err != nil {
			return session.Identity{}, fmt.Errorf("server_info: %w", err)
		}
		id.Shards = shards
	}
	return id, nil
}
