"""What scripts of ranks share, in torch and TensorFlow: cases that run in order, and node names."""

import importlib
import itertools
import os
import sys
import time
from contextlib import contextmanager

from sn_compress import CompressError


def main(cases, hvd, more=(), **options):
    """Start Horovod and run the cases, then those of scripts that are named on the command line.

    Of the cases, and of `more`, only those run that are asked for by name.
    """
    hvd.init(**options)
    scripts = [word[:-3] for word in sys.argv[1:] if word.endswith(".py")]
    if scripts:
        others = [importlib.import_module(script).CASES for script in scripts]
        cases = list(itertools.chain(cases, *others))
    elif asked := sys.argv[1:]:
        cases = [case for case in (*cases, *more) if case.__name__ in asked]
    run(cases, hvd.rank())


def run(cases, rank):
    """Run cases; print "ok CASE" of each, and on the first rank what it took."""
    for case in cases:
        start = time.monotonic()
        case()
        if rank == 0:
            print(f"{case.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        print(f"ok {case.__name__}", flush=True)


def message_of(call, kinds=CompressError):
    """What it raises says."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("an error was to be raised")


@contextmanager
def on_nodes_of(size, rank):
    """As many ranks of each node as this, the last one as many as are left."""
    before = os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = f"node {rank // size}"
    try:
        yield
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before
