"""What scripts of ranks share, in torch and TensorFlow."""

import gc
import logging
import os
from contextlib import contextmanager

from sn_compress import CompressError


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
