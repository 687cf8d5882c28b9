"""Communication hook for torch's DistributedDataParallel.

    state = CompressionState(FFTCompression, named_parameters=model.named_parameters())
    ddp_model.register_comm_hook(state, compression_hook)

DDP hands the hook a bucket: the gradients of some parameters in one flat tensor. The engine knows
each parameter by name, as DDP makes new buckets after the first step. Of each bucket

1. what travels plain is all-reduced together, at once where it is all of the bucket;
2. what is compressed travels in the collectives that the engine asks for: one all-gather of
   payloads with FFTCompression, all-reduces of words, of several buckets at once, with
   LowRankCompression;
3. the mean is written into the bucket, after the last bucket.

Every rank reads the same bytes in the same order, so all end with the same bits. All of it runs
where the tensors are; with the extra [cuda] the payloads of FFTCompression are made by kernels.
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations as objects.

import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import Variable

from ..codecs import registry
from ..collective import GROUP, Gradient
from ..compression import Compression, settings_of
from ..consistency import Fingerprint, Total
from ..engine import engine_state
from ..engine.engine import Engine
from ..engine.hierarchy import NodeLayout, find_layout
from ..errors import CompressError
from ..prediction import new_tuner
from .layout import (
    BucketSlice,
    Names,
    changes_of,
    check_scaler,
    fingerprint_of,
    in_shape_of,
    layout_of,
    loaded_arrays,
    parts_of,
)
from .outcomes import Outcomes, digest
from .process_group import CallWatch, Collectives, HookedModel

if TYPE_CHECKING:
    from .nodes import NodeGroups, NodeSum

_log = logging.getLogger(__name__)
_OVER = object()
_EXCHANGED = object()  # what rounds by nodes yield before they hand out means inside their node


class CompressionState:
    """What the hook of one DDP model keeps: settings, error memory, counts.

    Parameters
    ----------
    compression : of sn_compress, as LowRankCompression, bare or by `using`. How long to wait for
        other ranks is the process group's matter: wait_s is refused
    process_group : the group that DDP has, which None takes, too: with the first gradient, so where
        a state is loaded before, or saved, and DDP has a group of its own, it has to be said
    named_parameters : of the model, before or after DDP wraps it. Needed by state_dict only.
    scaler : the GradScaler, if there is one. The memory then follows its scale.
    find_unused_parameters : as DDP has it. On CUDA tensors it costs one wait for the device a
        bucket, to keep the memory of parameters that were not used; on the CPU it is always on.
    warn_after : steps of the optimizer without a call of the hook before UncalledWarning; 0: none

    A copy, as copy.deepcopy or pickle of a DDP model makes one, is no state: DDP copies no hook.

    Raises CompressError for what is none of ours in place of compression or group; in the first
    backward pass, on every rank, for settings that ranks do not share.
    """

    def __init__(
        self,
        compression: type[Compression],
        process_group: Any = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        scaler: Any = None,
        find_unused_parameters: bool = False,
        warn_after: int = 20,
    ) -> None:
        self.compression = compression
        self.settings = settings_of(compression, "CompressionState")
        check_scaler(scaler)
        if not isinstance(find_unused_parameters, bool):
            raise CompressError(f"{find_unused_parameters=}; expected True or False")
        self.process_group, self.collectives = process_group, Collectives(process_group)
        self._users_group = process_group
        # Of this pass, once it is over, where DDP may drop some of them.
        self._means: list[tuple[str, torch.Tensor]] | None = None
        self.settings.refuse_wait("torch's DistributedDataParallel")
        self.outcomes = Outcomes()
        self.engine = engine = Engine(
            self.settings, torch.get_num_threads(), stock="DDP", scaler=scaler,
            tuner=partial(new_tuner, casts=True), outcomes=self.outcomes,
            find_unused=find_unused_parameters,
        )  # fmt: skip
        self.traffic = engine.traffic
        self.collectives.waiting = engine.seconds.waiting
        self.names = Names(named_parameters)
        self.watch = CallWatch(warn_after, self.names.known, self._step_ended)
        self.model = HookedModel()
        self._travelled: set[int] = set()  # identities of parameters that were in a bucket
        self._exchanged = False  # since the last step of an optimizer
        self._compares = False  # parameters, in this pass
        self._fingerprint: Fingerprint | None = None  # of the parameters, behind the last step
        # In the first pass of a static graph: parameters whose buckets have not come yet.
        self._to_come: set[int] = set()
        self.waiting: list[Any] = []  # buckets whose rounds begin with that of a later one
        self.pending: list[Generator[Any, None, None]] = []  # rounds that have begun
        self.summing: list[Generator[Any, None, None]] = []  # of those, at the sum of their node
        self.nodes: NodeGroups | None = None  # where gradients are summed by nodes first
        self._knows_nodes = self.settings.hierarchy is None
        self._states = engine_state.NodeStates(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedState, (self.compression,)

    @property
    def ranks(self) -> int:
        """How many take part."""
        return self.collectives.ranks

    @property
    def rank(self) -> int:
        """Its number among them."""
        return self.collectives.rank

    def report(self) -> dict[str, float]:
        """What this rank sent so far, and what the tuner chose; see Compression.report."""
        report = self.engine.report()
        return report if self.nodes is None else report | self.nodes.report(self.traffic.steps)

    def parts(self, bucket: dist.GradBucket) -> list[BucketSlice]:
        """Return the slices of a bucket's parameters, in the order of their gradients in it."""
        named = [(self.names.of(parameter), parameter) for parameter in bucket.parameters()]
        for name, parameter in named:
            self.outcomes.follow(name, parameter)
        return parts_of(named)

    def rounds(
        self,
        flats: Sequence[tuple[torch.Tensor, Sequence[BucketSlice]]],
        futures: Sequence[torch.futures.Future[torch.Tensor]] = (),
    ) -> Generator[Any, None, None]:
        """Average flat tensors in place; futures of them are set in the end.

        Yields whenever collectives have been started; resuming waits for them. All ranks go
        through the rounds of all their tensors in the same order. By nodes the first collective is
        the sum inside the node, and _EXCHANGED is yielded before the node gathers the means.
        """
        self.agree(flats[0][0])
        sums: list[NodeSum] = []
        collectives = self.collectives
        groups = [
            ([Gradient(part.name, part.shape, part.of(flat)) for part in parts], flat)
            for flat, parts in flats
        ]
        for gradients, _ in groups:
            self.engine.begin(gradients)
        if self.nodes is not None:
            # From here on the ranks are the owners of one number, one of each node, and the
            # gradients those that this rank owns: the engine sees no others.
            collectives = self.nodes.between
            sums = [self.nodes.sum(gradients) for gradients, _ in groups]
            for node_sum in sums:
                node_sum.scatter()
            yield
            groups = [(node_sum.gradients(), node_sum.shard.values) for node_sum in sums]
        ranks = collectives.ranks
        plain: list[Generator[None, None, None]] = []
        dense: list[Gradient] = []
        coded: list[Gradient] = []
        for gradients, flat in groups:
            total = partial(self._total, flat.device, collectives)
            step = self.engine.sort(gradients, ranks=ranks, total=total)
            for gradient in step.dense:
                gradient.values.copy_(self.engine.dense_values(gradient))
            if views := [gradient.values for gradient in (*step.plain, *step.dense)]:
                packed = None if step.coded else flat
                plain.append(collectives.averages(views, packed))
            dense += step.dense
            coded += step.coded
        # Plain ones first, on every rank: torch matches collectives of ranks by their order alone.
        for average in plain:
            next(average)
        if coded:
            rounds = self.engine.rounds(coded, ranks=ranks, rank=collectives.rank)
            results = None
            with suppress(StopIteration):
                while True:
                    # Left before each yield: inside, it would hold in whoever resumed this.
                    with torch.no_grad(), self.engine.seconds.coding():
                        requests = rounds.send(results)  # type: ignore[arg-type]
                    started = [collectives.begin(request) for request in requests]
                    yield
                    results = [collectives.result(*handle) for handle in started]
        else:
            yield
        for average in plain:
            for _ in average:
                pass
        for gradient in dense:
            self.engine.learn(str(gradient.name), gradient.values)
        if sums:
            # The number of rounds differs inside a node. The node's collectives follow, which all
            # of its ranks start in one order: that of the groups of buckets.
            yield _EXCHANGED
            for node_sum in sums:
                node_sum.gather()
            yield
            for node_sum in sums:
                node_sum.finish()
        for future, (flat, _) in zip(futures, flats, strict=bool(futures)):
            future.set_result(flat)

    def agree(self, like: torch.Tensor) -> None:
        """CompressError, on every rank, unless all have the same settings and names; asked once.

        Before anything that may be an error of one rank only. like : a gradient
        """
        self.watch.called()
        if self._knows_nodes and self.engine.agreed == self.ranks:
            return  # in each bucket of each step: before a line is made of each parameter
        total = partial(self._total, like.device, self.collectives)
        fingerprint = fingerprint_of(self.names.known()) if self.names.complete else []
        if not self._states.saved(self.ranks):
            fingerprint += self.engine.progress()
        self.engine.agree(
            fingerprint, total=total, rank=self.rank, ranks=self.ranks, name="start",
            like=torch.zeros(1, dtype=torch.float32, device=like.device),
            do="Make CompressionState alike on all ranks, with what they saved at the same step.",
        )  # fmt: skip
        if not self._knows_nodes:
            self._knows_nodes = True
            self._find_nodes(total)

    def _find_nodes(self, total: Total) -> None:
        """See which ranks are on which node; with several of several ranks, go by nodes.

        A rank is on the node of its host and, under torchrun, of its agent (GROUP_RANK), which
        tells nodes apart that share a host name.
        """
        node = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
        layout = find_layout(total, node, rank=self.rank, ranks=self.ranks)
        if isinstance(layout, NodeLayout):
            from .nodes import NodeGroups  # a run without nodes loads none of it

            self.nodes = self._states.place = NodeGroups(self.collectives, layout)
            self.nodes.owned_names(self._tensors())
        elif self.rank == 0:
            level = logging.WARNING if layout.startswith("nodes have") else logging.DEBUG
            _log.log(level, "%s: all ranks exchange with all others", layout)
        self._settle()

    def _tensors(self) -> list[tuple[str, int]]:
        """All parameters that are known, in the order in which gradients come."""
        return [(name, parameter.numel()) for parameter, name in reversed(self.names.known())]

    def _total(self, device: torch.device, collectives: Collectives, _: str, words: Any) -> Any:
        """The sum over the ranks of a group, at once."""
        self.traffic.overhead(words.nbytes)
        return collectives.total(words, device)

    def begin_pass(self, bucket: dist.GradBucket) -> None:
        """Start a backward pass; drop what a pass that ended with an error has left."""
        first = self.model.find(self, bucket) and self.model.static
        self.process_group = self.collectives.group = self.model.group(self._users_group)
        self._to_come = {id(parameter) for parameter, _ in self._trained()} if first else set()
        self.model.check_join()
        # Outside of a backward pass DDP calls its hook for ranks that have joined.
        self.outcomes.joined = torch._C._current_graph_task_id() < 0
        self.watch.begin_pass()
        self._means = [] if self.model.drops_unused and not self.outcomes.joined else None
        self.waiting.clear()
        self.pending.clear()
        self.summing.clear()
        self.engine.new_step()
        self._compares = self.engine.sameness.step()
        if self._compares and not self.watch.any_step:  # they are updated by hand
            self._fingerprint = self._digests()

    def is_first(self, bucket: dist.GradBucket) -> bool:
        """Whether a pass begins with a bucket.

        Behind the first pass of a static graph DDP hands all buckets over at once, each as the
        first of several; there are several where parameters are of more than one type.
        """
        return bucket.index() == 0 and not self._to_come.issuperset(map(id, bucket.parameters()))

    def is_last(self, bucket: dist.GradBucket) -> bool:
        """Whether a pass ends with a bucket."""
        if not self._to_come:
            return bucket.is_last()
        self._to_come.difference_update(map(id, bucket.parameters()))
        return bucket.is_last() or not self._to_come

    def end_pass(self, device: torch.device) -> None:
        """End a pass after its averages; CompressError, on every rank, if parameters differ.

        Compared, in passes that do so, are the parameters after the last optimizer step behind an
        exchange: they are equal whatever was done to them since, as SAM does. A rank without such a
        step sends none: in a Join it has no data left.
        """
        self._to_come.clear()
        means, self._means = self._means, None
        if means is not None:
            # Behind what DDP itself calls when the pass is over: a call that such a call asks for.
            later = Variable._execution_engine.queue_callback
            later(partial(later, partial(self.outcomes.write_unused, means)))
        fingerprint, self._fingerprint, self._exchanged = self._fingerprint, None, True
        if self._compares:
            total = partial(self._total, device, self.collectives)
            late = [name for p, name in self._trained() if id(p) not in self._travelled]
            hint = late and (
                f"{', '.join(late[:3])} requires gradients now, but DDP was created before that "
                "and does not average them: wrap the model again. "
            )
            self.engine.compare(
                fingerprint, total=total, rank=self.rank, ranks=self.ranks, hint=hint or ""
            )

    def _step_ended(self) -> None:
        if self._exchanged and not self.engine.sameness.free_steps:
            self._fingerprint = self._digests()
        self._exchanged = False

    def _digests(self) -> Fingerprint:
        return [(name, digest(parameter)) for parameter, name in self._trained()]

    def _trained(self) -> list[tuple[torch.Tensor, str]]:
        trained = self.model.trained()
        return self.names.known() if trained is None else trained

    def state_dict(self) -> dict[str, Any]:
        """The error memory by parameter name, as torch tensors; it differs between ranks.

        Raises CompressError if parameters have no names.
        """
        if not self.names.complete and self.names.known():
            raise CompressError(
                "parameters are identified only by the order of DDP's buckets, which may change in "
                "the next run; expected names. Make CompressionState(..., "
                "named_parameters=model.named_parameters())."
            )
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.outcomes.look()
        state = engine_state.state_dict(
            self.engine, ranks=self.ranks, rank=self.rank, without_held=True
        )
        state["layout"] = layout_of(self.names.known())
        state["hierarchy"] = self._states.saved(self.ranks)
        return registry.map_tree(np.ndarray, torch.from_numpy, state)

    def load_state_dict(
        self,
        state: dict[str, Any] | Sequence[dict[str, Any]],
        all_states: Callable[[], Sequence[dict[str, Any]]] | None = None,
    ) -> None:
        """Take over this rank's state, or the list of all ranks' states, in order of rank.

        From another number of ranks, or other nodes, each takes the mean; for those the list is
        needed. Nothing changes if a state does not fit.

        all_states : returns the list. Called at the first step, if as many ranks are on other
            nodes now: so that otherwise each rank reads its own state only.
        """
        rest = None if all_states is None else lambda: loaded_arrays(all_states())
        self._states.load(
            loaded_arrays(state), all_states=rest, ranks=self.ranks, rank=self.rank,
            **self._checks(),
        )  # fmt: skip
        if self._knows_nodes:
            self._settle()

    def start_empty(self) -> None:
        """Forget all memories, and begin schedules anew; on all ranks."""
        self._states.loaded = []
        engine_state.start_empty(self.engine)

    def _settle(self) -> None:
        self._states.settle(self._tensors(), ranks=self.ranks, rank=self.rank, **self._checks())

    def _checks(self) -> dict[str, Any]:
        """What loading is told of the parameters."""
        named = self.names.known()
        return {
            "check": partial(engine_state.check_names, [name for _, name in named]),
            "changes": lambda saved: changes_of(named, saved.get("layout", {})),
        }


