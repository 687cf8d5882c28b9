"""Plans as selective-checkpoint policies: what is predicted is what torch's own executor holds."""

import copy
from dataclasses import replace

import pytest
import torch
from late_imports import Late
from models import Gpt2, Llama, UNet, resnet
from small_models import mlp
from torch import nn
from two_ranks import run_two_ranks

from sn_memory import BudgetError, PlanError
from sn_memory.torch import StorageTracker, TraceError, checkpoint_policy
from sn_memory.torch.model.step import run_step
from sn_memory.torch.policy.predict import Numbers

backends, autograd, partitioners, dry_run = map(
    Late,
    (
        "torch._dynamo.backends.common",
        "torch._functorch.aot_autograd",
        "torch._functorch.partitioners",
        "sn_memory.torch.policy.choose",
    ),
)

STATE = torch.get_rng_state().nbytes + 16  # kept by each checkpoint, and not counted
WRAPPED = "_checkpoint_wrapped_module."
NETWORKS = {
    "resnet": (lambda: resnet(50, width=4), lambda: torch.randn(4, 3, 32, 32)),
    "gpt2": (
        lambda: Gpt2(vocabulary=300, length=64, width=32, layers=3, heads=2),
        lambda: torch.randint(0, 300, (2, 64)),
    ),
    "llama": (
        lambda: Llama(vocabulary=300, width=32, layers=3, heads=2, groups=1, hidden=80),
        lambda: torch.randint(0, 300, (2, 64)),
    ),
    "unet": (lambda: UNet(width=4), lambda: torch.randn(2, 1, 64, 64)),
}


def measured(model, sample):
    """Peak, with kernels' scratch, and results of a step, by the names of the plain model."""
    torch.manual_seed(5)
    found = run_step(model, model, ((sample,), {}), kernels=True)
    return found.peak_bytes, {key.replace(WRAPPED, ""): it for key, it in found.results.items()}


def between(model, sample, **settings):
    """A budget halfway from the least that blocks can do to what no policy takes."""
    with pytest.raises(BudgetError) as caught:
        checkpoint_policy(model, sample, 1, profile=False, **settings)
    return f"{(caught.value.percent + 100) // 2}%"


@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_is_predicted_and_every_bit_is_the_same(name):
    make, data = NETWORKS[name]
    model, sample = make(), data()
    policy = checkpoint_policy(model, sample, between(model, sample), profile=False)
    plain_peak, plain = measured(copy.deepcopy(model), sample)
    peak, results = measured(policy.wrap(model), sample)
    assert plain_peak == policy.baseline_peak_bytes
    assert policy.smallest_peak_bytes <= policy.peak_bytes <= policy.budget_bytes
    assert 0 <= peak - policy.peak_bytes <= STATE * len(policy.saved)
    assert policy.saved
    assert policy.rerun_s > 0
    assert plain.keys() == results.keys()
    for key, it in plain.items():
        assert it is None or torch.equal(it, results[key]), key


def test_more_bytes_run_less_again_and_all_of_them_nothing():
    model, sample = mlp(), torch.randn(256, 32)
    found = [
        checkpoint_policy(model, sample, budget, profile=False) for budget in ("70%", "85%", "100%")
    ]
    assert found[0].rerun_s > found[1].rerun_s > found[2].rerun_s == 0
    assert not found[2].saved
    assert found[2].peak_bytes == found[2].baseline_peak_bytes


def test_a_budget_that_cannot_be_had_says_what_can():
    model, sample = mlp(), torch.randn(256, 32)
    with pytest.raises(BudgetError, match="The least that these blocks can do") as caught:
        checkpoint_policy(model, sample, "10%", profile=False)
    error = caught.value
    policy = checkpoint_policy(model, sample, error.peak_bytes, profile=False)
    assert policy.peak_bytes == error.peak_bytes == policy.smallest_peak_bytes
    assert checkpoint_policy(model, sample, f"{error.percent}%", profile=False).saved


