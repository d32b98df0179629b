package sched

import "github.com/baton-pd/baton/internal/engine"

// budget is the scheduler's account of the engine's KV cells and sequence slots.
// Pure; owned by the loop goroutine. 0 <= free <= total at all times.
type budget struct {
	total int
	free  int // cells that nobody has reserved
	seqs  []engine.Seq
	slots int // sequence slots in all
}

func newBudget(cells, seqs int) budget {
	b := budget{total: cells, free: cells, slots: seqs}
	for s := seqs - 1; s >= 0; s-- {
		b.seqs = append(b.seqs, engine.Seq(s))
	}
	return b
}

func (b *budget) fits(cells, seqs int) bool { return cells <= b.free && seqs <= len(b.seqs) }

func (b *budget) take(cells int) {
	if b.free -= cells; b.free < 0 {
		panic("sched: more KV cells reserved than there are")
	}
}

func (b *budget) give(cells int) {
	if b.free += cells; b.free > b.total {
		panic("sched: KV cells returned twice")
	}
}

func (b *budget) takeSeq() engine.Seq {
	s := b.seqs[len(b.seqs)-1]
	b.seqs = b.seqs[:len(b.seqs)-1]
	return s
}

func (b *budget) freeSeq(s engine.Seq) { b.seqs = append(b.seqs, s) }

func (b *budget) seqsUsed() int { return b.slots - len(b.seqs) }

// maxBypass is how often a waiting request may be overtaken by later ones that fit.
const maxBypass = 16

// line is a waiting line. It is served in order, but one that does not fit now does
// not block those behind it, until it has been overtaken maxBypass times: then
// nothing passes it, what is running drains, and it fits. Pure.
type line[T comparable] struct {
	items    []T
	overtook []int // how often items[i] was overtaken
}

func (l *line[T]) push(x T) {
	l.items, l.overtook = append(l.items, x), append(l.overtook, 0)
}

// next takes out the first item that fits and is not behind one that has been
// overtaken too often.
func (l *line[T]) next(fits func(T) bool) (x T, ok bool) {
	for i, it := range l.items {
		if fits(it) {
			for k := range i {
				l.overtook[k]++
			}
			l.cut(i)
			return it, true
		}
		if l.overtook[i] >= maxBypass {
			break
		}
	}
	return x, false
}

func (l *line[T]) remove(x T) {
	for i, it := range l.items {
		if it == x {
			l.cut(i)
			return
		}
	}
}

func (l *line[T]) cut(i int) {
	l.items = append(l.items[:i], l.items[i+1:]...)
	l.overtook = append(l.overtook[:i], l.overtook[i+1:]...)
}
