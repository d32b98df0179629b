package nixl

import (
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"
)

// agentConfig has the layout of nixl_capi_agent_config_t: 40 bytes.
type agentConfig struct {
	progThread, listenThread bool
	_                        [2]byte
	listenPort               int32
	threadSync               int32
	workers                  uint32
	progDelay, listenDelay   uint64 // µs
	telemetry                bool
	_                        [7]byte
}

// param is one key and value for a backend.
type param struct{ Key, Value string }

// region is memory that an agent has registered.
type region struct {
	addr uintptr
	size uint64
	list uintptr // its registration list
}

// agent is one NIXL agent with one backend. Owned by one goroutine, locked to its
// thread: the progress thread is off, so the library's work is done inside the calls.
// Nothing of it is ever destroyed in an orderly way except transfer requests: the
// process that holds it ends.
type agent struct {
	l       *library
	name    string
	kind    uintptr // of memory
	device  uint64
	h       uintptr
	opt     uintptr // backend hint
	notif   uintptr // backend hint and a notification; its text is replaced before each use
	inbox   uintptr // map of received notifications
	scratch [2]uintptr
}

// newAgent makes an agent called name with a backend ("UCX") and its parameters.
func newAgent(l *library, name, backend string, params []param, kind uintptr, device uint64) (*agent, error) {
	a := &agent{l: l, name: name, kind: kind, device: device}
	cfg := agentConfig{workers: 1}
	if err := l.must(fnCreateAgent, uintptr(unsafe.Pointer(cstring(name))), uintptr(unsafe.Pointer(&cfg)), uintptr(unsafe.Pointer(&a.h))); err != nil {
		return nil, err
	}
	var mems, ps, be uintptr
	if err := l.must(fnGetPluginParams, a.h, uintptr(unsafe.Pointer(cstring(backend))), uintptr(unsafe.Pointer(&mems)), uintptr(unsafe.Pointer(&ps))); err != nil {
		return nil, fmt.Errorf("backend %s: %w", backend, err)
	}
	for _, p := range params {
		if err := l.must(fnParamsAdd, ps, uintptr(unsafe.Pointer(cstring(p.Key))), uintptr(unsafe.Pointer(cstring(p.Value)))); err != nil {
			return nil, fmt.Errorf("backend %s: parameter %s: %w", backend, p.Key, err)
		}
	}
	if err := l.must(fnCreateBackend, a.h, uintptr(unsafe.Pointer(cstring(backend))), ps, uintptr(unsafe.Pointer(&be))); err != nil {
		return nil, fmt.Errorf("backend %s: %w", backend, err)
	}
	for _, opt := range []*uintptr{&a.opt, &a.notif} {
		if err := l.must(fnCreateOptArgs, uintptr(unsafe.Pointer(opt))); err != nil {
			return nil, err
		}
		if err := l.must(fnAddBackend, *opt, be); err != nil {
			return nil, err
		}
	}
	if err := l.must(fnCreateNotifs, uintptr(unsafe.Pointer(&a.inbox))); err != nil {
		return nil, err
	}
	for i := range a.scratch {
		if err := l.must(fnCreateList, a.kind, uintptr(unsafe.Pointer(&a.scratch[i]))); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// register makes size bytes at addr reachable for transfers.
func (a *agent) register(addr uintptr, size uint64) (region, error) {
	r := region{addr: addr, size: size}
	if err := a.l.must(fnCreateRegList, a.kind, uintptr(unsafe.Pointer(&r.list))); err != nil {
		return r, err
	}
	if err := a.l.must(fnRegListAdd, r.list, addr, uintptr(size), uintptr(a.device), 0, 0); err != nil {
		return r, err
	}
	if err := a.l.must(fnRegister, a.h, r.list, a.opt); err != nil {
		return r, fmt.Errorf("register %d bytes: %w", size, err)
	}
	return r, nil
}

// deregister undoes register.
func (a *agent) deregister(r region) error { return a.l.must(fnDeregister, a.h, r.list, a.opt) }

// metadata describes the agent and its registered memory to others.
func (a *agent) metadata() ([]byte, error) {
	var data, n uintptr
	if err := a.l.must(fnLocalMD, a.h, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&n))); err != nil {
		return nil, err
	}
	md := foreign(data, int(n))
	_, _, _ = purego.SyscallN(a.l.free, data)
	return md, nil
}

// connect loads another agent's metadata and opens the way to it; it returns its name.
func (a *agent) connect(md []byte) (string, error) {
	var p uintptr
	if len(md) == 0 {
		return "", errNoName
	}
	if err := a.l.must(fnLoadRemoteMD, a.h, uintptr(unsafe.Pointer(&md[0])), uintptr(len(md)), uintptr(unsafe.Pointer(&p))); err != nil {
		return "", err
	}
	name := foreignString(p)
	if name == "" {
		return "", errNoName
	}
	_, _, _ = purego.SyscallN(a.l.free, p)
	return name, a.l.must(fnConnect, a.h, uintptr(unsafe.Pointer(cstring(name))), a.opt)
}

