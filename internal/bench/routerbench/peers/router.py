"""Runs the HTTP router of a Python package (first argument: sglang_router or smg) with that package's own flags, which follow. Its commands would
import more than a router needs. It ends with standard input, by its starter's kill."""

import argparse
import importlib
import sys

package, flags = sys.argv[1], sys.argv[2:]
router_args = importlib.import_module(f"{package}.router_args").RouterArgs
parser = argparse.ArgumentParser(prog=package)
router_args.add_cli_args(parser, use_router_prefix=False)
parsed = router_args.from_cli_args(parser.parse_args(flags), use_router_prefix=False)
importlib.import_module(f"{package}.router").Router.from_args(parsed).start()
