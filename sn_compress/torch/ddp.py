"""Communication hook for torch's DistributedDataParallel.

    state = CompressionState(FFTCompression, named_parameters=model.named_parameters())
    ddp_model.register_comm_hook(state, compression_hook)

DDP passes the hook a bucket: the gradients of some parameters in one flat tensor. The engine
identifies each parameter by name, because DDP rebuilds its buckets after the first step. For each
bucket

1. uncompressed gradients are all-reduced together, without a copy if they fill the bucket;
2. compressed gradients travel in the collectives that the engine requests: one all-gather of
   payloads with FFTCompression; with LowRankCompression all-reduces of words, shared by several
   buckets;
3. the mean is written into the bucket, after the last bucket of the pass.

Every rank reads the same bytes in the same order, so all end with the same bits. Everything runs on
the device of the tensors; with the extra [cuda], CUDA kernels encode FFTCompression's payloads.
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
_EXCHANGED = object()  # yielded by hierarchical rounds before means are gathered inside the node


class CompressionState:
    """State of the hook of one DDP model: settings, error memory, counts.

    Parameters
    ----------
    compression : a compression class such as LowRankCompression, bare or from `using`. wait_s is
        refused: the process group's own timeout applies
    process_group : DDP's process group. None takes it from the model at the first gradient; pass it
        if DDP has a group of its own and a state is loaded or saved before that
    named_parameters : of the model, before or after DDP wraps it; only state_dict needs them
    scaler : the GradScaler, if there is one; the error memory is then rescaled with its scale
    find_unused_parameters : same as DDP's. On CUDA tensors it costs one device synchronization per
        bucket, to keep the memory of parameters that were not used; on the CPU it is always on
    warn_after : optimizer steps without a call of the hook before UncalledWarning; 0: never

    copy.deepcopy or pickle of a DDP model does not copy this state, since DDP does not copy hooks.

    Raises CompressError if compression or process_group is of the wrong type; and, in the first
    backward pass and on every rank, if the ranks' settings differ.
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
        # Means of this pass, kept until it is over, if DDP may drop some of them.
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
        self._travelled: set[int] = set()  # ids of parameters that were in a bucket
        self._exchanged = False  # whether a pass has ended since the last optimizer step
        self._compares = False  # whether parameters are compared in this pass
        self._fingerprint: Fingerprint | None = None  # of the parameters after the last step
        # In the first pass of a static graph: parameters whose buckets have not come yet.
        self._to_come: set[int] = set()
        self.waiting: list[Any] = []  # buckets that start together with a later bucket
        self.pending: list[Generator[Any, None, None]] = []  # rounds that have begun
        self.summing: list[Generator[Any, None, None]] = []  # those still summing inside the node
        self.nodes: NodeGroups | None = None  # set if gradients are summed within nodes first
        self._knows_nodes = self.settings.hierarchy is None
        self._states = engine_state.NodeStates(engine)

    def __reduce__(self) -> tuple[Any, ...]:
        return CopiedState, (self.compression,)

    @property
    def ranks(self) -> int:
        """Number of ranks in the group."""
        return self.collectives.ranks

    @property
    def rank(self) -> int:
        """Number of this rank in the group."""
        return self.collectives.rank

    def report(self) -> dict[str, float]:
        """Return what this rank has sent and what the tuner chose; see Compression.report."""
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
        """Average flat tensors in place; set their futures at the end.

        Yields whenever collectives have been started; resuming waits for them. All ranks run the
        rounds of all their tensors in the same order. In a hierarchical exchange the first
        collective is the sum within the node, and _EXCHANGED is yielded before the node gathers the
        means.
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
            # From here on the engine sees only one rank of each node, all of the same local number,
            # and only the gradients that this rank owns.
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
        # Plain gradients first, on every rank: torch matches collectives by order alone.
        for average in plain:
            next(average)
        if coded:
            rounds = self.engine.rounds(coded, ranks=ranks, rank=collectives.rank)
            results = None
            with suppress(StopIteration):
                while True:
                    # Exited before each yield: otherwise the caller would run under no_grad.
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
            # The number of rounds differs between the ranks of a node. The node's collectives come
            # next; all its ranks start them in the same order, that of the groups of buckets.
            yield _EXCHANGED
            for node_sum in sums:
                node_sum.gather()
            yield
            for node_sum in sums:
                node_sum.finish()
        for future, (flat, _) in zip(futures, flats, strict=bool(futures)):
            future.set_result(flat)

    def agree(self, like: torch.Tensor) -> None:
        """Raise CompressError on every rank unless settings and names are equal; checked once.

        Called before anything that may fail on a single rank. like : a gradient
        """
        self.watch.called()
        if self._knows_nodes and self.engine.agreed == self.ranks:
            return  # called for each bucket of each step: skip the fingerprint of all parameters
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
        """Find out which ranks share a node; exchange hierarchically if several nodes have several.

        A rank's node is its host and, under torchrun, its agent (GROUP_RANK), which distinguishes
        nodes that share a host name.
        """
        node = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
        layout = find_layout(total, node, rank=self.rank, ranks=self.ranks)
        if isinstance(layout, NodeLayout):
            from .nodes import NodeGroups  # not loaded in runs without nodes

            self.nodes = self._states.place = NodeGroups(self.collectives, layout)
            self.nodes.owned_names(self._tensors())
        elif self.rank == 0:
            level = logging.WARNING if layout.startswith("nodes have") else logging.DEBUG
            _log.log(level, "%s: all ranks exchange with all others", layout)
        self._settle()

    def _tensors(self) -> list[tuple[str, int]]:
        """All known parameters, in the order in which gradients come."""
        return [(name, parameter.numel()) for parameter, name in reversed(self.names.known())]

    def _total(self, device: torch.device, collectives: Collectives, _: str, words: Any) -> Any:
        """Sum over the ranks of a group; blocks."""
        self.traffic.overhead(words.nbytes)
        return collectives.total(words, device)

    def begin_pass(self, bucket: dist.GradBucket) -> None:
        """Start a backward pass; drop what is left of a pass that ended with an error."""
        first = self.model.find(self, bucket) and self.model.static
        self.process_group = self.collectives.group = self.model.group(self._users_group)
        self._to_come = {id(parameter) for parameter, _ in self._trained()} if first else set()
        self.model.check_join()
        # DDP calls the hook outside of a backward pass on ranks that have joined.
        self.outcomes.joined = torch._C._current_graph_task_id() < 0
        self.watch.begin_pass()
        self._means = [] if self.model.drops_unused and not self.outcomes.joined else None
        self.waiting.clear()
        self.pending.clear()
        self.summing.clear()
        self.engine.new_step()
        self._compares = self.engine.sameness.step()
        if self._compares and not self.watch.any_step:  # parameters are updated by hand
            self._fingerprint = self._digests()

    def is_first(self, bucket: dist.GradBucket) -> bool:
        """Whether a pass begins with this bucket.

        After the first pass of a static graph DDP passes all buckets at once, each with index 0;
        there are several if the parameters have more than one dtype.
        """
        return bucket.index() == 0 and not self._to_come.issuperset(map(id, bucket.parameters()))

    def is_last(self, bucket: dist.GradBucket) -> bool:
        """Whether a pass ends with this bucket."""
        if not self._to_come:
            return bucket.is_last()
        self._to_come.difference_update(map(id, bucket.parameters()))
        return bucket.is_last() or not self._to_come

    def end_pass(self, device: torch.device) -> None:
        """End a pass after its averages; raise CompressError on every rank if parameters differ.

        In the passes that compare, the parameters compared are those after the last optimizer step
        that followed an exchange: these are equal even if something (e.g. SAM) has changed the
        parameters since. A rank without such a step sends none: in a Join it has no data left.
        """
        self._to_come.clear()
        means, self._means = self._means, None
        if means is not None:
            # Must run after DDP's own end-of-pass callback, so it is queued from within a callback.
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
        """Return the error memory by parameter name, as torch tensors; it differs between ranks.

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
        """Load this rank's state, or the list of all ranks' states in rank order.

        If the number of ranks, or the nodes, have changed, pass the list: every rank then takes the
        mean. Nothing changes if a state does not fit.

        all_states : returns the list; called at the first step, and only if the same number of
            ranks is on other nodes, so that otherwise each rank reads its own state only
        """
        rest = None if all_states is None else lambda: loaded_arrays(all_states())
        self._states.load(
            loaded_arrays(state), all_states=rest, ranks=self.ranks, rank=self.rank,
            **self._checks(),
        )  # fmt: skip
        if self._knows_nodes:
            self._settle()

    def start_empty(self) -> None:
        """Clear all error memories and restart schedules; call it on all ranks."""
        self._states.loaded = []
        engine_state.start_empty(self.engine)

    def _settle(self) -> None:
        self._states.settle(self._tensors(), ranks=self.ranks, rank=self.rank, **self._checks())

    def _checks(self) -> dict[str, Any]:
        """Arguments about the parameters for loading a state."""
        named = self.names.known()
        return {
            "check": partial(engine_state.check_names, [name for _, name in named]),
            "changes": lambda saved: changes_of(named, saved.get("layout", {})),
        }


