"""One rank of nodes of two, as horovodrun -H HOST:2,HOST:2 makes them."""

import copy
from functools import partial

import cases
import horovod.torch as hvd
import torch
from behave import wrap
from buckets import small_buckets
from cases import message_of
from nets import assert_alike, batch, vector
from torch import nn

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.under_horovod.memory import memory_of

SHARED = LowRankCompression.using(ratio=8, warmup=2, every=4)
LOSSY = FFTCompression, SHARED


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 96), nn.Tanh(), nn.Linear(96, 64)
    )


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        x = batch(step, 16, 64)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def each_tensor_has_one_owner_in_a_node():
    for way in LOSSY:
        with small_buckets():
            model = net()
            optimizer = wrap(model, way)
            train(model, optimizer, range(5))
        assert_alike(model)
        report = FFTCompression.report(optimizer)
        assert report["nodes"] == 2
        # Each rank of a node sends what the other owns, and hands out what it owns itself.
        elements = sum(p.numel() for p in model.parameters())
        assert report["inside_bytes"] == 4 * elements
        memory = memory_of(optimizer)
        for name, parameter in model.named_parameters():
            if parameter.numel() < 1024:
                continue
            has = torch.tensor([int(memory.engine.remembers(name))])
            owner = memory.nodes.place.owners.of_name[name]
            owners = hvd.allgather(has, name="owners").tolist()
            assert owners == [int(rank % 2 == owner) for rank in range(4)], name


def a_run_learns_as_without_nodes():
    """The same steps: a mean of fewer ranks has fewer roundings in it, and no others."""
    for way in LOSSY:
        found = []
        for each in (way, way.using(hierarchy=None)):
            model = net()
            losses = torch.tensor(train(model, wrap(model, each), range(30)))
            found.append(float(hvd.allreduce(losses[-5:].mean(), name="loss")))
        first = float(hvd.allreduce(losses[0], name="first"))
        assert found[0] < found[1] + 0.05 * first, (found, first)
        assert found[0] < 0.9 * first, (found, first)


def without_a_hierarchy_all_is_as_on_one_node():
    """To the bit, and in as many bytes; a tuner has none either."""
    for way in LOSSY:
        ends = []
        for size, each in ((4, way), (2, way.using(hierarchy=None))):
            with cases.on_nodes_of(size, hvd.rank()):
                model = net()
                optimizer = wrap(model, each)
                train(model, optimizer, range(5))
            report = FFTCompression.report(optimizer)
            assert "nodes" not in report
            ends.append((vector(model), report["payload_bytes"]))
        assert torch.equal(ends[0][0], ends[1][0])
        assert ends[0][1] == ends[1][1]
    model = net()
    optimizer = wrap(model, AutoCompression.using(ratio=8, warmup=2))
    train(model, optimizer, range(3))
    assert "nodes" not in FFTCompression.report(optimizer)


def unequal_nodes_exchange_as_without():
    """Three ranks here and one there: a warning on rank 0, and all exchange with all."""
    with cases.on_nodes_of(3, hvd.rank()), cases.logged() as said:
        model = net()
        optimizer = wrap(model, FFTCompression)
        train(model, optimizer, range(2))
    assert "nodes" not in FFTCompression.report(optimizer)
    warned = [text for text in said if "nodes have 3 and 1 ranks" in text]
    assert len(warned) == (hvd.rank() == 0), said


def left_of(optimizer, model):
    """What all ranks have yet to send, as it is in the mean: by parameter."""
    own = FFTCompression.residuals(optimizer)
    return {
        name: hvd.allreduce(own.get(name, torch.zeros_like(p)), name=f"left.{name}")
        for name, p in model.named_parameters()
    }


def goes_on_with(load, first, then):
    """What was left to be sent is still there, when all have begun with other nodes."""
    model = net()
    optimizer = wrap(model, first)
    train(model, optimizer, range(4))
    left = left_of(optimizer, model)
    every = hvd.allgather_object(copy.deepcopy(FFTCompression.state_dict(optimizer)))
    again = copy.deepcopy(model)
    other = wrap(again, then)
    load(other, every)
    for parameter in again.parameters():
        parameter.grad = torch.zeros_like(parameter)
    other.synchronize()
    now = left_of(other, again)
    for name, parameter in again.named_parameters():
        lost = (parameter.grad + now[name] - left[name]).norm()
        assert lost <= 1e-5 * left[name].norm() + 1e-7, (name, lost)
    with other.skip_synchronize():
        other.step()
    train(again, other, range(4, 6))
    assert_alike(again)


def load_list(optimizer, every):
    FFTCompression.load_state_dict(optimizer, every)


def load_and_synchronize(optimizer, every):
    FFTCompression.load_state_dict(optimizer, every[hvd.rank()])
    FFTCompression.synchronize(optimizer, root_rank=1)


def a_run_goes_on_with_other_nodes():
    for way, load in zip(LOSSY, (load_list, load_and_synchronize), strict=True):
        flat = way.using(hierarchy=None)
        goes_on_with(load, way, flat)
        goes_on_with(load, flat, way)


def one_state_is_not_enough_for_other_nodes():
    for way in LOSSY:
        flat = way.using(hierarchy=None)
        for first, then in ((way, flat), (flat, way)):
            model = net()
            optimizer = wrap(model, first)
            train(model, optimizer, range(1))
            own = FFTCompression.state_dict(optimizer)
            again = copy.deepcopy(model)
            other = wrap(again, then)
            FFTCompression.load_state_dict(other, own)
            said = message_of(partial(train, again, other, [0]))
            assert "Load the list" in said, said


def a_rank_that_joins_is_refused():
    """By all others, before a gradient is summed; Horovod itself goes on."""
    for way in LOSSY:
        model = net()
        optimizer = wrap(model, way)
        train(model, optimizer, range(3))
        before = vector(model).clone()
        if hvd.rank():
            said = message_of(partial(train, model, optimizer, [3]))
            assert "another rank called hvd.join() (3 of 4" in said, said
            assert "with hierarchy=None" in said, said
        hvd.join()
        assert torch.equal(vector(model), before)
        model = net()
        optimizer = wrap(model, way)
        train(model, optimizer, range(2))
        assert_alike(model)


CASES = [
    each_tensor_has_one_owner_in_a_node, a_run_learns_as_without_nodes,
    without_a_hierarchy_all_is_as_on_one_node, unequal_nodes_exchange_as_without,
    a_run_goes_on_with_other_nodes, one_state_is_not_enough_for_other_nodes,
    a_rank_that_joins_is_refused,
]  # fmt: skip
