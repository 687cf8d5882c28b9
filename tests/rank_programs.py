"""What programs of ranks share, in all frameworks: messages, clocks of a tuner, garbage."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager
from dataclasses import replace

from sn_compress import CompressError
from sn_compress.prediction import tuning
from sn_compress.prediction.cost import step as step_of_model


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


class Clock:
    """Steps take as long as they are set to, and a little longer on each rank than before it."""

    now = 0.0

    def __init__(self, rank=0):
        self.rank = rank

    def __call__(self):
        return self.now * (1 + 0.01 * self.rank)


def price(seconds):
    """Let the tuner take a step that compresses for so long; None: as the model has it."""

    def priced(routes, **how):
        found = step_of_model(routes, **how)
        plain = all(route.method == "plain" for route in routes)
        return found if plain else replace(found, seconds=seconds)

    tuning.step = step_of_model if seconds is None else priced


@contextmanager
def tuner_lines(seconds=0.0):
    """What the tuner says, where a step that compresses is priced so: at nothing it is tried."""
    price(seconds)
    try:
        with logged(tuning.__name__, logging.INFO) as lines:
            yield lines
    finally:
        price(None)


def settle():
    """Between cases: what is there is no garbage.

    A new optimizer has all objects searched, and those of frameworks were most of what cases took.
    """
    gc.collect()
    gc.freeze()
