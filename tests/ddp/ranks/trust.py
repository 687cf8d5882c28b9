"""One rank: what may not go wrong in silence, one function a case.

Run as `trust.py RANK RANKS FILE [CASE...]`; prints "ok CASE" for each, or fails with an assertion.
"""

import copy
from functools import partial

import torch
from behave import LOSSY, SHARED, batch, loss_of, mean, message_of, net, own_memory, wrap
from cases import RANK, RANKS, process_group, run
from cases import said_by_all as said_by_all_of
from torch import nn

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.torch.ddp import BucketSlice, CompressionState

said_by_all = partial(said_by_all_of, kinds=(CompressError, RuntimeError))


def settings_and_names_are_agreed_on_at_the_start():
    odd = RANK == RANKS - 1
    model = net()
    names = dict(model.named_parameters())
    swapped = dict(zip(names, [names[n] for n in reversed(names)], strict=True))
    for words, options in (
        (
            ["setting theta: 0.8 on rank 0, 0.9 on rank"],
            {"compression": FFTCompression.using(theta=0.9 if odd else 0.8)},
        ),
        (
            ["setting ratio: 20.0 on rank 0, 30.0 on rank"],
            {"compression": SHARED.using(ratio=30.0 if odd else 20.0)},
        ),
        (
            ["setting compression: 'FFTCompression' on rank 0, 'LowRankCompression' on rank"],
            {"compression": LowRankCompression if odd else FFTCompression},
        ),
        (
            ["setting check_every: 7 on"],
            {"compression": LowRankCompression.using(check_every=8 if odd else 7)},
        ),
        (["tensor 0", "0.weight"], {"named_parameters": (swapped if odd else names).items()}),
        (["scaler"], {"scaler": torch.amp.GradScaler("cpu") if odd else None}),
    ):
        options = {"compression": LowRankCompression, **options}
        ddp = wrap(copy.deepcopy(model), CompressionState(**options))
        if "named_parameters" in options:
            ddp = wrap(model, CompressionState(**options))
        said = said_by_all(lambda ddp=ddp: loss_of(ddp, 0).backward())
        for word in words:
            assert word in said, (word, said)
    assert "timeout" in message_of(lambda: CompressionState(FFTCompression.using(wait_s=3)))


