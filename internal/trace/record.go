package trace

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// Version of the format. A reader refuses any other.
const Version = 1

// Kinds of records that are no room's events; an event's record has its name.
const (
	kindOpen    = "open"
	kindForget  = "forget"
	kindBeat    = "beat"    // nothing happened for a while, and the process runs
	kindDropped = "dropped" // Count records are missing here
	kindEnd     = "end"     // the trace was closed; Count records were dropped in all
)

// Header is the first line of an incarnation.
type Header struct {
	Version int    `json:"baton_trace"`
	Worker  string `json:"worker"`
	Side    string `json:"side"` // room.Side's name
	PID     int    `json:"pid"`
	Mono    int64  `json:"t"` // as in Record
	Wall    int64  `json:"w"`
	// Boot names the boot of the machine whose monotonic clock is meant; "" if Mono can not
	// be compared with other processes.
	Boot string `json:"boot,omitempty"`
	// Tombstone is how long an ended room refuses its key, in nanoseconds.
	Tombstone int64 `json:"tombstone"`
	// Beat is the longest silence of a process that runs, in nanoseconds.
	Beat int64 `json:"beat"`
}

// Record is one line. Fields that are zero are left out.
type Record struct {
	Mono int64  `json:"t"` // nanoseconds, never decreasing within an incarnation
	Wall int64  `json:"w"` // microseconds since 1970
	Kind string `json:"e"`
	// Room is the key, Instance which room of the process it is, Seq which of its events.
	Room     string `json:"room,omitempty"`
	Instance uint64 `json:"inst,omitempty"`
	Seq      uint32 `json:"seq,omitempty"`

	// Of open. Deadline is on the clock of Mono.
	Chunks   int   `json:"chunks,omitempty"`
	Deadline int64 `json:"deadline,omitempty"`

	// Of an event. Why is the code of the cause that it brought.
	Chunk int    `json:"chunk,omitempty"`
	Last  bool   `json:"last,omitempty"`
	Why   string `json:"why,omitempty"`
	From  string `json:"from,omitempty"`
	To    string `json:"to,omitempty"`
	// Effects are those executed, Withheld those of a room whose abort was acked before it
	// was opened.
	Effects  string `json:"fx,omitempty"`
	Withheld string `json:"withheld,omitempty"`
	Begun    int    `json:"begun,omitempty"`
	Settled  int    `json:"settled,omitempty"`
	Landed   int    `json:"landed,omitempty"`
	// Cause is the code of the room's first cause, from its failure on.
	Cause string `json:"cause,omitempty"`

	Count uint64 `json:"count,omitempty"` // of dropped and end
}

// headerMark begins every header and no record.
var headerMark = []byte(`{"baton_trace":`)

// decode reads line into v, a *Header or *Record, and refuses what the writer would have
// written differently.
func decode(line []byte, v any) error {
	if err := json.Unmarshal(line, v); err != nil {
		return err
	}
	again, err := json.Marshal(v)
	if err != nil {
		return err
	}
	if !bytes.Equal(line, again) {
		return errors.New("not in the one form that is written")
	}
	return nil
}

// code of a cause as it is recorded: the registry names an unnamed one so.
func code(c *room.Cause) string {
	switch {
	case c == nil:
		return ""
	case c.Code == "":
		return string(room.CodeInternal)
	default:
		return string(c.Code)
	}
}

// effects is "" for none.
func effects(fx room.Effects) string {
	if fx == 0 {
		return ""
	}
	return fx.String()
}

// parseKey reads what Key.String writes.
func parseKey(s string) (room.Key, error) {
	id, gen, _ := strings.Cut(s, "#")
	r, err := strconv.ParseUint(id, 10, 64)
	g := uint64(0)
	if err == nil && gen != "" {
		g, err = strconv.ParseUint(gen, 10, 32)
	}
	k := room.Key{Room: r, Gen: uint32(g)}
	if err != nil || k.String() != s {
		return room.Key{}, fmt.Errorf("%q is no room", s)
	}
	return k, nil
}

// meansChunk and meansLast say which events have these fields.
func meansChunk(k room.EventKind) bool {
	return k == room.EvBegin || k == room.EvSettle || k == room.EvSettleError || k == room.EvDrop || k == room.EvLanded
}

func meansLast(k room.EventKind) bool { return k == room.EvLanded }

// eventKinds by name.
var eventKinds = func() map[string]room.EventKind {
	m := make(map[string]room.EventKind)
	for _, k := range room.Events() {
		m[k.String()] = k
	}
	return m
}()
