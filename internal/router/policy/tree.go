package policy

import "slices"

// Tree remembers which worker was sent which beginnings of prompts: a radix tree over block hashes. It
// is an approximation of the workers' caches, which it never sees: what it says is a hint.
//
// Invariants: a node's owners are owners of its parent, too; every node but the root has at least one block and
// one owner; the leaves, and only they, are in the list, the least recently used first; bytes is
// at most the limit after each call.
type Tree struct {
	root     node
	lru      node // sentinel of the ring of leaves; next is the oldest
	tick     uint64
	max      int
	bytes    int
	nodes    int
	blocks   int
	evicted  uint64
	ids      map[string]uint32
	names    []string // by id; "" for one that is free
	spareIDs []uint32
}

type node struct {
	parent     *node
	blocks     []uint64
	children   map[uint64]*node // by first block; nil for a leaf
	owners     []uint32
	at         uint64 // tick of the last use
	prev, next *node  // in the ring of leaves
}

const (
	// Estimates of what the runtime takes, in bytes; TestTreeMemory compares them with the heap.
	nodeBytes    = 280 // the struct, its slices' rounding and its entry in its parent's map
	blockBytes   = 8
	ownerBytes   = 4
	minTreeBytes = nodeBytes + blockBytes*MaxBlocks + 64<<10
)

// Stats of a tree.
type Stats struct {
	Bytes, Nodes, Blocks int
	Evicted              uint64 // leaves forgotten to make room
}

// NewTree makes a tree that takes about max bytes at most.
func NewTree(max int) *Tree {
	t := &Tree{max: max, ids: map[string]uint32{}}
	t.lru.prev, t.lru.next = &t.lru, &t.lru
	return t
}

// Stats counts what is there.
func (t *Tree) Stats() Stats {
	return Stats{Bytes: t.bytes, Nodes: t.nodes, Blocks: t.blocks, Evicted: t.evicted}
}

// id interns a worker's name.
func (t *Tree) id(name string) uint32 {
	if id, ok := t.ids[name]; ok {
		return id
	}
	var id uint32
	if n := len(t.spareIDs); n > 0 {
		id, t.spareIDs = t.spareIDs[n-1], t.spareIDs[:n-1]
		t.names[id] = name
	} else {
		id = uint32(len(t.names)) // a fleet has fewer than 2^32 workers
		t.names = append(t.names, name)
	}
	t.ids[name] = id
	return id
}

// common is the length of the common beginning.
func common(a, b []uint64) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// Match returns how many blocks of prefix each worker was sent, by its id of [Tree.ID], in depth, which it grows and
// clears. It changes nothing in the tree.
func (t *Tree) Match(prefix []uint64, depth []int) []int {
	depth = append(depth[:0], make([]int, len(t.names))...)
	n, done := &t.root, 0
	for done < len(prefix) {
		child := n.children[prefix[done]]
		if child == nil {
			break
		}
		same := common(child.blocks, prefix[done:])
		done += same
		for _, id := range child.owners {
			depth[id] = done
		}
		if same < len(child.blocks) {
			break
		}
		n = child
	}
	return depth
}

// ID finds a worker's id; -1 if it was sent nothing.
func (t *Tree) ID(name string) int {
	if id, ok := t.ids[name]; ok {
		return int(id)
	}
	return -1
}

// Insert says that the worker of this name was sent prefix.
func (t *Tree) Insert(prefix []uint64, name string) {
	if len(prefix) == 0 {
		return
	}
	t.tick++
	id := t.id(name)
	n := &t.root
	for len(prefix) > 0 {
		child := n.children[prefix[0]]
		if child == nil {
			child = t.leaf(n, prefix)
		} else if same := common(child.blocks, prefix); same < len(child.blocks) {
			child = t.split(child, same)
		}
		prefix = prefix[len(child.blocks):]
		child.at = t.tick
		if !slices.Contains(child.owners, id) {
			child.owners = append(child.owners, id)
			t.bytes += ownerBytes
		}
		n = child
	}
	if len(n.children) == 0 {
		t.unlink(n)
		t.link(n, t.lru.prev) // the newest
	}
	for t.bytes > t.max {
		t.evicted++
		t.remove(t.lru.next)
	}
}

// leaf makes a new child of n.
func (t *Tree) leaf(n *node, blocks []uint64) *node {
	if n != &t.root && len(n.children) == 0 {
		t.unlink(n) // it was a leaf
	}
	child := &node{parent: n, blocks: slices.Clone(blocks)}
	if n.children == nil {
		n.children = map[uint64]*node{}
	}
	n.children[blocks[0]] = child
	t.nodes++
	t.blocks += len(blocks)
	t.bytes += nodeBytes + blockBytes*len(blocks)
	return child
}

// split cuts n after the first at blocks and returns the new upper part, which n is the only child of.
func (t *Tree) split(n *node, at int) *node {
	upper := &node{
		parent: n.parent, blocks: slices.Clone(n.blocks[:at]), owners: slices.Clone(n.owners), at: n.at,
		children: map[uint64]*node{n.blocks[at]: n},
	}
	n.parent.children[upper.blocks[0]] = upper
	n.parent, n.blocks = upper, slices.Clone(n.blocks[at:])
	t.nodes++
	t.bytes += nodeBytes + ownerBytes*len(upper.owners)
	return upper
}

// link puts a leaf into the ring after prev; unlink takes it out if it is there.
func (t *Tree) link(n, prev *node) {
	n.prev, n.next = prev, prev.next
	prev.next.prev, prev.next = n, n
}

func (t *Tree) unlink(n *node) {
	if n.next != nil {
		n.prev.next, n.next.prev = n.next, n.prev
		n.prev, n.next = nil, nil
	}
}

// remove takes a leaf out. Its parent, if it has no other child, becomes a leaf and takes its place in the order of use.
func (t *Tree) remove(n *node) {
	t.unlink(n)
	up := n.parent
	delete(up.children, n.blocks[0])
	n.parent = nil
	t.nodes--
	t.blocks -= len(n.blocks)
	t.bytes -= nodeBytes + blockBytes*len(n.blocks) + ownerBytes*len(n.owners)
	if up == &t.root || len(up.children) > 0 {
		return
	}
	up.children = nil
	// From both ends at once: it is seldom in the middle.
	for old, young := &t.lru, t.lru.prev; ; old, young = old.next, young.prev {
		switch {
		case old.next == &t.lru || old.next.at >= up.at:
			t.link(up, old)
			return
		case young == &t.lru || young.at < up.at:
			t.link(up, young)
			return
		}
	}
}

// Forget takes a worker out. It walks the whole tree, which is rare enough: a worker has gone for good.
func (t *Tree) Forget(name string) {
	id, ok := t.ids[name]
	if !ok {
		return
	}
	delete(t.ids, name)
	t.names[id] = ""
	t.spareIDs = append(t.spareIDs, id)
	var empty []*node // children before parents
	var walk func(n *node)
	walk = func(n *node) {
		for _, c := range n.children {
			i := slices.Index(c.owners, id)
			if i < 0 {
				continue // nor is it an owner further down
			}
			c.owners = slices.Delete(c.owners, i, i+1)
			t.bytes -= ownerBytes
			walk(c)
			if len(c.owners) == 0 {
				empty = append(empty, c)
			}
		}
	}
	walk(&t.root)
	for _, n := range empty {
		t.remove(n)
	}
}
