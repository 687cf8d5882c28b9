"""One rank: bad input of every kind in DDP and FSDP2 is a CompressError on every rank, soon."""

import time

import numpy as np
import torch
import torch.distributed as dist
from cases import (
    FFT,
    LAST,
    RANK,
    RANKS,
    everyone,
    fails_in_the_middle,
    hooked,
    loss_of,
    message_of,
    net,
    state_of,
    wrap,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.codecs import fft
from sn_compress.engine import payloads
from sn_compress.torch.ddp import CompressionState
from sn_compress.torch.fsdp import compress_replicas
from sn_compress.torch.process_group import Collectives

LONGEST = 20.0  # s that a case may take on a busy machine; a wait for the other rank ends at 60
LOW = LowRankCompression.using(warmup=1)
MESH = None


def start():
    global MESH
    MESH = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))


def step(model):
    model.zero_grad()
    loss_of(model, 0).backward()


def state(compression=LOW, *group, **options):
    return CompressionState(compression, *group, **options)


def step_with(state):
    """Of a state, or what is taken for one."""
    step(wrap(net(), state))


def named(pairs):
    return state(named_parameters=pairs)


def odd(usual, other):
    """What differs on the last rank."""
    return other if LAST else usual


def lacks_a_name(compression, place):
    model = net()
    pairs = list(model.named_parameters())
    fewer = pairs[:place] + pairs[place + 1 :]
    step(wrap(model, state(compression, named_parameters=odd(pairs, fewer))))


def names_swapped():
    model = net()
    names, tensors = zip(*model.named_parameters(), strict=True)
    step(wrap(model, named(zip(names, odd(tensors, tensors[::-1]), strict=True))))


def parameter_added(compression):
    model = net()
    ddp, own = hooked(model, compression)
    step(ddp)
    step(wrap(nn.Sequential(model, nn.Linear(16, 64)), own))


def sharded(model=None, *, replicas=True):
    model, over = model or net(), MESH["shard"] if replicas else MESH
    fully_shard(model[0], mesh=over)
    return fully_shard(model, mesh=over)


def replicated(compression, model=None):
    model = model or sharded()
    compress_replicas(model, compression, MESH["replicate"])
    return model


def sharded_later():
    model = net()
    fully_shard(model[0], mesh=MESH["shard"])
    replicated(LOW, model)
    step(fully_shard(model, mesh=MESH["shard"]))


def other_shapes():
    model = net()
    if RANK:
        model[0], model[2] = nn.Linear(64, 98), nn.Linear(98, 64)
    step(replicated(LOW, sharded(model)))


