"""What scripts of ranks share, in torch and TensorFlow."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / folder) for folder in (".", "compress")]
from rank_programs import logged as logged
from rank_programs import message_of as message_of
from rank_programs import settle as settle


@contextmanager
def on_nodes_of(size, rank):
    """As many ranks of each node as this, the last one as many as are left."""
    before = os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = f"node {rank // size}"
    try:
        yield
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before
