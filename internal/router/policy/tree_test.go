package policy

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
)

// check holds the tree's invariants, by walking it.
func check(t *testing.T, tree *Tree) {
	t.Helper()
	nodes, blocks, bytes, leaves := 0, 0, 0, 0
	var walk func(n *node)
	walk = func(n *node) {
		for first, c := range n.children {
			nodes, blocks = nodes+1, blocks+len(c.blocks)
			bytes += nodeBytes + blockBytes*len(c.blocks) + ownerBytes*len(c.owners)
			switch {
			case c.parent != n, len(c.blocks) == 0, c.blocks[0] != first, len(c.owners) == 0:
				t.Fatalf("broken node %+v", c)
			case (len(c.children) == 0) != (c.next != nil):
				t.Fatalf("a node with %d children is in the ring of leaves: %v", len(c.children), c.next != nil)
			case n != &tree.root && n.at < c.at:
				t.Fatalf("a parent was used at %d, its child at %d", n.at, c.at)
			}
			for _, o := range c.owners {
				if n != &tree.root && !slices.Contains(n.owners, o) {
					t.Fatalf("owner %d of a node does not own its parent", o)
				}
			}
			if len(c.children) == 0 {
				leaves++
			}
			walk(c)
		}
	}
	walk(&tree.root)
	if s := tree.Stats(); s.Nodes != nodes || s.Blocks != blocks || s.Bytes != bytes || bytes > tree.max {
		t.Fatalf("stats %+v; counted %d nodes, %d blocks, %d bytes; the limit is %d", s, nodes, blocks, bytes, tree.max)
	}
	last := uint64(0)
	for n := tree.lru.next; n != &tree.lru; n = n.next {
		if n.at < last {
			t.Fatalf("the ring of leaves is not in order of use: %d after %d", n.at, last)
		}
		last = n.at
		leaves--
	}
	if leaves != 0 {
		t.Fatalf("%d leaves are missing in the ring", leaves)
	}
}

// randomPrefix is one of few, with many common beginnings.
func randomPrefix(rng *rand.Rand) []uint64 {
	p := make([]uint64, 1+rng.IntN(12))
	for i := range p {
		p[i] = uint64(i)<<8 | uint64(rng.IntN(2)) // chained hashes differ by depth
	}
	return p
}

// sent is Match by name.
func sent(tree *Tree, prefix []uint64) map[string]int {
	out := map[string]int{}
	for id, n := range tree.Match(prefix, []int{7, 7, 7, 7, 7, 7}) {
		if name := tree.names[id]; name != "" {
			out[name] = n
		}
	}
	return out
}

// Without a lack of room the tree says what a plain list of everything sent says.
func TestTreeAgainstModel(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		tree := NewTree(1 << 20)
		model := map[string][][]uint64{}
		for range 300 {
			name := fmt.Sprint("w", rng.IntN(4))
			if rng.IntN(40) == 0 {
				tree.Forget(name)
				delete(model, name)
			} else {
				p := randomPrefix(rng)
				tree.Insert(p, name)
				model[name] = append(model[name], p)
			}
			check(t, tree)
			q := randomPrefix(rng)
			got := sent(tree, q)
			for _, name := range []string{"w0", "w1", "w2", "w3"} {
				want := 0
				for _, p := range model[name] {
					want = max(want, common(p, q))
				}
				if got[name] != want {
					t.Fatalf("seed %d: %s was sent %d blocks of %v, the tree says %d", seed, name, want, q, got[name])
				}
			}
		}
	}
}

// With little room the oldest leaves go, and the limit holds at every step.
func TestTreeIsBounded(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	tree := NewTree(20 * nodeBytes)
	for i := range 5000 {
		tree.Insert(randomPrefix(rng), fmt.Sprint("w", rng.IntN(3)))
		if check(t, tree); tree.Stats().Nodes == 0 {
			t.Fatalf("empty after insert %d", i)
		}
	}
	if tree.Stats().Evicted == 0 {
		t.Error("nothing was evicted")
	}
	for _, name := range []string{"w0", "w1", "w2"} {
		tree.Forget(name)
		check(t, tree)
	}
	if s := tree.Stats(); s.Nodes != 0 || s.Bytes != 0 || s.Blocks != 0 || len(tree.ids) != 0 {
		t.Errorf("left: %+v, %d ids", s, len(tree.ids))
	}
}

