package sglang

import (
	"fmt"
	"slices"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// Dialect is the wire of one release. SGLang announces no version on any of its three channels, so
// a peer is told by the shape of what it says first, and by its server's /server_info where the
// topology names the port.
type Dialect struct {
	Release string
	// TopologyKey is in the release's topology reply and in no earlier one's; TopologyKeys are all
	// that it may have.
	TopologyKey  string
	TopologyKeys []string
	// Registration is the number of frames of a registration, guard included.
	Registration int
}

// Supported is the one release that this package speaks.
var Supported = Dialect{
	Release:      "0.5.23",
	TopologyKey:  "enable_kv_cache_sharding",
	Registration: 25,
	TopologyKeys: []string{
		"attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room",
		"enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "decode_allocation_policy", "prefill_http_port", "kv_layout", "dsv41_spec_layout",
		"target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks", "required_dst_info_num", "required_prefill_response_num",
	},
}

// batonServer is the Server header of Baton's own bootstrap server, whose topology has the mandatory
// keys only: an unknown key makes older decode managers fail.
const batonServer = "baton-sglang/0.5.23"

// older guesses the releases of a registration of other lengths.
func older(frames int) string {
	switch {
	case frames < 20:
		return "0.5.15 or older"
	case frames < 24:
		return "0.5.15 to 0.5.18"
	case frames == 24:
		return "0.5.19 to 0.5.22"
	default:
		return "newer than 0.5.23"
	}
}

// checkRegistration refuses a decode manager of another release.
func (d *Dialect) checkRegistration(r *Registration) *room.Cause {
	if r.Frames == d.Registration {
		return nil
	}
	return &room.Cause{Code: room.CodeMismatch, Detail: fmt.Sprintf("the decode worker registered with %d frames, as SGLang %s does; release %s, the one supported here, sends %d: run the same release on both sides",
		r.Frames, older(r.Frames), d.Release, d.Registration)}
}

// checkTopology refuses a prefill server of another release: keys are what came, server the Server header.
func (d *Dialect) checkTopology(keys []string, server string) *room.Cause {
	refuse := func(how string) *room.Cause {
		return &room.Cause{Code: room.CodeMismatch, Detail: "the prefill server is not SGLang " + d.Release + ", the release supported here: " + how + "; run the same release on both sides"}
	}
	var unknown []string
	for _, k := range keys {
		if !slices.Contains(d.TopologyKeys, k) {
			unknown = append(unknown, k)
		}
	}
	switch {
	case len(unknown) > 0:
		slices.Sort(unknown)
		return refuse(fmt.Sprintf("its topology has unknown keys (%.200s), so it is newer", strings.Join(unknown, ", ")))
	case server == batonServer:
		return nil
	case !slices.Contains(keys, d.TopologyKey):
		return refuse("its topology lacks " + d.TopologyKey + ", so it is 0.5.22 or older and would tell the end of a transfer by NIXL notifications")
	}
	return nil
}

// checkVersion refuses what /server_info names; "" says nothing.
func (d *Dialect) checkVersion(v string) *room.Cause {
	base, _, _ := strings.Cut(v, "+") // local version labels
	if v == "" || base == d.Release || strings.HasPrefix(base, d.Release+".post") {
		return nil
	}
	return &room.Cause{Code: room.CodeMismatch, Detail: fmt.Sprintf("the prefill server says that it is SGLang %.60s; release %s is the one supported here: run the same release on both sides", v, d.Release)}
}
