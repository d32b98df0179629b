package sglang

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/baton-pd/baton/internal/doctor"
	"github.com/baton-pd/baton/internal/room"
	"github.com/baton-pd/baton/internal/sglang/zmtp"
)

// decodePair is a real prefill and a Baton decode.
type decodePair struct {
	p    *peer
	d    *Decode
	m    *Memory
	port int // of the prefill's bootstrap server
}

func (x *decodePair) run(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) {
		defer x.p.under(t)()
		f(t)
	})
}

// cancelAll ends rooms from the decode side.
func cancelAll(t *testing.T, rooms []*Receiving) {
	t.Helper()
	for _, r := range rooms {
		r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeClientGone {
			t.Error(err)
		}
	}
}

// TestAbortsAtSGLangPrefill: a Baton decode aborts at every point, and the prefill at every point; acks come after drain.
func TestAbortsAtSGLangPrefill(t *testing.T) {
	t.Parallel()
	port := freePort(t)
	p := startPeer(t, "prefill", port, "--deferred", "--monkey", "delay_xfer")
	d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.TombstoneTTL = 200 * time.Millisecond })
	x := &decodePair{p: p, d: d, m: m, port: port}
	x.run(t, "by the decode", x.byTheDecode)
	x.run(t, "by the decode, before it knows the prefill", x.byTheDecodeBeforeItKnowsThePrefill)
	x.run(t, "ack only after drain", x.ackOnlyAfterDrain)
	x.run(t, "by the prefill, which tells nobody", x.byThePrefillWhichTellsNobody)
	x.run(t, "by the prefill, before it knows the decode", x.byThePrefillBeforeItKnowsTheDecode)
	x.run(t, "a room's number again", x.aRoomNumberAgain)
	x.run(t, "foreign and malformed messages here", x.foreignAndMalformedMessagesHere)
	x.run(t, "a foreign message there, which kills its control thread", x.aForeignMessageThereWhichKillsItsControlThread)
}

func (x *decodePair) byTheDecode(t *testing.T) {
	rooms := decodeRooms(t, x.p, x.d, x.port, 10, patience)
	cancelAll(t, rooms)
	x.p.wait(11, "Failed")
	x.p.wait(12, "Failed")
	back(t, x.d, x.m, rooms...)
	if s := x.m.SlotStats(); s.FreedDrained != 6 || s.FreedFenced != 0 {
		t.Errorf("pages came back by other proofs than acks: %+v", s)
	}
}

func (x *decodePair) byTheDecodeBeforeItKnowsThePrefill(t *testing.T) {
	r := open(t, x.d, OpenReceive{Room: 20, Addr: loopback(x.port), Pages: 2})
	cancelAll(t, []*Receiving{r})
	back(t, x.d, x.m, r)
}

func (x *decodePair) ackOnlyAfterDrain(t *testing.T) {
	x.p.sender(30, 2, 1)
	r := open(t, x.d, OpenReceive{Room: 30, Addr: loopback(x.port), Pages: 2})
	x.p.wait(30, "WaitingForInput")
	x.p.do("gate", kw{"open": false})
	x.p.send(30, 1, []int{1})
	x.p.wait(30, "Transferring")
	cancelAll(t, []*Receiving{r})
	r.Release()
	x.p.wait(30, "Failed")
	<-time.After(300 * time.Millisecond)
	if s := x.m.SlotStats(); s.Quarantine != 2 {
		t.Errorf("the pages left quarantine while the prefill was writing: %+v", s)
	}
	x.p.do("gate", kw{"open": true})
	back(t, x.d, x.m)
}

func (x *decodePair) byThePrefillWhichTellsNobody(t *testing.T) {
	rooms := decodeRooms(t, x.p, x.d, x.port, 40, 2*time.Second)
	x.p.do("abort", kw{"room": 41})
	x.p.do("abort", kw{"room": 42})
	for _, r := range rooms {
		if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
			t.Error(err)
		}
	}
	back(t, x.d, x.m, rooms...)
}

