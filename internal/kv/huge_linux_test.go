package kv

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"testing"
	"unsafe"
)

// smaps is the kernel's description of the mapping that begins at mem.
func smaps(t *testing.T, mem []byte) map[string]string {
	t.Helper()
	all, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	begin := fmt.Sprintf("%x-", uintptr(unsafe.Pointer(&mem[0])))
	got := map[string]string{}
	inside := false
	for l := range strings.Lines(string(all)) {
		key, value, ok := strings.Cut(strings.TrimSpace(l), ":")
		if !ok || strings.Contains(key, " ") { // the first line of a mapping
			inside = strings.HasPrefix(l, begin)
			continue
		}
		if inside {
			got[key] = strings.TrimSpace(value)
		}
	}
	if len(got) == 0 {
		t.Fatalf("no mapping begins with %q", begin)
	}
	return got
}

// TestHugeAdvice: the kernel has got the advice, on both kinds of memory, and no advice when off.
func TestHugeAdvice(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skip("this kernel has no transparent huge pages: ", err)
	}
	for _, plain := range []bool{false, true} {
		for _, huge := range []HugePages{HugeAdvise, HugeOff} {
			p := open(t, Config{PageBytes: 4096, Pages: 3 * hugeBytes / 4096, Plain: plain, Huge: huge})
			mem, _ := p.Memory()
			advised := false
			for _, flag := range strings.Fields(smaps(t, mem)["VmFlags"]) {
				advised = advised || flag == "hg"
			}
			if advised != (huge == HugeAdvise) || p.Huge() != huge {
				t.Errorf("plain %v, %v: advised %v, pool says %v", plain, huge, advised, p.Huge())
			}
		}
	}
}

// freeHuge is how many huge pages are reserved and free.
func freeHuge(t *testing.T) int {
	t.Helper()
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(info), "HugePages_Free:")
	if !ok {
		return 0
	}
	n, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestHugeTLB: a pool of no whole number of huge pages lies in reserved ones, and gives them back.
func TestHugeTLB(t *testing.T) {
	free := freeHuge(t)
	if free < 2 {
		t.Skipf("%d reserved huge pages are free, 2 are needed: sysctl vm.nr_hugepages=2", free)
	}
	for _, plain := range []bool{false, true} {
		p := open(t, Config{PageBytes: 4096, Pages: 700, Plain: plain, Huge: HugeTLB})
		mem, _ := p.Memory()
		if len(mem) != 700*4096 {
			t.Errorf("plain %v: %d bytes", plain, len(mem))
		}
		for i := range mem {
			mem[i] = byte(i)
		}
		if size := smaps(t, mem)["KernelPageSize"]; size != "2048 kB" || p.Huge() != HugeTLB {
			t.Errorf("plain %v: pages of %s, pool says %v", plain, size, p.Huge())
		}
		if err := p.Close(); err != nil {
			t.Errorf("plain %v: %v", plain, err)
		}
		if left := freeHuge(t); left != free {
			t.Errorf("plain %v: %d reserved pages are free after Close, were %d", plain, left, free)
		}
	}
}

// TestHugeFallback: more than is reserved is given in ordinary pages, with a word in the log.
func TestHugeFallback(t *testing.T) {
	var log bytes.Buffer
	pages := (freeHuge(t) + 1) * (hugeBytes / 4096)
	p := open(t, Config{PageBytes: 4096, Pages: pages, Huge: HugeTLB, Log: slog.New(slog.NewTextHandler(&log, nil))})
	if p.Huge() == HugeTLB || !strings.Contains(log.String(), "vm.nr_hugepages") {
		t.Errorf("got %v, log %q", p.Huge(), log.String())
	}
	p.Page(PageID(pages - 1))[4095] = 1
}

func TestHugeNames(t *testing.T) {
	for _, h := range []HugePages{HugeAdvise, HugeTLB, HugeOff} {
		var got HugePages
		if err := got.Set(h.String()); err != nil || got != h {
			t.Errorf("%v: %v, %v", h, got, err)
		}
	}
	var h HugePages
	if err := h.Set("always"); err == nil {
		t.Error("always was taken")
	}
}
