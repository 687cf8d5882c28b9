"""One rank of nodes of two, which torchrun tells apart by GROUP_RANK.

Cases of other programs that hold whatever way gradients travel run here as well.
"""

import copy
import os
import tempfile
from functools import partial

import behave
import outcomes
import torch
import torch.distributed as dist
from cases import (
    FFT,
    LOSSY,
    RANK,
    assert_alike,
    assert_equal,
    batch,
    everyone,
    hooked,
    logged,
    loss_of,
    mean,
    message_of,
    net,
    residual,
    state_of,
    train,
    wrap,
)
from torch import nn

from sn_compress import AutoCompression, LowRankCompression
from sn_compress.torch.integrations import attach


def start():
    os.environ["GROUP_RANK"] = str(RANK // 2)


def plain_means_are_the_means():
    """What is not compressed has the mean of all ranks, whatever a rank owns."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 300), nn.Linear(300, 1)).to(dtype)
        own, x = copy.deepcopy(model), batch(0).to(dtype)
        own(x).float().square().mean().backward()
        ddp, _ = hooked(model, LowRankCompression.using(warmup=5))
        ddp(x).float().square().mean().backward()
        for p, q in zip(model.parameters(), own.parameters(), strict=True):
            due = mean(q.grad.double())
            assert (p.grad - due).norm() <= tolerance * due.norm()
        assert_alike(model)


def every_tensor_has_one_owner():
    """Its memory is on one rank of each node, and what travels between nodes is sent once."""
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        train(ddp, range(5))
        report = state.report()
        assert report["nodes"] == 2
        # Each rank of a node sends what the other owns, and hands out what it owns itself.
        assert report["inside_bytes"] == 4 * sum(p.numel() for p in model.parameters())
        assert sum(everyone(report["tensors"])) == 2 * 4
        for name, parameter in model.named_parameters():
            if parameter.numel() >= 1024:
                owner = state.nodes.owners.of_name[name]
                found = everyone(bool(state.engine.exchange.remembers(name)))
                assert found == [rank % 2 == owner for rank in range(4)], name


def fewer_bytes_leave_a_node_than_without():
    sent = {}
    for hierarchy in ("auto", None):
        ddp, state = hooked(net(), FFT.using(hierarchy=hierarchy))
        train(ddp, range(3))
        sent[hierarchy] = sum(everyone(state.report()["payload_bytes"]))
    # Half as many send; a payload that comes from fewer ranks is cut otherwise.
    assert sent["auto"] < 0.55 * sent[None], sent


def a_run_goes_on_bit_by_bit():
    for compression in LOSSY:
        model = net()
        ddp, state = hooked(model, compression)
        train(ddp, range(4))
        saved, weights = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
        # A new DDP has the buckets of a first step again.
        train(wrap(model, state), range(4, 8))
        every = everyone(saved)
        for loaded in (saved, every):
            again = net(seed=1)
            again.load_state_dict(weights)
            ddp, resumed = hooked(again, compression)
            resumed.load_state_dict(loaded)
            train(ddp, range(4, 8))
            assert_equal(model.parameters(), again.parameters())


def a_run_goes_on_with_other_nodes():
    """Without nodes, and with them again: the mean of what is left to be sent stays what it is."""
    for compression in LOSSY:
        flat = compression.using(hierarchy=None)
        for first, then in ((compression, flat), (flat, compression)):
            model = net()
            ddp, state = hooked(model, first)
            train(ddp, range(4))
            every = everyone(copy.deepcopy(state.state_dict()))
            left = {name: residual(state, name, p) for name, p in model.named_parameters()}
            again = copy.deepcopy(model)
            ddp, other = hooked(again, then)
            other.load_state_dict(every)
            other.agree(torch.zeros(1))
            for name, parameter in again.named_parameters():
                now = residual(other, name, parameter)
                assert (now - left[name]).norm() <= 1e-5 * left[name].norm(), name
            train(ddp, range(2))
            assert_alike(again)
            said = message_of(partial(go_on_from, model, then, every[RANK]))
            assert "Load the list" in said, said


def a_checkpoint_goes_on_with_other_nodes():
    """As of Trainer, accelerate and Lightning: the files of all ranks are read where they must."""
    flat = FFT.using(hierarchy=None)
    for first, then in ((FFT, flat), (flat, FFT), (FFT, FFT)):
        model, folder = net(), everyone(tempfile.mkdtemp())[0]
        ddp, state = hooked(model, first)
        train(ddp, range(4))
        attach.save(state, folder)
        dist.barrier()
        left = {name: residual(state, name, p) for name, p in model.named_parameters()}
        ddp, other = hooked(model, then)
        attach.load(other, folder)
        other.agree(torch.zeros(1))
        for name, parameter in model.named_parameters():
            now = residual(other, name, parameter)
            assert (now - left[name]).norm() <= 1e-5 * left[name].norm(), name
    if RANK == 0:
        os.remove(os.path.join(folder, "compression-rank3.pt"))
    dist.barrier()
    _, other = hooked(model, flat)
    assert "compression-rank3.pt" in message_of(partial(attach.load, other, folder))


def go_on_from(model, compression, saved):
    ddp, state = hooked(copy.deepcopy(model), compression)
    state.load_state_dict(saved)
    loss_of(ddp, 0).backward()


def uneven_nodes_exchange_as_without():
    """Three ranks here and one there: a warning on rank 0, and all exchange with all."""
    os.environ["GROUP_RANK"] = str(RANK // 3)
    try:
        with logged() as said:
            ddp, state = hooked(net(), FFT)
            train(ddp, range(2))
    finally:
        start()
    assert state.nodes is None
    assert "nodes" not in state.report()
    warned = [text for text in said if "nodes have 3 and 1 ranks" in text]
    assert len(warned) == (RANK == 0), said


def a_group_of_some_ranks_has_nodes_of_its_own():
    """DDP on ranks 0 and 2, one of each node, has none to sum in; on all, each has two."""
    half = dist.new_group([0, 2])
    if RANK in (0, 2):
        model = net()
        state = state_of(FFT, model)
        train(wrap(model, state, process_group=half), [0])
        assert state.nodes is None


def tuned_by_nodes():
    """AutoCompression decides in each group between nodes, alike on its ranks."""
    model = net()
    ddp, state = hooked(model, AutoCompression.using(ratio=8, warmup=2))
    train(ddp, range(40))
    assert state.report()["tuned"] == 1
    assert_alike(model)


CASES = [
    plain_means_are_the_means, every_tensor_has_one_owner, fewer_bytes_leave_a_node_than_without,
    a_run_goes_on_bit_by_bit, a_run_goes_on_with_other_nodes,
    a_checkpoint_goes_on_with_other_nodes, uneven_nodes_exchange_as_without,
    a_group_of_some_ranks_has_nodes_of_its_own, tuned_by_nodes,
    behave.ranks_stay_bit_identical, behave.nothing_is_lost, behave.nothing_is_lost_when_unused,
    behave.not_a_number_reaches_all, outcomes.what_is_thrown_away_leaves_no_trace,
    outcomes.nothing_else_is_lost, outcomes.an_exception_is_a_gradient_thrown_away,
    outcomes.a_scaler_skips_for_each_optimizer_by_itself,
    outcomes.ranks_that_decide_otherwise_are_an_error,
]  # fmt: skip
