"""Starts the router of package sglang_router or smg with that package's own flags, as its launcher does; the launchers
themselves import what only other commands of theirs need. The router ends when standard input does."""

import argparse
import importlib
import os
import signal
import sys

package = sys.argv[1]
args = importlib.import_module(package + ".router_args").RouterArgs
parser = argparse.ArgumentParser(prog=package)
args.add_cli_args(parser, use_router_prefix=False)
chosen = args.from_cli_args(parser.parse_args(sys.argv[2:]), use_router_prefix=False)
chosen._validate_router_args()

router = os.getpid()
if os.fork() == 0:  # not a thread: a running router keeps the interpreter's lock
    os.close(1)
    os.close(2)
    sys.stdin.buffer.read()
    if os.getppid() == router:
        os.kill(router, signal.SIGKILL)
    os._exit(0)

importlib.import_module(package + ".router").Router.from_args(chosen).start()
