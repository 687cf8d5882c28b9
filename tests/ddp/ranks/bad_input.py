"""One rank of two: bad input of every kind, one after the other in one process group.

Run as `bad_input.py RANK RANKS FILE`. Prints "ok CASE" where every rank got the error in time; each
case's entry says the words that the message of every rank has to have.
"""

import time

import numpy as np
import torch
import torch.distributed as dist
from cases import RANK, RANKS, everyone, process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sn_compress import AutoCompression, FFTCompression, LowRankCompression
from sn_compress.codecs import fft
from sn_compress.engine import payloads
from sn_compress.torch.ddp import CompressionState, compression_hook
from sn_compress.torch.fsdp import compress_replicas
from sn_compress.torch.process_group import Collectives

LONGEST = 20.0  # s that a case may take on a busy machine; a wait for the other rank ends at 40
LOW, FFT = LowRankCompression.using(warmup=1), FFTCompression


class Fails(torch.autograd.Function):
    """An exception in the middle of the backward pass."""

    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise ZeroDivisionError("in the middle")
        return gradient, None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 64)
        self.last = nn.Linear(64, 64)
        self.fail = False

    def forward(self, x):
        return self.last(self.second(Fails.apply(self.first(x).relu(), self.fail)))


def wrap(state, model=None, hook=compression_hook):
    # Several buckets.
    ddp = DistributedDataParallel(model or Net(), bucket_cap_mb=0.02)
    ddp.register_comm_hook(state, hook)
    return ddp


def step(model):
    model.zero_grad()
    model(torch.randn(8, 64)).square().mean().backward()


def state(compression=LOW, **options):
    return CompressionState(compression, **options)


def given(named):
    return state(named_parameters=named)


def odd(usual, other):
    """What differs on the last rank."""
    return other if RANK == RANKS - 1 else usual


def without_last(named, lacking):
    return [pair for place, pair in enumerate(named) if place != odd(None, lacking)]


def lacks_a_name(compression, place):
    model = Net()
    names = without_last(model.named_parameters(), place)
    step(wrap(state(compression, named_parameters=names), model))


def other_model():
    step(wrap(given(Net().named_parameters())))


def parameter_added(compression):
    model = Net()
    own = state(compression, named_parameters=model.named_parameters())
    step(wrap(own, model))
    grown = nn.Sequential(model, nn.Linear(64, 64))
    step(wrap(own, grown))


def state_of_another(compression):
    other = state(compression)
    other.load_state_dict({"format": 99})


def sharded(*, replicas=True):
    model = Net()
    over = MESH["shard"] if replicas else MESH
    fully_shard(model.first, mesh=over)
    return fully_shard(model, mesh=over)


def replicated(compression, model=None):
    model = model or sharded()
    compress_replicas(model, compression, MESH["replicate"])
    return model


def sharded_later():
    model = Net()
    fully_shard(model.first, mesh=MESH["shard"])
    replicated(LOW, model)
    step(fully_shard(model, mesh=MESH["shard"]))


def other_shapes():
    model = Net()
    if RANK:
        model.first, model.second = nn.Linear(64, 98), nn.Linear(98, 64)
    fully_shard(model.first, mesh=MESH["shard"])
    step(replicated(LOW, fully_shard(model, mesh=MESH["shard"])))


