"""A kind of input: what a plan is for, how two kinds differ, and how to say so."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

# An attribute, by the place of its module among all, and its name; or a whole argument, at OF_CALL.
Name = tuple[int, str]
OF_CALL = -1


@dataclass(frozen=True)
class Kind:
    """A kind of input; equal kinds take the same plan.

    Parameters
    ----------
    arguments
        Name of each argument that is not left at its default, and its form: how it is nested, and
        of each tensor in it size, strides, offset, type, whether it requires a gradient, and
        which inputs are the same tensor and the same memory.
    casts
        Kind of device and type, where autocast is on.
    wanted
        Per parameter, whether it requires a gradient.
    sharded
        Whether some parameter lies on several ranks, as where FSDP2 has sharded a module.
    settings
        Per module, names and values of what a forward may read beside tensors it registers.
    ones
        Places, among what the arguments are made of, of inputs that are all ones, where the step
        was planned for that (a mask that masks nothing); see `ones/by_kind.py`.
    free
        Attributes and arguments whose values are left out, as they change from step to step: only
        what runs the model's own forward may be planned for such a kind.
    """

    arguments: tuple[tuple[str, Any], ...]
    casts: tuple[Hashable, ...]
    wanted: tuple[bool, ...]
    sharded: bool
    settings: tuple[frozenset[tuple[str, Hashable]], ...]
    ones: tuple[int, ...] = ()
    free: tuple[Name, ...] = ()

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # It is looked up in each step, and has an item for each module.
        held = (self.arguments, self.casts, self.wanted, self.sharded, self.settings)
        return hash((*held, self.ones, self.free))

    @property
    def wants_gradients(self) -> bool:
        """Whether there is anything to differentiate by."""
        leaves = (leaf for _, (_, leaves) in self.arguments for leaf in leaves)
        return any(self.wanted) or any(_is_tensor(leaf) and leaf[4] for leaf in leaves)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors among the arguments."""
        leaves = (leaf for _, (_, leaves) in self.arguments for leaf in leaves)
        return sum(prod(it[0]) * it[3].itemsize for it in leaves if _is_tensor(it))

    def shapes(self) -> str:
        """Its tensors' shapes, as in "input_ids (4, 128), labels (4, 128)"."""
        found, ones = [], self._names_of_ones()
        for name, (_, leaves) in self.arguments:
            sizes = [str(it[0]) for it in leaves if _is_tensor(it)]
            more = " and more" if len(sizes) > 3 else ""
            if sizes:
                held = " of ones" if name in ones else ""
                found.append(f"{name} {' and '.join(sizes[:3])}{more}{held}")
        return ", ".join(found) or "no tensor"

    def _names_of_ones(self) -> set[str]:
        names = [name for name, (_, leaves) in self.arguments for _ in leaves]
        return {names[at] for at in self.ones}

    def without(self, free: Iterable[Name]) -> Kind:
        """Return the kind without the values of some attributes and arguments."""
        free = tuple(sorted({*free, *self.free}))
        if free == self.free:
            return self
        names = set(free)
        arguments = tuple(
            (name, (spec, tuple(it if _is_tensor(it) else (object, "any") for it in leaves)))
            if (OF_CALL, name) in names
            else (name, (spec, leaves))
            for name, (spec, leaves) in self.arguments
            # One that is no tensor may as well be left at its default.
            if (OF_CALL, name) not in names or any(map(_is_tensor, leaves))
        )
        settings = list(self.settings)
        for place in {place for place, _ in free if 0 <= place < len(settings)}:
            settings[place] = frozenset(it for it in settings[place] if (place, it[0]) not in names)
        return replace(self, arguments=arguments, settings=tuple(settings), free=free)

    def changed_since(self, other: Kind) -> set[Name]:
        """Return the attributes and arguments that have another value, sizes of tensors apart."""
        mine, theirs = dict(self.arguments), dict(other.arguments)
        found = {
            (OF_CALL, name)
            for name in mine.keys() | theirs.keys()
            if _differ(mine.get(name), theirs.get(name))
        }
        for place, (now, then) in enumerate(zip(self.settings, other.settings, strict=False)):
            if now is not then:
                found |= {(place, name) for name, _ in now ^ then}
        return found

    def covers(self, other: Kind) -> bool:
        """Whether another kind is of the same modes and arguments, and no tensor larger."""
        if not set(self.ones) <= set(other.ones):
            return False
        if (self.casts, self.wanted, self.sharded) != (other.casts, other.wanted, other.sharded):
            return False
        if self.free != other.free:
            return False
        if self.settings != other.settings or len(self.arguments) != len(other.arguments):
            return False
        return all(
            name == its and spec == their_spec and all(map(_holds, leaves, theirs))
            for (name, (spec, leaves)), (its, (their_spec, theirs)) in zip(
                self.arguments, other.arguments, strict=True
            )
        )

    def unlike(self, planned: Kind, paths: list[str]) -> list[str]:
        """What makes it another kind than one that was planned; `paths` names the modules."""
        mine, theirs = dict(self.arguments), dict(planned.arguments)
        found = [f"{name} was not given then" for name in mine.keys() - theirs.keys()]
        found += [f"{name} is missing" for name in theirs.keys() - mine.keys()]
        found += [
            f"{name} is {_shown(form, theirs[name])}, and was {_shown(theirs[name], form)}"
            for name, form in self.arguments
            if name in theirs and theirs[name] != form
        ]
        if self.arguments != planned.arguments and not found:
            found.append("the inputs come in another order or share memory otherwise")
        mine_of, theirs_of = self._names_of_ones(), planned._names_of_ones()
        # Of another shape it may not be known yet.
        alike = {name for name, form in self.arguments if theirs.get(name) == form}
        found += [f"{name} is all ones" for name in sorted(alike & mine_of - theirs_of)]
        found += [f"{name} is not all ones" for name in sorted(alike & theirs_of - mine_of)]
        if self.casts != planned.casts:
            found.append("autocast is otherwise")
        if self.wanted != planned.wanted:
            found.append("other parameters require gradients")
        if self.settings != planned.settings:
            names = {
                f"{path}.{name}" if path else name
                for path, now, then in zip(paths, self.settings, planned.settings, strict=False)
                for name, _ in now ^ then
            }
            told = ", ".join(sorted(names)[:4]) or "other modules"
            found.append(f"modes and numbers in its modules are otherwise ({told})")
        return found


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, tuple) and isinstance(leaf[0], tuple)


