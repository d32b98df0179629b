package session

import (
	"strings"
	"testing"

	"github.com/baton-pd/baton/internal/kv"
	pb "github.com/baton-pd/baton/proto/baton/v1"
)

var sampleShards = kv.Shards{
	Model: kv.Model{Layers: 6, KVHeads: 12, HeadDim: 8, ElemBytes: 2},
	Split: kv.Split{TP: 4, PP: 3, PageTokens: 16, HeadsFirst: true},
}

func TestShardsCross(t *testing.T) {
	latent := sampleShards
	latent.Latent, latent.KVHeads = true, 1
	for _, s := range []kv.Shards{{}, sampleShards, latent} {
		id := Identity{WorkerID: "w:1", Epoch: 1, Shards: s}
		if got, what := toIdentity(fromIdentity(id)); what != "" || got != id {
			t.Errorf("%v became %v: %s", id, got, what)
		}
	}
	g := Grant{ID: 1, PageBytes: 1, Chunks: []int{1}, Have: 77}
	if got, err := toGrant(fromGrant(g)); err != nil || got.Have != 77 {
		t.Errorf("%+v, %v", got, err)
	}
	for _, have := range []int64{-1, maxTokens + 1} {
		m := fromGrant(g)
		m.HaveTokens = have
		if _, err := toGrant(m); err == nil {
			t.Errorf("%d tokens that are there already were let through", have)
		}
	}
}

func TestBadShardsAreRefused(t *testing.T) {
	for name, change := range map[string]func(*pb.Shards){
		"negative": func(m *pb.Shards) { m.Tp = -4 },
		"huge":     func(m *pb.Shards) { m.PageTokens = 1 << 40 },
		"empty":    func(m *pb.Shards) { *m = pb.Shards{} },
		"no fit":   func(m *pb.Shards) { m.Tp = 5 },
	} {
		m := fromIdentity(Identity{WorkerID: "w:1", Epoch: 1, Shards: sampleShards})
		change(m.Shards)
		if _, what := toIdentity(m); !strings.Contains(what, "shards") {
			t.Errorf("%s: %q", name, what)
		}
	}
}

// TestShardsThatCannotMeet: the hello is refused with the field and both values; everything else may differ.
func TestShardsThatCannotMeet(t *testing.T) {
	for field, change := range map[string]func(*kv.Shards){
		"":          func(s *kv.Shards) { s.TP, s.PP, s.PageTokens, s.HeadsFirst = 12, 1, 7, false },
		"tp":        func(s *kv.Shards) { s.TP = 6 },
		"head_dim":  func(s *kv.Shards) { s.HeadDim = 4 },
		"kv_layout": func(s *kv.Shards) { *s = kv.Shards{} },
	} {
		a, b := Identity{Shards: sampleShards}, Identity{Shards: sampleShards}
		change(&b.Shards)
		got, ours, theirs, differ := differs(1, 1, a, b)
		if got != field || differ != (field != "") || differ && ours == theirs {
			t.Errorf("%q: field %q, values %q and %q", field, got, ours, theirs)
		}
		if field == "tp" {
			if d := mismatchDetail(got, ours, theirs); !strings.Contains(d, `tp differs: the prefill worker has "4", the decode worker has "6"`) || !strings.Contains(d, "multiple") {
				t.Error(d)
			}
		}
	}
}
