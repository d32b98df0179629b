package nixl

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/baton-pd/baton/internal/dynlib"
)

// Prototypes and values are those of libnixl_capi.so 1.5.1 (nixl-sys 1.5.1, wrapper.h).
const (
	statusSuccess    = 0
	statusInProgress = 1

	opWrite = 1
)

// Memory kinds of the library, by the names that Config.Memory takes.
var memoryKinds = map[string]uintptr{"DRAM": 0, "VRAM": 1}

// statusNames are the library's results below zero.
var statusNames = map[int32]string{
	-1: "invalid parameter", -2: "backend error", -3: "invalid state", -4: "exception", -5: "no telemetry", -6: "not found",
}

// StatusError is a call that the library refused. The library writes its own reason to
// the helper's standard error.
type StatusError struct {
	Call   string
	Status int32
}

// Error names the call and the library's word for the result.
func (e *StatusError) Error() string {
	name := statusNames[e.Status]
	if name == "" {
		name = "unknown status"
	}
	return fmt.Sprintf("nixl: %s: %s (%d)", e.Call, name, e.Status)
}

// function is an index into library.at.
type function int

const (
	fnIsStub function = iota
	fnCreateAgent
	fnDestroyAgent
	fnGetPluginParams
	fnCreateParams
	fnParamsAdd
	fnCreateBackend
	fnCreateOptArgs
	fnAddBackend
	fnSetNotif
	fnSetHasNotif
	fnCreateRegList
	fnRegListAdd
	fnRegister
	fnDeregister
	fnLocalMD
	fnLoadRemoteMD
	fnInvalidateRemoteMD
	fnConnect
	fnCreateList
	fnListAdd
	fnListClear
	fnPrepList
	fnMakeReq
	fnCreateReq
	fnPost
	fnStatus
	fnRelease
	fnDestroyReq
	fnGenNotif
	fnGetNotifs
	fnCreateNotifs
	fnNotifsSize
	fnNotifsAgentAt
	fnNotifsCount
	fnNotifsGet
	fnNotifsClear
	functions // their number
)

// names without the common prefix nixl_capi_, by function.
var names = [functions]string{
	"is_stub", "create_configured_agent", "destroy_agent", "get_plugin_params", "create_params", "params_add", "create_backend", "create_opt_args",
	"opt_args_add_backend", "opt_args_set_notif_msg", "opt_args_set_has_notif", "create_reg_dlist", "reg_dlist_add_desc", "register_mem",
	"deregister_mem", "get_local_md", "load_remote_md", "invalidate_remote_md", "agent_make_connection", "create_xfer_dlist",
	"xfer_dlist_add_desc", "xfer_dlist_clear", "prep_xfer_dlist", "make_xfer_req", "create_xfer_req", "post_xfer_req", "get_xfer_status",
	"release_xfer_req", "destroy_xfer_req", "gen_notif", "get_notifs", "create_notif_map", "notif_map_size", "notif_map_get_agent_at",
	"notif_map_get_notifs_size", "notif_map_get_notif", "notif_map_clear",
}

// library is the opened C API. One a process; only the helper process opens it.
type library struct {
	at   [functions]uintptr
	free uintptr // of the C library: what get_local_md returns is malloc'd
}

// openLibrary loads the library at an absolute path and checks that it has every
// function, and is not the stub that the package ships for machines without it.
func openLibrary(path string) (*library, error) {
	symbols := make([]string, functions)
	for i, n := range names {
		symbols[i] = "nixl_capi_" + n
	}
	lib, err := dynlib.Open(path, symbols...)
	if err != nil {
		return nil, err
	}
	l := &library{}
	for i, s := range symbols {
		if l.at[i], err = lib.Symbol(s); err != nil {
			return nil, err
		}
	}
	if l.free, err = purego.Dlsym(purego.RTLD_DEFAULT, "free"); err != nil {
		return nil, fmt.Errorf("nixl: look up free of the C library: %w", err)
	}
	if stub, _, _ := purego.SyscallN(l.at[fnIsStub]); stub&0xff != 0 {
		return nil, fmt.Errorf("nixl: %s is a stub without the real library behind it", path)
	}
	return l, nil
}

// call makes one C call. Pointers converted to uintptr in the argument list itself (not in
// a helper function) stay valid during the call: that is what the directive is for.
//
//go:uintptrescapes
func (l *library) call(fn function, args ...uintptr) int32 {
	r, _, _ := purego.SyscallN(l.at[fn], args...)
	return int32(r)
}

// must is call with every result but success an error.
//
//go:uintptrescapes
func (l *library) must(fn function, args ...uintptr) error {
	if st := l.call(fn, args...); st != statusSuccess {
		return &StatusError{Call: names[fn], Status: st}
	}
	return nil
}

// cstring is s with a final zero. The empty string is the library's name for the local
// agent.
func cstring(s string) *byte {
	b := make([]byte, len(s)+1)
	copy(b, s)
	return &b[0]
}

// foreign copies n bytes of memory that the library owns.
func foreign(addr uintptr, n int) []byte {
	if addr == 0 || n <= 0 {
		return nil
	}
	// The address is C memory; taken through a variable's address because vet rightly
	// dislikes making pointers of numbers, and here there is nothing Go could move.
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	return append([]byte(nil), unsafe.Slice((*byte)(p), n)...)
}

// foreignString copies a C string that the library owns, of at most 4096 bytes.
func foreignString(addr uintptr) string {
	if addr == 0 {
		return ""
	}
	p := *(*unsafe.Pointer)(unsafe.Pointer(&addr))
	for n := range 4096 {
		if *(*byte)(unsafe.Add(p, n)) == 0 {
			return string(unsafe.Slice((*byte)(p), n))
		}
	}
	return ""
}

var errNoName = errors.New("nixl: load_remote_md gave no agent name")