func (x *decodePair) byThePrefillBeforeItKnowsTheDecode(t *testing.T) {
	x.p.sender(43, 2, 1)
	x.p.do("abort", kw{"room": 43})
	r := open(t, x.d, OpenReceive{Room: 43, Addr: loopback(x.port), Pages: 2, Deadline: time.Now().Add(time.Second)})
	if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
		t.Error(err)
	}
	back(t, x.d, x.m, r)
}

func (x *decodePair) aRoomNumberAgain(t *testing.T) {
	for range 3 {
		oneRoom(t, x.p, x.d, x.m, x.port, 50)
		if _, err := x.d.Open(OpenReceive{Room: 50, Addr: loopback(x.port), Pages: 1, Deadline: time.Now().Add(time.Minute)}); causeCode(err) != room.CodeDuplicate {
			t.Fatal(err)
		}
		x.p.do("clear", kw{"room": 50})
		eventually(t, "the tombstone is gone", func() bool { _, is := x.d.reg.Ended(room.Key{Room: 50}); return !is })
	}
}

func (x *decodePair) foreignAndMalformedMessagesHere(t *testing.T) {
	push := zmtp.Dial(x.d.Endpoint().Addr(), zmtp.PushConfig{})
	bad := []zmtp.Message{{[]byte("HELLO")}, {[]byte(tagStatus)}, {[]byte(tagStatus), []byte("x"), []byte("4"), []byte("0")}, {[]byte(tagAbortAck), []byte("1")}, {[]byte(tagAbort), []byte("1")}}
	for _, b := range bad {
		if err := push.Send(b); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "they are counted", func() bool { s := x.d.Stats(); return s.Foreign+s.Malformed == uint64(len(bad)) })
	push.Close(0)
	oneRoom(t, x.p, x.d, x.m, x.port, 60)
}

func (x *decodePair) aForeignMessageThereWhichKillsItsControlThread(t *testing.T) {
	push := zmtp.Dial(loopback(x.p.hello.RankPort), zmtp.PushConfig{})
	_ = push.Send(zmtp.Message{[]byte("HELLO")})
	eventually(t, "the real prefill's thread dies", func() bool { return x.p.log.has("bootstrap_thread died") })
	push.Close(0)
	x.p.do("sender", kw{"room": 70})
	r := open(t, x.d, OpenReceive{Room: 70, Addr: loopback(x.port), Pages: 2, Deadline: time.Now().Add(time.Second)})
	if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeDeadline {
		t.Fatal(err)
	}
	r.Release()
	if s := x.m.SlotStats(); s.Quarantine != 2 {
		t.Errorf("pages without proof are not in quarantine: %+v", s)
	}
}

