package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

// release is major, minor, patch.
type release [3]int

func (r release) String() string { return fmt.Sprintf("%d.%d.%d", r[0], r[1], r[2]) }

func (r release) less(o release) bool {
	for i := range r {
		if r[i] != o[i] {
			return r[i] < o[i]
		}
	}
	return false
}

// parseRelease reads the first three numbers of a version; what follows them, such as .post1, rc0 or a
// build's hash, is left out.
func parseRelease(v string) (release, error) {
	var r release
	parts := strings.SplitN(strings.TrimPrefix(strings.TrimSpace(v), "v"), ".", 4)
	if len(parts) < 3 {
		return r, fmt.Errorf("%q is no version of three numbers", v)
	}
	for i := range r {
		digits := parts[i]
		if end := strings.IndexFunc(digits, func(c rune) bool { return c < '0' || c > '9' }); end >= 0 && i == 2 {
			digits = digits[:end]
		}
		n, err := strconv.Atoi(digits)
		if err != nil {
			return r, fmt.Errorf("%q is no version of three numbers", v)
		}
		r[i] = n
	}
	return r, nil
}

// row is what is known of SGLang's releases up to and including last, back to the row before.
type row struct {
	first, last release
	fault       string // "" if it is not known to pin or to damage
	weakness    string // of rows without a fault
	action      string
	completion  string // how a prefill side tells the end of a transfer
}

func (r *row) name() string {
	switch r.first {
	case release{}:
		return "up to " + r.last.String()
	case r.last:
		return r.last.String()
	default:
		return r.first.String() + " to " + r.last.String()
	}
}

const (
	byNotification = "NIXL notifications"
	byStatus       = "KV_STATUS messages"
	upgrade        = "upgrade all workers of the fleet together to 0.5.23 or newer"
)

// table is about SGLang's NIXL backend, read from the sources of the public releases and run against
// each other by this project (docs/doctor.md).
var table = []row{
	{release{0, 0, 0}, release{0, 5, 12}, "the decode side never tells an abort, and a room's status is merged by taking the larger value, of which Failed is the smallest: a failed room comes back to life, its last chunk is skipped in silence, and the request stays in the inflight queue for ever", "", upgrade, byNotification},
	{release{0, 5, 13}, release{0, 5, 15}, "the decode side sends ABORT and the prefill side's NIXL code has no handler for it: an assertion kills its control thread, and that rank never bootstraps anything again. A room's status is merged by taking the larger value, so failed rooms come back to life", "", upgrade, byNotification},
	{release{0, 5, 16}, release{0, 5, 18}, "an abort is handled but never acknowledged: the decode side gives its pages away while the prefill side may still write into them", "", upgrade, byNotification},
	{release{0, 5, 19}, release{0, 5, 19}, "ABORT_ACK carries no generation: the ack of an earlier abort of the same room frees pages that a later one still writes to", "", upgrade, byNotification},
	{release{0, 5, 20}, release{0, 5, 21}, "ABORT_ACK carries no generation: the ack of an earlier abort of the same room frees pages that a later one still writes to", "", upgrade, byNotification},
	{release{0, 5, 22}, release{0, 5, 22}, "", "no fault of the table; waiting and transferring rooms of the prefill side have no deadline, and a malformed frame ends its control thread", "", byNotification},
	{release{0, 5, 23}, release{0, 5, 23}, "", "no fault of the table; waiting and transferring rooms of the prefill side have no deadline, a stopped decode process pins them, and a malformed frame ends its control thread", "", byStatus},
}

// lastKnown is the newest release of the table.
var lastKnown = table[len(table)-1].last

// lookup is the row of r; nil if it is newer than the table.
func lookup(r release) *row {
	for i := range table {
		if !table[i].last.less(r) {
			return &table[i]
		}
	}
	return nil
}

// incompatible says why a prefill worker and a decode worker of these releases can not work together; "" if
// they may.
func incompatible(prefill, decode release) string {
	p, d := lookup(prefill), lookup(decode)
	switch {
	case p == nil || d == nil || p.completion == d.completion:
		return ""
	case d.completion == byStatus:
		return "the prefill side tells the end of a transfer by " + p.completion + " and the decode side waits for " + d.completion + ": the prefill side succeeds, and the decode side waits until its timeout of 300 s"
	default:
		return "the decode side can not read the topology that the prefill side's bootstrap server answers with (a key that it does not know), so discovery fails; it would also wait for " + d.completion
	}
}
