"""A plan without a budget is made for what this process may have."""

import pytest
import tensorflow as tf
from keras_samples import dense

import sn_memory.tensorflow
from sn_memory import PlanError
from sn_memory.base.host import Limit
from sn_memory.run import reserved
from sn_memory.run.reserved import process_bytes

FREE = process_bytes(None) + (320 << 20)


def small():
    return dense(32, 3, "relu"), tf.ones((16, 32))


def test_the_budget_counts_what_of_the_step_is_there(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: Limit("memory.max", FREE))
    model, sample = small()
    planned = sn_memory.tensorflow.plan(model, sample, profile=False)
    held = 4 * (3 * (32 * 32 + 32) + 16 * 32)
    room = FREE - process_bytes(None) - int(reserved.SHARE * FREE)
    assert planned.sn_memory.budget_bytes == room + held
    assert not planned.sn_memory.plan.overhead
    both = sn_memory.tensorflow.plan(model, [sample, sample[:4]], "limit", profile=False)
    assert both.sn_memory.budget_bytes == room + held
    assert both.sn_memory.process_bytes == process_bytes(both.sn_memory.trace.graph)


def test_where_nothing_is_known_the_error_asks_for_a_budget(monkeypatch):
    monkeypatch.setattr(reserved, "smallest_limit", lambda: None)
    with pytest.raises(PlanError, match=r"RLIMIT_DATA.*Pass budget="):
        sn_memory.tensorflow.plan(*small(), profile=False)
