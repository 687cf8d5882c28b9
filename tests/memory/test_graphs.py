"""The generated networks against their papers, and their gradients against what each op needs."""

from collections import Counter

import pytest
from graphs import (
    Net,
    alexnet,
    cifar_resnet,
    densenet121,
    inception_v4,
    layered,
    resnet,
    transformer,
    unet,
    vgg16,
)
from graphs.layers import concat, conv

from sn_memory.graph.liveness import lifetimes, peak

# Millions of parameters and 10^9 multiply-adds per image: the papers' tables and, where they only
# round, the counts that the reference implementations print.
KNOWN = [
    (lambda: alexnet(1), 62.378344, 1.135),
    (lambda: alexnet(1, groups=2), 60.965224, 0.72),
    (lambda: vgg16(1), 138.357544, 15.47),
    (lambda: resnet(1, 50), 25.557032, 4.09),
    (lambda: resnet(1, 101), 44.549160, 7.80),
    (lambda: resnet(1, 152), 60.192808, 11.51),
    (lambda: densenet121(1), 7.978856, 2.83),
    (lambda: inception_v4(1), 42.679816, 12.27),
    (lambda: cifar_resnet(1, 110), 1.727962, 0.253),
    (lambda: unet(1), 31.030658, None),
]
EVERY = [
    lambda: alexnet(2),
    lambda: vgg16(2, inplace_relu=True, optimizer="momentum"),
    lambda: resnet(2, workspaces=True, optimizer="adam"),
    lambda: densenet121(2, early_update=True),
    lambda: inception_v4(2, optimizer="none"),
    lambda: unet(1, inplace_relu=True, workspaces=True),
    lambda: cifar_resnet(2, 56),
    lambda: transformer(1, 2, drop=True),
    lambda: layered(30, seed=3),
    lambda: resnet(2, granularity="call", gradients="buffers", inplace_relu=True),
    lambda: unet(1, granularity="call", inplace_relu=True, optimizer="none"),
]
CALLS = {"granularity": "call", "gradients": "buffers", "inplace_relu": True}


@pytest.mark.parametrize(("build", "parameters", "macs"), KNOWN)
def test_parameters_and_arithmetic_are_those_of_the_papers(build, parameters, macs):
    net = build()
    assert net.parameter_count == round(parameters * 1e6)
    if macs is not None:
        # The papers leave out everything but convolutions and matrix products.
        heavy = sum(op.flops for op in net.ops if op.kind in ("conv", "linear"))
        assert heavy / 2e9 == pytest.approx(macs, rel=0.01)


@pytest.mark.parametrize("build", EVERY)
def test_whatever_is_made_is_read_or_stays(build):
    graph = build().graph()
    spans = lifetimes(graph)
    assert peak(graph).bytes > graph.base_bytes
    assert set(graph.arrays.source) <= {"roofline", "measured"}
    ends = zip(graph.storages, spans.start, spans.end, strict=True)
    assert not [it for it, start, end in ends if not (it.resident or it.keep or end > start + 1)]


@pytest.mark.parametrize("build", EVERY[:7])
def test_every_parameter_has_one_gradient_that_reaches_its_update(build):
    net = build()
    assert set(Counter(name for op in net.ops for name in op.outputs).values()) == {1}
    read = {name for op in net.ops if op.phase == "update" for name in op.inputs}
    gradients = [it for it in net.storages.values() if it.role == "gradient"]
    final = [it for it in gradients if it.name in read] or [it for it in gradients if it.keep]
    parameters = [it for group in net.parameters.values() for it in group]
    assert sorted(it.bytes for it in final) == sorted(it.nbytes for it in parameters)


@pytest.mark.parametrize("build", [vgg16, resnet, unet])
def test_calls_and_backward_passes_cost_what_they_should(build):
    net, fine = build(2), build(2, **CALLS)
    flops = Counter()
    for op in net.ops:
        flops[op.phase] += op.flops
    # The first convolution needs no gradient of the image; elementwise ops are a percent or two.
    assert flops["backward"] / flops["forward"] == pytest.approx(2, rel=0.03)
    # A convolution's backward pass is two calls for the same arithmetic.
    heavy = [sum(op.flops for op in it.ops if "conv" in op.kind) for it in (net, fine)]
    assert heavy[0] == heavy[1]
    before, after = net.graph(), fine.graph()
    # Gradients of parameters are resident now: as much again as the parameters.
    assert after.base_bytes - before.base_bytes == 4 * fine.parameter_count
    assert peak(after).bytes - after.base_bytes < peak(before).bytes - before.base_bytes


def test_settings_save_memory_or_buy_time():
    assert peak(vgg16(8, inplace_relu=True).graph()).bytes <= peak(vgg16(8).graph()).bytes
    assert peak(resnet(1, early_update=True).graph()).bytes < peak(resnet(1).graph()).bytes
    assert all(not op.workspaces for op in vgg16(4).graph().ops)
    ways = [op.workspaces for op in vgg16(4, workspaces=True).graph().ops if op.workspaces]
    assert all(plain.bytes == 0 < fast[0].bytes for plain, *fast in ways)
    # Every convolution of VGG-16 is 3x3 at stride 1.
    assert sum(way.name == "winograd" for it in ways for way in it) == 26


def test_layered_graphs_repeat_by_seed():
    assert layered(40, seed=1).graph() == layered(40, seed=1).graph()
    assert layered(40, seed=1).graph() != layered(40, seed=2).graph()


def test_shapes_that_do_not_fit_are_refused():
    net = Net("bad", 1)
    x = net.input(1, 3, 4, 4)
    with pytest.raises(ValueError, match="does not fit"):
        conv(x, 1, 7)
    with pytest.raises(ValueError, match="sizes differ"):
        concat([x, conv(x, 1, 2)])
    with pytest.raises(ValueError, match="6n"):
        cifar_resnet(1, 100)