NO_STATE = "as its state; expected a CompressionState"
APART = "ranks have different settings or tensors"
NAMES = "as named_parameters; expected pairs"
# Name: the call that has to raise CompressError on every rank, and words of its message.
CASES = {
    "hook without state": (lambda: step(wrap(None)), NO_STATE),
    "a class as state": (lambda: step(wrap(LOW)), NO_STATE),
    "a group as state": (lambda: step(wrap(dist.group.WORLD)), NO_STATE),
    "a model as state": (lambda: step(wrap(Net())), NO_STATE),
    "a model as compression": (lambda: state(Net()), "got a Net as compression"),
    "text as compression": (lambda: state("low rank"), "got 'low rank' as compression"),
    "a model as group": (lambda: state(process_group=Net()), "got a Net as process_group"),
    "text as group": (lambda: state(process_group="gloo"), "got a str as process_group"),
    "ranks as group": (lambda: state(process_group=[0, 1]), "got a list as process_group"),
    "a model as names": (lambda: given(Net()), f"got a Net {NAMES}"),
    "a dict as names": (lambda: given(dict(Net().named_parameters())), f"got a dict {NAMES}"),
    "text as names": (lambda: given("weight"), f"got a str {NAMES}"),
    "a number as names": (lambda: given(3), f"got a int {NAMES}"),
    "parameters as names": (lambda: given(Net().parameters()), "has a Parameter in it"),
    "a name of no tensor": (lambda: given([("a", 3)]), "has (str, int) in it"),
    "a name twice": (lambda: given([*Net().named_parameters()] * 2), "'first.weight' twice"),
    "text as scaler": (lambda: state(scaler="dynamic"), "got 'dynamic' as scaler; expected"),
    "a number as scaler": (lambda: state(scaler=2.0**16), "got a float as scaler; expected"),
    "text as a flag": (
        lambda: state(find_unused_parameters="no"), "find_unused_parameters='no'; expected True",
    ),
    "text as theta": (lambda: FFT.using(theta="0.9"), "theta='0.9'; expected a number"),
    "text as ratio": (lambda: LOW.using(ratio="50"), "ratio='50'; expected a number"),
    "text as ratio of auto": (lambda: AutoCompression.using(ratio="50"), "expected a number"),
    "text as warmup": (lambda: LOW.using(warmup="3"), "warmup='3'; expected a whole number"),
    "text as feedback": (lambda: FFT.using(feedback="no"), "expected True or False"),
    "half a step": (lambda: LOW.using(every=2.5), "every=2.5; expected a whole number"),
    "no number": (lambda: LOW.using(ratio=float("nan")), "ratio=nan"),
    "text as saved state": (lambda: state().load_state_dict("x"), "expected what it returned"),
    "nothing as saved state": (lambda: state().load_state_dict(None), "the saved state"),
    "other saved state": (lambda: state_of_another(LOW), "not a state of state_dict()"),
    "other ratios": (lambda: step(wrap(state(odd(LOW, LOW.using(ratio=30))))), "setting ratio"),
    "other thetas": (lambda: step(wrap(state(odd(FFT, FFT.using(theta=0.5))))), "setting theta"),
    "other classes": (lambda: step(wrap(state(odd(LOW, FFT)))), "setting compression"),
    "a scaler on one rank": (
        lambda: step(wrap(state(scaler=odd(None, torch.amp.GradScaler("cpu"))))), "scaler: none",
    ),
    "names on one rank": (
        lambda: step(wrap(given(odd(None, Net().named_parameters())))), "nothing on rank 0",
    ),
    "a first name missing on one rank": (lambda: lacks_a_name(LOW, 0), APART),
    "a last name missing on one rank": (lambda: lacks_a_name(LOW, 5), APART),
    "the same in a gather": (lambda: lacks_a_name(FFT, 5), APART),
    "names of another model": (other_model, "is not in named_parameters"),
    "a parameter added": (lambda: parameter_added(LOW), "is not in named_parameters"),
    "the same in a gather, added": (lambda: parameter_added(FFT), "is not in named_parameters"),
    "replicas: a plain model": (lambda: replicated(LOW, Net()), "without a module of FSDP2"),
    "replicas: text as compression": (lambda: replicated("fft"), "got 'fft' as compression"),
    "replicas: a model as group": (
        lambda: compress_replicas(sharded(), LOW, Net()), "got a Net as replicas",
    ),
    "replicas: averaged by torch": (
        lambda: replicated(LOW, sharded(replicas=False)), "over which it averages itself",
    ),
    "replicas: twice": (lambda: replicated(LOW, replicated(LOW)), "has an all-reduce hook already"),
    "replicas: other ratios": (
        lambda: step(replicated(odd(LOW, LOW.using(ratio=30)))), "setting ratio",
    ),
    "replicas: other shapes": (other_shapes, "'first.weight' (96, 64)"),
    "replicas: a module sharded later": (sharded_later, "was sharded after compress_replicas"),
}  # fmt: skip


