"""What scripts of ranks share, in torch and TensorFlow: cases that run in order, and node names."""

import os
import time
from contextlib import contextmanager


def run(cases, rank):
    """Run cases; print "ok CASE" of each, and on the first rank what it took."""
    for case in cases:
        start = time.monotonic()
        case()
        if rank == 0:
            print(f"{case.__name__}: {time.monotonic() - start:.1f} s", flush=True)
        print(f"ok {case.__name__}", flush=True)


def named(cases, names):
    """Those of these names; all where none is given."""
    return [case for case in cases if not names or case.__name__ in names]


@contextmanager
def on_nodes_of(size, rank):
    """As many ranks of each node as this, the last one as many as are left."""
    before = os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = f"node {rank // size}"
    try:
        yield
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before
