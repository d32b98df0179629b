package room

import "testing"

// TestTable: the production rows in a Table of their own step as Step does, a changed row is
// obeyed, and the production table does not hear of it.
func TestTable(t *testing.T) {
	rows := SenderTable()
	same := NewTable(SideSender, rows)
	for i := range rows {
		if rows[i].From == boot && rows[i].Event == EvGrant {
			rows[i].To, rows[i].Effects = moving, FxStale
		}
	}
	wrong := NewTable(SideSender, rows)
	s, r := NewSender(2), NewReceiver(2)
	receiver := NewTable(SideReceiver, ReceiverTable())
	for _, e := range []Event{{Kind: EvGrant}, {Kind: EvGranted}, {Kind: EvBegin}, {Kind: EvLanded}, {Kind: EvSettleError}, {Kind: EvPeerLost}, {Kind: EvFenced}, {Kind: EvRelease}} {
		want, fx := s.Step(e)
		if got, gotFx := same.Sender(s, e); got.Node() != want.Node() || got.Outstanding() != want.Outstanding() || gotFx != fx {
			t.Errorf("sender, %v: %v %v, want %v %v", e.Kind, got, gotFx, want, fx)
		}
		wantR, fxR := r.Step(e)
		if got, gotFx := receiver.Receiver(r, e); got.Node() != wantR.Node() || gotFx != fxR {
			t.Errorf("receiver, %v: %v %v, want %v %v", e.Kind, got, gotFx, wantR, fxR)
		}
		s, r = want, wantR
	}
	if got, fx := wrong.Sender(NewSender(2), Event{Kind: EvGrant}); got.Node() != moving || fx != FxStale {
		t.Errorf("a changed row gives %v, %v", got.Node(), fx)
	}
	if got, fx := NewSender(2).Step(Event{Kind: EvGrant}); got.Node() != waiting || fx != FxGranted {
		t.Errorf("the production table gives %v, %v", got.Node(), fx)
	}
}
