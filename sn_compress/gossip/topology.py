"""Topologies: which rank receives from which at each step, and with what mixing weight.

All-reduce gives every rank everything. In gossip a rank sends one message and receives one, so a
step costs the same for 8 ranks and for 8,000. Partners change from step to step, so that after
about log2(ranks) steps every update has reached every rank.

    dissemination   from r - 2**s    Daily et al. 2018 (GossipGraD); Hensgen, Finkel, Manber 1988
    exponential     from r + 2**s    one-peer exponential graph, Ying et al. 2021: its mirror image
    hypercube       with r XOR 2**s  pairs; ranks must be a power of two
    ring            from r - 1       for comparison: updates need ranks - 1 steps
    exact           pairs            any number of ranks, the exact mean after `steps` steps; like
                                     the Base-2 graph of Takezawa et al. 2023, sections 4, 5

Nothing here communicates. How fast a topology converges follows from its mixing matrices: a gossip
step is x <- W x with a doubly stochastic W. Rows sum to one, so equal values are preserved; columns
sum to one, so the mean over the ranks is preserved. The disagreement left after some steps is
bounded by the second largest singular value of their product (Boyd et al. 2006; Ying et al. 2021,
section 3).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from ..errors import CompressError

NAMES = ("dissemination", "exponential", "hypercube", "ring", "exact")


@dataclass(frozen=True)
class Partner:
    """One rank's partners in one step.

    Attributes
    ----------
    source, target : the ranks it receives from and sends to; itself if it is idle in this step
    weight : mixing weight of what it receives, in [0, 1]; its own value has 1 - weight
    """

    source: int
    target: int
    weight: float


@dataclass(frozen=True)
class Meeting:
    """One step of all ranks.

    Attributes
    ----------
    sources : the rank each rank receives from; a permutation, so each sends to exactly one
    weights : mixing weight of what each rank receives, in [0, 1]
    """

    sources: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if sorted(self.sources) != list(range(len(self.weights))):
            raise CompressError(
                f"sources {self.sources} of {len(self.weights)} ranks; expected each rank once"
            )
        received = [self.weights[source] for source in self.sources]
        if min(received) < 0 or max(received) > 1 or received != list(self.weights):
            raise CompressError(
                f"weights {self.weights} for sources {self.sources}; expected numbers in [0, 1], "
                "the same for what a rank sends and what it receives"
            )

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """The rank each rank sends to."""
        return tuple(np.argsort(self.sources).tolist())

    @property
    def matrix(self) -> npt.NDArray[np.float64]:
        """The mixing matrix [r, r], doubly stochastic: new values are matrix @ old values."""
        ranks = np.arange(len(self.sources))
        matrix = np.zeros((len(ranks), len(ranks)))
        # Added: an idle rank is its own source, so that both entries coincide.
        np.add.at(matrix, (ranks, ranks), 1 - np.array(self.weights))
        np.add.at(matrix, (ranks, np.array(self.sources)), self.weights)
        return matrix

    def mix(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Multiply the matrix by values [r, n], without forming the [r, r] matrix."""
        weights = np.array(self.weights)[:, None]
        return values + weights * (values[list(self.sources)] - values)


@dataclass(frozen=True, eq=False)
class Topology:
    """A periodic sequence of meetings; created by `topology`.

    Attributes
    ----------
    name : one of NAMES
    ranks : number of ranks
    meetings : those of one period
    exact : whether every rank has the mean, up to rounding, after a whole period
    rotate : whether every further period permutes the ranks
    seed : of the permutations

    Examples
    --------
    >>> ring = topology("ring", 4)
    >>> ring.partner(0, step=7)
    Partner(source=3, target=1, weight=0.5)
    >>> topology("exact", 6).steps
    4
    """

    name: str
    ranks: int
    meetings: tuple[Meeting, ...]
    exact: bool
    rotate: bool = False
    seed: int = 0

    @property
    def steps(self) -> int:
        """Number of steps in one period."""
        return len(self.meetings)

    def at(self, step: int) -> Meeting:
        """Return the meeting of a step, counted from 0."""
        cycle, place = divmod(step, self.steps)
        return _cycle(self, cycle if self.rotate else 0)[place]

    def partner(self, rank: int, step: int) -> Partner:
        """Return one rank's partners at a step."""
        meeting = self.at(step)
        return Partner(meeting.sources[rank], meeting.targets[rank], meeting.weights[rank])

    def matrix(self, step: int) -> npt.NDArray[np.float64]:
        """Return the mixing matrix of a step, [r, r]."""
        return self.at(step).matrix

    def __repr__(self) -> str:
        more = f", rotate=True, seed={self.seed}" if self.rotate else ""
        return f"topology({self.name!r}, {self.ranks}{more})"


