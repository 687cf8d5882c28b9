"""Averaging of a Keras optimizer's gradients: compressed, or by plain Horovod."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..errors import CompressError
from .agreement import agree_at_trace, elastic, fingerprint_of_compression
from .graph import after
from .memory import exchanged_by_tapes, memory_of
from .tape import compressed_means, refuse_xla
from .tracing import Call, Plain, was_reduced
from .variables import as_variables, fingerprint_of_variables, relative_names

# Prefix of op names by which hvd.elastic.run recognizes a failed collective; any other error ends
# the function passed to it silently.
_ELASTIC = "HorovodAllreduce_"
# All live instances: ranks compare how many have not agreed yet.
_alive: weakref.WeakSet[Averaging] = weakref.WeakSet()


class Averaging:
    """Averages the gradients of one optimizer; see DistributedOptimizer."""

    def __init__(
        self,
        *,
        compression: Any,
        op: Any,
        process_set: Any,
        predivide: float,
        groups: int | Sequence[Sequence[Any]] | None,
        sparse_as_dense: bool,
        missing_as_zeros: bool,
    ) -> None:
        self.compression, self.op, self.process_set = compression, op, process_set
        self.scales = {"prescale_factor": 1 / predivide, "postscale_factor": predivide}
        self.groups, self.sparse_as_dense = groups, sparse_as_dense
        self.missing_as_zeros = missing_as_zeros
        self.agreed: set[str] = set()  # fingerprints that ranks have compared
        self.variables: list[Any] = []  # of the gradients that Keras is about to apply
        # Traced, because eager collectives run one by one and would never be fused.
        self._traced = tf.function(self._average, autograph=False)
        _alive.add(self)

    def has_no_peers(self) -> bool:
        """Whether there is no other rank to average with."""
        if elastic():
            return False  # the number of ranks may change after the trace
        return not self.process_set.included() or self.process_set.size() == 1

    def average(self, gradients: Sequence[Any], optimizer: Any) -> list[Any]:
        """Return the gradients of self.variables, averaged over the ranks."""
        if self.has_no_peers():
            return list(gradients)
        # Conversion to dense loses the static shape.
        if self.sparse_as_dense:
            gradients = [
                tf.ensure_shape(tf.convert_to_tensor(g), v.shape)
                for g, v in zip(gradients, self.variables, strict=True)
            ]
        # Collectives are named by the index of a variable in the optimizer, equal on all ranks.
        places = tuple(optimizer._get_variable_index(v) for v in self.variables)
        run = self._traced if tf.executing_eagerly() else self._average
        return list(run(list(gradients), places, self._parts(places, optimizer), optimizer.name))

    def all_true(self, value: Any) -> Any:
        """Return whether a boolean is true on every rank."""
        if self.has_no_peers():
            return value
        refuse_xla()
        least = hvd.allreduce(
            tf.cast(value, tf.int32), op=hvd.Min, name=_ELASTIC + "finite",
            process_set=self.process_set,
        )  # fmt: skip
        return tf.cast(least, tf.bool)

    def _average(
        self, gradients: list[Any], places: tuple[int, ...], parts: Any, scope: str
    ) -> list[Any]:
        refuse_xla()
        self._agree(scope)
        indices, named = tuple(range(len(places))), _names(places, parts)
        with tf.name_scope(scope):
            start, results, gradients = self._compressed(gradients, named)
            missing = {i for i, mean in enumerate(results) if mean is None}
            with after(start):
                for part in [indices] if parts is None else parts:
                    plain = [i for i in part if i in missing]
                    group = None if parts is None else f"group_{places[part[0]]}"
                    means = self._plain(
                        [gradients[i] for i in plain], [named[i] for i in plain], group
                    )
                    for i, mean in zip(plain, means, strict=True):
                        results[i] = mean
        return results

    def _compressed(
        self, gradients: list[Any], names: list[str]
    ) -> tuple[Any, list[Any], list[Any]]:
        """See compressed_means."""
        if not hasattr(self.compression, "settings"):
            return None, [None] * len(gradients), gradients
        # Two tests: eagerly, and for arguments of a function, `was_reduced` is always false.
        for variable in exchanged_by_tapes(as_variables(self.variables)):
            raise _averaged_twice(f"{variable.name}: its gradients are")
        if any(was_reduced(gradient) for gradient in gradients):
            raise _averaged_twice("gradients are")
        # `sources` is empty: a tape's variables would be inspected, and None means a plain
        # hvd.allreduce.
        call = Call(
            compression=self.compression, name="gradients", sources=(), place=None,
            op=self.op, process_set=self.process_set, ignore_name_scope=False,
            scale=self.scales["prescale_factor"] * self.scales["postscale_factor"],
        )  # fmt: skip
        return compressed_means(call, gradients, names, self.variables, self)

    def _plain(self, gradients: list[Any], names: list[str], group: str | None) -> list[Any]:
        """Return the means of gradients that are sent by plain Horovod."""
        # Plain even without compression, because Horovod cannot reduce bfloat16.
        plain = hasattr(self.compression, "settings") or self.compression is hvd.Compression.none
        how = {
            "compression": Plain if plain else self.compression,
            "op": self.op,
            "process_set": self.process_set,
            **self.scales,
        }
        if group is not None:
            name = _ELASTIC + group
            return list(hvd.grouped_allreduce(gradients, name=name, **how)) if gradients else []
        return [
            hvd.allreduce(gradient, name=_ELASTIC + name, **how)
            for gradient, name in zip(gradients, names, strict=True)
        ]

    def _agree(self, scope: str) -> None:
        """Raise CompressError on every rank unless all have the same optimizers; while tracing.

        scope : the optimizer's name, by which Horovod matches collectives
        """
        options = {
            "op": self.op, "sparse_as_dense": self.sparse_as_dense,
            "missing_as_zeros": self.missing_as_zeros, **self.scales,
        }  # fmt: skip
        groups = self.groups
        if isinstance(groups, Sequence):
            groups = str(relative_names([v.path for group in groups for v in group]))
        fingerprint = [
            ("number of optimizers", _number_of_optimizers(self.process_set)),
            ("name of the optimizer", scope),
            *fingerprint_of_compression(self.compression),
            *((name, str(value)) for name, value in options.items()),
            ("groups", str(groups)),
            *fingerprint_of_variables(self.variables),
        ]
        if hasattr(self.compression, "settings"):
            memory = memory_of(self.compression)
            memory.agree(self.process_set, fingerprint, self.agreed)
        else:
            agree_at_trace(self.agreed, self.process_set, fingerprint)

    def keys(self, optimizer: Any) -> dict[str, tuple[Any, str]]:
        """Return variables and the names of their error memories, by path."""
        places = tuple(optimizer._get_variable_index(v) for v in self.variables)
        names = _names(places, self._parts(places, optimizer))
        keys = {v.path: (v, name) for v, name in zip(self.variables, names, strict=True)}
        if len(keys) < len(names):
            raise CompressError(
                f"{len(names)} variables have {len(keys)} different paths; expected each to have "
                "its own. Give layers different names."
            )
        return keys

    def _parts(self, places: tuple[int, ...], optimizer: Any) -> Any:
        """Return the indices of the gradients in each group; None without groups."""
        if self.groups is None:
            return None
        if isinstance(self.groups, int):
            split = np.array_split(range(len(places)), self.groups)
            # Python integers, as tf.function converts NumPy's to tensors.
            return tuple(tuple(map(int, part)) for part in split if len(part))
        # Groups may contain variables that Keras left out for lack of a gradient.
        index = {place: i for i, place in enumerate(places)}
        groups = [[optimizer._get_variable_index(v) for v in group] for group in self.groups]
        parts = [tuple(index.pop(p) for p in group if p in index) for group in groups]
        return (*filter(None, parts), *((i,) for i in index.values()))


def _names(places: tuple[int, ...], parts: Any) -> list[str]:
    """Return names for collectives and memories; `parts` are the indices in each group."""
    grouped = {
        i: f"group_{places[part[0]]}.{at}" for part in parts or () for at, i in enumerate(part)
    }
    return [grouped.get(i, f"gradient_{place}") for i, place in enumerate(places)]


def _averaged_twice(what: str) -> CompressError:
    """The error for gradients that are already the ranks' means."""
    return CompressError(
        f"{what} averaged twice, by Horovod's tape and by this optimizer, whose compression would "
        "take clipped or unscaled means for new gradients, and add its error memory to them; "
        "expected each rank's own. Use a plain tf.GradientTape with this optimizer, or a plain "
        "optimizer with the tape. If the tape's training is over: memory_of(its "
        "compression).clear()."
    )


def _number_of_optimizers(process_set: Any) -> str:
    """Count the optimizers that have not agreed yet."""
    gc.collect()  # ranks may otherwise differ in which unused ones were already collected
    sets = [averaging.process_set.process_set_id for averaging in _alive if not averaging.agreed]
    return str(sets.count(process_set.process_set_id))