class Awkward(nn.Module):
    """Batch norm, a counter, ReLU in place, two dropouts, a result that is written over."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        y = self.norm(self.conv(nn.functional.dropout(x, 0.3, self.training)))
        y *= 2
        y = torch.relu_(y)
        return x + nn.functional.dropout(y * y, 0.3, self.training)


def test_second_runs_write_nothing_twice_and_draw_the_same():
    model, sample = nn.Sequential(*(Awkward() for _ in range(4))), torch.randn(4, 4, 16, 16)
    budget = between(model, sample, blocks=[Awkward])
    policy = checkpoint_policy(model, sample, budget, blocks=[Awkward], profile=False)
    _, plain = measured(copy.deepcopy(model), sample)
    peak, results = measured(policy.wrap(model), sample)
    assert 0 <= peak - policy.peak_bytes <= STATE * len(policy.saved)
    assert float(results["buffer 0.calls"]) == 1
    assert all(it is None or torch.equal(it, results[key]) for key, it in plain.items())


def test_dropout_is_no_call_of_its_ops():
    numbers = Numbers()
    eager = ["aten.mul.Tensor", "aten.bernoulli_.float", "aten.div_.Scalar", "aten.mul.Tensor"]
    assert [numbers.of(op) for op in (*eager, "aten.mul.Tensor")] == [0, None, None, None, 1]


@pytest.mark.parametrize(("saved", "again"), [({}, 2), ({"aten.gelu.default": (0,)}, 0)])
def test_compiled_it_saves_what_it_says(saved, again):
    """A GELU's result is wanted by the product behind it: saved, or made in the backward graph."""
    model, sample = mlp(2, 16), torch.randn(64, 16)
    model = nn.Sequential(*(nn.Sequential(it, nn.Linear(16, 16)) for it in model))
    policy = checkpoint_policy(model, sample, "100%", blocks=["0", "1"], profile=False)
    policy = replace(policy, saved={"0": saved, "1": saved}, kept=())
    _, plain = measured(copy.deepcopy(model), sample)
    graphs = []

    def note(graph, inputs):
        graphs.append(graph)
        return autograd.make_boxed_func(graph.forward)

    backend = backends.aot_autograd(
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    compiled = torch.compile(policy.wrap(model), backend=backend, fullgraph=True)
    found = run_step(compiled, model, ((sample,), {}))
    made = [it for it in graphs[1].graph.nodes if str(it.target) == "aten.gelu.default"]
    assert len(made) == again
    for key, it in found.results.items():
        other = plain[key.replace(WRAPPED, "")]
        assert it is None or torch.allclose(it, other, atol=1e-5), key


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.second(nn.functional.gelu(self.first(x)))


def compiled_budget(model, sample):
    """A percentage halfway from the least that blocks can do to what no policy takes."""
    with pytest.raises(BudgetError, match="The least that these blocks can do") as caught:
        checkpoint_policy(model, sample, 1, profile=False, compiled=True)
    return f"{(caught.value.percent + 100) // 2}%", caught.value.peak_bytes


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*context_fn is passed")
def test_for_a_compiled_step_it_is_planned_on_its_kernels():
    """The promise is of the compiled step, which holds less."""
    torch._dynamo.reset()
    model, sample = nn.Sequential(Block(), Block()), torch.randn(256, 16)
    before = {name: id(it) for name, it in model.named_modules()}
    budget, least = compiled_budget(model, sample)
    policy = checkpoint_policy(model, sample, budget, profile=False, compiled=True)
    eager = checkpoint_policy(model, sample, "100%", profile=False)
    assert policy.compiled
    assert not eager.compiled
    assert policy.saved
    assert least == policy.smallest_peak_bytes <= policy.peak_bytes <= policy.budget_bytes
    assert policy.budget_bytes < policy.baseline_peak_bytes < eager.baseline_peak_bytes
    assert {name: id(it) for name, it in model.named_modules()} == before
    assert policy.peak_bytes == dry_run.compiled_peak(policy.wrap(model), ((sample,), {}))


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore:.*context_fn is passed")
def test_its_compiled_step_holds_what_was_promised():
    torch._dynamo.reset()
    model, sample = nn.Sequential(Block(), Block()), torch.randn(256, 16)
    budget, _ = compiled_budget(model, sample)
    policy = checkpoint_policy(model, sample, budget, profile=False, compiled=True)
    compiled = torch.compile(policy.wrap(model), fullgraph=True, dynamic=False)
    for _ in range(2):
        found = run_step(compiled, model, ((sample,), {}), by_allocator=True)
    assert found.peak_bytes == policy.peak_bytes <= policy.budget_bytes


def test_its_key_is_of_what_it_says():
    model, sample = mlp(), torch.randn(256, 32)
    first, same, other = (
        checkpoint_policy(model, sample, budget, profile=False) for budget in ("75%", "75%", "90%")
    )
    assert first.key == same.key != other.key
    block = next(iter(first.saved))
    assert first.context_fn(block).cache_hash == f"{first.key}/{block}"
    with pytest.raises(PlanError, match="expected one that runs again"):
        first.context_fn("elsewhere")


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        (["nowhere"], "expected a path, a class or a module"),
        (["0", "0.1"], "lies within the block '0'"),
        ([nn.Conv2d], "expected a path, a class or a module"),
    ],
)
def test_blocks_that_are_none_are_refused(blocks, match):
    with pytest.raises(TraceError, match=match):
        checkpoint_policy(mlp(), torch.randn(8, 32), "90%", blocks=blocks, profile=False)