func TestTreeEvictsTheOldest(t *testing.T) {
	tree := NewTree(4*(nodeBytes+blockBytes+ownerBytes) + 10)
	for i := range 4 {
		tree.Insert([]uint64{uint64(i)}, "w")
	}
	tree.Insert([]uint64{0}, "w") // used again
	tree.Insert([]uint64{4}, "w")
	got := []int{}
	for i := range 5 {
		if sent(tree, []uint64{uint64(i)})["w"] > 0 {
			got = append(got, i)
		}
	}
	if !slices.Equal(got, []int{0, 2, 3, 4}) {
		t.Errorf("left are %v", got)
	}
}

// A full tree takes on the heap what it says, within a third; workers that come and go leave nothing.
func TestTreeMemory(t *testing.T) {
	heap := func() int {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc)
	}
	before := heap()
	rng := rand.New(rand.NewPCG(1, 1))
	tree := NewTree(8 << 20)
	for i := range 60000 {
		p := make([]uint64, 1+rng.IntN(40))
		for j := range p {
			p[j] = rng.Uint64()
		}
		p[0] = uint64(rng.IntN(5000))
		tree.Insert(p, fmt.Sprint("w", i%300))
	}
	took := heap() - before
	t.Logf("%+v take %d bytes", tree.Stats(), took)
	if limit := 8 << 20; took > limit+limit/3 || tree.Stats().Bytes < limit/2 {
		t.Errorf("%d bytes on the heap; the tree says %d of %d", took, tree.Stats().Bytes, limit)
	}
	for i := range 300 {
		tree.Forget(fmt.Sprint("w", i))
	}
	if tree.Stats().Nodes != 0 || len(tree.names) > 300 {
		t.Errorf("left: %+v, %d names", tree.Stats(), len(tree.names))
	}
	for i := range 1000 {
		tree.Insert([]uint64{1}, fmt.Sprint("other ", i))
		tree.Forget(fmt.Sprint("other ", i))
	}
	if len(tree.names) > 300 {
		t.Errorf("%d names after 1,000 workers came and went", len(tree.names))
	}
	runtime.KeepAlive(tree)
}

func TestBlocks(t *testing.T) {
	a := make([]byte, 10*BlockBytes+5)
	for i := range a {
		a[i] = byte(i * 7)
	}
	b := slices.Clone(a)
	b[5*BlockBytes] ^= 1
	x, y := Blocks(nil, a), Blocks(nil, b)
	if len(x) != 10 || common(x, y) != 5 || slices.Equal(x[6:], y[6:]) {
		t.Errorf("%d blocks, %d in common", len(x), common(x, y))
	}
	if longer := Blocks(nil, append(a, b...)); common(x, longer) != 10 {
		t.Error("a longer prompt does not begin like its beginning")
	}
	if n := len(Blocks(nil, make([]byte, 10<<20))); n != MaxBlocks {
		t.Errorf("%d blocks", n)
	}
	// One bit changes the hash, wherever it is; there are few enough to see any weakness at once.
	seen := map[uint64]bool{}
	for i := range BlockBytes * 8 {
		c := slices.Clone(a[:BlockBytes])
		c[i/8] ^= 1 << (i % 8)
		seen[Blocks(nil, c)[0]] = true
	}
	if len(seen) != BlockBytes*8 || seen[x[0]] {
		t.Errorf("%d different hashes of %d", len(seen), BlockBytes*8)
	}
}

