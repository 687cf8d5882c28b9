"""One rank: train a small net for some steps in one of many ways, then compare all ranks.

Cases are of an exchange, "gather-fp16" or "shared-fp16"; see `named`.
"""

import warnings
from functools import cache

import horovod.torch as hvd
import torch
from nets import assert_alike, same_on_all, vector, wrap
from torch import nn

from sn_compress import FFTCompression, LowRankCompression

STEPS = 20


class Net(nn.Module):
    """Three layers above the size that is compressed, biases below; one may go unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(96, 128)
        self.branch = nn.Linear(128, 128)
        self.last = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if branch:
            x = x + torch.tanh(self.branch(x))
        return self.last(x)


GATHER = FFTCompression.using(theta=0.9)
SHARED = LowRankCompression.using(ratio=8, warmup=3, every=12)


def train(dtype=torch.float32, *, way=GATHER, clip=False, branch=True, passes=1, **options):
    torch.manual_seed(0)
    model = Net().to(dtype)
    process_set = options.get("process_set")
    options = {"backward_passes_per_step": passes, **options}
    optimizer = wrap(model, way, lr=0.05, momentum=0.9, **options)
    torch.manual_seed(1 + hvd.rank())
    only_here = branch or hvd.rank() == 0
    for step in range(STEPS):
        optimizer.zero_grad()
        for _ in range(passes):
            x, y = torch.randn(8, 96, dtype=dtype), torch.randint(0, 10, (8,))
            loss = nn.functional.cross_entropy(model(x, only_here).float(), y)
            loss.backward()
        if clip:
            optimizer.synchronize()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
        if step % 5 < 4:  # ranks that differ stay so, and ranks spin while Horovod gathers
            continue
        assert_alike(model, **({"process_set": process_set} if process_set else {}))
    report = FFTCompression.report(optimizer)
    assert report["steps"] == STEPS, report
    if "nodes" in report:  # each rank of a node sends some of the tensors
        assert hvd.size() == 2 * report["nodes"], report
        return model, optimizer
    # The three weights; biases travel plain. Shared, four of the 20 steps are dense.
    assert report["tensors"] == 3, report
    how = "low_rank" if issubclass(way, LowRankCompression) else "frequencies"
    assert (report[how], report["plain"]) == (3, len(list(model.parameters())) - 3), report
    assert report["ratio"] > (3 if way.settings.exchange == "shared" else 5), report
    return model, optimizer


@cache
def halves():
    """Process sets of the even ranks and of the odd ones; Horovod makes none of the same twice."""
    return [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]


def process_sets(way):
    model, _ = train(way=way, process_set=halves()[hvd.rank() % 2])
    assert not same_on_all(vector(model)), "the sets were to train apart"


def without_names(way):
    """Horovod then names the parameters by their place."""
    model = nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=way
    )
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    assert FFTCompression.report(optimizer)["tensors"] == 1


def spoil_once():
    """A hook that puts Inf into the first gradient it sees."""
    left = [True]

    def hook(gradient):
        if not left:
            return gradient
        left.clear()
        return gradient.index_fill(0, torch.tensor([3]), float("inf"))

    return hook


def scaler(way):
    """One rank overflows: all skip, and go on as if the step had never been."""
    results = []
    for spoil in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = wrap(model, way, lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        FFTCompression.watch(optimizer, scaler)
        for step in range(9):
            if step == 6 and not spoil:
                FFTCompression.state_dict(optimizer)  # what was done so far is kept,
                scaler.update(512.0)  # and the scale becomes that after the skipped step
            for bad in (True, False) if spoil and step == 6 else (False,):
                torch.manual_seed(step * 10 + hvd.rank())
                optimizer.zero_grad()
                x, y = torch.randn(8, 96), torch.randint(0, 10, (8,))
                out = model(x, True)
                if bad and hvd.rank() == 1:  # in one tensor of one rank only
                    model.branch.weight.register_hook(spoil_once())
                scaler.scale(nn.functional.cross_entropy(out, y)).backward()
                optimizer.synchronize()
                scaler.unscale_(optimizer)
                with optimizer.skip_synchronize():
                    scaler.step(optimizer)
                scaler.update()
        results.append(vector(model))
    assert torch.equal(*results)


WAYS = {"gather": GATHER, "shared": SHARED}
PAPER = FFTCompression.using(mode="paper", theta=0.9)
CASES = {
    "fp32": train,
    "fp16": lambda way: train(torch.float16, way=way),
    "bf16": lambda way: train(torch.bfloat16, way=way),
    "paper": lambda way: train(way=PAPER),
    "sum": lambda way: train(way=way, op=hvd.Sum),
    "predivide": lambda way: train(way=way, gradient_predivide_factor=2.0),
    "accumulate": lambda way: train(way=way, passes=3),
    "clip": lambda way: train(way=way, clip=True),
    "unused": lambda way: train(way=way, branch=False),
    "groups": lambda way: train(way=way, groups=2),
    "groups-bf16": lambda way: train(torch.bfloat16, way=way, groups=2),
    "process-sets": process_sets,
    "without-names": without_names,
    "scaler": scaler,
}


def named(word):
    """The case of an exchange, in which a warning is an error."""
    way, _, case = word.partition("-")

    def call():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            CASES[case](way=WAYS[way])

    return call
