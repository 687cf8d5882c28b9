"""Heads of attention, and fused layers: rows of one weight that only go together."""

import pytest

torch = pytest.importorskip("torch")
from shrinking import ROUNDING, apoptosis, check_duplicates, train  # noqa: E402
from torch import nn  # noqa: E402 - without torch there is nothing to import

from sn_memory.apoptosis.torch import rebuild  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet")


class Attention(nn.Module):
    """Four heads of four channels on a stream of six."""

    def __init__(self, kind="fused", heads=4):
        super().__init__()
        self.kind, self.heads = kind, heads
        self.q, self.k, self.v = (nn.Linear(6, 4 * heads) for _ in range(3))
        self.out = nn.Linear(4 * heads, 6)

    def split(self, x):
        odd = {"literal": (4, 4), "smaller": (4, -1), "open": (-1, 4)}
        sizes = odd.get(self.kind, (self.heads, 4))
        return x.view(*x.shape[:2], *sizes).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.split(made(x)) for made in (self.q, self.k, self.v))
        if self.kind == "written out":
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-2, -1) / 2).masked_fill(later, -1e9)
            found = scores.softmax(-1) @ v
        else:
            found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


def duplicate_head(model, one=1, other=3, value=1.0):
    """Make a head a copy of another one, its values a multiple."""
    for name, tensor in model.state_dict().items():
        if not name.startswith("out"):
            factor = value if name.startswith("v") else 1.0
            tensor[4 * other : 4 * other + 4] = factor * tensor[4 * one : 4 * one + 4]


@pytest.mark.parametrize("kind", ["fused", "written out", "open"])
@pytest.mark.parametrize("value", [1.0, -2.0])
def test_heads_that_say_the_same_merge_whole(kind, value):
    model = Attention(kind)
    duplicate_head(model, value=value)
    event = check_duplicates(model, torch.randn(16, 5, 6))
    assert event.merged[0].group == "q.weight + k.weight + v.weight"
    assert (event.merged[0].before, event.merged[0].after, model.heads) == (4, 3, 3)
    assert model.q.weight.shape == (12, 6)
    assert model.out.weight.shape == (6, 12)


def test_a_head_that_says_nothing_goes():
    model = Attention()
    with torch.no_grad():
        model.v.weight[8:12], model.v.bias[8:12] = 0.0, 0.0
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0))
    inputs = torch.randn(16, 5, 6)
    before = model(inputs).detach()
    (merged,) = shrink.step().merged
    assert merged.pairs == ((2, None),)
    assert (model(inputs) - before).abs().max() <= ROUNDING * before.abs().max()


@pytest.mark.parametrize(
    ("kind", "says"), [("literal", "cannot run"), ("smaller", "makes each smaller")]
)
def test_heads_that_a_model_counts_in_its_code_stay(kind, says):
    model = Attention(kind)
    duplicate_head(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.randn(16, 5, 6))
    event = shrink.step()
    assert not event
    assert says in event.refused["q.weight + k.weight + v.weight"]
    assert model.heads == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("seed", range(4))
def test_what_heads_change_is_within_the_tolerance(seed):
    torch.manual_seed(seed)
    model = Attention(heads=6)
    with torch.no_grad():
        model.out.bias.zero_()
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0), tolerance=0.5)
    inputs = torch.randn(64, 5, 6)
    odd = inputs[1::2]
    before = (model(inputs) - inputs)[1::2].detach()
    (merged,) = shrink.step().merged
    assert merged.after == model.heads < 6
    change = ((model(odd) - odd - before).norm() / before.norm()).item()
    # Sums in float32 of 160 rows of some ten products.
    assert change == pytest.approx(merged.changes["out.weight"], rel=1e-4)
    assert change <= 0.5


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_memory_of_heads_is_what_the_small_net_has(kind):
    big, small = Attention(), Attention(heads=3)
    duplicate_head(big)
    with torch.no_grad():
        big.out.weight[:, 12:] = 0.5 * big.out.weight[:, 4:8]  # then squares add up exactly, too
        for ours, theirs in zip(small.parameters(), big.parameters(), strict=True):
            ours.copy_(theirs[tuple(slice(size) for size in ours.shape)])
        small.out.weight[:, 4:8] += big.out.weight[:, 12:]
    make = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.0),
    }[kind]
    first, second = make(big.parameters()), make(small.parameters())
    inputs = torch.randn(32, 5, 6)
    shrink = apoptosis(big, first, every=2)
    for _ in range(2):
        train(big, first, inputs)
        train(small, second, inputs)
        event = shrink.step()
    ((gone, survivor),) = event.merged[0].pairs
    assert {gone, survivor} == {1, 3}
    heads = [1 if head == 3 else head for head in range(4) if head != gone]
    order = [4 * head + channel for head in heads for channel in range(4)]
    for (name, ours), theirs in zip(big.named_parameters(), small.parameters(), strict=True):
        for key, value in first.state[ours].items():
            expected = second.state[theirs][key]
            if value.dim() and name != "out.bias":
                expected = expected.index_select(int(name == "out.weight"), torch.tensor(order))
            # The key's bias moves nothing: its gradient is rounding, 1e-9 here.
            torch.testing.assert_close(value, expected, rtol=5e-5, atol=1e-8)


