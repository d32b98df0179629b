package room

import (
	"bytes"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var rewrite = flag.Bool("rewrite", false, "record the output of testdata/script/*.txt; review the diff")

// TestScripts runs the interleavings in testdata/script. A script is blocks of one
// command, "----" and its recorded output, divided by empty lines; commands are the
// methods of scriptWorld. Each file runs in a bubble with its own clock.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/script/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { runScript(t, file) })
		})
	}
}

func runScript(t *testing.T, file string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	w := &scriptWorld{}
	defer w.close()
	var out bytes.Buffer
	for block := range strings.SplitSeq(strings.TrimRight(string(text), "\n"), "\n\n") {
		var command string
		for line := range strings.SplitSeq(block, "\n") {
			if line == "----" {
				break
			}
			fmt.Fprintln(&out, line)
			if line != "" && line[0] != '#' {
				command = line
			}
		}
		if command != "" {
			fmt.Fprintln(&out, "----")
			w.run(strings.Fields(command))
			out.Write(w.out.Bytes())
			w.out.Reset()
		}
		fmt.Fprintln(&out)
	}
	got := strings.TrimRight(out.String(), "\n") + "\n"
	if got == string(text) {
		return
	}
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	a, b := strings.Split(string(text), "\n"), strings.Split(got, "\n")
	for i := range min(len(a), len(b)) {
		if a[i] != b[i] {
			t.Fatalf("%s:%d: recorded %q, now %q (go test -run TestScripts -rewrite records anew)", file, i+1, a[i], b[i])
		}
	}
	t.Fatalf("%s: %d lines recorded, now %d", file, len(a), len(b))
}

// scriptWorld is two machines with a network between them, or one registry.
type scriptWorld struct {
	out bytes.Buffer

	sender   Sender
	receiver Receiver
	net      []string // messages under way, oldest first
	writes   []int    // chunks whose bytes may still be stored
	stored   []int    // chunks stored, their completion not yet told to the sender
	freed    bool     // the receiver's pages may be reused

	reg *Registry
	log lockedBuffer
}

// lockedBuffer is written by the deadline loop as well.
type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

// moveTo empties b into w.
func (b *lockedBuffer) moveTo(w *bytes.Buffer) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, _ = b.buf.WriteTo(w)
}

func (w *scriptWorld) close() {
	if w.reg != nil {
		w.reg.Close()
	}
}

func (w *scriptWorld) printf(format string, args ...any) { fmt.Fprintf(&w.out, format+"\n", args...) }

func (w *scriptWorld) run(f []string) {
	verbs := map[string]func(args []string) error{
		"pair": w.pair, "s": w.s, "r": w.r, "deliver": w.deliver, "lose": w.lose, "store": w.store, "settle": w.settle, "break": w.breakWrite,
		"table": w.table, "registry": w.registry, "open": w.open, "abort": w.abort, "apply": w.apply, "get": w.get,
		"advance": w.advance, "stats": w.stats,
	}
	verb, ok := verbs[f[0]]
	if !ok {
		w.printf("unknown command %q", f[0])
		return
	}
	if err := verb(f[1:]); err != nil {
		w.printf("error: %v", err)
	}
}

// arg is the value of name=value, or otherwise.
func arg(args []string, name, otherwise string) string {
	for _, a := range args {
		if v, ok := strings.CutPrefix(a, name+"="); ok {
			return v
		}
	}
	return otherwise
}

func intArg(args []string, name string, otherwise int) (n int) {
	if _, err := fmt.Sscan(arg(args, name, fmt.Sprint(otherwise)), &n); err != nil {
		return otherwise
	}
	return n
}

func scriptCause(args []string) *Cause {
	if code := arg(args, "code", ""); code != "" {
		return &Cause{Code: Code(code), Detail: "scripted"}
	}
	return nil
}

// pair chunks=N: a fresh room on both sides.
func (w *scriptWorld) pair(args []string) error {
	n := intArg(args, "chunks", 1)
	w.sender, w.receiver = NewSender(n), NewReceiver(n)
	w.net, w.writes, w.stored, w.freed = nil, nil, nil, false
	w.printf("%d chunks", n)
	return nil
}

// s EVENT [code=C]: an event of the prefill side.
func (w *scriptWorld) s(args []string) error {
	e, err := parseEvent(args[0])
	if err != nil {
		return err
	}
	e.Cause = scriptCause(args)
	was := w.sender
	var fx Effects
	w.sender, fx = w.sender.Step(e)
	w.printf("sender %v -> %v: %v%s", was.Node(), w.sender.Node(), fx, causeNote(was.Cause(), w.sender.Cause()))
	if fx.Has(FxWrite) {
		w.writes = append(w.writes, e.Chunk)
	}
	w.send(fx, FxSendFailed, "failed")
	w.send(fx, FxSendAck, "ack")
	if fx.Has(FxSendAck) && len(w.writes)+len(w.stored) > 0 {
		w.printf("VIOLATION: acked with writes outstanding")
	}
	return nil
}

