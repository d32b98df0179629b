// Command baton serves large language models with prefill and decode on separate
// workers. Run `baton up` for a whole stack on this machine, or a single role on any.
//
// Exit status: 0 success; 1 the command failed; 2 wrong usage.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

// version is set by the linker.
var version = "dev"

// errUsage marks errors that are the caller's: exit status 2.
type usageError struct{ err error }

func (e usageError) Error() string { return e.err.Error() }
func (e usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return usageError{fmt.Errorf(format, args...)} }

// globals are the flags of every command.
type globals struct {
	logLevel  string
	logFormat string
}

// logger writes structured lines to w.
func (g *globals) logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(g.logLevel)); err != nil {
		return nil, usagef("--log-level %q: use debug, info, warn or error", g.logLevel)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch g.logFormat {
	case "text":
		return slog.New(slog.NewTextHandler(w, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, opts)), nil
	default:
		return nil, usagef("--log-format %q: use text or json", g.logFormat)
	}
}

func newRoot() *cobra.Command {
	g := &globals{}
	root := &cobra.Command{
		Use:   "baton",
		Short: "Serve LLMs with prefill and decode on separate workers; every request ends",
		Long: `Baton serves large language models with prefill and decode on separate workers.
Every request ends: with its answer, or with a clear error that names its cause,
before its deadline, with all KV memory returned.

Exit status: 0 success, 1 failure, 2 wrong usage.`,
		Version:       version,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.PersistentFlags().StringVar(&g.logLevel, "log-level", "info", "debug, info, warn or error")
	root.PersistentFlags().StringVar(&g.logFormat, "log-format", "text", "text or json")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(
		newUp(g), newDemo(g), newPrefill(g), newDecode(g), newRouter(g),
		newSetup(), newDoctor(), newNIXLHelper(), newChat(), newChaos(), newBench(g), newRace(), newExplore(),
	)
	strict(root)
	return root
}

// strict makes wrong arguments usage errors, as wrong flags are, in c and its subcommands. A command that
// takes arguments says so in Args; one that has only subcommands shows its help.
func strict(c *cobra.Command) {
	if c.Args == nil {
		c.Args = noArgs
	}
	if !c.Runnable() {
		c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	}
	c.RunE = checked(c.RunE)
	for _, sub := range c.Commands() {
		strict(sub)
	}
}

func noArgs(c *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case c.HasSubCommands():
		return usagef("%s has no command %q; see `%s --help`", c.CommandPath(), args[0], c.CommandPath())
	default:
		return usagef("%s takes no arguments, but got %q; see `%s --help`", c.CommandPath(), args[0], c.CommandPath())
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	os.Exit(report(os.Stderr, err))
}

// report prints err for people and maps it to the exit status.
func report(w io.Writer, err error) int {
	if err == nil {
		return 0
	}
	fmt.Fprintln(w, "baton:", err)
	var usage usageError
	if errors.As(err, &usage) {
		return 2
	}
	var own interface{ ExitStatus() int }
	if errors.As(err, &own) {
		return own.ExitStatus()
	}
	return 1
}