NO_STATE = "as its state; expected a CompressionState"
APART = "ranks have different settings or tensors"
NAMES = "as named_parameters; expected pairs"
# Name: the call that has to raise CompressError on every rank, and words of its message.
REFUSED = {
    "hook without state": (lambda: step_with(None), NO_STATE),
    "a class as state": (lambda: step_with(LOW), NO_STATE),
    "a group as state": (lambda: step_with(dist.group.WORLD), NO_STATE),
    "a model as compression": (lambda: state(net()), "got a Sequential as compression; expected"),
    "text as compression": (lambda: state("low rank"), "got 'low rank' as compression"),
    "settings as compression": (lambda: state(FFT.settings), "got a Settings as compression"),
    "an object": (lambda: state(FFTCompression(theta=0.9)), "FFTCompression.using(theta=0.9)"),
    "a layer": (lambda: state(nn.Linear), "got the class Linear as compression"),
    "a model as group": (lambda: state(process_group=net()), "got a Sequential as process_group"),
    "text as group": (lambda: state(process_group="gloo"), "got a str as process_group"),
    "ranks as group": (lambda: state(process_group=[0, 1]), "got a list as process_group"),
    "a state as group": (lambda: state(LOW, state()), "got a CompressionState as process_group"),
    "a model as names": (lambda: named(net()), f"got a Sequential {NAMES}"),
    "a dict as names": (lambda: named(dict(net().named_parameters())), f"got a dict {NAMES}"),
    "parameters as names": (lambda: named(net().parameters()), "has a Parameter in it"),
    "a name of no tensor": (lambda: named([("a", 3)]), "has (str, int) in it"),
    "a name twice": (lambda: named([*net().named_parameters()] * 2), "'0.weight' twice"),
    "text as scaler": (lambda: state(scaler="dynamic"), "got 'dynamic' as scaler; expected"),
    "a number as scaler": (lambda: state(scaler=2.0**16), "got a float as scaler; expected"),
    "text as a flag": (
        lambda: state(find_unused_parameters="no"), "find_unused_parameters='no'; expected True",
    ),
    "a wait of its own": (lambda: state(FFT.using(wait_s=3)), "timeout"),
    "text as saved state": (lambda: state().load_state_dict("x"), "expected what it returned"),
    "nothing as saved state": (lambda: state().load_state_dict(None), "the saved state"),
    "other saved state": (
        lambda: state().load_state_dict({"format": 99}), "not a state of state_dict()",
    ),
    "a state without names": (lambda: step_then_save(state()), "names"),
    "other ratios": (
        lambda: step_with(state(LOW.using(ratio=odd(20, 30)))),
        "setting ratio: 20 on rank 0, 30 on rank",
    ),
    "other thetas": (
        lambda: step_with(state(odd(FFT, FFT.using(theta=0.5)))),
        "setting theta: 0.9 on rank 0, 0.5 on rank",
    ),
    "other classes": (
        lambda: step_with(state(odd(FFT, LOW))),
        "setting compression: 'FFTCompression' on rank 0, 'LowRankCompression' on rank",
    ),
    "other comparisons": (
        lambda: step_with(state(LOW.using(check_every=odd(7, 8)))), "setting check_every: 7 on",
    ),
    "a scaler on one rank": (
        lambda: step_with(state(scaler=odd(None, torch.amp.GradScaler("cpu")))), "scaler: none",
    ),
    "names on one rank": (
        lambda: step_with(named(odd(None, net().named_parameters()))), "nothing on rank 0",
    ),
    "a first name missing on one rank": (lambda: lacks_a_name(LOW, 0), APART),
    "a last name missing in a gather": (lambda: lacks_a_name(FFT, 7), APART),
    "names in another order": (names_swapped, "tensor 0"),
    "names of another model": (
        lambda: step_with(named(net().named_parameters())), "is not in named_parameters",
    ),
    "a parameter added": (lambda: parameter_added(LOW), "is not in named_parameters"),
    "the same in a gather, added": (lambda: parameter_added(FFT), "is not in named_parameters"),
    "replicas: a plain model": (lambda: replicated(LOW, net()), "without a module of FSDP2"),
    "replicas: text as compression": (lambda: replicated("fft"), "got 'fft' as compression"),
    "replicas: a model as group": (
        lambda: compress_replicas(sharded(), LOW, net()), "got a Sequential as replicas",
    ),
    "replicas: no model": (
        lambda: compress_replicas(LOW, net(), MESH["replicate"]), "as model; expected a module",
    ),
    "replicas: a whole mesh": (
        lambda: compress_replicas(sharded(), LOW, MESH), "a mesh of 2 dimensions",
    ),
    "replicas: averaged by torch": (
        lambda: replicated(LOW, sharded(replicas=False)), "over which it averages itself",
    ),
    "replicas: twice": (lambda: replicated(LOW, replicated(LOW)), "has an all-reduce hook already"),
    "replicas: other ratios": (
        lambda: step(replicated(odd(LOW, LOW.using(ratio=30)))), "setting ratio",
    ),
    "replicas: other shapes": (other_shapes, "'0.weight' (96, 64)"),
    "replicas: a module sharded later": (sharded_later, "was sharded after compress_replicas"),
}  # fmt: skip


def step_then_save(own):
    step_with(own)
    own.state_dict()


def raised_by(call):
    """The type and the text of what is raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (which one is what is tested)
        return type(error).__name__, str(error)
    return "nothing", ""


def every_rank_is_told():
    for name, (call, words) in REFUSED.items():
        began = time.monotonic()
        said = raised_by(call)
        took = time.monotonic() - began
        for rank, (kind, text) in enumerate(everyone(said)):
            assert kind == "CompressError", (name, rank, kind, text)
            assert words in text, (name, rank, text)
        assert max(everyone(took)) < LONGEST, (name, took)


def an_exception_in_a_pass_of_replicas():
    """FSDP2 alone would go on and reduce nothing, in silence, until it is told."""
    for compression in (LOW, FFT):
        model = replicated(compression)
        for _ in range(3):
            step(model)
        handle = fails_in_the_middle(model[1])
        message_of(lambda model=model: step(model), ZeroDivisionError)
        handle.remove()
        said = message_of(lambda model=model: step(model), CompressError)
        assert "reset_iter_state()" in said, said
        model.reset_iter_state()
        for _ in range(3):
            step(model)
            whole = [p.grad.full_tensor().double().sum().item() for p in model.parameters()]
            sums = everyone(whole)
            assert all(each == sums[0] for each in sums), sums


def damage_where_no_compiled_code_reaches():
    """Of a payload: the step ends, the next is an error of all."""
    gather, elsewhere = Collectives.gather, [(module, module.on_host) for module in (payloads, fft)]

    def damaged(collectives, words, sizes=None):
        if RANK:
            words[40] ^= 4
        return gather(collectives, words, sizes)

    for module, _ in elsewhere:  # as a device without CuPy
        module.on_host = lambda values: isinstance(values, np.ndarray)
    try:
        model = net()
        ddp = wrap(model, state_of(FFT, model))
        step(ddp)
        assert not any(p.grad.isnan().any() for p in model.parameters())
        Collectives.gather = damaged
        step(ddp)
        assert any(p.grad.isnan().all() for p in model.parameters())
        Collectives.gather = gather
        for kind, text in everyone(raised_by(lambda: step(ddp))):
            assert (kind, "previous step is corrupt" in text) == ("PayloadError", True), text
    finally:
        Collectives.gather = gather
        for module, before in elsewhere:
            module.on_host = before


CASES = [
    every_rank_is_told, an_exception_in_a_pass_of_replicas, damage_where_no_compiled_code_reaches,
]  # fmt: skip
