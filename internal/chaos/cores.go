package chaos

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// waits remembers how long each thread has waited for a core.
type waits map[string]time.Duration

// step is the longest that one thread of pid has waited for a core since the step before; 0 for a
// process that is new or gone, or where the system does not tell (it does on Linux).
func (w waits) step(pid int) (longest time.Duration) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid)) // the pattern is ours and good
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has ended
		}
		total, ok := parseWait(string(text))
		before, known := w[f]
		if w[f] = total; ok && known {
			longest = max(longest, total-before)
		}
	}
	return longest
}

// parseWait reads the second figure of a schedstat: nanoseconds on a run queue.
func parseWait(text string) (time.Duration, bool) {
	f := strings.Fields(text)
	if len(f) < 2 {
		return 0, false
	}
	n, err := strconv.ParseInt(f[1], 10, 64)
	return time.Duration(n), err == nil
}
