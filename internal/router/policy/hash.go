package policy

import (
	"encoding/binary"
	"math"
	"math/bits"
)

// BlockBytes is how many bytes of a prompt are one block of a prefix.
const BlockBytes = 128

// MaxBlocks bounds a prefix: 256 KiB of prompt. What comes after it does not change where a request goes.
const MaxBlocks = 2048

// Odd constants of the golden ratio's and pi's digits; any would do that keep bits mixed.
const (
	mixA = 0x9e3779b97f4a7c15
	mixB = 0x243f6a8885a308d3
)

func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^mixA, b^mixB)
	return hi ^ lo ^ bits.RotateLeft64(a, 23) // one factor may be 0: the other must not be lost
}

// hash is a fast hash of p that depends on seed. It is not for adversaries: who makes two prompts
// collide only misleads the choice of a worker for his own requests.
func hash(seed uint64, p []byte) uint64 {
	h := mix(seed, uint64(len(p)))
	for len(p) >= 8 {
		h = mix(h, binary.LittleEndian.Uint64(p))
		p = p[8:]
	}
	if len(p) > 0 {
		var tail [8]byte
		copy(tail[:], p)
		h = mix(h, binary.LittleEndian.Uint64(tail[:]))
	}
	return mix(h, mixA)
}

// Blocks appends the prefix of a prompt (its bytes as the client wrote them, text or token ids) to dst: a hash for
// each whole block that covers everything before it, too, so equal hashes mean equal beginnings. The last, partial
// block is left out: the next turn of a conversation continues it.
func Blocks(dst []uint64, prompt []byte) []uint64 {
	h := uint64(0)
	for n := 0; len(prompt) >= BlockBytes && n < MaxBlocks; n++ {
		h = hash(h, prompt[:BlockBytes])
		dst = append(dst, h)
		prompt = prompt[BlockBytes:]
	}
	return dst
}

// sessionHash sends a session to the worker of the highest hash of both names (rendezvous hashing), as long as that one
// has at most BoundedLoad times the mean load; then to the next highest, and so on. A ring of virtual nodes would do the
// same with a table to keep and uneven shares; here a worker that joins takes its share of sessions and no other moves,
// and the sessions of one that leaves, and those that are too many, spread over all the others.
type sessionHash struct {
	unlearned
	o     Options
	least leastInflight
}

func (p *sessionHash) Choose(r *Request, cands []Candidate) int {
	if r.Session == "" || len(cands) < 2 {
		return p.least.Choose(r, cands)
	}
	total := 1 // with this one
	for i := range cands {
		total += cands[i].Inflight
	}
	limit := max(int(math.Ceil(p.o.BoundedLoad*float64(total)/float64(len(cands)))), p.o.MinLoad)
	key := hash(0, []byte(r.Session))
	best, score := -1, uint64(0)
	for i := range cands {
		if cands[i].Inflight >= limit {
			continue
		}
		if s := hash(key, []byte(cands[i].ID)); best < 0 || s > score {
			best, score = i, s
		}
	}
	if best < 0 { // cannot be: not all are above the mean
		return p.least.Choose(r, cands)
	}
	return best
}
