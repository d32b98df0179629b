package model

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/baton-pd/baton/internal/room"
)

// Key implements [explore.System]. Pages are interchangeable, so their numbers are left
// out: what counts is which life holds how many with what in them. In a world of two rooms
// that were not told apart by anything, the two are interchangeable as well. Causes are left
// out: no step depends on them, and each step that sets one is checked by itself.
func (w *World) Key(s State, out []byte) []byte {
	n := len(out)
	out = w.encode(&s, [maxLives]uint8{0, 1, 2}, out)
	if w.symmetric {
		m := len(out)
		out = w.encode(&s, [maxLives]uint8{1, 0, 2}, out)
		if bytes.Compare(out[m:], out[n:m]) < 0 {
			copy(out[n:], out[m:])
		}
		out = out[:m]
	}
	return out
}

// encode writes s with its lives in the order of perm. Keys equal lives where perm is
// not the identity.
func (w *World) encode(s *State, perm [maxLives]uint8, out []byte) []byte {
	var as [maxLives + 1]uint8 // new number + 1 of a grant
	for i, p := range perm {
		as[p+1] = uint8(i) + 1
	}
	for _, p := range perm[:w.lives] {
		out = encodeSending(&s.send[p], as, out)
		out = w.encodeReceiving(s, p, out)
		out = append(out, s.parked[p].sess<<4|as[s.parked[p].grant], flags(s.parked[p].stuck), byte(s.tombS[p])<<4|byte(s.tombR[p]))
	}
	for i := range s.nsess {
		out = append(out, s.sess[i].bits()...)
	}
	out = append(out, s.nsess, s.nnet)
	var net [maxNet]message
	copy(net[:], s.net[:s.nnet])
	for i := range net[:s.nnet] {
		m := &net[i]
		m.key, m.grant, m.about = as[m.key+1]-1, as[m.grant], as[m.about]
	}
	if w.sc.Reorder {
		sortMessages(net[:s.nnet])
	}
	for _, m := range net[:s.nnet] {
		out = append(out, byte(m.kind)<<4|m.sess, m.key<<4|m.grant, m.about)
	}
	for _, b := range s.left {
		out = append(out, b)
	}
	var acked uint8
	for g, a := range as {
		acked |= (s.acked >> g & 1) << a
	}
	return append(out, acked)
}

func encodeSending(x *sending, as [maxLives + 1]uint8, out []byte) []byte {
	n := x.m.Node()
	out = append(out, byte(x.at)<<4|byte(n.State), byte(n.Drain), byte(x.m.Begun()), byte(x.m.Outstanding()),
		x.sess<<4|as[x.grant], x.ackSess<<4|as[x.ackGrant], x.next, flags(x.indexed, x.released))
	return append(out, byte(x.w[0])<<4|byte(x.w[1]), byte(x.w[2]))
}

func (w *World) encodeReceiving(s *State, p uint8, out []byte) []byte {
	x := &s.recv[p]
	n := x.m.Node()
	out = append(out, byte(x.at)<<4|byte(n.State), byte(n.Drain), byte(x.m.Landed()), byte(x.boot)<<4|x.sess,
		flags(x.leased, x.request, x.transfer, x.granted, x.live, x.byGrant, x.bySess, x.released), flags(x.gone, x.leave, x.unwanted), x.nacts)
	for _, a := range x.acts[:x.nacts] {
		out = append(out, byte(a))
	}
	if x.request || x.transfer {
		for _, id := range x.pages[:w.sc.Chunks] {
			out = append(out, s.page[id].content)
		}
	}
	return out
}

func (x session) bits() []byte {
	return []byte{flags(x.up, x.cut, x.lossy, x.downS, x.downR, x.deadS, x.deadR, x.closing), flags(x.closed, x.gone, x.fenced)}
}

func flags(bits ...bool) (b byte) {
	for i, on := range bits {
		if on {
			b |= 1 << i
		}
	}
	return b
}

// Show implements [explore.System]: a state on one line, what is at rest left out.
func (w *World) Show(s State) string {
	var b strings.Builder
	for i := range w.lives {
		x, y := &s.send[i], &s.recv[i]
		fmt.Fprintf(&b, "%s: prefill %s", w.name(uint8(i)), showSide(x.at, x.m.Node(), x.m.Cause()))
		for c, p := range x.w[:w.sc.Chunks] {
			if p != idle {
				fmt.Fprintf(&b, " c%d=%s", c, p)
			}
		}
		fmt.Fprintf(&b, ", decode %s", showSide(y.at, y.m.Node(), y.m.Cause()))
		if n := y.m.Landed(); n > 0 {
			fmt.Fprintf(&b, " %d landed", n)
		}
		if y.request || y.transfer {
			fmt.Fprintf(&b, " pages%v held by%s%s", y.pages[:w.sc.Chunks], word(y.request, " request"), word(y.transfer, " transfer"))
		}
		b.WriteString("; ")
	}
	for _, m := range s.net[:s.nnet] {
		b.WriteString(w.showMessage(m) + " ")
	}
	for k, p := range s.parked[:w.lives] {
		if p.grant != 0 {
			fmt.Fprintf(&b, "parked grant %d of key %d ", p.grant, k)
		}
	}
	free := 0
	for _, p := range s.page[:w.sc.Pages] {
		if p.owner == 0 {
			free++
		}
	}
	fmt.Fprintf(&b, "%d of %d pages free", free, w.sc.Pages)
	return b.String()
}

func showSide(at where, n room.Node, c *room.Cause) string {
	switch at {
	case unborn:
		return "unborn"
	case refused:
		return "refused"
	case died:
		return "dead"
	}
	s := n.String()
	if c != nil {
		s += "(" + string(c.Code) + ")"
	}
	return s
}

func word(on bool, s string) string {
	if on {
		return s
	}
	return ""
}

func (w *World) showMessage(m message) string {
	s := fmt.Sprintf("[%s key %d", m.kind, m.key)
	if m.kind != msgFailed {
		s += fmt.Sprintf(" grant %d", m.grant)
	}
	return s + fmt.Sprintf(" session %d]", m.sess)
}

// String survives unknown values.
func (p phase) String() string {
	names := [...]string{"idle", "queued", "inside", "half", "inside2", "stored", "landed", "broken", "applied", "lost", "vanished"}
	if int(p) < len(names) {
		return names[p]
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}
