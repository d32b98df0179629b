//go:build !linux

package wire

import (
	"errors"
	"fmt"
)

// Switch needs Linux.
type Switch struct{}

// Host of a Switch.
type Host struct{}

// Addr is empty.
func (h *Host) Addr() string { return "" }

// Do fails.
func (h *Host) Do(func() error) error { return errNoLinux }

var errNoLinux = fmt.Errorf("wire: network namespaces need Linux: %w", errors.ErrUnsupported)

// OpenSwitch fails.
func OpenSwitch(uint64, ...string) (*Switch, error) { return nil, errNoLinux }

// Host finds none.
func (s *Switch) Host(string) *Host { return nil }

// Set does nothing.
func (s *Switch) Set(string, string, Weather) {}

// Counts is zero.
func (s *Switch) Counts() Counts { return Counts{} }

// Close does nothing.
func (s *Switch) Close() error { return nil }
