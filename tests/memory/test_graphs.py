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
from graphs.layers import add, classify, concat, conv, flatten, linear, norm, relu

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


def test_by_call_each_backward_call_reads_what_it_needs():
    net = Net("calls", 2, **CALLS)
    a = norm(conv(net.input(2, 3, 8, 8), 4, 3, pad=1))
    b = conv(relu(a), 4, 3, pad=1)
    net.finish(classify(linear(flatten(b), 5)))
    ops = {op.name: op for op in net.ops}
    assert ops["bn1.stats"].outputs == ("bn1.stats",)
    assert ops["bn1"].inputs == ("conv1", "bn1.stats", "bn1.weight", "bn1.bias")
    weight, data = ops["conv2.back.weight"], ops["conv2.back.input"]
    assert (weight.outputs, weight.writes) == ((), ("conv2.weight.grad",))
    assert "bn1" in weight.inputs
    assert "bn1" not in data.inputs
    # ReLU works over its input, and its backward over the gradient.
    assert ops["relu1"].writes == ("bn1",)
    assert ops["relu1.back"].writes == data.outputs
    # The image needs no gradient.
    assert "conv1.back.input" not in ops


@pytest.mark.parametrize("settings", [{}, CALLS], ids=["by op", "by call"])
def test_a_join_shares_its_gradient_until_somebody_changes_it(settings):
    net = Net("join", 1, **settings)
    x = linear(net.input(1, 4), 4)
    other = linear(x, 4) if settings else x
    net.finish(classify(linear(add(relu(x), relu(other)), 4)))
    back = [op for op in net.ops if op.kind == "relu_backward"]
    if settings:
        # The sum's gradient belongs to both; who comes last may have it.
        assert [len(op.outputs) for op in back] == [1, 0]
        return
    ops = {op.name: op for op in net.ops}
    shared = ops["linear2.back"].outputs[0]
    assert all(shared in op.inputs for op in back)
    # x was read twice: the second gradient is added to the first, in place.
    assert (ops["sum1"].outputs, ops["sum1"].writes) == ((), ops["relu2.back"].outputs)


def test_concat_hands_each_part_its_slice():
    net = Net("concat", 1)
    x = conv(net.input(1, 3, 4, 4), 2, 1)
    net.finish(classify(linear(flatten(concat([x, conv(x, 6, 1)])), 2)))
    split = next(op for op in net.ops if op.kind == "split")
    assert [net.storages[name].bytes for name in split.outputs] == [4 * 2 * 16, 4 * 6 * 16]


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
