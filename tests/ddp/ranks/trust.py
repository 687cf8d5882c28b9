"""One rank: what may not go wrong in silence, one function a case."""

import copy
from functools import partial

import torch
from cases import (
    FFT,
    LOSSY,
    RANK,
    RANKS,
    SHARED,
    assert_equal,
    batch,
    hooked,
    loss_of,
    message_of,
    net,
    own_memory,
    said_by_all,
    sgd,
    state_of,
    train,
    weights_of,
    wrap,
)
from torch import nn

from sn_compress import LowRankCompression
from sn_compress.torch.ddp import CompressionState
from sn_compress.torch.layout import BucketSlice


def damage_on_receipt_is_found():
    """In what travels gathered, in rounds, on dense steps, and plain."""

    def loop(model, ddp, name, at):
        optimizer = sgd(model)
        for step in range(40):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            if step == at and RANK == 1:
                gradient = dict(model.named_parameters())[name].grad
                at_worst = gradient.abs().argmax()  # a mean may be 0 anywhere else
                gradient.view(torch.int32).view(-1)[at_worst] ^= 1 << 20
            optimizer.step()

    for compression, name, at, found in (
        (FFT, "0.weight", 6, 10),
        (SHARED, "2.weight", 7, 10),
        (SHARED, "0.weight", 1, 5),
        (SHARED, "2.bias", 12, 15),
    ):
        model = net()
        ddp, _ = hooked(model, compression.using(check_every=5))
        said = said_by_all(partial(loop, model, ddp, name, at))
        before = f"the same after step {found - 5}" if found > 5 else "not compared before"
        for words in (f"{name}: ", f"after step {found}, ", before, "checkpoint"):
            assert words in said, said


def bag():
    torch.manual_seed(0)
    return nn.EmbeddingBag(2000, 32, sparse=True, mode="sum")


def damage_of_sparse_gradients_is_found_too():
    model = bag()
    ddp = wrap(model, CompressionState(LowRankCompression.using(check_every=3)))

    def loop():
        for step in range(20):
            model.zero_grad()
            ddp(torch.tensor([[RANK, 100]])).square().sum().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad.to_dense()
                model.weight[100, 0] += 1e-3 * (step == 4 and RANK == 1)

    said = said_by_all(loop)
    assert "after step 6, they were the same after step 3" in said, said


def equal_ranks_are_never_told_to_differ():
    for compression in LOSSY:
        model = net()
        state = CompressionState(compression.using(check_every=5))
        train(wrap(model, state), range(16), torch.optim.Adam(model.parameters(), lr=0.01))
        assert state.engine.sameness.same_at == 15
        asked = 4 + (state.settings.exchange == "shared")  # of hardware, too
        nodes = 8 * RANKS  # which node each rank is on, asked once
        assert state.report()["other_bytes"] == asked * 17 * 8 + nodes


def sparse_gradients_are_in_the_report():
    """The 2000 x 32 embedding of which nothing was counted, beside what is compressed."""
    state = CompressionState(FFT)
    ddp = wrap(nn.Sequential(bag(), nn.Linear(32, 64)), state)
    rows = 50 + RANK
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.arange(2 * rows).view(2, rows) // 2).square().mean().backward()
    report, sent = state.report(), rows * (8 + 4 * 32)  # an index of 8 bytes and a row
    payload = CompressionState(FFT).engine.codec.payload_bytes(32 * 64)
    assert report["payload_bytes"] == sent + payload + 4 * 64, report
    assert report["dense_bytes"] == sent + 4 * 33 * 64, report
    assert report["steps"] == 3, report


def pictures(layout):
    torch.manual_seed(0)
    layers = nn.Conv2d(8, 24, 3), nn.Conv2d(24, 24, (3, 1))
    return nn.Sequential(*layers).to(memory_format=layout)


def memory_of(state, name, parameter):
    """By the tensor's own indices, whatever the order in which it lies."""
    vector = own_memory(state, name, torch.empty(parameter.numel()))
    return vector.as_strided(parameter.shape, parameter.stride()).contiguous()


def a_memory_follows_its_tensor_into_another_layout():
    layouts = torch.contiguous_format, torch.channels_last
    for compression in (*LOSSY, LowRankCompression.using(warmup=1, ratio=8.0)):
        for old in layouts:
            model = pictures(old)
            ddp, state = hooked(model, compression)
            for step in range(4):
                ddp(batch(step, 4, 8 * 36).view(4, 8, 6, 6)).square().mean().backward()
            saved = copy.deepcopy(state.state_dict())
            for new in layouts:
                other = pictures(new)
                loaded = state_of(compression, other)
                loaded.load_state_dict(saved)
                for name in ("0.weight", "1.weight"):
                    p, q = (dict(each.named_parameters())[name] for each in (model, other))
                    was, now = memory_of(state, name, p), memory_of(loaded, name, q)
                    assert was.any(), "there was nothing to remember"
                    # Transformed there and back, and rounded to float32 once.
                    assert (was - now).norm() <= (old != new) * 1e-5 * was.norm(), (name, old, new)
                    assert old == new or not q.is_contiguous() or not p.is_contiguous()
                wrap(other, loaded)(batch(4, 4, 8 * 36).view(4, 8, 6, 6)).sum().backward()
    saved["layout"] = {name: [0, 0] for name in saved["layout"]}
    assert "layout" in message_of(lambda: loaded.load_state_dict(saved))


def a_skipped_step_takes_back_nothing_older():
    """Tensors that sit the skipped step out, as modules of FSDP2 may, keep what they remember."""
    for compression in LOSSY:
        scaler, like = torch.amp.GradScaler("cpu", init_scale=8.0), torch.empty(64, 64)
        scaler.scale(torch.zeros(1))  # the first call makes it
        state = CompressionState(compression, scaler=scaler)

        def step(number, names, state=state):
            for name in names:
                flat = batch(number, 4096, 1).view(-1)
                for _ in state.rounds([(flat, [BucketSlice(name, 0, (64, 64))])]):
                    pass

        for number in range(4):
            step(number, "ab")
        step(4, "a")  # skipped; "b" is as after step 3
        before = own_memory(state, "b", like).clone()
        scaler.update(4.0)
        step(5, "a")
        after = own_memory(state, "b", like)
        assert before.any()
        # The gather exchange transforms there and back.
        assert (2 * after - before).norm() <= 1e-6 * before.norm(), compression


def mean_of_ranks_is_not_changed_by_the_question():
    """Steps that compare give the same bits as those of a state that never does."""
    for compression in LOSSY:
        ends = []
        for check in (0, 2):
            model = net()
            train(wrap(model, CompressionState(compression.using(check_every=check))), range(5))
            ends.append(weights_of(model))
        assert_equal(*ends)


CASES = [
    damage_on_receipt_is_found, damage_of_sparse_gradients_is_found_too,
    equal_ranks_are_never_told_to_differ, sparse_gradients_are_in_the_report,
    a_memory_follows_its_tensor_into_another_layout, a_skipped_step_takes_back_nothing_older,
    mean_of_ranks_is_not_changed_by_the_question,
]  # fmt: skip
