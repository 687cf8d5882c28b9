"""Heads of attention, and fused layers: rows of one weight that only go together."""

import pytest

torch = pytest.importorskip("torch")
from shrinking import (  # noqa: E402
    ROUNDING,
    apoptosis,
    check_duplicates,
    check_it_stays,
    train,
    trained,
)
from torch import nn  # noqa: E402 - without torch there is nothing to import

from sn_memory.apoptosis.torch import rebuild  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet")
TOKENS = (16, 5, 6)
attend = nn.functional.scaled_dot_product_attention


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
        q, k, v = (self.split(layer(x)) for layer in (self.q, self.k, self.v))
        if self.kind == "written out":
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = (q @ k.transpose(-2, -1) / 2).masked_fill(later, -1e9)
            seen = scores.softmax(-1) @ v
        else:
            seen = attend(q, k, v, is_causal=self.kind != "all places")
        return x + self.out(seen.transpose(1, 2).flatten(2))


class Fused(nn.Module):
    """Four heads whose queries, keys and values are rows of one weight."""

    def __init__(self, kind="chunk", heads=4, bias=True):
        super().__init__()
        self.kind, self.num_heads, self.inner_dim = kind, heads, 4 * heads
        self.qkv = nn.Linear(6, 12 * heads, bias=bias)
        self.out = nn.Linear(4 * heads, 6)

    def forward(self, x):
        rows = x.shape[:2]
        packed = self.qkv(x)
        if self.kind in ("unbind", "index"):
            packed = packed.reshape(*rows, 3, self.num_heads, 4).permute(2, 0, 3, 1, 4)
            q, k, v = packed.unbind(0) if self.kind == "unbind" else (packed[i] for i in range(3))
        else:
            width = {"split": self.inner_dim, "literal": 16}.get(self.kind)
            parts = packed.chunk(3, dim=-1) if width is None else packed.split(width, dim=-1)
            q, k, v = (it.view(*rows, self.num_heads, -1).transpose(1, 2) for it in parts)
        return x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class PackedGate(nn.Module):
    """A gate and what it gates, made by one layer."""

    def __init__(self, kind="chunk", width=6):
        super().__init__()
        self.kind, self.width = kind, width
        self.both, self.down = nn.Linear(4, 2 * width), nn.Linear(width, 4)

    def forward(self, x):
        both = self.both(x)
        if self.kind == "glu":
            gated = nn.functional.glu(both)
        elif self.kind == "uneven":
            up, gate = both.split([2 * self.width - 3, 3], dim=-1)
            gated = up[:, : self.width] * gate.sum(-1, keepdim=True)
        else:
            up, gate = both.chunk(2, dim=-1)
            gated = nn.functional.silu(gate) * up
        if self.kind == "whole":
            gated = gated + both.mean()
        return x + self.down(gated)


def alike(model, value=1.0):
    """Make head, or gate, 3 a copy of number 1; the values of a head a multiple."""
    for name, tensor in model.state_dict().items():
        if not name.startswith(("out", "down")):
            parts = {"qkv": 3, "both": 2}.get(name.partition(".")[0], 1)
            size = 1 if parts == 2 else 4
            for place, rows in enumerate(tensor.chunk(parts)):
                of_values = name.startswith("v") or (parts, place) == (3, 2)
                factor = value if of_values else 1.0
                rows[3 * size : 4 * size] = factor * rows[size : 2 * size]
    return model


@pytest.mark.parametrize(
    ("kind", "value"), [("fused", 1.0), ("fused", -2.0), ("written out", -2.0), ("open", 1.0)]
)
def test_heads_that_say_the_same_merge_whole(kind, value):
    model = alike(Attention(kind), value)
    event = check_duplicates(model, torch.randn(TOKENS))
    assert event.merged[0].group == "q.weight + k.weight + v.weight"
    assert (event.merged[0].before, event.merged[0].after, model.heads) == (4, 3, 3)
    assert model.q.weight.shape == (12, 6)
    assert model.out.weight.shape == (6, 12)


@pytest.mark.parametrize(
    ("kind", "value"),
    [("chunk", 1.0), ("chunk", -2.0), ("split", -2.0), ("unbind", 1.0), ("index", -2.0)],
)
def test_fused_heads_merge_whole(kind, value):
    model = alike(Fused(kind, bias=kind != "index"), value)
    before = model.qkv.weight.detach().view(3, 4, 4, 6)
    (merged,) = check_duplicates(model, torch.randn(TOKENS)).merged
    assert merged.group == "qkv.weight"
    assert (merged.before, merged.after, model.num_heads, model.inner_dim) == (4, 3, 3, 12)
    kept = [head for head in range(4) if head != merged.pairs[0][0]]
    assert torch.equal(model.qkv.weight.detach(), before[:, kept].reshape(36, 6))
    assert (model.qkv.out_features, model.out.in_features) == (36, 12)


