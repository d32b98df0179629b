//go:build !linux

package kv

import "errors"

// openMapping knows only plain memory where there is no memfd.
func openMapping(_ string, size int, plain bool, _ HugePages) (mem []byte, fd int, got HugePages, err error) {
	if !plain {
		return nil, -1, HugeOff, errors.New("memory that other processes can map needs Linux; use a plain pool")
	}
	return make([]byte, size), -1, HugeOff, nil
}

func closeMapping([]byte, int) error { return nil }