def topology(name: str, ranks: int, *, rotate: bool = False, seed: int = 0) -> Topology:
    """Create the topology with this name.

    Parameters
    ----------
    name : one of NAMES
    ranks : 1 or more; for "hypercube" a power of two
    rotate : permute the ranks after each period, as GossipGraD does. In our runs it gained nothing
        (docs/gossip.md), and each rank eventually communicates with all others.
    seed : of the permutations; the same on all ranks

    Raises CompressError for an unknown name or a number of ranks it cannot serve.
    """
    if name not in NAMES:
        raise CompressError(f"topology {name!r}; expected one of {', '.join(NAMES)}")
    if ranks < 1:
        raise CompressError(f"topology {name!r} for {ranks} ranks; expected 1 or more")
    two_to = ranks & (ranks - 1) == 0
    if name == "hypercube" and not two_to:
        raise CompressError(
            f"a hypercube of {ranks} ranks; expected a power of two. Use 'exact' or "
            "'dissemination', which take any number."
        )
    hops = [2**s for s in range((ranks - 1).bit_length())]
    if name == "exact":
        meetings = _exact(ranks)
    elif name == "hypercube":
        meetings = [_paired(ranks, ((r, r ^ hop, 0.5) for r in range(ranks))) for hop in hops]
    else:
        shifts = {"dissemination": [-hop for hop in hops], "exponential": hops, "ring": [-1]}
        meetings = [_shifted(ranks, shift) for shift in shifts[name]]
    # With 2**d ranks, averaging with partners at all powers of two is exact, as in a hypercube.
    exact = ranks <= 2 or name == "exact" or (two_to and name != "ring")
    # A single rank still needs one step per period.
    idle = Meeting(tuple(range(ranks)), (0.0,) * ranks)
    return Topology(name, ranks, tuple(meetings) or (idle,), exact, rotate, seed)


def _shifted(ranks: int, shift: int) -> Meeting:
    """Every rank receives from the rank `shift` further on."""
    sources = tuple((r + shift) % ranks for r in range(ranks))
    return Meeting(sources, tuple(0.0 if source == r else 0.5 for r, source in enumerate(sources)))


def _paired(ranks: int, pairs: Iterable[tuple[int, int, float]]) -> Meeting:
    """Pairs (a, b, weight) exchange; the other ranks are idle."""
    sources, weights = list(range(ranks)), [0.0] * ranks
    for a, b, weight in pairs:
        sources[a], sources[b] = b, a
        weights[a] = weights[b] = weight
    return Meeting(tuple(sources), tuple(weights))


def _exact(ranks: int) -> list[Meeting]:
    """Average within 2**d groups of an odd number of ranks, then over a hypercube of groups."""
    groups = ranks & -ranks
    odd = ranks // groups
    meetings = [
        _paired(
            ranks,
            [(g * odd + a, g * odd + b, w) for g in range(groups) for a, b, w in pairs],
        )
        for pairs in _exact_pairs(odd)
    ]
    hops = [2**s for s in range(groups.bit_length() - 1)]
    cube = [
        [(g * odd + i, (g ^ hop) * odd + i, 0.5) for g in range(groups) for i in range(odd)]
        for hop in hops
    ]
    return meetings + [_paired(ranks, pairs) for pairs in cube]


