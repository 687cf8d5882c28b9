"""The generated networks against their papers, and the tape against small nets done by hand."""

from collections import Counter

import pytest
from graphs import (
    V100_LIKE,
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
from graphs.layers import add, classify, concat, conv, flatten, linear, max_pool, norm, relu

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


@pytest.mark.parametrize(("build", "parameters", "macs"), KNOWN)
def test_parameters_and_arithmetic_are_those_of_the_papers(build, parameters, macs):
    net = build()
    assert net.parameter_count == round(parameters * 1e6)
    if macs is not None:
        # The papers leave out everything but convolutions and matrix products.
        heavy = sum(op.flops for op in net.ops if op.kind in ("conv", "linear"))
        forward = sum(
            op.flops for op in net.ops if op.phase == "forward" and op.kind in ("conv", "linear")
        )
        assert heavy == forward
        assert forward / 2e9 == pytest.approx(macs, rel=0.01)


@pytest.mark.parametrize("build", EVERY)
def test_every_graph_is_valid_and_live(build):
    net = build()
    graph = net.graph()
    arrays, spans, top = graph.arrays, lifetimes(graph), peak(graph)
    assert top.bytes > graph.base_bytes
    assert set(arrays.source) <= {"roofline", "measured"}
    # Whatever is made is read, or stays.
    unread = [
        storage.name
        for storage, start, end in zip(graph.storages, spans.start, spans.end, strict=True)
        if not storage.resident and not storage.keep and end == start + 1
    ]
    assert unread == []


@pytest.mark.parametrize("build", EVERY[:7])
def test_every_parameter_has_one_gradient_that_reaches_its_update(build):
    net = build()
    made = Counter(name for op in net.ops for name in op.outputs)
    assert set(made.values()) == {1}
    gradients = {
        name
        for op in net.ops
        if op.phase == "update"
        for name in op.inputs
        if net.storages[name].role == "gradient"
    } or {s.name for s in net.storages.values() if s.keep and s.role == "gradient"}
    parameters = [p for group in net.parameters.values() for p in group]
    assert len(gradients) == len(parameters)
    assert sorted(net.storages[g].bytes for g in gradients) == sorted(p.nbytes for p in parameters)


@pytest.mark.parametrize("build", [lambda: vgg16(1), lambda: resnet(1), lambda: unet(1)])
def test_the_backward_pass_costs_twice_the_forward_pass(build):
    net = build()
    flops = Counter()
    for op in net.ops:
        flops[op.phase] += op.flops
    # The first convolution needs no gradient of the image; elementwise ops are a percent or two.
    assert flops["backward"] / flops["forward"] == pytest.approx(2, rel=0.03)


def test_what_each_layer_keeps():
    net = Net("keeps", 2)
    image = net.input(2, 3, 8, 8)
    a = conv(image, 4, 3, pad=1)
    b = norm(a)
    c = relu(b)
    d = max_pool(c, 2, 2)
    net.finish(classify(linear(flatten(d), 5)))
    reads = {op.name: set(op.inputs) for op in net.ops}
    forward = {name: s for name, s in net.storages.items() if s.role != "gradient"}
    kept = {name: ops & forward.keys() for name, ops in reads.items() if name.endswith(".back")}
    assert kept == {
        "softmax.back": {"softmax", "labels"},
        "linear1.back": {"pool1", "linear1.weight"},
        "pool1.back": {"pool1.index"},
        "relu1.back": {"relu1"},
        "bn1.back": {"conv1", "bn1.stats", "bn1.weight"},
        "conv1.back": {"input", "conv1.weight"},
    }
    # The image needs no gradient.
    assert not any("d(input)" in name for op in net.ops for name in op.outputs)


def test_a_join_shares_its_gradient_until_somebody_changes_it():
    net = Net("join", 1)
    x = linear(net.input(1, 4), 4)
    left, right = relu(x), relu(x)
    net.finish(classify(linear(add(left, right), 4)))
    by_name = {op.name: op for op in net.ops}
    shared = by_name["linear2.back"].outputs[0]
    assert shared in by_name["relu1.back"].inputs
    assert shared in by_name["relu2.back"].inputs
    # x was read twice: the second gradient is added to the first, in place.
    total = by_name["sum1"]
    assert total.outputs == ()
    assert total.writes == by_name["relu2.back"].outputs

    net = Net("join with itself", 1)
    x = linear(net.input(1, 4), 4)
    net.finish(classify(linear(add(x, relu(x)), 4)))
    by_name = {op.name: op for op in net.ops}
    # The sum's gradient is the skip's gradient too; by then nobody else needs it.
    assert by_name["sum1"].writes == by_name["linear2.back"].outputs[:1]


def test_concat_hands_each_part_its_slice():
    net = Net("concat", 1)
    x = conv(net.input(1, 3, 4, 4), 2, 1)
    y = concat([x, conv(x, 6, 1)])
    net.finish(classify(linear(flatten(y), 2)))
    split = next(op for op in net.ops if op.kind == "split")
    assert [net.storages[name].bytes for name in split.outputs] == [4 * 2 * 16, 4 * 6 * 16]
    with pytest.raises(ValueError, match="sizes differ"):
        concat([x, conv(x, 1, 2)])


def test_in_place_relu_and_early_updates_save_memory():
    assert peak(vgg16(8, inplace_relu=True).graph()).bytes <= peak(vgg16(8).graph()).bytes
    late, early = resnet(1).graph(), resnet(1, early_update=True).graph()
    assert peak(early).bytes < peak(late).bytes
    assert sorted(op.name for op in early.ops) == sorted(op.name for op in late.ops)


def test_workspaces_buy_time():
    graph = vgg16(4, workspaces=True).graph()
    found = 0
    for op in graph.ops:
        ways = op.workspaces
        if op.kind in ("conv", "conv_backward"):
            found += any(way.name == "winograd" for way in ways)
            assert ways[0].bytes == 0
            assert all(way.bytes > 0 for way in ways[1:])
            assert min(way.seconds for way in ways) > 0
    # Every convolution of VGG-16 is 3x3 at stride 1.
    assert found == 26
    assert all(not op.workspaces for op in vgg16(4).graph().ops)


def test_layered_graphs_repeat_by_seed():
    assert layered(40, seed=1).graph() == layered(40, seed=1).graph()
    assert layered(40, seed=1).graph() != layered(40, seed=2).graph()
    net = layered(40, seed=1)
    # One more op ties the loose ends together to a loss.
    assert sum(op.phase == "forward" for op in net.ops) == 41
    assert net.device is V100_LIKE


CALLS = {"granularity": "call", "gradients": "buffers", "inplace_relu": True}


def test_by_call_a_net_keeps_its_arithmetic_and_holds_less():
    for build in (vgg16, resnet, unet):
        coarse, fine = build(2), build(2, **CALLS)
        # A convolution's backward pass is two calls for the same arithmetic.
        flops = [sum(op.flops for op in net.ops if "conv" in op.kind) for net in (coarse, fine)]
        assert flops[0] == flops[1]
        assert len(fine.ops) > len(coarse.ops)
        before, after = coarse.graph(), fine.graph()
        # Gradients of parameters are resident now: as much again as the parameters.
        assert after.base_bytes - before.base_bytes == 4 * fine.parameter_count
        assert peak(after).bytes - after.base_bytes < peak(before).bytes - before.base_bytes


def test_by_call_each_backward_call_reads_what_it_needs():
    net = Net("calls", 2, **CALLS)
    a = norm(conv(net.input(2, 3, 8, 8), 4, 3, pad=1))
    b = conv(relu(a), 4, 3, pad=1)
    net.finish(classify(linear(flatten(b), 5)))
    ops = {op.name: op for op in net.ops}
    assert {ops["bn1.stats"].outputs, ops["bn1"].inputs} == {
        ("bn1.stats",),
        ("conv1", "bn1.stats", "bn1.weight", "bn1.bias"),
    }
    weight, data = ops["conv2.back.weight"], ops["conv2.back.input"]
    assert (weight.outputs, weight.writes) == ((), ("conv2.weight.grad",))
    assert "bn1" in weight.inputs
    assert "bn1" not in data.inputs
    # ReLU works over its input, and its backward over the gradient.
    assert ops["relu1"].writes == ("bn1",)
    assert ops["relu1.back"].writes == data.outputs
    assert "conv1.back.input" not in ops


def test_a_shared_gradient_is_not_overwritten():
    net = Net("join", 1, **CALLS)
    x = linear(net.input(1, 4), 4)
    net.finish(classify(linear(add(relu(x), relu(linear(x, 4))), 4)))
    back = [op for op in net.ops if op.kind == "relu_backward"]
    # The sum's gradient belongs to both; who comes last may have it.
    assert [len(op.outputs) for op in back] == [1, 0]


def test_shapes_that_do_not_fit_are_refused():
    net = Net("bad", 1)
    x = net.input(1, 3, 4, 4)
    with pytest.raises(ValueError, match="does not fit"):
        conv(x, 1, 7)
    with pytest.raises(ValueError, match="sizes differ"):
        net.view(x, 7)
    with pytest.raises(ValueError, match="already"):
        net.input(1)
    with pytest.raises(ValueError, match="6n"):
        cifar_resnet(1, 100)
