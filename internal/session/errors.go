package session

import "errors"

// ErrDown is returned by the Send methods once the session has ended: the
// message was not accepted and will not be delivered. It is joined with the
// session's *room.Cause, so room.CauseOf of it tells why.
var ErrDown = errors.New("session: down")
