//go:build !linux

package kv

import "errors"

// openMapping knows only plain memory where there is no memfd.
func openMapping(_ string, size int, plain bool) (mem []byte, fd int, err error) {
	if !plain {
		return nil, -1, errors.New("memory that other processes can map needs Linux; use a plain pool")
	}
	return make([]byte, size), -1, nil
}

func closeMapping([]byte, int) error { return nil }
