package setup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/baton-pd/baton/internal/dynlib"
	"github.com/baton-pd/baton/internal/dynlib/needffi"
)

// Options of a set-up. The zero value installs library and model in the default cache.
type Options struct {
	Dir     string    // cache directory; "": see [DefaultDir]
	Out     io.Writer // progress lines; nil: none
	Offline bool      // fetch nothing: what is not there is an error
	NoModel bool      // the caller has a model of his own
	LibDir  string    // a directory that holds the engine library already; "" fetches it
	With    []string  // more parts: "nixl"
}

// Paths is where the parts are.
type Paths struct {
	LibDir string // directory with libllama.so and its companions
	Model  string // a GGUF file; "" with NoModel
	NIXL   string // libnixl_capi.so; "" if it was not asked for
}

// DefaultDir is $BATON_CACHE, or baton in the user's cache directory.
func DefaultDir() (string, error) {
	if dir := os.Getenv("BATON_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	base, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find a cache directory (set BATON_CACHE): %w", err)
	}
	return filepath.Join(base, "baton"), nil
}

// Run makes sure that everything is there and tells where. It fetches what is
// missing or damaged. ctx ends the clients it started; nothing half stays behind.
func Run(ctx context.Context, o Options) (Paths, error) {
	if o.Out == nil {
		o.Out = io.Discard
	}
	if err := needffi.Check(); err != nil {
		return Paths{}, err
	}
	want, paths, err := plan(o)
	if err != nil {
		return Paths{}, err
	}
	dir, err := cacheDir(o.Dir)
	if err != nil {
		return Paths{}, err
	}
	if err := ensure(ctx, dir, want, o); err != nil {
		return Paths{}, err
	}
	return locate(dir, want, paths), nil
}

// ensure installs those of the wanted artifacts that are missing or damaged.
func ensure(ctx context.Context, dir string, want []artifact, o Options) error {
	missing := notInstalled(dir, want)
	switch {
	case len(missing) == 0:
		return nil
	case o.Offline:
		return notInstalledError(dir, missing)
	default:
		return installAll(ctx, dir, missing, o.Out)
	}
}

// Locate tells where the parts are without fetching or changing anything. dir as
// in Options.Dir. A missing part is an error that matches [ErrNotInstalled]; the
// Paths then name what is there.
func Locate(dir string) (Paths, error) {
	dir, err := cacheDir(dir)
	if err != nil {
		return Paths{}, err
	}
	want, paths, err := plan(Options{})
	if err != nil {
		return Paths{}, err
	}
	missing := notInstalled(dir, want)
	if len(missing) == 0 {
		return locate(dir, want, paths), nil
	}
	var there []artifact
	for _, a := range want {
		if verifyInstalled(a, a.dir(dir)) == nil {
			there = append(there, a)
		}
	}
	return locate(dir, there, paths), notInstalledError(dir, missing)
}

// plan lists the artifacts that o asks for and the paths that it already gives.
func plan(o Options) ([]artifact, Paths, error) {
	var want []artifact
	var paths Paths
	if o.LibDir != "" {
		for _, name := range []string{"llama", "ggml", "ggml-base"} {
			if _, err := dynlib.Find(o.LibDir, name); err != nil {
				return nil, Paths{}, fmt.Errorf("engine library given with --lib-dir: %w", err)
			}
		}
		abs, err := filepath.Abs(o.LibDir)
		if err != nil {
			return nil, Paths{}, fmt.Errorf("engine library given with --lib-dir: %w", err)
		}
		paths.LibDir = abs
	} else {
		engine, err := engineHere()
		if err != nil {
			return nil, Paths{}, err
		}
		want = append(want, engine)
	}
	if !o.NoModel {
		want = append(want, defaultModel)
	}
	for _, part := range o.With {
		if part != "nixl" {
			return nil, Paths{}, fmt.Errorf("no part is called %q: use nixl", part)
		}
		if err := nixlHere(runtime.GOOS, runtime.GOARCH); err != nil {
			return nil, Paths{}, err
		}
		want = append(want, nixlWheel)
	}
	return want, paths, nil
}