@torch.compiler.disable  # an exchange cannot be traced, if a step is compiled with its backward
def compression_hook(
    state: CompressionState, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:  # fmt: skip
    """Average a bucket's gradients over the ranks, compressed; for register_comm_hook.

    The collectives overlap with the backward pass; what follows them runs after its last bucket. As
    a continuation of the collective's future it would run in one of Gloo's threads, in a different
    order on each rank, and the program may abort at exit while that thread still uses Python.
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
    # An embedding's sparse gradient has a bucket of its own, and travels as without the hook.
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
    # A low-rank step takes two all-reduces whatever its size, so small buckets share them; payloads
    # are sent with their own bucket.
    large = sum(tensor.numel() for _, tensor, _ in state.waiting) >= GROUP
    if state.waiting and (large or last or state.settings.exchange != "shared"):
        group, state.waiting = state.waiting, []
        flats = [(flat, parts) for _, flat, parts in group]
        state.pending.append(state.rounds(flats, [future for future, _, _ in group]))
        summed, state.summing = state.summing, state.pending[-1:] if state.nodes else []
        for rounds in (state.pending[-1], *summed):  # for earlier ones the node's sum has arrived
            next(rounds)
    if last:
        # Advance every group by one round before any takes the next, so that they overlap. In a
        # hierarchical exchange, groups finish earlier or later than on other ranks of the node, so
        # none gathers its means before all have exchanged.
        state.summing.clear()
        active, exchanged = state.pending, set[int]()
        while active:
            marks = [(rounds, next(rounds, _OVER)) for rounds in active]
            exchanged.update(id(rounds) for rounds, mark in marks if mark is _EXCHANGED)
            active = [rounds for rounds, mark in marks if mark is None]
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
    flat = flat.div_(state.ranks).coalesce()  # as torch does before it sends a sparse gradient
    nbytes = sum(part.numel() * part.element_size() for part in (flat.indices(), flat.values()))
    state.traffic.sparse(name, flat.values().numel(), nbytes)
    work = state.collectives.sum(flat)
    yield
    work.wait()
    future.set_result(work.get_future().wait()[0])


class CopiedState:
    """Takes the place of the CompressionState in a copy of a DDP model, which has no hook."""

    def __init__(self, compression: type[Compression]) -> None:
        self.compression = compression


def check_state(state: Any, where: str) -> None:
    """Raise CompressError if a hook's state is not a CompressionState."""
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
    """Raise CompressError unless the bucket comes from DDP's reducer."""
    if not isinstance(bucket, dist.GradBucket):
        raise CompressError(
            f"compression_hook got a {type(bucket).__qualname__} as its bucket; expected a "
            'dist.GradBucket. torch._dynamo.config.optimize_ddp="python_reducer" hands hooks one '
            "gradient at a time: set it to True, which is the default, or train without this hook."
        )