// r EVENT [code=C]: an event of the decode side.
func (w *scriptWorld) r(args []string) error {
	e, err := parseEvent(args[0])
	if err != nil {
		return err
	}
	e.Cause = scriptCause(args)
	was := w.receiver
	var fx Effects
	w.receiver, fx = w.receiver.Step(e)
	w.printf("receiver %v -> %v: %v%s", was.Node(), w.receiver.Node(), fx, causeNote(was.Cause(), w.receiver.Cause()))
	w.send(fx, FxSendGrant, "grant")
	w.send(fx, FxSendAbort, "abort")
	w.freed = w.freed || fx.Has(FxFreeTransfer)
	return nil
}

func (w *scriptWorld) send(fx, want Effects, message string) {
	if fx.Has(want) {
		w.net = append(w.net, message)
	}
}

func causeNote(was, now *Cause) string {
	if now == was {
		return ""
	}
	return fmt.Sprintf(" (%s in %s: %s)", now.Code, now.Phase, now.Detail)
}

// deliver MESSAGE [again]: the network hands it over, and keeps a copy if again.
func (w *scriptWorld) deliver(args []string) error {
	if err := w.take(args[0], slices.Contains(args, "again")); err != nil {
		return err
	}
	switch args[0] {
	case "grant", "abort":
		return w.s(args[:1])
	case "failed":
		c := w.sender.Cause()
		return w.r([]string{"remote_failed", "code=" + string(c.Code)})
	default:
		return w.r(args[:1])
	}
}

// lose MESSAGE: it never arrives.
func (w *scriptWorld) lose(args []string) error { return w.take(args[0], false) }

func (w *scriptWorld) take(message string, keep bool) error {
	i := slices.Index(w.net, message)
	if i < 0 {
		return fmt.Errorf("no %s under way, only %v", message, w.net)
	}
	if !keep {
		w.net = slices.Delete(w.net, i, i+1)
	}
	return nil
}

// store N: the bytes of chunk N reach the decode side's memory.
func (w *scriptWorld) store(args []string) error {
	var n int
	if _, err := fmt.Sscan(args[0], &n); err != nil || !slices.Contains(w.writes, n) {
		return fmt.Errorf("no write of chunk %s under way, only %v", args[0], w.writes)
	}
	if w.freed {
		w.printf("VIOLATION: bytes stored into freed pages")
	}
	w.writes = slices.DeleteFunc(w.writes, func(c int) bool { return c == n })
	w.stored = append(w.stored, n)
	word := fmt.Sprintf("landed%d", n)
	if n == w.receiver.Chunks()-1 {
		word += "!"
	}
	return w.r([]string{word})
}

// settle N: the sender learns that chunk N was stored.
func (w *scriptWorld) settle(args []string) error {
	i := slices.IndexFunc(w.stored, func(c int) bool { return fmt.Sprint(c) == args[0] })
	if i < 0 {
		return fmt.Errorf("chunk %s is not stored, only %v", args[0], w.stored)
	}
	w.stored = slices.Delete(w.stored, i, i+1)
	return w.s([]string{"settle" + args[0]})
}

// break N: the write of chunk N ends with an error, its bytes not stored.
func (w *scriptWorld) breakWrite(args []string) error {
	i := slices.IndexFunc(w.writes, func(c int) bool { return fmt.Sprint(c) == args[0] })
	if i < 0 {
		return fmt.Errorf("no write of chunk %s under way, only %v", args[0], w.writes)
	}
	w.writes = slices.Delete(w.writes, i, i+1)
	return w.s([]string{"settle_error" + args[0]})
}

// table sender|receiver: the whole table, as it is printed in the docs.
func (w *scriptWorld) table(args []string) error {
	rows := SenderTable()
	if args[0] == "receiver" {
		rows = ReceiverTable()
	}
	for _, r := range rows {
		if r.Reason == whyForeign {
			continue
		}
		event, to, code := r.Event.String(), "=", ""
		if r.When != WhenAlways {
			event += " [" + r.When.String() + "]"
		}
		if r.To != r.From {
			to = r.To.String()
		}
		if r.Code != "" {
			code = " (" + string(r.Code) + ")"
		}
		w.printf("%-19s %-30s %-19s %v%s; %s", r.From, event, to, r.Effects, code, r.Reason)
	}
	return nil
}

