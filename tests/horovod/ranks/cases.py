"""What scripts of ranks share, in torch and TensorFlow: cases that run in order, and node names."""

import gc
import importlib
import itertools
import os
import sys
import time
from contextlib import contextmanager

from sn_compress import CompressError


def main(cases, hvd, more=(), before=lambda: None, **options):
    """Start Horovod and run the cases, then those of scripts that are named on the command line.

    Of the cases, and of `more`, only those run that are asked for by name; `before` each is called.
    """
    hvd.init(**options)
    scripts = [word[:-3] for word in sys.argv[1:] if word.endswith(".py")]
    if scripts:
        others = [importlib.import_module(script).CASES for script in scripts]
        cases = list(itertools.chain(cases, *others))
    elif asked := sys.argv[1:]:
        cases = [case for case in (*cases, *more) if case.__name__ in asked]
    run(cases, hvd.rank(), before)


def run(cases, rank, before=lambda: None):
    """Run cases; print "ok CASE" of each, and on the first rank what it took."""
    for case in cases:
        before()
        start = time.monotonic()
        case()
        if rank == 0:
            print(f"{case.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        print(f"ok {case.__name__}", flush=True)


def settle():
    """Between cases: what is there is no garbage.

    A new optimizer has all objects searched, and those of frameworks were most of what cases took.
    """
    gc.collect()
    gc.freeze()


def named(word):
    """The case of another script that is asked for as SCRIPT.py:CASE."""
    script, _, case = word.partition(".py:")
    return getattr(importlib.import_module(script), case)


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