@torch.compiler.disable  # of a compiled step with its backward pass: an exchange is no graph
def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    """Average a bucket's gradients over the ranks, compressed; for register_comm_hook.

    The collectives overlap with the backward pass; what follows them runs after its last bucket. In
    a continuation of the collective's future it would run in one of Gloo's threads: in another
    order on each rank, and the program may abort at exit while that thread still holds Python.
    """
    check_state(state, "compression_hook")
    check_bucket(bucket)
    flat = bucket.buffer()
    if state.is_first(bucket):
        state.begin_pass(bucket)
    last = state.is_last(bucket)
    state.agree(flat)
    state._travelled.update(map(id, bucket.parameters()))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[flat.device] if flat.is_cuda else None
    )
    # An embedding's sparse gradient is alone in its bucket, and travels as without the hook.
    if flat.is_sparse:
        state.pending.append(_sparse_rounds(state, flat, state.parts(bucket)[0].name, future))
        next(state.pending[-1])
    else:
        parts = state.parts(bucket)
        state.waiting.append((future, flat, parts))
        if state._means is not None:
            state._means += [
                (part.name, in_shape_of(parameter, part.of(flat)))
                for part, parameter in zip(parts, bucket.parameters(), strict=True)
            ]
    # A low-rank step is two all-reduces, whatever its size, so small buckets share them; payloads
    # start with their own bucket.
    large = sum(tensor.numel() for _, tensor, _ in state.waiting) >= GROUP
    if state.waiting and (large or last or state.settings.exchange != "shared"):
        group, state.waiting = state.waiting, []
        flats = [(flat, parts) for _, flat, parts in group]
        state.pending.append(state.rounds(flats, [future for future, _, _ in group]))
        summed, state.summing = state.summing, state.pending[-1:] if state.nodes else []
        for rounds in (state.pending[-1], *summed):  # of those before, the node's sum is there
            next(rounds)
    if last:
        # One round of every group before the next one of any, so that they overlap. By nodes some
        # are through sooner than on other ranks of the node: none hands out means before all are.
        state.summing.clear()
        going, exchanged = state.pending, set[int]()
        while going:
            marks = [(rounds, next(rounds, _OVER)) for rounds in going]
            exchanged.update(id(rounds) for rounds, mark in marks if mark is _EXCHANGED)
            going = [rounds for rounds, mark in marks if mark is None]
        by_nodes = [rounds for rounds in state.pending if id(rounds) in exchanged]
        state.pending = []
        for rounds in by_nodes:
            next(rounds)
        for rounds in by_nodes:
            next(rounds, None)
        state.end_pass(flat.device)
    return future


