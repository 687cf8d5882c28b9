"""One rank: what may not go wrong in silence, one function a case."""

import copy
import gc
import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import horovod.torch as hvd
import numpy as np
import torch
from cases import message_of
from nets import batch, said_by_all, wrap
from torch import nn

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.codecs import fft
from sn_compress.engine import payloads
from sn_compress.torch import horovod as rim
from sn_compress.torch.under_horovod.memory import memory_of

RATIO = {"ratio": 8, "warmup": 2, "check_every": 5}
SHARED = LowRankCompression.using(**RATIO)
WAYS = [SHARED, FFTCompression.using(theta=0.9, check_every=5)]


def net(seed=0, width=48):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def backward(model, step):
    model(batch(step, 8, model[0].in_features)).square().mean().backward()


def train(model, optimizer, steps):
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def settings_and_names_are_agreed_on_at_the_start():
    odd = hvd.rank() == 1
    swapped = [("0.weight", 2), ("0.bias", 0), ("2.weight", 0), ("2.bias", 2)]

    def first(compression=SHARED, seed=0, extra=None, freeze=False, swap=False, **options):
        model = net(seed)
        if freeze:
            model[0].bias.requires_grad = False
        named = dict(model.named_parameters())
        if swap:
            named = {n: getattr(model[at], n.partition(".")[2]) for n, at in swapped}
        held.append(wrap(model, compression, list(named.items()), **options))
        if extra:
            held.append(wrap(net(), SHARED))
        backward(model, 0)

    held = []
    for words, options in (
        (["setting ratio: 8 on rank 0, 4 on rank 1"],
         {"compression": SHARED.using(ratio=4) if odd else SHARED}),
        (["setting theta: 0.9 on rank 0, 0.8 on rank 1"],
         {"compression": FFTCompression.using(theta=0.8 if odd else 0.9)}),
        (["setting compression: 'LowRankCompression' on rank 0, 'FFTCompression' on rank 1"],
         {"compression": WAYS[odd]}),
        (["0.weight", "2.weight", "tensor 0"], {"swap": odd}),
        (["tensor", "0.bias"], {"freeze": odd}),
        (["number of optimizers: 1 on rank 0, 2 on rank 1"], {"extra": odd}),
    ):  # fmt: skip
        said = said_by_all(lambda options=options: first(**options))
        # Their gradients would otherwise hold them for ever, in C++.
        for optimizer in held:
            optimizer._grad_accs.clear()
        del held[:], optimizer
        for word in words:
            assert word in said, (word, said)
    # What all have alike is no error, and optimizers keep their memories apart.
    both = []
    for seed, prefix in enumerate("ab"):
        model = net(seed)
        named = [(f"{prefix}.{name}", p) for name, p in model.named_parameters()]
        both.append((model, wrap(model, WAYS[1], named)))
    for step in range(3):
        for model, optimizer in both:
            train(model, optimizer, [step])
    for prefix, (_, optimizer) in zip("ab", both, strict=True):
        memory = FFTCompression.state_dict(optimizer)["feedback"]["memory"]
        assert sorted(memory) == [f"{prefix}.0.weight", f"{prefix}.2.weight"]


def what_is_loaded_is_of_the_same_step():
    """A rank that was killed before it saved has the file of the save before."""
    model = net()
    optimizer = wrap(model, SHARED)
    train(model, optimizer, range(3))
    states = [copy.deepcopy(SHARED.state_dict(optimizer))]
    train(model, optimizer, range(3, 5))
    states.append(copy.deepcopy(SHARED.state_dict(optimizer)))
    for mine in (states[hvd.rank() % 2], states[0] if hvd.rank() else None):
        model = net()
        optimizer = wrap(model, SHARED)
        if mine:
            SHARED.load_state_dict(optimizer, mine)
        said = said_by_all(partial(backward, model, 5))
        assert "steps of the loaded memory: " in said, said
        optimizer._grad_accs.clear()


def garbage_is_nothing_to_agree_on():
    """Unused optimizers that one rank has collected and the other has not, in a correct program."""
    gc.disable()
    try:
        for _ in range(3):
            model = net()
            optimizer = wrap(model, SHARED)
        if hvd.rank() == 1:
            gc.collect()
        backward(model, 0)
        optimizer.step()
    finally:
        gc.enable()
    # What was frozen is no garbage, and not among what the collector looks at.
    model = net()
    optimizer = wrap(model, SHARED)
    gc.freeze()
    try:
        train(model, optimizer, range(2))
        assert memory_of(optimizer).engine.agreed == hvd.size()
    finally:
        gc.unfreeze()


def calls_agree_too():
    """A ratio of its own would be another number of words, and wait for ever or abort."""
    way = LowRankCompression.using(ratio=7 + hvd.rank(), warmup=1)

    def calls():
        for _ in range(2):
            hvd.allreduce(torch.ones(64, 64), name="odd", compression=way)

    said = said_by_all(calls)
    assert "setting ratio: 7 on rank 0, 8 on rank 1" in said, said


# A tuner that has settled on plain.
SETTLED = SimpleNamespace(settled=True, choice="plain", method=lambda name, shape: "plain")


