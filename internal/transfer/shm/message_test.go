package shm

import (
	"bytes"
	"errors"
	"math"
	"syscall"
	"testing"

	"github.com/baton-pd/baton/internal/transfer"
)

var goodMessages = []message{
	{kind: kindHello, value: math.MaxUint64, code: version},
	{kind: kindWelcome, value: 1 << 40, code: uint32(statusOK)},
	{kind: kindDone, value: 7, grant: math.MaxUint64, notify: true, notifyN: transfer.MaxNotify},
	{kind: kindDone, value: 7, grant: 9, notify: true},
	{kind: kindDone, value: 7, grant: 9},
	{kind: kindLeft, grant: 3},
	{kind: kindAnswer, value: 8, code: verdictGrant},
	{kind: kindWake},
}

func TestMessageRoundTrip(t *testing.T) {
	for _, m := range goodMessages {
		b := m.append(nil)
		var got message
		if err := got.decode(b); len(b) != messageLen || err != nil || got != m {
			t.Errorf("%+v: %d bytes decode to %+v, %v", m, len(b), got, err)
		}
	}
}

func TestMalformedMessagesAreRefused(t *testing.T) {
	for name, m := range map[string]message{
		"kind 0": {}, "kind 7": {kind: 7},
		"hello with a grant":           {kind: kindHello, grant: 1},
		"answer with a notification":   {kind: kindAnswer, notify: true},
		"wake with a value":            {kind: kindWake, value: 1},
		"left with a value":            {kind: kindLeft, grant: 1, value: 1},
		"done with a code":             {kind: kindDone, code: 1},
		"notification too long":        {kind: kindDone, notify: true, notifyN: transfer.MaxNotify + 1},
		"length of an absent notify":   {kind: kindDone, notifyN: 1},
		"welcome with a notify length": {kind: kindWelcome, notifyN: 3},
	} {
		var got message
		if err := got.decode(m.append(nil)); !errors.Is(err, errMessage) {
			t.Errorf("%s: decoded to %+v, %v", name, got, err)
		}
	}
	for _, at := range []int{0, 3, 5, 28, 31} {
		b := goodMessages[5].append(nil)
		b[at] ^= 0x80
		var got message
		if err := got.decode(b); !errors.Is(err, errMessage) {
			t.Errorf("byte %d changed: decoded to %+v, %v", at, got, err)
		}
	}
}

func TestStatusMeaning(t *testing.T) {
	of := func(s status) error { return (&message{code: uint32(s), value: uint64(syscall.EMFILE)}).refusal() }
	if of(statusOK) != nil || !errors.Is(of(statusSession), transfer.ErrSession) || !errors.Is(of(statusBusy), transfer.ErrSession) ||
		!errors.Is(of(statusVersion), errVersion) || of(statusUser) == nil || !errors.Is(of(statusFailed), syscall.EMFILE) || of(99) == nil {
		t.Error("a status means the wrong thing")
	}
}

func FuzzMessage(f *testing.F) {
	for _, m := range goodMessages {
		f.Add(m.append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) < messageLen {
			return
		}
		var m message
		if m.decode(b) != nil {
			return
		}
		if m.notifyN < 0 || m.notifyN > transfer.MaxNotify {
			t.Fatalf("limits not kept: %+v", m)
		}
		if again := m.append(nil); !bytes.Equal(again, b[:messageLen]) {
			t.Fatalf("%x decodes to %+v, which encodes as %x", b[:messageLen], m, again)
		}
	})
}