// Conversations stay where they began, a shared system prompt does not bind all of them to one worker, and
// a worker with too much to do gets no more.
func TestPrefixCache(t *testing.T) {
	p := newPolicy(t, PrefixCache, Options{})
	cands := fleetOf(4)
	system := []uint64{1, 2, 3}
	send := func(prefix ...uint64) int {
		r := Request{Prefix: prefix}
		i := p.Choose(&r, cands)
		p.Sent(&r, cands[i].ID)
		return i
	}
	home := send(append(slices.Clone(system), 10, 11)...)
	for turn := range 5 {
		if i := send(append(slices.Clone(system), 10, 11, 12, uint64(13+turn))...); i != home {
			t.Errorf("turn %d went to %d, not %d", turn, i, home)
		}
	}
	if i := send(90, 91, 92); i == home {
		t.Error("another prompt went to the same worker, although others were as idle")
	}
	// 3 of 13 blocks match: less than the least match.
	if i := send(append(slices.Clone(system), 20, 21, 22, 23, 24, 25, 26, 27, 28, 29)...); i == home {
		t.Error("a short match decided")
	}
	cands[home].Inflight = 15
	if i := send(append(slices.Clone(system), 10, 11, 12)...); i != home {
		t.Error("left a worker within the threshold")
	}
	cands[home].Inflight = 16
	other := send(append(slices.Clone(system), 10, 11, 12)...)
	if other == home {
		t.Error("stayed with a worker beyond the threshold")
	}
	for i := range cands {
		cands[i].Inflight = 100
	}
	cands[home].Inflight, cands[other].Inflight = 140, 130 // 1.4 times, both have it
	if i := send(append(slices.Clone(system), 10, 11, 12)...); i != other {
		t.Errorf("went to %d; the less loaded of two with the same match is %d", i, other)
	}
	p.Forget(cands[other].ID)
	if i := send(append(slices.Clone(system), 10, 11, 12)...); i != home {
		t.Errorf("went to %d after %d was forgotten; %d has the prefix", i, other, home)
	}
}

func FuzzTree(f *testing.F) {
	f.Add([]byte("abcabdabe"), 3)
	f.Fuzz(func(t *testing.T, data []byte, cut int) {
		tree := NewTree(3000)
		cut, data = 1+min(max(cut, 0), 8), data[:min(len(data), 200)] // each step walks the whole tree
		for i := 0; len(data) >= cut; i++ {
			p := make([]uint64, cut)
			for j := range p {
				p[j] = uint64(data[j])
			}
			name := fmt.Sprint(data[0] % 3)
			if data[0]%7 == 0 {
				tree.Forget(name)
			} else {
				tree.Insert(p, name)
			}
			data = data[1:]
			check(t, tree)
		}
	})
}

func BenchmarkTree(b *testing.B) {
	prompts := make([][]uint64, 1000) // of 32 KiB, 8k tokens, the first half in common with 9 others
	for i := range prompts {
		text := make([]byte, 32<<10)
		for j := range text {
			text[j] = byte(i / 10)
			if j > len(text)/2 {
				text[j] = byte(i ^ j)
			}
		}
		prompts[i] = Blocks(nil, text)
	}
	b.Run("hash", func(b *testing.B) {
		text, dst := make([]byte, 32<<10), make([]uint64, 0, 256)
		b.SetBytes(32 << 10)
		for b.Loop() {
			dst = Blocks(dst[:0], text)
		}
	})
	b.Run("insert", func(b *testing.B) {
		tree := NewTree(1 << 20) // some 300 prompts: evicts all the time
		for i := 0; b.Loop(); i++ {
			tree.Insert(prompts[i%len(prompts)], "w")
		}
	})
	b.Run("match", func(b *testing.B) {
		tree, depth := NewTree(64<<20), []int{}
		for i, p := range prompts {
			tree.Insert(p, fmt.Sprint("w", i%16))
		}
		for i := 0; b.Loop(); i++ {
			depth = tree.Match(prompts[i%len(prompts)], depth)
		}
	})
}