@pytest.mark.parametrize("kind", ["chunk", "glu"])
def test_fused_gates_merge_with_what_they_gate(kind):
    model = alike(PackedGate(kind))
    event = check_duplicates(model, torch.randn(64, 4))
    assert event.merged[0].group == "both.weight"
    assert (model.both.out_features, model.down.in_features) == (10, 5)


def test_a_head_that_says_nothing_goes():
    model, inputs = Attention(), torch.randn(TOKENS)
    with torch.no_grad():
        model.v.weight[8:12], model.v.bias[8:12] = 0.0, 0.0
    shrink = apoptosis(model)
    before = model(inputs).detach()
    (merged,) = shrink.step().merged
    assert merged.pairs == ((2, None),)
    assert (model(inputs) - before).abs().max() <= ROUNDING * before.abs().max()


@pytest.mark.parametrize(
    ("model", "shape", "says"),
    [
        (Attention("literal"), TOKENS, "cannot run"),
        (Attention("smaller"), TOKENS, "makes each smaller"),
        (Fused("literal"), TOKENS, "cannot run"),
        (PackedGate("uneven"), (64, 4), "parts of"),
        (PackedGate("whole"), (64, 4), "read whole"),
    ],
    ids=["heads in the code", "smaller heads", "width in the code", "uneven parts", "read whole"],
)
def test_what_a_model_counts_in_its_code_or_reads_whole_stays(model, shape, says):
    event = check_it_stays(alike(model), torch.randn(shape), apoptosis(model))
    group = {Attention: "q.weight + k.weight + v.weight", Fused: "qkv.weight"}
    assert says in event.refused[group.get(type(model), "both.weight")]
    assert getattr(model, "heads", 4) == 4


@pytest.mark.parametrize("seed", range(2))
def test_what_heads_change_is_within_the_tolerance(seed):
    torch.manual_seed(seed)
    model = Attention(heads=6)
    with torch.no_grad():
        model.out.bias.zero_()
    shrink = apoptosis(model, tolerance=0.5)
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
    big, small, inputs = alike(Attention()), Attention(heads=3), torch.randn(32, 5, 6)
    with torch.no_grad():
        big.out.weight[:, 12:] = 0.5 * big.out.weight[:, 4:8]  # then squares add up exactly, too
        for ours, theirs in zip(small.parameters(), big.parameters(), strict=True):
            ours.copy_(theirs[tuple(slice(size) for size in ours.shape)])
        small.out.weight[:, 4:8] += big.out.weight[:, 12:]
    second, _ = trained(small, kind, inputs, 1)
    train(small, second, inputs)
    first, event = trained(big, kind, inputs, 2)
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


@pytest.mark.parametrize("kind", ["momentum", "adam"])
def test_the_memory_of_fused_heads_is_that_of_separate_ones(kind):
    """Events of one weight with queries, keys and values, and of three weights, leave the same."""
    fused, apart, inputs = alike(Fused()), Attention("all places"), torch.randn(32, 5, 6)
    apart.out.load_state_dict(fused.out.state_dict())
    for place, layer in enumerate((apart.q, apart.k, apart.v)):
        rows = {name: tensor.chunk(3)[place] for name, tensor in fused.qkv.state_dict().items()}
        layer.load_state_dict(rows)
    found = []
    for model in (fused, apart):
        optimizer, event = trained(model, kind, inputs, 3)
        assert set(event.merged[0].pairs[0]) == {1, 3}
        optimizer.param_groups[0]["lr"] = 0.01
        train(model, optimizer, inputs)
        found.append((event.merged[0].pairs, optimizer))
    (pairs, first), (other, second) = found
    assert pairs == other
    for name in ("weight", "bias"):
        ours = getattr(fused.qkv, name)
        theirs = [getattr(layer, name) for layer in (apart.q, apart.k, apart.v)]
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


@pytest.mark.parametrize("kind", [Attention, Fused])
def test_heads_are_rebuilt_from_an_export(kind, tmp_path):
    model, inputs = alike(kind("split")), torch.randn(TOKENS)
    shrink = apoptosis(model)
    model(inputs)
    assert shrink.step()
    shrink.export(tmp_path / "small.pt")
    again = rebuild(kind("split"), tmp_path / "small.pt")
    counted = (again.heads,) if kind is Attention else (again.num_heads, again.inner_dim)
    assert counted == ((3,) if kind is Attention else (3, 12))
    assert torch.equal(again(inputs), model(inputs))
