package setup

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// install fetches one artifact, checks it, and moves it into place.
func install(ctx context.Context, cache string, a artifact, out io.Writer) (err error) {
	tmp, err := os.MkdirTemp(cache, tempPrefix)
	if err != nil {
		return fmt.Errorf("make temporary directory: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()

	download := filepath.Join(tmp, "download")
	ready := filepath.Join(tmp, "ready")
	for _, d := range []string{download, ready, filepath.Join(tmp, "tmp")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return fmt.Errorf("make temporary directory: %w", err)
		}
	}
	if err := fetch(ctx, a, download, filepath.Join(tmp, "tmp"), out); err != nil {
		return err
	}
	archive := filepath.Join(download, a.archive)
	fmt.Fprintf(out, "%s: checking %s\n", a.what, a.archive)
	if err := checkSum(ctx, archive, a.sum); err != nil {
		return err
	}
	files, err := extract(ctx, a, archive, ready)
	if err != nil {
		return err
	}
	for name, target := range a.links {
		if err := os.Symlink(target, filepath.Join(ready, name)); err != nil {
			return fmt.Errorf("link %s: %w", name, err)
		}
	}
	if err := writeStamp(a, files, ready); err != nil {
		return err
	}
	if err := replace(ready, a.dir(cache), filepath.Join(tmp, "old")); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: ready in %s\n", a.what, a.dir(cache))
	return nil
}

// replace renames ready to final, moving a damaged predecessor to old first.
func replace(ready, final, old string) error {
	if err := os.MkdirAll(filepath.Dir(final), 0o755); err != nil {
		return fmt.Errorf("make cache directory: %w", err)
	}
	if err := os.Rename(final, old); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("move damaged %s away: %w", final, err)
	}
	if err := os.Rename(ready, final); err != nil {
		return fmt.Errorf("move %s into place: %w", final, err)
	}
	return nil
}

// stamp records what was verified at installation, so that later runs need not
// hash again: a file of the same size and modification time is the same file.
type stamp struct {
	Archive string               `json:"archive_sha256"`
	Files   map[string]stampFile `json:"files"`
}

type stampFile struct {
	Size    int64  `json:"size"`
	ModTime int64  `json:"mtime_ns"`
	Sum     string `json:"sha256"`
}

const stampName = "stamp.json"

func writeStamp(a artifact, files []fileSum, dir string) error {
	s := stamp{Archive: a.sum, Files: map[string]stampFile{}}
	for _, f := range files {
		st, err := os.Stat(filepath.Join(dir, f.name))
		if err != nil {
			return fmt.Errorf("write stamp: %w", err)
		}
		s.Files[f.name] = stampFile{Size: st.Size(), ModTime: st.ModTime().UnixNano(), Sum: f.sum}
	}
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("write stamp: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, stampName), append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write stamp: %w", err)
	}
	return nil
}

// verifyInstalled tells whether dir holds the whole artifact. Files that changed
// their modification time since the stamp are hashed.
func verifyInstalled(a artifact, dir string) error {
	b, err := os.ReadFile(filepath.Join(dir, stampName))
	if errors.Is(err, os.ErrNotExist) {
		return errors.New("missing")
	} else if err != nil {
		return err
	}
	var s stamp
	if err := json.Unmarshal(b, &s); err != nil || s.Archive != a.sum {
		return errors.New("stamp of another version")
	}
	files := slices.Clone(a.files)
	if a.trees != nil { // what the archive, whose sum is right, had in them
		for name, f := range s.Files {
			files = append(files, fileSum{name, f.Size, f.Sum})
		}
		slices.SortFunc(files, func(a, b fileSum) int { return strings.Compare(a.name, b.name) })
	}
	if len(files) == 0 {
		return errors.New("stamp names no files")
	}
	for _, f := range files {
		path := filepath.Join(dir, f.name)
		st, err := os.Lstat(path)
		if err != nil {
			return fmt.Errorf("%s missing", f.name)
		}
		have := s.Files[f.name]
		if !st.Mode().IsRegular() || st.Size() != f.size || have.Sum != f.sum {
			return fmt.Errorf("%s damaged", f.name)
		}
		if st.ModTime().UnixNano() != have.ModTime {
			if err := checkSum(context.Background(), path, f.sum); err != nil {
				return fmt.Errorf("%s damaged", f.name)
			}
		}
	}
	for name, target := range a.links {
		if got, err := os.Readlink(filepath.Join(dir, name)); err != nil || got != target {
			return fmt.Errorf("link %s damaged", name)
		}
	}
	return nil
}

// checkSum hashes a file and compares; a difference is a [ChecksumError].
func checkSum(ctx context.Context, path, want string) error {
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("check %s: %w", filepath.Base(path), err)
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, &ctxReader{ctx, f}); err != nil {
		return fmt.Errorf("check %s: %w", filepath.Base(path), err)
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != want {
		return &ChecksumError{File: filepath.Base(path), Want: want, Got: got}
	}
	return nil
}

// ctxReader ends a long copy when its context does.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := context.Cause(c.ctx); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// diskError adds ErrDiskFull and its hint to an error of the file system.
func diskError(err error) error {
	if (errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)) && !errors.Is(err, ErrDiskFull) {
		return fmt.Errorf("%w: %w\n%s", ErrDiskFull, err, kindHint(ErrDiskFull, ""))
	}
	return err
}

// lockRetry is how often a waiting set-up looks whether the other one has ended.
const lockRetry = 200 * time.Millisecond

// lock takes the lock file, waiting for another set-up until ctx ends. The kernel
// drops the lock when its holder dies.
func lock(ctx context.Context, path string, out io.Writer) (unlock func() error, err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open lock file: %w", err)
	}
	told := false
	tick := time.NewTicker(lockRetry)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return f.Close, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		if !told {
			fmt.Fprintf(out, "another set-up is running in %s: waiting for it\n", filepath.Dir(path))
			told = true
		}
		select {
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("wait for another set-up: %w", context.Cause(ctx)), f.Close())
		case <-tick.C:
		}
	}
}