// prepare makes a list of equal blocks that transfers then name by index. owner is ""
// for the agent's own memory.
func (a *agent) prepare(owner string, addr uintptr, block uint64, count int) (uintptr, error) {
	var list, handle uintptr
	if err := a.l.must(fnCreateList, a.kind, uintptr(unsafe.Pointer(&list))); err != nil {
		return 0, err
	}
	for i := range count {
		if err := a.l.must(fnListAdd, list, addr+uintptr(i)*uintptr(block), uintptr(block), uintptr(a.device)); err != nil {
			return 0, err
		}
	}
	err := a.l.must(fnPrepList, a.h, uintptr(unsafe.Pointer(cstring(owner))), list, uintptr(unsafe.Pointer(&handle)), a.opt)
	return handle, err
}

// say makes note the notification of the next request.
func (a *agent) say(note []byte) (uintptr, error) {
	if note == nil {
		return a.opt, nil
	}
	if err := a.l.must(fnSetNotif, a.notif, uintptr(unsafe.Pointer(unsafe.SliceData(note))), uintptr(len(note))); err != nil {
		return 0, err
	}
	return a.notif, a.l.must(fnSetHasNotif, a.notif, 1)
}

// byIndex makes a write request of prepared blocks.
func (a *agent) byIndex(local uintptr, from []int32, remote uintptr, to []int32, note []byte) (req uintptr, err error) {
	opt, err := a.say(note)
	if err != nil {
		return 0, err
	}
	err = a.l.must(fnMakeReq, a.h, opWrite, local, uintptr(unsafe.Pointer(unsafe.SliceData(from))), uintptr(len(from)),
		remote, uintptr(unsafe.Pointer(unsafe.SliceData(to))), uintptr(len(to)), uintptr(unsafe.Pointer(&req)), opt)
	return req, err
}

// copyOf is one block of a write: addresses in the two processes.
type copyOf struct {
	from, to uintptr
	n        uint64
}

// byAddress makes a write request of arbitrary blocks.
func (a *agent) byAddress(owner *byte, list []copyOf, note []byte) (req uintptr, err error) {
	opt, err := a.say(note)
	if err != nil {
		return 0, err
	}
	for _, s := range a.scratch {
		if err := a.l.must(fnListClear, s); err != nil {
			return 0, err
		}
	}
	for _, c := range list {
		if err := a.l.must(fnListAdd, a.scratch[0], c.from, uintptr(c.n), uintptr(a.device)); err != nil {
			return 0, err
		}
		if err := a.l.must(fnListAdd, a.scratch[1], c.to, uintptr(c.n), uintptr(a.device)); err != nil {
			return 0, err
		}
	}
	err = a.l.must(fnCreateReq, a.h, opWrite, a.scratch[0], a.scratch[1], uintptr(unsafe.Pointer(owner)), uintptr(unsafe.Pointer(&req)), opt)
	return req, err
}

// post starts a request. done: it is complete already. It may copy all bytes before it returns.
func (a *agent) post(req uintptr) (done bool, err error) {
	return finished(fnPost, a.l.call(fnPost, a.h, req, 0))
}

// status asks how a request is doing, and makes the library do its work.
func (a *agent) status(req uintptr) (done bool, err error) {
	return finished(fnStatus, a.l.call(fnStatus, a.h, req))
}

func finished(fn function, st int32) (bool, error) {
	switch st {
	case statusSuccess:
		return true, nil
	case statusInProgress:
		return false, nil
	default:
		return false, &StatusError{Call: names[fn], Status: st}
	}
}

// release gives a request up. That does not stop one in flight.
func (a *agent) release(req uintptr) error {
	if err := a.l.must(fnRelease, a.h, req); err != nil {
		return err
	}
	return a.l.must(fnDestroyReq, req)
}

// notify sends a notification that belongs to no transfer.
func (a *agent) notify(owner *byte, note []byte) error {
	return a.l.must(fnGenNotif, a.h, uintptr(unsafe.Pointer(owner)), uintptr(unsafe.Pointer(unsafe.SliceData(note))), uintptr(len(note)), a.opt)
}

// receive makes the library do its work and hands over the notifications that have come.
func (a *agent) receive(each func(note []byte)) error {
	if err := a.l.must(fnGetNotifs, a.h, a.inbox, a.opt); err != nil {
		return err
	}
	var agents uintptr
	if err := a.l.must(fnNotifsSize, a.inbox, uintptr(unsafe.Pointer(&agents))); err != nil || agents == 0 {
		return err
	}
	for i := range agents {
		var name, count uintptr
		if err := a.l.must(fnNotifsAgentAt, a.inbox, i, uintptr(unsafe.Pointer(&name))); err != nil {
			return err
		}
		if err := a.l.must(fnNotifsCount, a.inbox, name, uintptr(unsafe.Pointer(&count))); err != nil {
			return err
		}
		for k := range count {
			var data, n uintptr
			if err := a.l.must(fnNotifsGet, a.inbox, name, k, uintptr(unsafe.Pointer(&data)), uintptr(unsafe.Pointer(&n))); err != nil {
				return err
			}
			each(foreign(data, int(n)))
		}
	}
	return a.l.must(fnNotifsClear, a.inbox)
}