def message_of(call):
    """The type and the text of what is raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 (which one is what is tested)
        return type(error).__name__, str(error)
    return "nothing", ""


def refused(name):
    call, words = CASES[name]
    start = time.monotonic()
    said = message_of(call)
    took = time.monotonic() - start
    for rank, (kind, text) in enumerate(everyone(said)):
        assert kind == "CompressError", (name, rank, kind, text)
        assert words in text, (name, rank, text)
    assert max(everyone(took)) < LONGEST, (name, took)


def an_exception_in_the_middle(compression):
    """DDP refuses the next step by itself, at once; with a new one the same state goes on."""
    model = Net()
    own = state(compression, named_parameters=model.named_parameters())
    ddp = wrap(own, model)
    for _ in range(3):
        step(ddp)
    model.fail = True
    assert message_of(lambda: step(ddp)) == ("ZeroDivisionError", "in the middle")
    model.fail = False
    kind, text = message_of(lambda: step(ddp))
    assert kind == "RuntimeError", (kind, text)
    assert "prior iteration" in text, text
    ddp = wrap(own, model)
    for _ in range(3):
        step(ddp)
        sums = everyone([p.grad.double().sum().item() for p in model.parameters()])
        assert all(each == sums[0] for each in sums), sums


def an_exception_of_replicas(compression):
    """FSDP2 alone would go on and reduce nothing, in silence, until it is told."""
    model = replicated(compression)
    for _ in range(3):
        step(model)
    model.fail = True
    assert message_of(lambda: step(model)) == ("ZeroDivisionError", "in the middle")
    model.fail = False
    for kind, text in everyone(message_of(lambda: step(model))):
        assert kind == "CompressError", (kind, text)
        assert "reset_iter_state()" in text, text
    model.reset_iter_state()
    for _ in range(3):
        step(model)
        sums = everyone([p.grad.full_tensor().double().sum().item() for p in model.parameters()])
        assert all(each == sums[0] for each in sums), sums


def damage_on_the_way():
    """Of a payload that no compiled code reaches: the step ends, the next is an error of all."""
    gather, elsewhere = Collectives.gather, [(module, module.on_host) for module in (payloads, fft)]

    def damaged(collectives, words, sizes=None):
        if RANK:
            words[40] ^= 4
        return gather(collectives, words, sizes)

    for module, _ in elsewhere:  # as a device without CuPy
        module.on_host = lambda values: isinstance(values, np.ndarray)
    try:
        model = Net()
        ddp = wrap(state(FFT, named_parameters=model.named_parameters()), model)
        step(ddp)
        assert not model.last.weight.grad.isnan().any()
        Collectives.gather = damaged
        step(ddp)
        assert model.last.weight.grad.isnan().all()
        Collectives.gather = gather
        for kind, text in everyone(message_of(lambda: step(ddp))):
            assert (kind, "previous step is corrupt" in text) == ("PayloadError", True), text
    finally:
        Collectives.gather = gather
        for module, before in elsewhere:
            module.on_host = before


STEPS = {
    "damage where no compiled code reaches": damage_on_the_way,
    "an exception in the middle": lambda: an_exception_in_the_middle(LOW),
    "an exception in the middle of a gather": lambda: an_exception_in_the_middle(FFT),
    "replicas: an exception in the middle": lambda: an_exception_of_replicas(LOW),
    "replicas: an exception in the middle of a gather": lambda: an_exception_of_replicas(FFT),
}

if __name__ == "__main__":
    with process_group(40):
        MESH = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicate", "shard"))
        for case in CASES:
            refused(case)
            print(f"ok {case}.", flush=True)
        for case, call in STEPS.items():
            call()
            print(f"ok {case}.", flush=True)
