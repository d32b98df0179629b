package edge

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"strconv"
	"strings"
)

const (
	// keyPrefix begins every made key, so that people and scanners for leaked secrets know what it is.
	keyPrefix = "baton-"
	// hashPrefix begins a hash in the file.
	hashPrefix = "sha256:"
	maxName    = 64 // bytes
)

// Key is one line of the key file: who a client is, and what it may.
type Key struct {
	// Name is the client's in logs, metrics and the queue; several secrets may stand for it.
	Name string
	// Weight of its share in the queue, more than 0 [1].
	Weight float64
	// MaxPriority is the highest priority that its requests get; higher ones count as this [no ceiling].
	MaxPriority int
	// MaxInflight is how many of its generating requests may be there at a time, PerMinute how many may come in a minute, see
	// [Bucket]. 0: no limit.
	MaxInflight, PerMinute int
	// Operator: it may also use what is about the fleet and not about one client.
	Operator bool
}

// NewKey makes a key and its hash, as the file wants it.
func NewKey() (key, hash string) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read does not fail
	key = keyPrefix + base64.RawURLEncoding.EncodeToString(b[:])
	sum := sha256.Sum256([]byte(key))
	return key, hashPrefix + hex.EncodeToString(sum[:])
}

// CheckName says what is wrong with a client's name.
func CheckName(name string) error {
	if name == "" || len(name) > maxName || strings.Trim(name, nameLetters) != "" ||
		strings.HasPrefix(name, keyPrefix) && len(name) == len(keyPrefix)+base64.RawURLEncoding.EncodedLen(32) { // that is a key
		return fmt.Errorf("a name has 1 to %d letters, digits, and any of . _ @ / -", maxName)
	}
	return nil
}

const nameLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@/-"

// ring is a file's contents, immutable.
type ring struct {
	keys []*Key
	// byHash finds secrets by the first 16 bits of their hash; the rest is compared in constant time. What the time
	// tells of those 16 bits is about the hash, and nothing leads from there to a key.
	byHash map[uint16][]secret
}

type secret struct {
	hash [sha256.Size]byte
	key  *Key
}

// find is the key whose secret this is; nil if there is none.
func (r *ring) find(text string) (found *Key) {
	sum := sha256.Sum256([]byte(text))
	for _, s := range r.byHash[binary.BigEndian.Uint16(sum[:])] {
		if subtle.ConstantTimeCompare(s.hash[:], sum[:]) == 1 {
			found = s.key
		}
	}
	return found
}

// parseRing reads a key file: a line a client, NAME HASH... [ATTRIBUTE=VALUE]...; empty lines and those that begin with # are
// nothing. Errors name the line and show nothing of it but names: it may hold a key.
func parseRing(text []byte) (*ring, error) {
	r := &ring{byHash: map[uint16][]secret{}}
	names, lines := map[string]bool{}, strings.Split(string(text), "\n")
	for i, line := range lines {
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		k, hashes, err := parseKey(words)
		if err == nil && names[k.Name] {
			err = fmt.Errorf("the name %s is there twice; further hashes of a client go on its own line", k.Name)
		}
		if err == nil {
			names[k.Name] = true
			err = r.add(k, hashes)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", i+1, err)
		}
	}
	if len(r.keys) == 0 {
		return nil, fmt.Errorf("there is no key in it")
	}
	return r, nil
}

func (r *ring) add(k *Key, hashes [][sha256.Size]byte) error {
	for _, h := range hashes {
		at := binary.BigEndian.Uint16(h[:])
		for _, s := range r.byHash[at] {
			if s.hash == h {
				return fmt.Errorf("this hash is there already, for %s", s.key.Name)
			}
		}
		r.byHash[at] = append(r.byHash[at], secret{h, k})
	}
	r.keys = append(r.keys, k)
	return nil
}

// parseKey reads the words of a line.
func parseKey(words []string) (*Key, [][sha256.Size]byte, error) {
	k := &Key{Name: words[0], Weight: 1, MaxPriority: math.MaxInt}
	if err := CheckName(k.Name); err != nil {
		return nil, nil, err
	}
	var hashes [][sha256.Size]byte
	seen := map[string]bool{}
	for _, w := range words[1:] {
		if digits, ok := strings.CutPrefix(w, hashPrefix); ok {
			b, err := hex.DecodeString(digits)
			if err != nil || len(b) != sha256.Size {
				return nil, nil, fmt.Errorf("a hash is %s and 64 hexadecimal digits", hashPrefix)
			}
			hashes = append(hashes, [sha256.Size]byte(b))
			continue
		}
		name, value, _ := strings.Cut(w, "=")
		if seen[name] {
			return nil, nil, fmt.Errorf("an attribute is there twice")
		}
		seen[name] = true
		if err := k.set(name, value); err != nil {
			return nil, nil, err
		}
	}
	if len(hashes) == 0 {
		return nil, nil, fmt.Errorf("%s has no hash: want %s and 64 hexadecimal digits; baton router keygen makes a line", k.Name, hashPrefix)
	}
	return k, hashes, nil
}

// set takes one attribute.
func (k *Key) set(name, value string) (err error) {
	number := func(low, high int) int {
		n, e := strconv.Atoi(value)
		if e != nil || n < low || n > high {
			err = fmt.Errorf("%s must be a whole number in [%d, %d]", name, low, high)
		}
		return n
	}
	switch name {
	case "weight":
		k.Weight, err = strconv.ParseFloat(value, 64)
		if err != nil || !(k.Weight >= 0.01 && k.Weight <= 100) {
			return fmt.Errorf("weight must be in [0.01, 100]")
		}
	case "max-priority":
		k.MaxPriority = number(-100, 100)
	case "max-inflight":
		k.MaxInflight = number(1, 1<<20)
	case "per-minute":
		k.PerMinute = number(1, 1<<20)
	case "operator":
		if k.Operator = true; value != "" {
			return fmt.Errorf("operator takes no value")
		}
	default: // it may be a key: it is not shown
		return fmt.Errorf("there is something that is neither a hash nor weight=, max-priority=, max-inflight=, per-minute= or operator")
	}
	return err
}