def test_heads_are_rebuilt_from_an_export(tmp_path):
    model, inputs = Attention(), torch.randn(16, 5, 6)
    duplicate_head(model)
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model(inputs)
    assert shrink.step()
    shrink.export(tmp_path / "small.pt")
    again = rebuild(Attention(), tmp_path / "small.pt")
    assert again.heads == 3
    assert torch.equal(again(inputs), model(inputs))


class Fused(nn.Module):
    """Four heads whose queries, keys and values are rows of one weight."""

    def __init__(self, kind="chunk", heads=4, bias=True):
        super().__init__()
        self.kind, self.num_heads, self.inner_dim = kind, heads, 4 * heads
        self.qkv = nn.Linear(6, 12 * heads, bias=bias)
        self.out = nn.Linear(4 * heads, 6)

    def forward(self, x):
        rows = x.shape[:2]
        made = self.qkv(x)
        if self.kind in ("unbind", "index"):
            made = made.reshape(*rows, 3, self.num_heads, 4).permute(2, 0, 3, 1, 4)
            q, k, v = made.unbind(0) if self.kind == "unbind" else (made[0], made[1], made[2])
        else:
            width = {"split": self.inner_dim, "literal": 16}.get(self.kind)
            parts = made.chunk(3, dim=-1) if width is None else made.split(width, dim=-1)
            q, k, v = (it.view(*rows, self.num_heads, -1).transpose(1, 2) for it in parts)
        found = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(found.transpose(1, 2).flatten(2))


class PackedGate(nn.Module):
    """A gate and what it gates, made by one layer."""

    def __init__(self, kind="chunk", width=6):
        super().__init__()
        self.kind, self.width = kind, width
        self.both, self.down = nn.Linear(4, 2 * width), nn.Linear(width, 4)

    def forward(self, x):
        both = self.both(x)
        if self.kind == "glu":
            made = nn.functional.glu(both)
        elif self.kind == "uneven":
            up, gate = both.split([2 * self.width - 3, 3], dim=-1)
            made = up[:, : self.width] * gate.sum(-1, keepdim=True)
        else:
            up, gate = both.chunk(2, dim=-1)
            made = nn.functional.silu(gate) * up
        if self.kind == "whole":
            made = made + both.mean()
        return x + self.down(made)


def alike(tensor, part, size, one=1, other=3, factor=1.0):
    """Make one neuron of a part of a fused layer another one, its rows a multiple."""
    start = part * len(tensor) // 3 if size == 4 else part * len(tensor) // 2
    rows = [slice(start + size * it, start + size * (it + 1)) for it in (one, other)]
    with torch.no_grad():
        tensor[rows[1]] = factor * tensor[rows[0]]


@pytest.mark.parametrize("kind", ["chunk", "split", "unbind", "index"])
@pytest.mark.parametrize("value", [1.0, -2.0])
def test_fused_heads_merge_whole(kind, value):
    model = Fused(kind, bias=kind != "index")
    for tensor in model.qkv.parameters():
        for part in range(3):
            alike(tensor, part, 4, factor=value if part == 2 else 1.0)
    before = model.qkv.weight.detach().view(3, 4, 4, 6)
    event = check_duplicates(model, torch.randn(16, 5, 6))
    (merged,) = event.merged
    assert merged.group == "qkv.weight"
    assert (merged.before, merged.after, model.num_heads, model.inner_dim) == (4, 3, 3, 12)
    kept = [head for head in range(4) if head != merged.pairs[0][0]]
    assert torch.equal(model.qkv.weight.detach(), before[:, kept].reshape(36, 6))
    assert (model.qkv.out_features, model.out.in_features) == (36, 12)