def damage_on_receipt_is_found():
    """In what travels gathered, in rounds, on dense steps, plain, and where all travels plain."""

    def train(model, optimizer, name, at):
        for step in range(40):
            backward(model, step)
            engine = memory_of(optimizer).engine
            if step == 1 and engine.tuner:
                engine.tuner = SETTLED
            optimizer.synchronize()
            if step == at and hvd.rank() == 1:
                gradient = dict(model.named_parameters())[name].grad
                at_worst = gradient.abs().argmax()  # a mean may be 0 anywhere else
                gradient.view(torch.int32).view(-1)[at_worst] ^= 1 << 20
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()

    for way, name, at, found in (
        (WAYS[1], "0.weight", 6, 10),  # gathered
        (SHARED, "2.weight", 7, 10),  # summed in rounds
        (SHARED, "0.weight", 1, 5),  # dense
        (SHARED, "2.bias", 12, 15),  # plain
        (AutoCompression.using(check_every=5), "2.bias", 11, 15),
    ):
        model = net()
        said = said_by_all(partial(train, model, wrap(model, way), name, at))
        before = f"the same after step {found - 5}" if found > 5 else "not compared before"
        for words in (f"{name}: ", f"after step {found}, ", before, "check_every", "checkpoint"):
            assert words in said, said


@contextmanager
def damaged(function):
    """One bit of what rank 1 sends by this function of Horovod is turned over."""
    send = getattr(hvd, function)

    def flipping(tensor, *args, **options):
        name = options.get("name") or (args[1] if args else "")
        # A payload, not the word that counts the ranks of a step.
        if hvd.rank() == 1 and name.startswith("sn") and not name.startswith("sn.ranks."):
            tensor = tensor.clone()
            tensor.view(torch.uint8)[-9] ^= 16
        return send(tensor, *args, **options)

    setattr(hvd, function, flipping)
    try:
        yield
    finally:
        setattr(hvd, function, send)


def damage_on_its_way_is_an_error_of_all():
    """Of the next step where the host does not read what has come, and array code makes payloads.

    Of three ranks, one owner alone is sent it; of four by nodes one rank, which tells the others.
    """
    way, sends = {
        2: (FFTCompression, "allgather_async"), 3: (FFTCompression, "alltoall_async"),
        4: (LowRankCompression, "alltoall_async"),
    }[hvd.size()]  # fmt: skip
    elsewhere, before = hvd.size() == 2, (payloads.on_host, fft.on_host)
    if elsewhere:
        payloads.on_host = fft.on_host = lambda values: isinstance(values, np.ndarray)
    try:
        model = net(width=256)
        optimizer = wrap(model, way)
        train(model, optimizer, range(15))  # low rank is dense before step 10
        with damaged(sends):
            if elsewhere:
                train(model, optimizer, [15])
            every = hvd.allgather_object(message_of(partial(train, model, optimizer, [16])))
    finally:
        payloads.on_host, fft.on_host = before
    if hvd.size() == 4:
        told = "another rank has failed in this step: rank 3: PayloadError"
        assert [text.startswith(told) for text in every] == [True, True, True, False], every
    assert any("checksum" in text or "corrupt" in text for text in every), every


def equal_ranks_are_never_told_to_differ():
    for way in WAYS:
        for options in ({}, {"groups": 2}, {"backward_passes_per_step": 2}):
            model = net()
            optimizer = wrap(model, way, **options)
            passes = options.get("backward_passes_per_step", 1)
            for step in range(16):
                for each in range(passes):
                    backward(model, step + 100 * each)
                optimizer.step()
                optimizer.zero_grad()
            memory = memory_of(optimizer)
            assert memory.engine.sameness.same_at == 15, memory.engine.sameness.same_at
            # One question at the start of 17 words of 8 bytes, and one every 5 steps; where factors
            # are multiplied, one of hardware; and one word, the number of its names. Before a
            # gather, in each step, one of 4 bytes that counts the ranks.
            shared = memory.settings.exchange == "shared"
            asked = (4 + shared) * 17 * 8 + 8 + (0 if shared else 4 * 16)
            assert FFTCompression.report(optimizer)["other_bytes"] == asked


def a_call_that_failed_leaves_nothing_behind():
    way = LowRankCompression.using(ratio=8, warmup=1)
    send = hvd.allreduce_async_

    def fails(tensor, *args, name=None, **options):
        if name == "sn1.x":
            raise RuntimeError("no memory for the second round")
        return send(tensor, *args, name=name, **options)

    def call(name):
        return hvd.allreduce(torch.randn(64, 64), name=name, compression=way)

    for name in ("x", "y"):
        call(name)
    hvd.allreduce_async_ = fails
    assert "second round" in message_of(lambda: call("x"), RuntimeError)
    hvd.allreduce_async_ = send
    for _ in range(2):
        assert call("y").isfinite().all()


def calls_of_many_settings_keep_a_bounded_number_of_memories():
    before = rim._memory_of_calls.cache_info().currsize
    for number in range(rim._MOST_CALLS + 9):
        way = FFTCompression.using(theta=0.5 + number / 1000)
        hvd.allreduce(torch.ones(2048), name="many", compression=way)
    assert rim._memory_of_calls.cache_info().currsize == rim._MOST_CALLS
    assert before < rim._MOST_CALLS


def a_wait_has_a_limit():
    if hvd.rank() == 0:
        way = FFTCompression.using(theta=0.77, wait_s=1)
        said = message_of(lambda: hvd.allreduce(torch.ones(2048), name="l", compression=way))
        assert "waited 1 s" in said, said
        assert "wait_s" in said, said
    else:
        time.sleep(2)
        hvd.allreduce(torch.zeros(17, dtype=torch.int64), name="sn.agree", op=hvd.Sum)
    hvd.barrier()


CASES = [
    settings_and_names_are_agreed_on_at_the_start, what_is_loaded_is_of_the_same_step,
    garbage_is_nothing_to_agree_on,
    calls_agree_too, damage_on_receipt_is_found, damage_on_its_way_is_an_error_of_all,
    equal_ranks_are_never_told_to_differ,
    a_call_that_failed_leaves_nothing_behind,
    calls_of_many_settings_keep_a_bounded_number_of_memories, a_wait_has_a_limit,
]  # fmt: skip
