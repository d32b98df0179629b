package config

import "fmt"

// DivideCores gives each worker of one machine its compute threads, prefill
// workers first, then decode workers. The engine's threads spin at barriers, so
// the sum never exceeds total unless there are more workers than cores; then each
// gets one thread and oversubscribed is true. Cores that do not divide evenly go
// to prefill workers first: prefill is bound by arithmetic, decode by memory.
//
// note says in one line what was decided, for people. Counts below zero are taken
// as zero, a total below one as one.
func DivideCores(total, prefills, decodes int) (threads []int, note string, oversubscribed bool) {
	total, prefills, decodes = max(total, 1), max(prefills, 0), max(decodes, 0)
	workers := prefills + decodes
	if workers == 0 {
		return nil, fmt.Sprintf("%s, no workers", count(total, "core")), false
	}
	threads = make([]int, workers)
	each, rest := total/workers, total%workers
	if each == 0 {
		each, rest, oversubscribed = 1, 0, true
	}
	for i := range threads {
		threads[i] = each
		if i < rest {
			threads[i]++
		}
	}
	note = fmt.Sprintf("%s: %s", count(total, "core"), describe(threads, prefills))
	if oversubscribed {
		note += fmt.Sprintf("; oversubscribed: %d workers share %s, and their spinning threads slow each other down several times; "+
			"use at most %s on this machine", workers, count(total, "core"), count(total, "worker"))
	}
	return threads, note, oversubscribed
}

// describe is "prefill 2+1 threads, decode 1 thread".
func describe(threads []int, prefills int) string {
	part := func(role string, t []int) string {
		s, sum := role+" ", 0
		for i, n := range t {
			if i > 0 {
				s += "+"
			}
			s += fmt.Sprint(n)
			sum += n
		}
		if sum == 1 {
			return s + " thread"
		}
		return s + " threads"
	}
	switch {
	case prefills == 0:
		return part("decode", threads)
	case prefills == len(threads):
		return part("prefill", threads)
	default:
		return part("prefill", threads[:prefills]) + ", " + part("decode", threads[prefills:])
	}
}

func count(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
