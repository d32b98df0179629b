package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/baton-pd/baton/internal/setup"
)

func newSetup() *cobra.Command {
	var o setup.Options
	c := &cobra.Command{
		Use:   "setup",
		Short: "Fetch the engine library and the default model, verified by checksum",
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Out = cmd.OutOrStdout()
			p, err := setup.Run(cmd.Context(), o)
			if err != nil {
				return err
			}
			fmt.Fprintf(o.Out, "engine library  %s\ndefault model   %s\n", p.LibDir, p.Model)
			if p.NIXL != "" {
				fmt.Fprintf(o.Out, "NIXL library    %s\n", p.NIXL)
			}
			return nil
		},
	}
	c.Flags().StringVar(&o.Dir, "dir", "", "cache directory (default: $BATON_CACHE or the user's cache directory)")
	c.Flags().StringVar(&o.LibDir, "lib-dir", "", "take the engine library from here instead of fetching it")
	c.Flags().BoolVar(&o.Offline, "offline", false, "only check what is there; fetch nothing")
	c.Flags().BoolVar(&o.NoModel, "no-model", false, "fetch only the engine library")
	c.Flags().StringSliceVar(&o.With, "with", nil, "fetch more: nixl (the NIXL library for --transport nixl, 69 MB)")
	return c
}
