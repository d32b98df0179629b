package openai

import "math"

// Abort is a checked body of /abort_request.
type Abort struct {
	RID string // the request's id; "" if All
	All bool   // every live request
	// Room, if OfRoom, narrows RID down to the request with this bootstrap_room: ids come from clients,
	// who use them again.
	Room   uint64
	OfRoom bool
}

// ParseAbort parses a body of /abort_request: {"rid":"..."}, perhaps with "bootstrap_room", or
// {"abort_all":true}.
// Errors are *Error.
func ParseAbort(body []byte) (Abort, error) {
	members, err := splitObject(body)
	if err != nil {
		return Abort{}, NewError(400, CodeInvalidBody, "", "%v", err)
	}
	var a Abort
	table := fieldTable{
		"rid": func(_ *Request, name string, raw []byte) (e *Error) {
			a.RID, e = str(name, raw, MaxRIDBytes)
			return e
		},
		"bootstrap_room": integer(0, math.MaxInt64, func(_ *Request, v int64) { a.Room, a.OfRoom = uint64(v), true }),
		"abort_all":      boolean(func(_ *Request, v bool) { a.All = v }),
		"abort_message":  text(4096, func(*Request, string) {}), // for SGLang's own logs
	}
	if e := table.apply(nil, members, ""); e != nil {
		return Abort{}, e
	}
	switch {
	case a.All && a.RID != "":
		return Abort{}, invalid("rid", "rid and abort_all must not both be given")
	case a.All && a.OfRoom:
		return Abort{}, invalid("bootstrap_room", "bootstrap_room and abort_all must not both be given")
	case !a.All && !ValidRID(a.RID):
		return Abort{}, invalid("rid", "rid (1 to %d visible ASCII characters) or abort_all=true is required", MaxRIDBytes)
	}
	return a, nil
}
