"""What scripts of ranks share, in torch and TensorFlow."""

import gc
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sn_compress.prediction.cost import step as step_of_model

sys.path.append(str(Path(__file__).parents[2]))
from messages import logged as logged
from messages import message_of as message_of


class Clock:
    """Steps take as long as they are set to."""

    now = 0.0

    def __call__(self):
        return self.now


def priced(seconds, routes, **how):
    """In the place of the model: a step that compresses takes so long."""
    found = step_of_model(routes, **how)
    plain = all(route.method == "plain" for route in routes)
    return found if plain else replace(found, seconds=seconds)


def settle():
    """Between cases: what is there is no garbage.

    A new optimizer has all objects searched, and those of frameworks were most of what cases took.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def on_nodes_of(size, rank):
    """As many ranks of each node as this, the last one as many as are left."""
    before = os.environ["HOROVOD_HOSTNAME"]
    os.environ["HOROVOD_HOSTNAME"] = f"node {rank // size}"
    try:
        yield
    finally:
        os.environ["HOROVOD_HOSTNAME"] = before