def test_a_block_that_changes_what_it_is_given_is_left_alone():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return self.linear(x.mul_(2))

    model = nn.Sequential(nn.Linear(8, 8), Writes())
    with pytest.raises(TraceError, match="changes what it is given in place"):
        checkpoint_policy(model, torch.randn(4, 8), "90%", blocks=[Writes], profile=False)


def test_a_block_that_ends_in_rrelu_is_left_alone():
    """Gradients were NaN: torch ended the second run before the kernel had written its noise."""

    def blocks(*last):
        ends = (lambda: nn.RReLU(0.1, 0.9), *last)
        parts = (lambda: nn.Linear(64, 128), nn.GELU, lambda: nn.Linear(128, 64), *ends)
        return nn.Sequential(*(nn.Sequential(*(make() for make in parts)) for _ in range(4)))

    sample, names = torch.randn(512, 64), ["0", "1", "2", "3"]
    with pytest.raises(
        TraceError, match=r"0, 1, 2, 3: aten\.rrelu_with_noise\.default, its last op, writes"
    ):
        checkpoint_policy(blocks(), sample, "70%", blocks=names, profile=False)
    model = blocks(lambda: nn.LayerNorm(64))
    policy = checkpoint_policy(mlp(4), torch.randn(8, 32), "100%", blocks=names, profile=False)
    policy = replace(policy, saved={name: {} for name in names}, kept=())
    _, plain = measured(copy.deepcopy(model), sample)
    _, results = measured(policy.wrap(model), sample)
    for key, it in plain.items():
        assert it is None or torch.equal(it, results[key]), key


RANK = """
import json, sys, torch
from small_models import mlp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from sn_memory.torch import StorageTracker, checkpoint_policy
torch.set_num_threads(1)
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

class WithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = mlp(8, 64)

    def forward(self, x):
        return self.blocks(x).square().mean()

torch.manual_seed(0)
model, sample = WithLoss(), torch.randn(1024, 64)
policy = checkpoint_policy(model, sample, "80%", profile=False)
expected = policy.sharded_peak_bytes(model, 2)
policy.wrap(model)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
for _ in range(2):
    model.zero_grad()
    tracker = StorageTracker([*model.parameters(), sample])
    with tracker:
        model(sample).backward()
grads = [float(it.grad.full_tensor().double().sum()) for it in model.parameters()]
print(json.dumps([expected, tracker.peak_bytes, grads]))
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_under_fsdp2_on_two_ranks(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("no torch.distributed")
    (expected, peak, grads), _ = run_two_ranks(RANK, tmp_path / "store")
    assert abs(peak - expected) <= 0.1 * expected
    torch.manual_seed(0)
    model, sample = mlp(8, 64), torch.randn(1024, 64)
    model(sample).square().mean().backward()
    plain = [float(it.grad.double().sum()) for it in model.parameters()]
    assert grads == pytest.approx(plain, rel=1e-4, abs=1e-6)


def test_the_tracker_is_told_of_every_call():
    heard = []
    with StorageTracker(heard=heard.append) as tracker:
        torch.zeros(256)
    assert max(heard) == tracker.peak_bytes == 1024
