package kv

import "fmt"

// HugePages says whether a pool's memory should be in pages of 2 MiB: copies run faster for want of TLB misses,
// and a peer's first touch of a mapping faults 512 times less.
type HugePages uint8

// The ways.
const (
	// HugeAdvise asks for transparent ones. It costs nothing where the kernel's settings
	// (transparent_hugepage/enabled for a plain pool, shmem_enabled for a shared one) forbid them.
	HugeAdvise HugePages = iota
	// HugeTLB takes reserved ones (vm.nr_hugepages), and HugeAdvise if there are too few.
	HugeTLB
	// HugeOff asks for nothing.
	HugeOff
)

var hugeNames = [...]string{"advise", "hugetlb", "off"}

// String is the name that Set takes.
func (h HugePages) String() string {
	if int(h) < len(hugeNames) {
		return hugeNames[h]
	}
	return fmt.Sprintf("HugePages(%d)", uint8(h))
}

// Set knows "advise", "hugetlb" and "off"; with String and Type it makes a flag's value.
func (h *HugePages) Set(s string) error {
	for i, name := range hugeNames {
		if s == name {
			*h = HugePages(i)
			return nil
		}
	}
	return fmt.Errorf("kv: huge pages %q, want advise, hugetlb or off", s)
}

// Type is what usage texts call the value.
func (*HugePages) Type() string { return "kind" }