def _exact_pairs(n: int) -> list[list[tuple[int, int, float]]]:
    """Return pairs per step after which each of n ranks has the mean; 2 * floor(log2 n) + 1 steps.

    n is a sum of powers of two, the sizes of blocks. (1) Each block averages internally. (2) Block
    by block, the largest first, each later rank is paired with one of the block, with the weight
    that makes the block's mean the overall mean: the block's size over the number of ranks from it
    on. (3) The block averages internally again, while the later ones continue.
    """
    if n == 1:
        return []
    sizes = [2**bit for bit in reversed(range(n.bit_length())) if n >> bit & 1]
    starts = np.cumsum([0, *sizes]).tolist()
    largest = sizes[0].bit_length() - 1
    steps: list[list[tuple[int, int, float]]] = [[] for _ in range(2 * largest + 1)]
    for number, (start, size) in enumerate(zip(starts, sizes, strict=False)):
        later = range(start + size, n)
        for bit in range(size.bit_length() - 1):
            pairs = [(start + i, start + (i ^ 2**bit), 0.5) for i in range(size)]
            steps[bit] += pairs
            # The last block has size 1 and needs no pairs, for which there would be no steps left.
            steps[largest + number + 1 + bit] += pairs
        if later:
            weight = size / (size + len(later))
            steps[largest + number] += [(start + i, r, weight) for i, r in enumerate(later)]
    return steps


@lru_cache(maxsize=8)
def _cycle(topology: Topology, cycle: int) -> tuple[Meeting, ...]:
    """Return the meetings of one period; from the second one on with permuted ranks."""
    if cycle == 0:
        return topology.meetings
    # Seeded by seed and period only, so that every rank draws the same permutation at any step,
    # even after a restart.
    place = np.random.default_rng((topology.seed, cycle)).permutation(topology.ranks)
    rank = np.argsort(place)
    return tuple(
        Meeting(
            tuple(rank[np.array(meeting.sources)[place]].tolist()),
            tuple(np.array(meeting.weights)[place].tolist()),
        )
        for meeting in topology.meetings
    )


Matrix = npt.NDArray[np.float64]


def product(topology: Topology, steps: int | None = None) -> Matrix:
    """Return the matrix [r, r] of the first `steps` steps combined; None: a whole period."""
    matrix = np.eye(topology.ranks)
    for step in range(topology.steps if steps is None else steps):
        matrix = topology.at(step).mix(matrix)
    return matrix


def remainder(matrix: Matrix) -> float:
    """Return the largest fraction of a disagreement left by a matrix [r, r], in [0, 1]."""
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def spectral_gap(topology: Topology) -> float:
    """Return 1 minus the contraction per step, over one period: 1 is exact, 0 is no mixing.

    The geometric mean over the steps of a period, as a single one-peer step has no gap.
    """
    # An exact period leaves a rounding error, whose root would look like slow mixing.
    contraction = remainder(product(topology))
    if contraction <= _rounding(topology, topology.steps):
        return 1.0
    return float(1 - contraction ** (1 / topology.steps))


def steps_to_exact(topology: Topology) -> int | None:
    """Return after how many steps all ranks have the mean; None if one period does not suffice."""
    matrix = np.eye(topology.ranks)
    for step in range(topology.steps):
        if remainder(matrix) <= _rounding(topology, step):
            return step
        matrix = topology.at(step).mix(matrix)
    return topology.steps if remainder(matrix) <= _rounding(topology, topology.steps) else None


def _rounding(topology: Topology, steps: int) -> float:
    """Bound on the rounding error in the norm: a few ulps per entry and step, r entries a row."""
    return 4 * topology.ranks * (steps + 1) * float(np.finfo(float).eps)


def consensus_distance(weights: npt.ArrayLike) -> float:
    """Return the root mean square distance of the ranks' weights, [r, n], from their mean.

    >>> consensus_distance([[1.0, 0.0], [-1.0, 0.0]])
    1.0
    """
    values = np.asarray(weights, np.float64)
    return float(np.sqrt(((values - values.mean(0)) ** 2).sum(1).mean()))
