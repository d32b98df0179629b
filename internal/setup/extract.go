package setup

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// extract takes the artifact's files and trees, and nothing else, out of the archive. An entry
// is used only if its full name is the expected directory and an expected base name, or a clean
// name in a tree, so no name in the archive can lead anywhere else. It returns what it has written,
// by paths below dir.
func extract(ctx context.Context, a artifact, archive, dir string) ([]fileSum, error) {
	written := slices.Clone(a.files)
	want := make(map[string]fileSum, len(a.files))
	for _, f := range a.files {
		want[path.Join(a.inner, f.name)] = f
	}
	take := func(name string, regular bool, size int64, open func() (io.ReadCloser, error)) error {
		f, ok := want[name]
		if !ok && regular && a.takes(name) {
			got, err := writeTree(ctx, dir, fileSum{name: name, size: size}, open)
			written = append(written, got)
			return err
		}
		if !ok {
			return nil
		}
		if !regular || size != f.size {
			return fmt.Errorf("%w: %s is not a file of %d bytes", ErrArchive, name, f.size)
		}
		delete(want, name) // a second entry of that name is ignored
		_, err := writeChecked(ctx, filepath.Join(dir, f.name), f, open)
		return err
	}
	var err error
	if strings.HasSuffix(archive, ".tgz") {
		err = eachTar(archive, take)
	} else {
		err = eachZip(archive, take)
	}
	if err != nil {
		return nil, fmt.Errorf("unpack %s: %w", filepath.Base(archive), err)
	}
	for name := range want {
		return nil, fmt.Errorf("unpack %s: %w: %s is missing", filepath.Base(archive), ErrArchive, name)
	}
	if len(written) == 0 {
		return nil, fmt.Errorf("unpack %s: %w: nothing that is needed is in it", filepath.Base(archive), ErrArchive)
	}
	return written, nil
}

// writeTree writes one file of a tree; its sum is what it has.
func writeTree(ctx context.Context, dir string, f fileSum, open func() (io.ReadCloser, error)) (fileSum, error) {
	dst := filepath.Join(dir, filepath.FromSlash(f.name))
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return f, err
	}
	var err error
	f.sum, err = writeChecked(ctx, dst, f, open)
	return f, err
}

type takeFunc func(name string, regular bool, size int64, open func() (io.ReadCloser, error)) error

func eachTar(archive string, take takeFunc) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	zr, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	defer zr.Close()
	tr := tar.NewReader(zr)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		open := func() (io.ReadCloser, error) { return io.NopCloser(tr), nil }
		if err := take(h.Name, h.Typeflag == tar.TypeReg, h.Size, open); err != nil {
			return err
		}
	}
}

func eachZip(archive string, take takeFunc) error {
	zr, err := zip.OpenReader(archive)
	if err != nil {
		return err
	}
	defer zr.Close()
	for _, f := range zr.File {
		regular := f.Mode()&fs.ModeType == 0
		if err := take(f.Name, regular, int64(f.UncompressedSize64), f.Open); err != nil {
			return err
		}
	}
	return nil
}

// writeChecked writes one file durably and compares its sum, if it has one; it returns the sum.
func writeChecked(ctx context.Context, dst string, f fileSum, open func() (io.ReadCloser, error)) (got string, err error) {
	r, err := open()
	if err != nil {
		return "", err
	}
	defer r.Close()
	w, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	h := sha256.New()
	// One byte more than expected is read, so that a lying size shows.
	n, err := io.Copy(io.MultiWriter(w, h), io.LimitReader(&ctxReader{ctx, r}, f.size+1))
	if err != nil {
		return "", err
	}
	if n != f.size {
		return "", fmt.Errorf("%w: %s holds %d bytes, not %d", ErrArchive, f.name, n, f.size)
	}
	if got = hex.EncodeToString(h.Sum(nil)); f.sum != "" && got != f.sum {
		return "", &ChecksumError{File: f.name, Want: f.sum, Got: got}
	}
	return got, w.Sync()
}
