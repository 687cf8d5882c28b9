"""One rank of nodes of two: `hierarchy.py RANK RANKS FILE [CASE...]`.

torchrun tells nodes apart by GROUP_RANK; here each two ranks say that they are on one. The cases of
`behave.py` that hold whatever way gradients travel run here as well.
"""

import copy
import logging
import os
from functools import partial

import behave
import outcomes
import torch
import torch.distributed as dist
from behave import LOSSY, loss_of, mean, message_of, net, residual, wrap
from cases import RANK, everyone, gathered, process_group, run, same_on_all
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import CompressionState


def state_of(compression, model, **options):
    return CompressionState(compression, named_parameters=model.named_parameters(), **options)


def train(model, ddp, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss_of(ddp, step).backward()
        optimizer.step()


def plain_means_are_the_means():
    """What is not compressed has the mean of all ranks, whatever a rank owns."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2e-2)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 20), nn.Linear(20, 300), nn.Linear(300, 1)).to(dtype)
        own = copy.deepcopy(model)
        x = behave.batch(0).to(dtype)
        own(x).float().square().mean().backward()
        ddp = wrap(model, state_of(LowRankCompression.using(warmup=5), model))
        ddp(x).float().square().mean().backward()
        for p, q in zip(model.parameters(), own.parameters(), strict=True):
            due = mean(q.grad.double())
            assert (p.grad - due).norm() <= tolerance * due.norm()
            assert same_on_all(p.grad)


def every_tensor_has_one_owner():
    """Its memory is on one rank of each node, and what travels between nodes is sent once."""
    for compression in LOSSY:
        model = net()
        state = state_of(compression, model)
        train(model, wrap(model, state), range(5))
        report = state.report()
        assert report["nodes"] == 2
        # Each rank of a node sends what the other owns, and hands out what it owns itself.
        elements = sum(p.numel() for p in model.parameters())
        assert report["inside_bytes"] == 4 * elements
        tensors = sum(int(each) for each in gathered(torch.tensor([report["tensors"]])))
        assert tensors == 2 * 4
        exchange = state.exchange
        for name, parameter in model.named_parameters():
            if parameter.numel() < 1024:
                continue
            owners = gathered(torch.tensor([int(exchange.remembers(name))]))
            number = state.nodes.owners.of_name[name]
            assert [int(each) for each in owners] == [int(r % 2 == number) for r in range(4)], name


def fewer_bytes_leave_a_node_than_without():
    sent = {}
    for hierarchy in ("auto", None):
        model = net()
        state = state_of(FFTCompression.using(hierarchy=hierarchy), model)
        train(model, wrap(model, state), range(3))
        total = torch.tensor([state.report()["payload_bytes"]])
        sent[hierarchy] = sum(int(each) for each in gathered(total))
    # Half as many send; a payload that comes from fewer ranks is cut otherwise.
    assert sent["auto"] < 0.55 * sent[None], sent


def a_run_goes_on_bit_by_bit():
    for compression in LOSSY:
        model = net()
        state = state_of(compression, model)
        ddp = wrap(model, state)
        train(model, ddp, range(4))
        saved, weights = copy.deepcopy(state.state_dict()), copy.deepcopy(model.state_dict())
        ddp = wrap(model, state)  # which has the buckets of a first step again
        train(model, ddp, range(4, 8))
        every = everyone(saved)
        for loaded in (saved, every):
            again = net(seed=1)
            again.load_state_dict(weights)
            resumed = state_of(compression, again)
            resumed.load_state_dict(loaded)
            train(again, wrap(again, resumed), range(4, 8))
            for p, q in zip(model.parameters(), again.parameters(), strict=True):
                assert torch.equal(p, q)


def a_run_goes_on_with_other_nodes():
    """Without nodes, and with them again: the mean of what is left to be sent stays what it is."""
    for compression in LOSSY:
        flat = compression.using(hierarchy=None)
        for first, then in ((compression, flat), (flat, compression)):
            model = net()
            state = state_of(first, model)
            train(model, wrap(model, state), range(4))
            every = everyone(copy.deepcopy(state.state_dict()))
            left = {name: residual(state, name, p) for name, p in model.named_parameters()}
            again = copy.deepcopy(model)
            other = state_of(then, again)
            other.load_state_dict(every)
            ddp = wrap(again, other)
            other.agree(torch.zeros(1))
            for name, parameter in again.named_parameters():
                now = residual(other, name, parameter)
                assert (now - left[name]).norm() <= 1e-5 * left[name].norm(), name
            train(again, ddp, range(2))
            assert all(same_on_all(p) for p in again.parameters())
            own = every[RANK]
            said = message_of(partial(go_on_from, model, then, own))
            assert "Load the list" in said, said


def go_on_from(model, compression, saved):
    model = copy.deepcopy(model)
    state = state_of(compression, model)
    state.load_state_dict(saved)
    ddp = wrap(model, state)
    loss_of(ddp, 0).backward()


def uneven_nodes_exchange_as_without():
    """Three ranks here and one there: a warning on rank 0, and all exchange with all."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("sn_compress").addHandler(handler)
    os.environ["GROUP_RANK"] = str(RANK // 3)
    try:
        model = net()
        state = state_of(FFTCompression, model)
        train(model, wrap(model, state), range(2))
    finally:
        os.environ["GROUP_RANK"] = str(RANK // 2)
        logging.getLogger("sn_compress").removeHandler(handler)
    assert state.nodes is None
    assert "nodes" not in state.report()
    warned = [text for text in said if "nodes have 3 and 1 ranks" in text]
    assert len(warned) == (RANK == 0), said


def a_group_of_some_ranks_has_nodes_of_its_own():
    """DDP on ranks 0 and 2, one of each node, has none to sum in; on all, each has two."""
    half = dist.new_group([0, 2])
    if RANK in (0, 2):
        model = net()
        ddp = DistributedDataParallel(model, process_group=half)
        state = state_of(FFTCompression, model)
        ddp.register_comm_hook(state, behave.compression_hook)
        loss_of(ddp, 0).backward()
        assert state.nodes is None


def tuned_by_nodes():
    """AutoCompression decides in each group between nodes, alike on its ranks."""
    model = net()
    state = state_of(AutoCompression.using(ratio=8, warmup=2), model)
    train(model, wrap(model, state), range(40))
    assert state.report()["tuned"] == 1
    assert all(same_on_all(p) for p in model.parameters())


CASES = [
    plain_means_are_the_means, every_tensor_has_one_owner, fewer_bytes_leave_a_node_than_without,
    a_run_goes_on_bit_by_bit, a_run_goes_on_with_other_nodes, uneven_nodes_exchange_as_without,
    a_group_of_some_ranks_has_nodes_of_its_own, tuned_by_nodes,
    behave.ranks_stay_bit_identical, behave.nothing_is_lost, behave.nothing_is_lost_when_unused,
    behave.skipped_steps_are_taken_back, behave.not_a_number_reaches_all,
    outcomes.what_is_thrown_away_leaves_no_trace, outcomes.nothing_else_is_lost,
    outcomes.an_exception_is_a_gradient_thrown_away,
    outcomes.ranks_that_decide_otherwise_are_an_error,
]  # fmt: skip

if __name__ == "__main__":
    os.environ["GROUP_RANK"] = str(RANK // 2)
    with process_group():
        run(CASES)
