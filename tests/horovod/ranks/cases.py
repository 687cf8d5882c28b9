"""What scripts of ranks share, in torch and TensorFlow."""

import gc
import logging
import os
from contextlib import contextmanager
from dataclasses import replace

from sn_compress import CompressError
from sn_compress.prediction.cost import step as step_of_model


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


@contextmanager
def logged(name="sn_compress", level=logging.WARNING):
    """What a logger of the package says meanwhile."""
    said, handler, logger = [], logging.Handler(), logging.getLogger(name)
    handler.emit = lambda record: said.append(record.getMessage())
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield said
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
