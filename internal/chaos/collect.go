package chaos

import (
	"encoding/json"
	"strings"
	"sync"
)

// collector reads what the processes print.
type collector struct {
	mu       sync.Mutex
	names    map[string]string // address -> process
	life     map[string]int
	lines    []Line
	failures []Failure
	odd      []string
}

func newCollector() *collector {
	return &collector{names: map[string]string{}, life: map[string]int{}}
}

// named tells the collector whose address that is in the router's log.
func (c *collector) named(addr, process string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names[addr] = process
}

// starts notes that a process begins another life.
func (c *collector) starts(process string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.life[process]++
}

// lifeOf counts the starts of a process, the first one included.
func (c *collector) lifeOf(process string) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.life[process] + 1
}

// strange are words of lines that no log should have, whatever their format.
var strange = []string{"DATA RACE", "panic:", "fatal error:", "SIGSEGV", "SIGABRT", "GGML_ASSERT", "goroutine stack exceeds"}

// maxOdd bounds what is kept: a panic prints hundreds of lines.
const maxOdd = 40

// remark keeps a strange line.
func (c *collector) remark(what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.odd) < maxOdd {
		c.odd = append(c.odd, what)
	}
}

// line takes one line of a process. It is called by one goroutine a process.
func (c *collector) line(process, text string) {
	var v struct {
		Level      string      `json:"level"`
		Msg        string      `json:"msg"`
		RID        string      `json:"rid"`
		Outcome    string      `json:"outcome"`
		Cause      string      `json:"cause"`
		Prefill    string      `json:"prefill"`
		Decode     string      `json:"decode"`
		Attempts   int         `json:"attempts"`
		Room       json.Number `json:"room"`
		Generation json.Number `json:"generation"`
	}
	if !strings.HasPrefix(text, "{") {
		for _, w := range strange {
			if strings.Contains(text, w) {
				c.remark(process + ": " + text)
				return
			}
		}
		return
	}
	if json.Unmarshal([]byte(text), &v) != nil {
		return // other messages use the same names for other things
	}
	if v.Level == "ERROR" {
		c.remark(process + ": " + text)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case process == router && v.Msg == "request":
		l := Line{Life: c.life[process] + 1, RID: v.RID, Outcome: v.Outcome, Cause: v.Cause, Attempts: v.Attempts,
			Prefill: c.names[v.Prefill], Decode: c.names[v.Decode]}
		if l.Cause == "" {
			l.Cause = "none"
		}
		c.lines = append(c.lines, l)
	case v.Msg == "room failed":
		c.failures = append(c.failures, Failure{Process: process, Life: c.life[process] + 1, Room: v.Room.String() + "#" + v.Generation.String()})
	}
}
