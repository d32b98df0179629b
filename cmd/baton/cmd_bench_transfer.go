package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/bench/kvbench"
	"github.com/baton-pd/baton/internal/transfer"
	"github.com/baton-pd/baton/internal/transfer/shm"
	"github.com/baton-pd/baton/internal/transfer/tcp"
)

// transferBench are the flags of `bench transfer`.
type transferBench struct {
	transports []string
	work       kvbench.Work
	sizeMiB    int
	json       string
}

func newBenchTransfer() *cobra.Command {
	b := transferBench{}
	c := &cobra.Command{
		Use:   "transfer",
		Short: "KV transfer between two processes: GB/s and latency by block size, every byte verified",
		RunE:  func(cmd *cobra.Command, _ []string) error { return b.run(cmd.Context(), cmd.OutOrStdout()) },
	}
	f := c.Flags()
	f.StringSliceVar(&b.transports, "transports", []string{"tcp", "shm"}, "transports to measure, in turn")
	f.IntSliceVar(&b.work.Blocks, "blocks", []int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20}, "block sizes in bytes")
	f.IntVar(&b.work.Rooms, "rooms", 1, "rooms at a time")
	f.IntVar(&b.work.Rounds, "rounds", 3, "repetitions; medians are reported")
	f.IntVar(&b.work.Latencies, "latencies", 2000, "single blocks timed for each size")
	f.IntVar(&b.sizeMiB, "size-mib", 256, "bytes a round, in MiB")
	f.StringVar(&b.json, "json", "", "also write the rows to this file")
	return c
}

func (b *transferBench) run(ctx context.Context, out io.Writer) error {
	b.work.Size = b.sizeMiB << 20
	if b.work.Rooms < 1 || b.work.Rounds < 1 || b.sizeMiB < 1 {
		return usagef("--rooms, --rounds and --size-mib must be at least 1")
	}
	for _, n := range b.work.Blocks {
		if n < 1 {
			return usagef("--blocks %d: a block has at least one byte", n)
		}
	}
	var rows []kvbench.Row
	for _, name := range b.transports {
		r, err := b.measure(ctx, name)
		rows = append(rows, r...)
		if err != nil {
			return err
		}
	}
	if err := kvbench.Table(out, rows); err != nil {
		return err
	}
	if b.json != "" {
		f, err := os.Create(b.json)
		if err != nil {
			return err
		}
		if err := kvbench.JSON(f, rows); err != nil {
			return err
		}
		if err := f.Close(); err != nil {
			return err
		}
	}
	for _, r := range rows {
		if !r.Verified {
			return fmt.Errorf("bench transfer: %s, blocks of %d bytes: bytes at the target are wrong", r.Transport, r.BlockBytes)
		}
	}
	return nil
}

// measure runs one transport with its own target process, which ends with its input.
func (b *transferBench) measure(ctx context.Context, name string) ([]kvbench.Row, error) {
	tr, err := benchTransport(name)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, "bench", "transfer-target", "--transport", name, "--size", strconv.Itoa(b.work.Size))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	answers, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	rows, err := kvbench.Measure(ctx, tr, name, b.work, in, answers)
	_ = in.Close() // the target ends with its input
	if werr := cmd.Wait(); err == nil && werr != nil {
		err = fmt.Errorf("bench transfer: target process: %w", werr)
	}
	return rows, err
}

// newBenchTransferTarget is the other process; `bench transfer` starts it.
func newBenchTransferTarget() *cobra.Command {
	var name string
	var size int
	c := &cobra.Command{
		Use: "transfer-target", Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			tr, err := benchTransport(name)
			if err != nil {
				return err
			}
			return kvbench.ServeTarget(tr, size, cmd.InOrStdin(), cmd.OutOrStdout())
		},
	}
	c.Flags().StringVar(&name, "transport", "tcp", "")
	c.Flags().IntVar(&size, "size", 256<<20, "")
	return c
}

func benchTransport(name string) (transfer.Transport, error) {
	switch name {
	case "tcp":
		return tcp.New(tcp.Config{}), nil
	case "shm":
		return shm.New(shm.Config{}), nil
	default:
		return nil, usagef("--transports %q: use tcp or shm", name)
	}
}
