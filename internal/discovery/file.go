package discovery

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// maxFile is the longest file that is read, in bytes.
const maxFile = 4 << 20

// File is a source that reads a JSON file, {"workers":[{"leg":"decode","url":"http://..."}, ...]}, again and again.
//
// It compares contents instead of waiting for the kernel's notices: those do not come over NFS and FUSE, come for the
// wrong directory when a parent is renamed or a Kubernetes ConfigMap swaps its symlink, and can be lost; times of
// modification are too coarse to tell two writes apart. Reading some kilobytes a second costs nothing. The file
// may be replaced by rename or rewritten in place: half a JSON text is not one, so that the set before it stays.
type File struct {
	path     string
	interval time.Duration
}

// NewFile watches path, reading it every interval.
func NewFile(path string, interval time.Duration) (*File, error) {
	switch {
	case path == "":
		return nil, errors.New("workers file: no path")
	case interval <= 0:
		return nil, fmt.Errorf("workers file %s: %w", path, errInterval)
	}
	return &File{path, interval}, nil
}

// Name is "file:" and the path.
func (f *File) Name() string { return "file:" + f.path }

// Run implements [Source].
func (f *File) Run(ctx context.Context, report Report) {
	poll(ctx, f.interval, report, func(context.Context) ([]Worker, error) { return f.read() })
}

func (f *File) read() ([]Worker, error) {
	h, err := os.Open(f.path)
	if err != nil {
		return nil, fmt.Errorf("workers file: %w", err)
	}
	defer func() { _ = h.Close() }() // it was only read
	text, err := io.ReadAll(io.LimitReader(h, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("workers file: %w", err)
	}
	if len(text) > maxFile {
		return nil, fmt.Errorf("workers file %s has more than %d bytes", f.path, maxFile)
	}
	set, err := ParseFile(text)
	if err != nil {
		return nil, fmt.Errorf("workers file %s: %w", f.path, err)
	}
	return set, nil
}

// ParseFile reads a workers file's text. Unknown fields are errors: a mistyped one would be silently without effect.
func ParseFile(text []byte) ([]Worker, error) {
	var file struct {
		Workers *[]Worker `json:"workers"`
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&file); err != nil {
		return nil, fmt.Errorf("not a list of workers: %w", err)
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("not a list of workers: there is something after the JSON object")
	}
	if file.Workers == nil {
		return nil, errors.New(`not a list of workers: "workers" is missing`)
	}
	if err := Normalize(*file.Workers); err != nil {
		return nil, err
	}
	return *file.Workers, nil
}