def _differ(form: Any, other: Any) -> bool:
    """Whether an argument's forms differ in more than tensors; None where it is at its default."""
    if form is None or other is None:
        return form is not other and not any(map(_is_tensor, (form or other)[1]))
    if form[0] != other[0]:
        return False
    pairs = zip(form[1], other[1], strict=True)
    return any(mine != its and not (_is_tensor(mine) and _is_tensor(its)) for mine, its in pairs)


def _holds(leaf: Any, other: Any) -> bool:
    """Whether a tensor's form is that of another, and as large or larger; all else is equal."""
    if not (_is_tensor(leaf) and _is_tensor(other)):
        return bool(leaf == other)
    same = len(leaf[0]) == len(other[0]) and leaf[3:] == other[3:]
    return same and all(mine >= its for mine, its in zip(leaf[0], other[0], strict=True))


def _shown(form: Any, other: Any) -> str:
    """Show an argument's form beside another: shapes and types of tensors, values of the rest."""
    told = [_leaf(it) for it in form[1]]
    if told == [_leaf(it) for it in other[1]]:
        told = [_leaf(it, whole=True) for it in form[1]]
    return " and ".join(told[:3]) + (" and more" if len(told) > 3 else "")


def _leaf(leaf: Any, *, whole: bool = False) -> str:
    if not _is_tensor(leaf):
        return leaf.__name__ if isinstance(leaf, type) else str(leaf[1])
    size, stride, offset, dtype, wanted, same, shared = leaf
    told = f"{str(dtype).removeprefix('torch.')} of shape {size}"
    if whole:
        told += f" (strides {stride} from {offset}, requires_grad {wanted}, the tensor of input "
        told += f"{same}, memory of input {shared})"
    return told
