"""Lanes that copy when it suits them worst, and plans that move at random.

A lane may carry a copy out at any moment between those it waits for and the one that waits for it.
Copies at once, as on the CPU, are one order of many and the kindest. These lanes take others: as
late as they may, or at moments drawn at random; in each direction in any order, which is more than
two streams allow themselves. So what is right here is right by what waits for what, not by luck.
"""

import random
import weakref

import numpy as np
import torch

from sn_memory import check_plan
from sn_memory.check import carry_out
from sn_memory.plan.plan import Action, Plan
from sn_memory.torch.trace.record import View


class Copy:
    """A copy asked for: it holds neither end alive, and notes if one is given back too early."""

    def __init__(self, source, target, after, faults):
        self.source, self.target = (weakref.ref(it.untyped_storage()) for it in (source, target))
        self.forms = [(it.storage_offset(), it.numel()) for it in (source, target)]
        self.after, self.faults, self.done = after, faults, False

    def carry_out(self):
        if self.done:
            return
        for earlier in self.after:
            earlier.carry_out()
        self.done = True
        ends = [self.source(), self.target()]
        if None in ends:
            self.faults.append("memory was given back before the copy was waited for")
            return
        source, target = (
            torch.empty(0, dtype=torch.uint8).set_(memory, offset, (size,))
            for memory, (offset, size) in zip(ends, self.forms, strict=True)
        )
        target.copy_(source)


class OddLanes:
    """Lanes of which, at each call, every copy under way is carried out with a probability.

    0: each as late as it may, when it is waited for. 1: at once. What is not waited for in the end
    is a fault, as nobody could give its memory back.
    """

    def __init__(self, probability=0.0, seed=0):
        self.probability, self.chance = probability, random.Random(seed)
        self.copies, self.faults = [], []

    def leave(self, here, host, after=()):
        return self._ask(here, host, after)

    def arrive(self, host, here, after):
        # New memory holds anything; NaN in whatever type shows in all that is computed from it.
        here.fill_(255)
        return self._ask(host, here, (after,))

    def wait(self, ticket):
        ticket.carry_out()
        self._some()

    def finish(self, ticket):
        self.wait(ticket)

    def under_way(self):
        return [it for it in self.copies if not it.done]

    def _ask(self, source, target, after):
        made = Copy(source, target, tuple(it for it in after if it is not None), self.faults)
        self.copies.append(made)
        # Those that nobody can wait for any more: their memory may be anybody's.
        weakref.finalize(target.untyped_storage(), self._released, made)
        weakref.finalize(source.untyped_storage(), self._released, made)
        self._some()
        return made

    def _released(self, copy):
        if not copy.done:
            self.faults.append("memory was given back before the copy was waited for")
            copy.done = True

    def _some(self):
        self.copies = self.under_way()
        for copy in self.copies:
            if self.probability and self.chance.random() < self.probability:
                copy.carry_out()


def random_moves(traced, plan, seed, *, share=0.5):
    """Return a plan that moves storages of another to the host and back at random moments.

    A stay lies between two actions that touch a storage. Its copy out, the end of its memory and
    its copy back lie anywhere between, in this order, so that places on the host change hands.
    """
    rng, graph = np.random.default_rng(seed), traced.graph
    resident = {it.name for it in graph.storages if it.resident or it.keep or it.held}
    outside = {it.storage for it in traced.captured.outputs if isinstance(it, View)}
    outside |= {it.storage for it in traced.captured.output_gradients}
    fixed = resident | {it for it, at in traced.named.storage_of.items() if at in outside}
    ops = {op.name: op for op in graph.ops}
    touched, there = {}, set()
    for at, (kind, target, _) in enumerate(plan.actions):
        op = ops[target] if kind == "run" else None
        names = {target}
        if op is not None:
            # What is made again beside what was wanted does not touch the one that is there.
            names = {*op.inputs, *op.writes, *op.outputs} - (
                there & {*op.outputs} - {*op.inputs, *op.writes}
            )
        there = there - {target} if kind == "free" else there | names
        for name in names - fixed:
            touched.setdefault(name, []).append((at, kind))
    after = {}
    for name in sorted(touched):
        for (first, kind), (last, _) in zip(touched[name], touched[name][1:], strict=False):
            if kind == "free" or last - first < 2 or rng.random() > share:
                continue
            moments = np.sort(rng.uniform(first, last, 3))
            for moment, what in zip(moments, ("offload", "free", "prefetch"), strict=True):
                after.setdefault(int(moment), []).append((float(moment), what, name))
    actions = []
    for at, action in enumerate(plan.actions):
        actions.append(action)
        actions += [Action(what, name) for _, what, name in sorted(after.get(at, []))]
    return predicted(graph, actions)


def predicted(graph, actions):
    """Return a plan of these actions with what a replay finds, checked."""
    made = Plan(tuple(actions), (), "random", 0, 0.0, 0.0)
    found = carry_out(graph, made)
    made = Plan(tuple(actions), (), "random", found.peak_bytes, found.seconds, 0.0)
    check_plan(graph, made)
    return made