// nixlHere says whether the pinned wheel is for this platform.
func nixlHere(goos, goarch string) error {
	if goos+"/"+goarch != "linux/amd64" {
		return fmt.Errorf("no NIXL library is known for %s/%s: install %s for it and name its libnixl_capi.so with --nixl-lib", goos, goarch, nixlWheel.spec)
	}
	return nil
}

// LocateNIXL tells where the NIXL library is without fetching or changing anything. dir as in
// Options.Dir. What `baton setup --with nixl` has fetched comes first, then the package in an
// environment of Python ($VIRTUAL_ENV, site-packages of the system). An error matches [ErrNotInstalled].
func LocateNIXL(dir string) (string, error) {
	dir, err := cacheDir(dir)
	if err != nil {
		return "", err
	}
	if nixlHere(runtime.GOOS, runtime.GOARCH) == nil && verifyInstalled(nixlWheel, nixlWheel.dir(dir)) == nil {
		return nixlPath(nixlWheel.dir(dir)), nil
	}
	for _, root := range []string{os.Getenv("VIRTUAL_ENV"), "/usr/local", "/usr"} {
		if root == "" {
			continue
		}
		for _, place := range []string{"lib/python3*/site-packages", "lib/python3*/dist-packages", "lib/python3/dist-packages"} {
			for _, cuda := range []string{".nixl_cu12.mesonpy.libs", ".nixl_cu13.mesonpy.libs"} {
				if found, _ := filepath.Glob(filepath.Join(root, place, cuda, "libnixl_capi.so")); len(found) > 0 {
					return found[len(found)-1], nil
				}
			}
		}
	}
	return "", fmt.Errorf("%w: the NIXL library is neither in %s nor in a site-packages directory; run baton setup --with nixl", ErrNotInstalled, dir)
}

func nixlPath(dir string) string { return filepath.Join(dir, nixlLibs, "libnixl_capi.so") }

func locate(dir string, there []artifact, paths Paths) Paths {
	for _, a := range there {
		switch a.kind {
		case "lib":
			paths.LibDir = a.dir(dir)
		case "models":
			paths.Model = filepath.Join(a.dir(dir), a.files[0].name)
		case "nixl":
			paths.NIXL = nixlPath(a.dir(dir))
		}
	}
	return paths
}

func cacheDir(dir string) (string, error) {
	if dir == "" {
		return DefaultDir()
	}
	return filepath.Abs(dir)
}

func (a artifact) dir(cache string) string { return filepath.Join(cache, a.kind, a.key) }

func notInstalled(dir string, want []artifact) []artifact {
	var missing []artifact
	for _, a := range want {
		if verifyInstalled(a, a.dir(dir)) != nil {
			missing = append(missing, a)
		}
	}
	return missing
}

func notInstalledError(dir string, missing []artifact) error {
	var parts []string
	for _, a := range missing {
		parts = append(parts, fmt.Sprintf("%s (%v)", a.what, verifyInstalled(a, a.dir(dir))))
	}
	return fmt.Errorf("%w in %s: %s; run baton setup", ErrNotInstalled, dir, strings.Join(parts, ", "))
}

// installAll fetches the missing artifacts under the lock of the cache.
func installAll(ctx context.Context, dir string, missing []artifact, out io.Writer) (err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return diskError(fmt.Errorf("make cache directory: %w", err))
	}
	unlock, err := lock(ctx, filepath.Join(dir, "setup.lock"), out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock()) }()
	if err := sweep(dir); err != nil {
		return err
	}
	for _, a := range missing {
		if verifyInstalled(a, a.dir(dir)) == nil {
			continue // another set-up did it while we waited for the lock
		}
		if err := install(ctx, dir, a, out); err != nil {
			return fmt.Errorf("set up %s: %w", a.what, diskError(err))
		}
	}
	return nil
}

// tempPrefix marks the directories of a set-up that is running, or was interrupted.
const tempPrefix = ".tmp-"

// sweep removes what interrupted set-ups left. Call it under the lock.
func sweep(dir string) error {
	old, err := filepath.Glob(filepath.Join(dir, tempPrefix+"*"))
	if err != nil {
		return fmt.Errorf("look for left-overs: %w", err)
	}
	for _, d := range old {
		if err := os.RemoveAll(d); err != nil {
			return fmt.Errorf("remove left-over of an interrupted set-up: %w", err)
		}
	}
	return nil
}
