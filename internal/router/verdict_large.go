package router

import "github.com/baton-pd/baton/internal/openai"

// judgeInline is the largest answer, in bytes, that is judged where it was read: it takes some 10 ms.
const judgeInline = 1 << 20

// judged is judgeUsage for the leg's answer. A large one takes long (64 MiB half a second, up to 2.5 s in uncommon forms), which no deadline waits for: when
// the attempt ends before it is done there is no verdict, and the rest of the work is for nothing. Nobody changes body afterwards: buffers of that
// size are not used again.
func (l *leg) judged(body []byte) (usage, *openai.Error, error) {
	type verdict struct {
		u   usage
		e   *openai.Error
		err error
	}
	kind, choices, side, phase := l.a.c.kind, l.a.c.choices, l.w.side, l.phase()
	judge := func() (v verdict) {
		v.u, v.e, v.err = judgeUsage(kind, choices, body, side, phase)
		return v
	}
	if len(body) <= judgeInline {
		v := judge()
		return v.u, v.e, v.err
	}
	done := make(chan verdict, 1)
	l.a.r.group.spawn(func() { done <- judge() })
	select {
	case v := <-done:
		return v.u, v.e, v.err
	case <-l.a.ctx.Done():
		return usage{}, nil, nil
	}
}
