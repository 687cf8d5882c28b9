"""What a planned TensorFlow model says of itself, and planning while it is at work."""

import pytest
import tensorflow as tf
from keras_samples import dense, step_of

import sn_memory
import sn_memory.tensorflow as rim


def network():
    return dense(32, 4, "tanh")


def test_a_planned_model_tells_what_it_does(tmp_path, monkeypatch):
    stages = []
    monkeypatch.setattr(sn_memory.settings, "progress", stages.append)
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
    assert list(dict.fromkeys(it.stage for it in stages)) == ["trace", "search", "trial"]


@pytest.mark.parametrize(
    ("planned", "first", "last"),
    [
        (
            lambda: rim.plan_step(step_of(network()), tf.ones((64, 32)), "90%", profile=False),
            "Plan by ",
            "back end graph, planned for 1: as its sample",
        ),
        (
            lambda: rim.plan(network(), tf.ones((64, 32)), "200%", backend="layers"),
            "Plan by measured steps",
            "back end layers, planned for 1: any",
        ),
    ],
)
def test_steps_and_plans_by_layers_tell_what_they_do(planned, first, last):
    lines = repr(planned().sn_memory).splitlines()
    assert lines[0].startswith(first)
    assert lines[-1] == last


def test_what_is_measured_cannot_be_the_same_everywhere(counted_work):
    for settings in ({}, {"profile": False, "backend": "layers"}):
        with pytest.raises(ValueError, match="measured seconds differ"):
            rim.plan(network(), tf.zeros((64, 32)), "90%", **settings)
    with pytest.raises(ValueError, match="measured seconds differ"):
        rim.plan_step(step_of(network()), tf.ones((64, 32)), "90%")


@pytest.mark.parametrize("name", ["deterministic", "progress"])
def test_what_was_a_keyword_is_refused_with_what_to_write(name):
    match = rf"'{name}', which was removed.*sn_memory\.settings\.{name} = "
    with pytest.raises(TypeError, match=match):
        rim.plan(network(), tf.zeros((64, 32)), "90%", **{name: True})
    with pytest.raises(TypeError, match=match):
        rim.plan_step(step_of(network()), tf.ones((64, 32)), "90%", **{name: True})