def _sparse_rounds(
    state: CompressionState,
    flat: torch.Tensor,
    name: str,
    future: torch.futures.Future[torch.Tensor],
) -> Generator[None, None, None]:
    flat = flat.div_(state.ranks).coalesce()  # as torch would, before it sends all of it
    nbytes = sum(part.numel() * part.element_size() for part in (flat.indices(), flat.values()))
    state.traffic.sparse(name, flat.values().numel(), nbytes)
    work = state.collectives.sum(flat)
    yield
    work.wait()
    future.set_result(work.get_future().wait()[0])


class CopiedState:
    """What a copy of a DDP model has in the place of its CompressionState: no hook calls it."""

    def __init__(self, compression: type[Compression]) -> None:
        self.compression = compression


def check_state(state: Any, where: str) -> None:
    """Raise CompressError if a hook was given something else in the place of its state."""
    if isinstance(state, CopiedState):
        raise CompressError(
            f"{where} got a copy of a CompressionState, made by copy.deepcopy or pickle, which "
            "keeps its settings only; expected a CompressionState. Create a new "
            f"CompressionState({state.compression!r}, ...); to continue from another one, call "
            "load_state_dict() with what its state_dict() returned."
        )
    if not isinstance(state, CompressionState):
        raise CompressError(
            f"{where} got a {type(state).__qualname__} as its state; expected a CompressionState. "
            "Make CompressionState(FFTCompression, named_parameters=model.named_parameters()), or "
            "of another compression."
        )


def check_bucket(bucket: Any) -> None:
    """Raise CompressError for what a hook is handed by another than DDP's reducer."""
    if not isinstance(bucket, dist.GradBucket):
        raise CompressError(
            f"compression_hook got a {type(bucket).__qualname__} as its bucket; expected a "
            'dist.GradBucket. torch._dynamo.config.optimize_ddp="python_reducer" hands hooks one '
            "gradient at a time: set it to True, which is the default, or train without this hook."
        )
