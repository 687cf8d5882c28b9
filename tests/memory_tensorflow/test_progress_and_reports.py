"""What a planned TensorFlow model says of itself, and planning while it is at work."""

import keras
import pytest
import tensorflow as tf

import sn_memory
import sn_memory.tensorflow as rim


def network():
    layers = [keras.layers.Dense(32, "tanh") for _ in range(4)]
    return keras.Sequential([keras.Input((32,)), *layers])


def step_of(width=32):
    weights = [tf.Variable(tf.ones((width, width)) / width) for _ in range(6)]

    def step(x):
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_sum(h)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(1e-4 * gradient)
        return loss

    return step


def test_a_planned_model_tells_what_it_does(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(sn_memory.settings, "progress", told.append)
    model = rim.plan(network(), tf.zeros((64, 32)), "90%", profile=False)
    record = model.sn_memory
    lines = repr(record).splitlines()
    assert len(lines) == 5
    assert lines[:4] == repr(record.plan).splitlines()
    assert lines[4] == "back end graph, planned for 1: inputs=float32[64, 32]"
    assert 'src="data:image/png;base64,' in record._repr_html_()
    page = record.report()
    assert page.startswith("<!DOCTYPE html>")
    record.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == page
    assert list(dict.fromkeys(it.stage for it in told)) == ["trace", "search", "trial"]


def test_a_planned_step_tells_what_it_does():
    planned = rim.plan_step(step_of(), tf.ones((64, 32)), "90%", profile=False)
    last = repr(planned.sn_memory).splitlines()[-1]
    assert last == "back end graph, planned for 1: as its sample"


def test_a_plan_by_layers_tells_what_it_does():
    model = rim.plan(network(), tf.ones((64, 32)), "200%", backend="layers")
    lines = repr(model.sn_memory).splitlines()
    assert (lines[0], lines[-1]) == (
        "Plan by measured steps",
        "back end layers, planned for 1: any",
    )


def test_what_is_measured_cannot_be_the_same_everywhere(counted_work):
    for settings in ({}, {"profile": False, "backend": "layers"}):
        with pytest.raises(ValueError, match="measured seconds differ"):
            rim.plan(network(), tf.zeros((64, 32)), "90%", **settings)
    with pytest.raises(ValueError, match="measured seconds differ"):
        rim.plan_step(step_of(), tf.ones((64, 32)), "90%")