def damage_on_receipt_is_found():
    """In what travels gathered, in rounds, on dense steps, plain and sparse."""
    for compression, name, at, found in (
        (LOSSY[0], "0.weight", 6, 10),
        (SHARED, "2.weight", 7, 10),
        (SHARED, "0.weight", 1, 5),
        (SHARED, "2.bias", 12, 15),
    ):
        model = net()
        named = model.named_parameters()
        ddp = wrap(
            model, CompressionState(compression.using(check_every=5), named_parameters=named)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        reached = [0]

        def train(model=model, ddp=ddp, optimizer=optimizer, reached=reached, name=name, at=at):
            for step in range(40):
                reached[0] = step
                optimizer.zero_grad()
                loss_of(ddp, step).backward()
                if step == at and RANK == 1:
                    gradient = dict(model.named_parameters())[name].grad
                    at_worst = gradient.abs().argmax()  # a mean may be 0 anywhere else
                    gradient.view(torch.int32).view(-1)[at_worst] ^= 1 << 20
                optimizer.step()

        said = said_by_all(train)
        assert reached[0] == found, (reached, said)
        assert f"{name}: " in said, said
        assert f"after step {found}, " in said, said
        before = f"the same after step {found - 5}" if found > 5 else "not compared before"
        assert before in said, said
        assert "checkpoint" in said, said


def bag():
    torch.manual_seed(0)
    return nn.EmbeddingBag(2000, 32, sparse=True, mode="sum")


def damage_of_sparse_gradients_is_found_too():
    model = bag()
    ddp = wrap(model, CompressionState(LowRankCompression.using(check_every=3)))
    reached = [0]

    def train():
        for step in range(20):
            reached[0] = step
            model.zero_grad()
            ddp(torch.tensor([[RANK, 100]])).square().sum().backward()
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad.to_dense()
                model.weight[100, 0] += 1e-3 * (step == 4 and RANK == 1)

    said = said_by_all(train)
    assert reached[0] == 6, (reached, said)


def equal_ranks_are_never_told_to_differ():
    for compression in LOSSY:
        model = net()
        state = CompressionState(compression.using(check_every=5))
        ddp = wrap(model, state)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(16):
            optimizer.zero_grad()
            loss_of(ddp, step).backward()
            optimizer.step()
        assert state.engine.sameness.same_at == 15
        asked = 4 + (state.settings.exchange == "shared")  # of hardware, too
        nodes = 8 * RANKS  # which node each rank is on, asked once
        assert state.report()["other_bytes"] == asked * 17 * 8 + nodes


def sparse_gradients_are_in_the_report():
    """The 2000 x 32 embedding of which nothing was counted, beside what is compressed."""
    model = nn.Sequential(bag(), nn.Linear(32, 64))
    state = CompressionState(FFTCompression.using(theta=0.9))
    ddp = wrap(model, state)
    rows = 50 + RANK
    for _ in range(3):
        model.zero_grad()
        ddp(torch.arange(2 * rows).view(2, rows) // 2).square().mean().backward()
    report, sent = state.report(), rows * (8 + 4 * 32)  # an index of 8 bytes and a row
    codec = CompressionState(FFTCompression.using(theta=0.9)).engine.codec
    assert report["payload_bytes"] == sent + codec.payload_bytes(32 * 64) + 4 * 64, report
    assert report["dense_bytes"] == sent + 4 * 33 * 64, report
    assert report["steps"] == 3, report


def pictures(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(8, 24, 3), nn.Conv2d(24, 24, (3, 1)))


def memory_of(state, name, parameter):
    """By the tensor's own indices, whatever the order in which it lies."""
    vector = own_memory(state, name, torch.empty(parameter.numel()))
    return vector.as_strided(parameter.shape, parameter.stride()).contiguous()


def a_memory_follows_its_tensor_into_another_layout():
    layouts = torch.contiguous_format, torch.channels_last
    for compression in (*LOSSY, LowRankCompression.using(warmup=1, ratio=8.0)):
        for old in layouts:
            model = pictures().to(memory_format=old)
            state = CompressionState(compression, named_parameters=model.named_parameters())
            ddp = wrap(model, state)
            for step in range(4):
                ddp(batch(step, 4, 8 * 36).view(4, 8, 6, 6)).square().mean().backward()
            saved = copy.deepcopy(state.state_dict())
            for new in layouts:
                other = pictures().to(memory_format=new)
                loaded = CompressionState(compression, named_parameters=other.named_parameters())
                loaded.load_state_dict(saved)
                every = zip(model.named_parameters(), other.parameters(), strict=True)
                for (name, p), q in every:
                    if p.dim() < 4:
                        continue
                    was, now = memory_of(state, name, p), memory_of(loaded, name, q)
                    assert was.any(), "there was nothing to remember"
                    # Transformed there and back, and rounded to float32 once.
                    assert (was - now).norm() <= (old != new) * 1e-5 * was.norm(), (name, old, new)
                    assert old == new or not q.is_contiguous() or not p.is_contiguous()
                wrap(other, loaded)(batch(4, 4, 8 * 36).view(4, 8, 6, 6)).sum().backward()
    broken = copy.deepcopy(saved)
    broken["layout"] = {name: [0, 0] for name in broken["layout"]}
    assert "layout" in message_of(lambda: loaded.load_state_dict(broken))


class Scaler:
    """Of which all that CompressionState asks is the scale."""

    scale = 8.0

    def get_scale(self):
        return self.scale


def a_skipped_step_takes_back_nothing_older():
    """Tensors that sit the skipped step out, as modules of FSDP2 may, keep what they remember."""
    for compression in LOSSY:
        scaler = Scaler()
        state = CompressionState(compression, scaler=scaler)

        def step(number, names, state=state):
            for name in names:
                flat = batch(number, 4096, 1).view(-1)
                for _ in state.rounds([(flat, [BucketSlice(name, 0, (64, 64))])]):
                    pass

        for number in range(4):
            step(number, "ab")
        step(4, "a")  # skipped; "b" is as after step 3
        before = own_memory(state, "b", torch.empty(64, 64)).clone()
        scaler.scale /= 2
        step(5, "a")
        after = own_memory(state, "b", torch.empty(64, 64))
        assert before.any()
        # The gather exchange transforms there and back.
        assert (2 * after - before).norm() <= 1e-6 * before.norm(), compression


def mean_of_ranks_is_not_changed_by_the_question():
    """Steps that compare give the same bits as those of a state that never does."""
    for compression in LOSSY:
        every = []
        for check in (0, 2):
            model = net()
            ddp = wrap(model, CompressionState(compression.using(check_every=check)))
            for step in range(5):
                model.zero_grad()
                loss_of(ddp, step).backward()
            every.append([p.grad.clone() for p in model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*every, strict=True))
        assert torch.isfinite(mean(every[0][0])).all()


CASES = [
    settings_and_names_are_agreed_on_at_the_start, damage_on_receipt_is_found,
    damage_of_sparse_gradients_is_found_too, equal_ranks_are_never_told_to_differ,
    sparse_gradients_are_in_the_report, a_memory_follows_its_tensor_into_another_layout,
    a_skipped_step_takes_back_nothing_older, mean_of_ranks_is_not_changed_by_the_question,
]  # fmt: skip

if __name__ == "__main__":
    with process_group():
        run(CASES)
