package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/bench/kvbench"
	"github.com/baton-pd/baton/internal/config"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// transferBench are the flags of `bench transfer`.
type transferBench struct {
	transports []string
	work       kvbench.Work
	sizeMiB    int
	json, svg  string
	fair       bool
	peers      bool
	python     string
	verbose    bool
	starts     int
}

func newBenchTransfer() *cobra.Command {
	b := transferBench{}
	c := &cobra.Command{
		Use:   "transfer",
		Short: "KV transfer between two processes: GB/s and latency by block size, every byte verified",
		RunE:  func(cmd *cobra.Command, _ []string) error { return b.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := c.Flags()
	f.StringSliceVar(&b.transports, "transports", []string{"tcp", "shm", "memcpy"}, "what to measure, side by side: tcp, shm, nixl, nixl-tcp (UCX_TLS=tcp), memcpy (one thread in one process)")
	f.IntSliceVar(&b.work.Blocks, "blocks", []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20}, "block sizes in bytes")
	f.IntVar(&b.work.Rooms, "rooms", 1, "rooms at a time")
	f.IntVar(&b.work.Rounds, "rounds", 3, "repetitions; medians are reported")
	f.IntVar(&b.starts, "starts", 1, "start everything anew this many times, the repetitions spread over them: each time processes get other memory, which is worth some per cent")
	f.IntVar(&b.work.Latencies, "latencies", 2000, "single blocks timed for each size (0: none)")
	f.IntVar(&b.sizeMiB, "size-mib", 256, "bytes a round, in MiB; each transport and peer has memory of twice that")
	f.DurationVar(&b.work.Patience, "patience", 30*time.Second, "how long all in all to wait for two cores that share no cache at the moment, and to repeat rounds, on machines of two cores (0: neither)")
	f.Var(&b.work.Huge, "huge-pages", "memory of both processes: advise, hugetlb (reserve them before: vm.nr_hugepages) or off")
	f.StringVar(&b.json, "json", "", "also write the rows to this file")
	f.StringVar(&b.svg, "svg", "", "also draw the rows into this file")
	f.BoolVar(&b.fair, "fair", false, "instead: small writes of one room while another one moves 1 GiB")
	f.BoolVar(&b.peers, "peers", false, "also run NIXL's and Mooncake's Python APIs on the same work")
	f.StringVar(&b.python, "python", "python3", "interpreter that has nixl-cu12, mooncake-transfer-engine-non-cuda and numpy")
	f.BoolVar(&b.verbose, "verbose", false, "show what the peers print")
	return c
}

func (b *transferBench) run(ctx context.Context, out io.Writer) error {
	config.SpareProcs() // as the workers do
	defer config.HeapFloor()()
	b.work.Size = b.sizeMiB << 20
	if b.work.Rooms < 1 || b.work.Rounds < 1 || b.sizeMiB < 1 {
		return usagef("--rooms, --rounds and --size-mib must be at least 1")
	}
	if b.starts < 1 || b.starts > b.work.Rounds {
		return usagef("--starts %d: at least 1, and no more than --rounds (%d)", b.starts, b.work.Rounds)
	}
	for _, n := range b.work.Blocks {
		if n < 1 {
			return usagef("--blocks %d: a block has at least one byte", n)
		}
	}
	if b.fair {
		return b.runFair(ctx, out)
	}
	rows, failed := b.measure(ctx)
	if len(rows) == 0 && failed != nil {
		return failed
	}
	if err := kvbench.Table(out, rows); err != nil {
		return err
	}
	if err := b.ratios(out, rows); err != nil {
		return err
	}
	if err := toFile(b.json, func(w io.Writer) error { return kvbench.JSON(w, rows) }); err != nil {
		return err
	}
	if err := toFile(b.svg, func(w io.Writer) error { return kvbench.SVG(w, rows) }); err != nil {
		return err
	}
	for _, r := range rows {
		if !r.Verified {
			return fmt.Errorf("bench transfer: %s, blocks of %d bytes: bytes at the target are wrong", r.Transport, r.BlockBytes)
		}
	}
	return failed
}

// ratios compares tcp with the peers' tcp, and shm with whatever NIXL has, and with memcpy.
func (b *transferBench) ratios(out io.Writer, rows []kvbench.Row) error {
	var all []kvbench.Ratio
	if b.peers {
		all = append(all, kvbench.Ratios(rows, "tcp", func(n string) bool { return strings.Contains(n, " tcp") })...)
		all = append(all, kvbench.Ratios(rows, "shm", func(n string) bool { return strings.HasPrefix(n, "nixl ") })...)
	}
	all = append(all, kvbench.Ratios(rows, "shm", func(n string) bool { return n == "memcpy" })...)
	if len(all) == 0 {
		return nil
	}
	fmt.Fprintln(out)
	return kvbench.RatioTable(out, all)
}

// toFile writes a file; nothing if path is empty.
func toFile(path string, write func(io.Writer) error) error {
	if path == "" {
		return nil
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// runFair prints one line a transport.
func (b *transferBench) runFair(ctx context.Context, out io.Writer) error {
	var rows []kvbench.FairRow
	for _, name := range b.transports {
		if name == "memcpy" {
			continue
		}
		t, err := b.startTarget(ctx, name)
		if err != nil {
			return err
		}
		row, err := kvbench.Fair(ctx, t.tr, name, b.work, t.in, t.answers)
		if err := errors.Join(err, t.end()); err != nil {
			return err
		}
		rows = append(rows, row)
	}
	if err := kvbench.FairTable(out, rows); err != nil {
		return err
	}
	return toFile(b.json, func(w io.Writer) error { return kvbench.JSON(w, rows) })
}

// measure runs all transports and peers side by side, started b.starts times. There may be rows beside an error.
func (b *transferBench) measure(ctx context.Context) ([]kvbench.Row, error) {
	bench := kvbench.NewBench(b.work)
	var err error
	for k := range b.starts {
		rounds := b.work.Rounds*(k+1)/b.starts - b.work.Rounds*k/b.starts
		err = errors.Join(err, b.sitting(ctx, bench, k, rounds))
	}
	return bench.Rows(), err
}

// sitting starts everything, does rounds and ends everything. Who is started first gets what memory lies scattered, so
// that is another one each time, and the peers are it every other time.
func (b *transferBench) sitting(ctx context.Context, bench *kvbench.Bench, number, rounds int) (err error) {
	var systems []kvbench.System
	defer func() {
		for _, s := range systems {
			err = errors.Join(err, s.Close())
		}
	}()
	var missing error
	peers := func() {
		log := io.Discard
		if b.verbose {
			log = os.Stderr
		}
		var more []kvbench.System
		more, missing = kvbench.Peers(ctx, b.python, b.work, log)
		systems = append(systems, more...)
	}
	if b.peers && number%2 == 1 {
		peers()
	}
	for i := range b.transports {
		s, err := b.start(ctx, b.transports[(i+number)%len(b.transports)])
		if err != nil {
			return err
		}
		systems = append(systems, s)
	}
	if b.peers && number%2 == 0 {
		peers()
	}
	return errors.Join(missing, bench.Run(ctx, systems, rounds))
}

// start makes a transport or memcpy ready to be measured.
func (b *transferBench) start(ctx context.Context, name string) (kvbench.System, error) {
	if name == "memcpy" {
		return kvbench.Memcpy(b.work)
	}
	t, err := b.startTarget(ctx, name)
	if err != nil {
		return nil, err
	}
	s, err := kvbench.Open(ctx, t.tr, name, b.work, t.in, t.answers)
	if err != nil {
		return nil, errors.Join(err, t.end())
	}
	return sourceAndTarget{s, t}, nil
}

// sourceAndTarget ends the target process with the source.
type sourceAndTarget struct {
	*kvbench.Source
	target *benchTarget
}

func (s sourceAndTarget) Close() error { return errors.Join(s.Source.Close(), s.target.end()) }

// benchTarget is a target process and this process's transport of the same kind.
type benchTarget struct {
	tr      transfer.Transport
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers io.Reader
}

func (b *transferBench) startTarget(ctx context.Context, name string) (*benchTarget, error) {
	tr, err := benchTransport(name)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	t := &benchTarget{tr: tr}
	t.cmd = exec.CommandContext(ctx, self, "bench", "transfer-target", "--transport", name, "--size", strconv.Itoa(b.work.Size),
		"--huge-pages", b.work.Huge.String())
	t.cmd.Stderr = os.Stderr
	if t.in, err = t.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if t.answers, err = t.cmd.StdoutPipe(); err != nil {
		return nil, err
	}
	return t, t.cmd.Start()
}

// end ends the process with its input and waits for it.
func (t *benchTarget) end() error {
	_ = t.in.Close()
	if err := t.cmd.Wait(); err != nil {
		return fmt.Errorf("bench transfer: target process: %w", err)
	}
	return nil
}

// newBenchTransferTarget is the other process; `bench transfer` starts it.
func newBenchTransferTarget() *cobra.Command {
	var name string
	var work kvbench.Work
	c := &cobra.Command{
		Use: "transfer-target", Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			config.SpareProcs()
			defer config.HeapFloor()()
			tr, err := benchTransport(name)
			if err != nil {
				return err
			}
			return kvbench.ServeTarget(tr, work, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	c.Flags().StringVar(&name, "transport", "tcp", "")
	c.Flags().IntVar(&work.Size, "size", 256<<20, "")
	c.Flags().Var(&work.Huge, "huge-pages", "")
	return c
}

func benchTransport(name string) (transfer.Transport, error) {
	switch name {
	case "tcp":
		return tcp.New(tcp.Config{}), nil
	case "shm":
		return shm.New(shm.Config{}), nil
	case "nixl", "nixl-tcp":
		n := nixlFlags{backend: "UCX", memory: "DRAM"}
		if name == "nixl-tcp" {
			n.tls = "tcp"
		}
		return n.open("", "127.0.0.1:0", "", slog.New(slog.DiscardHandler))
	default:
		return nil, usagef("--transports %q: use tcp, shm, nixl, nixl-tcp or memcpy", name)
	}
}
