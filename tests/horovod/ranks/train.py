"""One rank: train a small net for some steps in one of many ways, then compare all ranks.

Run as `train.py CASE`; prints "ok CASE" on every rank, or fails with an assertion.
"""

import sys
import warnings

import horovod.torch as hvd
import torch
from torch import nn

from sn_compress import FFTCompression

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


def train(
    dtype=torch.float32, *, theta=0.9, clip=False, branch=True, passes=1, mode=None, **options
):
    torch.manual_seed(0)
    model = Net().to(dtype)
    process_set = options.get("process_set")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        named_parameters=model.named_parameters(),
        compression=FFTCompression.using(theta=theta, mode=mode),
        backward_passes_per_step=passes,
        **options,
    )
    torch.manual_seed(1 + hvd.rank())
    only_here = branch or hvd.rank() == 0
    for _ in range(STEPS):
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
        flat = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])
        assert torch.isfinite(flat).all()
        extra = {"process_set": process_set} if process_set else {}
        all_ranks = hvd.allgather(flat[None], name="parameters", **extra)
        assert torch.equal(all_ranks, all_ranks[:1].expand_as(all_ranks)), "ranks differ"
    report = FFTCompression.report(optimizer)
    assert report["steps"] == STEPS, report
    assert report["tensors"] == 3, report
    assert report["ratio"] > 5, report
    return model, optimizer


def order_differs():
    """Rank 0 builds its graph in another order, and so its hooks fire in another order."""
    torch.manual_seed(0)
    sides = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(sides.parameters(), lr=0.05),
        named_parameters=sides.named_parameters(),
        compression=FFTCompression.using(theta=0.9),
    )
    fired = []
    for name, parameter in sides.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    torch.manual_seed(1 + hvd.rank())
    for _ in range(STEPS):
        fired.clear()
        optimizer.zero_grad()
        x = torch.randn(8, 64)
        sum(side(x).square().mean() for side in (sides[::-1] if hvd.rank() else sides)).backward()
        optimizer.step()
    orders = hvd.allgather_object(fired)
    assert orders[0] != orders[1], "this test was to make the orders differ"
    flat = torch.cat([p.detach().reshape(-1) for p in sides.parameters()])
    everyone = hvd.allgather(flat[None], name="order")
    assert torch.equal(everyone, everyone[:1].expand_as(everyone)), "ranks differ"


def process_sets():
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    odd = hvd.add_process_set(list(range(1, hvd.size(), 2)))
    model, _ = train(process_set=even if hvd.rank() % 2 == 0 else odd)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    everyone = hvd.allgather(flat[None], name="sets")
    if hvd.size() > 1:
        assert not torch.equal(everyone[0], everyone[1]), "the sets were to train apart"


def without_names():
    """Horovod then names the parameters by their place."""
    model = nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=FFTCompression
    )
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    assert FFTCompression.report(optimizer)["tensors"] == 1


def two_optimizers():
    """Two nets with the same parameter names keep their memories apart."""
    nets = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1),
            named_parameters=[(f"net{i}.weight", net.weight)],
            compression=FFTCompression,
        )
        for i, net in enumerate(nets)
    ]
    for net, optimizer in zip(nets, optimizers, strict=True):
        net(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    for i, optimizer in enumerate(optimizers):
        state = FFTCompression.state_dict(optimizer)
        assert list(state["memory"]) == [f"net{i}.weight"]


CASES = {
    "fp32": lambda: train(),
    "fp16": lambda: train(torch.float16),
    "bf16": lambda: train(torch.bfloat16),
    "paper": lambda: train(mode="paper"),
    "sum": lambda: train(op=hvd.Sum),
    "predivide": lambda: train(gradient_predivide_factor=2.0),
    "accumulate": lambda: train(passes=3),
    "clip": lambda: train(clip=True),
    "unused": lambda: train(branch=False),
    "groups": lambda: train(groups=2),
    "groups-bf16": lambda: train(torch.bfloat16, groups=2),
    "order": order_differs,
    "process-sets": process_sets,
    "without-names": without_names,
    "two-optimizers": two_optimizers,
}

if __name__ == "__main__":
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    for case in sys.argv[1:]:
        CASES[case]()
        print(f"ok {case}", flush=True)
