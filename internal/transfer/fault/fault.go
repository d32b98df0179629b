package fault

import (
	"context"
	"fmt"

	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/transfer"
)

// Wrap decorates t. rules nil: t itself.
func Wrap(t transfer.Transport, rules *Rules) transfer.Transport {
	if rules == nil {
		return t
	}
	return &transport{t, rules}
}

type transport struct {
	transfer.Transport
	rules *Rules
}

// Dial dials as the rules let it.
func (t *transport) Dial(ctx context.Context, d transfer.Descriptor, s transfer.SessionID) (transfer.Peer, error) {
	v := t.rules.decide(opDial, t.Kind(), room.Key{})
	switch v.action() {
	case actError:
		return nil, fmt.Errorf("dial %s: %w", d.Addr, v.err())
	case actStall:
		if !t.rules.wait(v.rule, ctx.Done(), nil) {
			return nil, fmt.Errorf("dial %s: stalled by rule of line %d: %w", d.Addr, v.rule.line, ctx.Err())
		}
	}
	p, err := t.Transport.Dial(ctx, d, s)
	if err != nil {
		return nil, err
	}
	return newPeer(p, t.rules), nil
}

// Listen wraps the target and its sink.
func (t *transport) Listen(m transfer.Memory, sink transfer.Sink) (transfer.Target, error) {
	tgt := newTarget(t.Kind(), t.rules, sink)
	inner, err := t.Transport.Listen(m, tgt)
	if err != nil {
		return nil, err
	}
	tgt.Target = inner
	return tgt, nil
}