// TestOldFault: the behaviour of older releases, brought back in the real code, pins the prefill's room and writes after the ack. The
// decode side ends all the same; where acks are not believed, its pages are safe too.
func TestOldFault(t *testing.T) {
	t.Parallel()
	for _, old := range []struct {
		name, monkey string
		pinned       bool // the room never ends at the prefill; else its last chunk is written after the ack
		distrust     bool
	}{
		{"pinned", "delay_xfer,max_status,rewrite_transferring,pop_infos", true, false},
		{"pinned, acks not believed", "delay_xfer,max_status,rewrite_transferring,pop_infos", true, true},
		{"written after the ack", "delay_xfer,max_status,rewrite_transferring", false, true},
	} {
		t.Run(old.name, func(t *testing.T) {
			port := freePort(t)
			p := startPeer(t, "prefill", port, "--deferred", "--monkey", old.monkey)
			d, m := newDecode(t, peerLayout(), func(c *DecodeConfig) { c.DistrustAcks = old.distrust })
			p.do("fill", kw{"pages": []int{1, 2}, "seed": 99})
			p.sender(10, 2, 1)
			r := open(t, d, OpenReceive{Room: 10, Addr: loopback(port), Pages: 2})
			p.wait(10, "WaitingForInput")
			pages := r.Pages()
			p.do("gate", kw{"open": false})
			p.send(10, 1, []int{1})
			p.wait(10, "Transferring")
			r.Cancel(&room.Cause{Code: room.CodeClientGone, Detail: "the client is gone"})
			// The manager's own word: a poll of the sender would keep the first end that it sees.
			status := func(want string) func() bool {
				return func() bool { return p.do("state", kw{"room": 10}).Status == want }
			}
			eventually(t, "the abort fails the prefill's room", status("Failed"))
			p.do("gate", kw{"open": true})
			if err := ended(t, r.Done(), r.Err); causeCode(err) != room.CodeClientGone {
				t.Error(err)
			}
			eventually(t, "the failed room is transferring again", status("Transferring"))
			back(t, d, m, r)
			if s := m.SlotStats(); old.distrust && s.FreedFenced != 2 || !old.distrust && s.FreedDrained != 2 {
				t.Errorf("pages came back by another proof: %+v", s)
			}
			for b := range m.Buffers { // somebody else's now
				for _, page := range pages {
					clear(m.KV(b, page))
				}
			}
			zero, _ := m.crcs([]int{pages[0]}, 0)
			p.send(10, 1, []int{2})
			var finds []string
			if old.pinned {
				first := scrape(t, p, 10)
				<-time.After(500 * time.Millisecond)
				if s := p.do("state", kw{"room": 10}).Status; s != "Transferring" {
					t.Errorf("the old fault is not there: the prefill's room is %s", s)
				}
				finds = diagnose(t, first, scrape(t, p, 10))
			} else {
				eventually(t, "its late write finds nobody", status("Failed"))
				first := scrape(t, p, 10)
				<-time.After(500 * time.Millisecond)
				finds = diagnose(t, first, scrape(t, p, 10))
			}
			if pin := slices.Contains(finds, "stuck-queue"); pin != old.pinned {
				t.Errorf("the doctor finds %v; the room is pinned: %v", finds, old.pinned)
			}
			for _, page := range pages {
				if got, _ := m.crcs([]int{page}, 0); !reflect.DeepEqual(got, zero) {
					t.Errorf("page %d was written after it had come back", page)
				}
			}
			oneRoom(t, p, d, m, port, 20)
		})
	}
}

// scrape is what the peer's scheduler would show: its queue of transfers is the rooms that have not ended in the
// real manager's eyes. The peer itself is the manager without a scheduler, and has no /metrics.
func scrape(t *testing.T, p *peer, rooms ...int) doctor.Scrape {
	t.Helper()
	inflight, ended := 0, 0
	for _, r := range rooms {
		if s := p.do("state", kw{"room": r}).Status; s == "Failed" || s == "Success" {
			ended++
		} else {
			inflight++
		}
	}
	const labels = `{engine_type="prefill",model_name="m",pp_rank="0",tp_rank="0"}`
	text := fmt.Sprintf("# TYPE sglang:num_prefill_bootstrap_queue_reqs gauge\nsglang:num_prefill_bootstrap_queue_reqs%[1]s 0\n"+
		"# TYPE sglang:num_prefill_inflight_queue_reqs gauge\nsglang:num_prefill_inflight_queue_reqs%[1]s %[2]d\n"+
		"# TYPE sglang:kv_transfer_latency_ms_count counter\nsglang:kv_transfer_latency_ms_count%[1]s %[3]d\n", labels, inflight, ended)
	samples, err := doctor.ParseText(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return doctor.Scrape{Target: "prefill", Time: time.Now(), Samples: samples}
}

// diagnose is the rules that the doctor finds broken between the scrapes.
func diagnose(t *testing.T, scrapes ...doctor.Scrape) (rules []string) {
	t.Helper()
	fleet, err := doctor.Build(scrapes, map[string]doctor.About{"prefill": {Version: "0.5.23", Backend: "nixl"}})
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range doctor.Diagnose(fleet, nil, doctor.Config{StuckAfter: 300 * time.Millisecond, MaxRoomAge: time.Hour}).Findings {
		rules = append(rules, f.Rule)
	}
	return rules
}
