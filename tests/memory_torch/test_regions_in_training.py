"""What training does around a plan of regions: kept graphs, hooks, several samples, experts."""

import random
import warnings

import pytest
import torch
from region_models import ROWS, WIDTH, Looks, Masks, Tied, Views, block, rows, twins, watched
from steps import grads, same
from torch import nn
from torch.autograd import grad


@pytest.mark.parametrize("kind", [Tied, Views])
@pytest.mark.filterwarnings("ignore:a backward pass through:sn_memory.base.errors.PlanWarning")
def test_passes_through_a_graph_that_is_kept(kind):
    found = []
    for it in twins(kind):
        parameters, x = list(it.parameters()), rows(1).requires_grad_()
        out = it(x)
        last = grad(out, parameters[-2:], retain_graph=True)
        first = grad(out.sin(), [x, *parameters[:2]], retain_graph=True)
        out.cos().backward(retain_graph=True)
        out.backward()
        found.append([*last, *first, x.grad, *grads(it)])
        with pytest.raises(RuntimeError):
            out.backward()
    assert same(*found)


def test_hooks_see_and_change_what_they_do_in_the_model():
    net, twin = twins(Looks)
    seen = {net: [], twin: []}
    for it, norms in seen.items():
        for parameter in it.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
            parameter.register_post_accumulate_grad_hook(lambda p, n=norms: n.append(p.grad.norm()))
        # Around a region, inside of one, and around the model.
        it.blocks[1].register_forward_hook(lambda module, args, out: out * 2.0)
        it.blocks[1].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
        it.blocks[2].register_full_backward_hook(
            lambda module, left, arrived, n=norms: n.append(arrived[0].norm())
        )
        it.blocks[0][1].register_forward_hook(lambda module, args, out: out.tanh())
        it.register_forward_hook(lambda module, args, out: out * 3.0)
        # Planned anew for the hooks: steps that are measured run those of modules.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            it(rows()).backward()
        norms.clear()
    for seed in range(3):
        assert same(watched(twin, rows(seed))[0], watched(net, rows(seed))[0])
    # Gradients that autograd has summed come in its order, which is another with fewer nodes.
    assert sorted(map(float, seen[twin])) == sorted(map(float, seen[net]))


def test_each_of_several_samples_keeps_the_budget():
    net, twin = twins(Looks, "60%", [rows(1, 64), rows(2, 200), rows(3, 256)])
    assert [it.how for it in twin.sn_memory.kinds].count("planned by regions") <= 2
    kinds = len(twin.sn_memory.kinds)
    for at, many in enumerate((64, 200, 256, 200, 64)):
        x = rows(at + 5, many)
        (mine, peak), (own, _) = watched(twin, x), watched(net, x)
        assert same(mine, own)
        assert peak <= twin.sn_memory.budget_bytes
    # None of these is new.
    assert len(twin.sn_memory.kinds) == kinds


@pytest.mark.parametrize(("backend", "share"), [("regions", 70), ("modules", 85)])
def test_each_of_several_samples_of_one_shape_keeps_the_budget(backend, share):
    def batch(seed, part):
        return rows(seed), torch.arange(ROWS) < part * ROWS

    # In any order: the rows that a mask shows are no part of its shape.
    for parts in ((0.3, 1.0), (1.0, 0.3)):
        samples = [batch(1, part) for part in parts]
        net, twin = twins(Masks, f"{share}%", samples, backends=(backend,), backend=backend)
        record = twin.sn_memory
        for part in (0.3, 1.0):
            (own, most), (mine, peak) = (watched(it, *batch(2, part)) for it in (net, twin))
            assert same(mine, own)
            assert peak <= record.budget_bytes
        # Percent are of the one that needs most.
        assert record.budget_bytes == pytest.approx(share / 100 * most, rel=0.02)


class Crowded(Looks):
    """Another number of experts, in another order, from step to step; some get no row."""

    def __init__(self):
        super().__init__(6, stem=nn.Linear(WIDTH, WIDTH), head=nn.Linear(WIDTH, 1))

    def forward(self, x, chosen):
        x = self.stem(x)
        for number in chosen.unique().tolist():
            at = (chosen == number).nonzero().squeeze(1)
            x = x.index_add(0, at, self.blocks[number](x[at]))
        return self.head(x).square().mean()


def test_experts_that_come_and_go():
    net, twin = twins(Crowded, "75%", (rows(), torch.arange(ROWS) % 3))
    counted = twin.sn_memory.plan.leaner_steps
    draw = random.Random(0)
    less = []
    for seed in range(12):
        many = draw.choice((1, 2, 3, 4, 5, 6))
        picked = torch.tensor(draw.sample(range(6), many))
        chosen = picked[torch.randint(many, (ROWS,))]
        twin.zero_grad()
        # What comes for the first time is traced in its step.
        twin(rows(seed), chosen)
        (own, most), (mine, peak) = (watched(it, rows(seed), chosen) for it in (net, twin))
        assert same(mine, own)
        # How many experts come, and the rows of each, are known when they are called, not before.
        assert peak <= most
        less.append(peak < most)
    # One that is given all rows takes what it takes.
    assert sum(less) >= 6
    assert twin.sn_memory.plan.leaner_steps > counted


class HalfDropped(Looks):
    """LayerDrop as it is used, at a half; each layer drops numbers of its own as well."""

    def __init__(self):
        super().__init__(8, lambda: nn.Sequential(block(), nn.Dropout(0.1)))

    def forward(self, x):
        for it in self.blocks:
            if random.random() >= 0.5:
                x = x + it(x)
        return x.square().mean()


def test_half_of_the_layers_left_out():
    random.seed(3)
    net, twin = twins(HalfDropped, "70%")
    budget, peaks, plain = twin.sn_memory.budget_bytes, [], []
    for seed in range(30):
        (own, most), (mine, peak) = (watched(it, rows(seed), seed=seed + 100) for it in (net, twin))
        assert same(mine, own)
        plain.append(most)
        peaks.append(peak)
    assert max(plain) > budget
    # In sixteen runs six of the layers ran at most. Of a run with other layers than those
    # planned for not all is known ahead (decision 92).
    assert max(peaks) <= 1.06 * budget
    assert sum(peak > budget for peak in peaks) <= 4
    assert max(peaks[len(peaks) // 2 :]) <= budget
