"""Gradients by nodes over all-to-alls: ranks of several nodes, step by step in one process."""

import pytest
import torch
from rounds import drive

from sn_compress import CompressError, FFTCompression, LowRankCompression
from sn_compress.collective import Gradient
from sn_compress.engine import all_to_all
from sn_compress.engine.engine import Engine
from sn_compress.engine.hierarchy import NodeLayout, Place

# The last one is a node's only tensor of its dtype.
SHAPES = {"a": (96, 80), "b": (7,), "c": (64, 64), "d": (50, 60), "e": (3,)}
HALF = {"d", "e"}
WAYS = {
    "fft": FFTCompression.using(min_elements=64),
    "low rank": LowRankCompression.using(ratio=8, warmup=2, every=4, min_elements=64),
}
LAYOUTS = {
    "2 x 2": NodeLayout(((0, 1), (2, 3))),
    "3 x 2": NodeLayout(((0, 3), (1, 4), (2, 5))),
    "2 x 3": NodeLayout(((0, 1, 2), (3, 4, 5))),
    "5 x 6": NodeLayout(tuple(tuple(range(6 * node, 6 * node + 6)) for node in range(5))),
}


def engine_of(way):
    return Engine(WAYS[way].settings, 1, stock="plain", tuner=None, drops_unused=False, pauses=True)


def gradients_of(rank, step, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [
        Gradient(
            name, shape,
            torch.randn(shape, generator=generator).flatten().to(
                torch.float16 if name in HALF else torch.float32
            ),
        )
        for name, shape in shapes.items()
    ]  # fmt: skip


class Ranks:
    """Of a layout; what they send each other in a step goes by hand, and is counted."""

    def __init__(self, layout, way):
        self.layout = layout
        self.ranks = sum(map(len, layout.nodes))
        self.engines = [engine_of(way) for _ in range(self.ranks)]
        self.places = [Place(layout, rank) for rank in range(self.ranks)]
        self.between = 0  # bytes

    def step(self, every):
        """Take all gradients through their rounds: what each rank raised, or None."""
        for engine, gradients in zip(self.engines, every, strict=True):
            engine.begin(gradients)

        def rounds(*of):
            try:
                yield from all_to_all.rounds(*of, lambda names: None)
            except Exception as error:  # noqa: BLE001, is compared
                return error

        def combine(_, carries):
            sent = [carry.words.split(carry.splits) for (carry,) in carries]
            for rank, own in enumerate(sent):
                mine = self.layout.nodes[self.places[rank].node]
                self.between += sum(8 * len(w) for at, w in enumerate(own) if at not in mine)
            return [[[own[rank] for own in sent]] for rank in range(self.ranks)]

        return drive([*map(rounds, self.engines, self.places, every)], combine)


def mean_by_nodes(layout, values):
    """Of one tensor's values by rank: each node's mean in their dtype, and the mean of those."""
    means = []
    for node in layout.nodes:
        total = sum(values[rank].float() for rank in node)
        means.append((total / len(node)).to(values[0].dtype).float())
    return torch.stack(means).mean(0)


@pytest.mark.parametrize(("way", "layout"), [
    ("fft", "2 x 2"), ("low rank", "3 x 2"), ("low rank", "2 x 3"), ("fft", "5 x 6"),
])  # fmt: skip
def test_ranks_have_the_same_bits_and_the_mean(way, layout):
    """Over steps that are dense and compressed, the sum of all means is that of all gradients.

    A dense mean is that of the nodes' means. Of six ranks a node one owns none of five tensors.
    """
    layout = LAYOUTS[layout]
    ranks = Ranks(layout, way)
    asked = {name: torch.zeros(shape).flatten() for name, shape in SHAPES.items()}
    got = {name: torch.zeros(shape).flatten() for name, shape in SHAPES.items()}
    for step in range(8):
        every = [gradients_of(rank, step) for rank in range(ranks.ranks)]
        dense = step == 0 and way == "low rank"
        due = {}
        for number, name in enumerate(SHAPES):
            asked[name] += sum(each[number].values.float() for each in every) / ranks.ranks
            due[name] = mean_by_nodes(layout, [each[number].values for each in every])
        assert ranks.step(every) == [None] * ranks.ranks
        for number, name in enumerate(SHAPES):
            bits = every[0][number].values
            assert all(torch.equal(bits, each[number].values) for each in every), name
            got[name] += bits.float()
            if dense:
                tolerance = 2**-11 if name in HALF else 1e-6
                assert torch.allclose(bits.float(), due[name], atol=tolerance, rtol=tolerance)
    for name in SHAPES:
        # What was not sent is with the owners: of each node one.
        left = [
            torch.from_numpy(engine.residual(name)) for engine in ranks.engines
            if engine.remembers(name)
        ]  # fmt: skip
        assert len(left) in (0, len(layout.nodes)), name
        total = got[name] + sum(left) / len(layout.nodes)
        # Of half precision each of the steps rounds by 2**-11 of values of about 1, in two places.
        tolerance = 8 * 2 * 2**-11 if name in HALF else 1e-4
        assert (total - asked[name]).norm() <= tolerance * asked[name].norm() + 1e-3, name


def test_bytes_between_nodes_do_not_grow_with_the_ranks_of_a_node():
    sent = {}
    for size in (2, 6):
        layout = NodeLayout(tuple(tuple(range(size * node, size * node + size)) for node in (0, 1)))
        ranks = Ranks(layout, "fft")
        ranks.step([gradients_of(rank, 0) for rank in range(ranks.ranks)])
        sent[size] = ranks.between
    dense = sum(each.values.nbytes for each in gradients_of(0, 0))
    assert sent[6] == pytest.approx(sent[2], rel=0.02)
    assert 0 < sent[2] < 0.5 * dense


@pytest.mark.parametrize("step", [0, 3], ids=["dense", "compressed"])
def test_a_rank_that_fails_ends_the_step_on_all(step, monkeypatch):
    """In the same all-to-all: nobody waits for ever, and the others are told why."""
    ranks = Ranks(LAYOUTS["3 x 2"], "low rank")
    for at in range(step):
        assert ranks.step([gradients_of(rank, at) for rank in range(6)]) == [None] * 6

    def fail(*args, **options):
        raise MemoryError("no room left")

    monkeypatch.setattr(ranks.engines[4], "sort", fail)
    errors = ranks.step([gradients_of(rank, step) for rank in range(6)])
    assert isinstance(errors[4], MemoryError)
    for error in errors[:4] + errors[5:]:
        assert isinstance(error, CompressError)
        assert "rank 4: MemoryError: no room left" in str(error)
