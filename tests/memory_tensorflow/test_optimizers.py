"""Bytes of optimizers, where their variables cannot be made without memory as well."""

import keras
import pytest
import tensorflow as tf
from keras_samples import dense

from sn_memory.base.errors import PlanWarning
from sn_memory.tensorflow import estimate

SAMPLE = tf.TensorSpec((64, 4))


def network():
    return dense(64, 1, "relu", keras.layers.Dense(8), inputs=4)


def held_by(optimizer, model):
    twin = type(optimizer).from_config(optimizer.get_config())
    twin.build(model.trainable_variables)
    return sum(tf.size(it).numpy() * tf.as_dtype(it.dtype).size for it in twin.variables)


@pytest.mark.parametrize("name", ["adafactor", "nadam", "adam", "lion", "rmsprop", "sgd"])
def test_of_any_kind(name):
    model, optimizer = network(), keras.optimizers.get(name)
    found = estimate(model, SAMPLE, optimizer=optimizer)
    assert found.optimizer_bytes == held_by(optimizer, model)
    assert not optimizer.built


class Own(keras.optimizers.SGD):
    """Says nothing of how it was made."""

    def __init__(self, model):
        super().__init__(0.1)
        self.model = model


def test_an_unknown_one_is_said_with_its_reason_and_a_wrong_name_is_an_error():
    model = network()
    with pytest.warns(PlanWarning, match="Own are unknown before its first step"):
        found = estimate(model, SAMPLE, optimizer=Own(model))
    assert found.optimizer_bytes == 0
    with pytest.raises(ValueError, match="optimizer"):
        estimate(network(), SAMPLE, optimizer="adamm")