// registry side=sender|receiver [ttl=D] [bootstrapping=D] [waiting=D] [transferring=D].
func (w *scriptWorld) registry(args []string) error {
	w.close()
	c := Config{Side: SideSender, Bounds: make(map[State]time.Duration), Shards: 1, MaxTombstones: intArg(args, "tombstones", 0)}
	if arg(args, "side", "sender") == "receiver" {
		c.Side = SideReceiver
	}
	for s := StateBootstrapping; s < StateSuccess; s++ {
		c.Bounds[s], _ = time.ParseDuration(arg(args, s.String(), "0s"))
	}
	c.TombstoneTTL, _ = time.ParseDuration(arg(args, "ttl", "0s"))
	c.Log = slog.New(slog.NewTextHandler(&w.log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	c.Execute = func(r *Room, e Event, fx Effects) []Event {
		fmt.Fprintf(&w.log, "execute room %v, %v -> %v: %v\n", r.Key(), e.Kind, r.State(), fx)
		return nil
	}
	w.reg = NewRegistry(c)
	return nil
}

func scriptKey(word string) (k Key, err error) {
	if _, err = fmt.Sscanf(word, "%d#%d", &k.Room, &k.Gen); err != nil {
		_, err = fmt.Sscan(word, &k.Room)
	}
	return k, err
}

// flush prints what was executed and logged since.
func (w *scriptWorld) flush() {
	synctest.Wait()
	w.log.moveTo(&w.out)
}

// open ROOM[#GEN] [chunks=N] [deadline=D].
func (w *scriptWorld) open(args []string) error {
	k, err := scriptKey(args[0])
	if err != nil {
		return err
	}
	d, err := time.ParseDuration(arg(args, "deadline", "1h"))
	if err != nil {
		return err
	}
	r, err := w.reg.Open(k, time.Now().Add(d), intArg(args, "chunks", 1), nil)
	w.flush()
	if err != nil {
		return err
	}
	w.show(r)
	return nil
}

func (w *scriptWorld) show(r *Room) {
	note := ""
	if c := r.Cause(); c != nil {
		note = fmt.Sprintf(", cause %v", c)
	}
	w.printf("room %v: %v, granted %v, done %v%s", r.Key(), r.State(), isClosed(r.Granted()), isClosed(r.Done()), note)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// abort ROOM[#GEN] [code=C].
func (w *scriptWorld) abort(args []string) error {
	k, err := scriptKey(args[0])
	if err != nil {
		return err
	}
	fx, known := w.reg.Abort(k, scriptCause(args))
	w.flush()
	w.printf("known %v: %v", known, fx)
	return nil
}

// apply ROOM[#GEN] EVENT [code=C].
func (w *scriptWorld) apply(args []string) error {
	k, err := scriptKey(args[0])
	if err != nil {
		return err
	}
	e, err := parseEvent(args[1])
	if err != nil {
		return err
	}
	r := w.reg.Get(k)
	if r == nil {
		return fmt.Errorf("no room %v", k)
	}
	e.Cause = scriptCause(args)
	fx := r.Apply(e)
	w.flush()
	w.printf("%v: %v", r.State(), fx)
	return nil
}

// get ROOM[#GEN].
func (w *scriptWorld) get(args []string) error {
	k, err := scriptKey(args[0])
	if err != nil {
		return err
	}
	if r := w.reg.Get(k); r != nil {
		w.show(r)
	} else if c, ok := w.reg.Ended(k); ok && c != nil {
		w.printf("ended: %v", c)
	} else if ok {
		w.printf("ended with success")
	} else {
		w.printf("unknown")
	}
	return nil
}

// advance D: the clock moves on, and the deadline loop does what is due.
func (w *scriptWorld) advance(args []string) error {
	d, err := time.ParseDuration(args[0])
	if err != nil {
		return err
	}
	<-time.After(d)
	w.flush()
	return nil
}

// stats: what is not zero.
func (w *scriptWorld) stats([]string) error {
	s := w.reg.Stats()
	for st, n := range s.Live {
		if n > 0 {
			w.printf("%d %v, oldest %v", n, State(st), s.OldestAge[st])
		}
	}
	w.printf("undrained %d, outstanding %d, tombstones %d of which aborts %d, evicted %d", s.Undrained, s.Outstanding, s.Tombstones, s.AbortTombstones, s.EvictedTombstones)
	w.printf("opened %d, succeeded %d, failed %v, stale %d, duplicates %d, late causes %d, skipped %d",
		s.Opened, s.Succeeded, s.Failed, s.Stale, s.Duplicates, s.LateCauses, s.Skipped)
	return nil
}