@pytest.mark.parametrize("kind", ["chunk", "glu"])
def test_fused_gates_merge_with_what_they_gate(kind):
    model = PackedGate(kind)
    for tensor in model.both.parameters():
        for part in range(2):
            alike(tensor, part, 1)
    event = check_duplicates(model, torch.randn(64, 4))
    assert event.merged[0].group == "both.weight"
    assert (model.both.out_features, model.down.in_features) == (10, 5)


@pytest.mark.parametrize(
    ("model", "shape", "says"),
    [
        (Fused("literal"), (16, 5, 6), "cannot run"),
        (PackedGate("uneven"), (64, 4), "parts of"),
        (PackedGate("whole"), (64, 4), "read whole"),
    ],
    ids=["width in the code", "uneven parts", "read whole"],
)
def test_fused_layers_that_have_to_stay(model, shape, says):
    name, size = ("qkv", 4) if isinstance(model, Fused) else ("both", 1)
    fused = getattr(model, name)
    for tensor in fused.parameters():
        for part in range(3 if size == 4 else 2):
            alike(tensor, part, size)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model(torch.randn(shape))
    event = shrink.step()
    assert not event
    assert says in event.refused[f"{name}.weight"]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_memory_of_fused_heads_is_that_of_separate_ones(kind):
    """Events of one weight with queries, keys and values, and of three weights, leave the same."""
    fused, apart = Fused(), Attention()
    for tensor in fused.qkv.parameters():
        for part in range(3):
            alike(tensor, part, 4)
    with torch.no_grad():
        for made, part in zip((apart.q, apart.k, apart.v), range(3), strict=True):
            made.weight.copy_(fused.qkv.weight[16 * part : 16 * part + 16])
            made.bias.copy_(fused.qkv.bias[16 * part : 16 * part + 16])
        apart.out.load_state_dict(fused.out.state_dict())
    apart.forward = lambda x: plainly(apart, x)
    make = {
        "momentum": lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.0),
    }[kind]
    inputs = torch.randn(32, 5, 6)
    found = []
    for model in (fused, apart):
        optimizer = make(model.parameters())
        shrink = apoptosis(model, optimizer, every=3)
        for _ in range(3):
            train(model, optimizer, inputs)
            event = shrink.step()
        assert set(event.merged[0].pairs[0]) == {1, 3}
        optimizer.param_groups[0]["lr"] = 0.01
        train(model, optimizer, inputs)
        found.append((event.merged[0].pairs, model, optimizer))
    (pairs, _, first), (other, _, second) = found
    assert pairs == other
    for name in ("weight", "bias"):
        ours = getattr(fused.qkv, name)
        theirs = [getattr(made, name) for made in (apart.q, apart.k, apart.v)]
        both = [(ours, theirs)] + [
            (value, [second.state[it][key] for it in theirs])
            for key, value in first.state[ours].items()
            if value.dim()
        ]
        for value, parts in both:
            for place, (mine, part) in enumerate(zip(value.chunk(3), parts, strict=True)):
                # The key's bias moves nothing: its gradient is rounding, of which Adam makes steps.
                if (name, place) != ("bias", 1):
                    torch.testing.assert_close(mine, part, rtol=1e-4, atol=1e-6)


def plainly(model, x):
    """Attention over all places, as the fused one has it."""
    q, k, v = (model.split(made(x)) for made in (model.q, model.k, model.v))
    found = nn.functional.scaled_dot_product_attention(q, k, v)
    return x + model.out(found.transpose(1, 2).flatten(2))


def test_fused_heads_are_rebuilt_from_an_export(tmp_path):
    model, inputs = Fused("split"), torch.randn(16, 5, 6)
    for tensor in model.qkv.parameters():
        for part in range(3):
            alike(tensor, part, 4)
    shrink = apoptosis(model, torch.optim.SGD(model.parameters(), lr=0.0))
    model(inputs)
    assert shrink.step()
    shrink.export(tmp_path / "small.pt")
    again = rebuild(Fused("split"), tmp_path / "small.pt")
    assert (again.num_heads, again.inner_dim) == (3, 12)
    assert torch.equal(again(inputs), model(inputs))
