"""What an error or a logger says, for the ranks of all frameworks."""

from __future__ import annotations

import logging
from contextlib import contextmanager

from sn_compress import CompressError


def message_of(call, kinds=CompressError):
    """What it raises says."""
    try:
        call()
    except kinds as error:
        return str(error)
    raise AssertionError("an error was to be raised")


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
