"""Calls of a kernel that are known, and how far what they returned is from what alternatives say of it."""

import math
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from reference.alternatives import Alternative, Given, candidates
from reference.alternatives.backward import gradients, has_gradients
from reference.alternatives.declaration import BACKWARD, CONDITIONS, EVERY, OUT_AND_LSE
from reference.alternatives.memory import LeavesMemory
from reference.alternatives.views import View, views
from reference.bounds import Exact
from reference.family import Family
from reference.heads import unfold
from tests.harness.trial.judge import exact_of, is_large, judge
from tests.harness.trial.problem import ARGUMENTS, Outputs, as_changed, given_of
from tests.harness.trial.trial import LawBroken, OutOfBounds, Trial

FAR, LEAST_FAR = 8.0, 2.0**-10
"""A tensor is far from a value if it misses it by so many roundings of its dtype, or by that part of its norm.

So an alternative that computes something else is mostly left out without a bound. Roundings of a design of full
precision add up to fewer: P and dS are rounded once each, and so is what is stored.
"""


def values(g: Given, e: Exact, names: Collection[str] = EVERY) -> dict[str, tuple[Tensor, float]]:
    """Return what attention gives for a call, in float64, each with the norm of what its roundings are relative to.

    Gradients, which are left out if none is among ``names``, follow from the out and lse that the call returned. dq and
    dk are differences of two sums, and the norms of both count.
    """
    heads = g["q"].shape[1]
    found = {"out": unfold(e.out, heads), "lse": unfold(e.lse, heads)}
    sizes = dict.fromkeys(found, 0.0)
    if has_gradients(g) and not {*BACKWARD}.isdisjoint(names):
        whole, of_delta = gradients(g, e)
        for name, x in whole.items():
            lost = of_delta.get(name, torch.zeros_like(x))
            found[name], sizes[name] = x - lost, _norm(x) + _norm(lost)
        found["dq"] = unfold(found["dq"], heads)
    return {name: (x, sizes[name]) for name, x in found.items()}


def _norm(x: Tensor) -> float:
    found = float(x.norm())
    return found if math.isfinite(found) else float(x[x.isfinite()].norm())


@dataclass(frozen=True)
class Compared:
    """A tensor of a call beside what alternatives give, in float64; ``size`` is that of ``values``."""

    actual: Tensor
    expected: Tensor
    size: float

    def distance(self, limit: float) -> float:
        """Return how far the tensor is from what is expected, relative to ``limit`` times its norm: above 1 is far.

        An element that is not finite where the other one is counts as large as those are on average.
        """
        if self.actual.shape != self.expected.shape:
            return math.inf
        x, unlike = self.expected, 0
        norm, error = float(x.norm()), float((self.actual - x).norm())
        if not math.isfinite(norm + error):
            known = x.isfinite() & self.actual.isfinite()
            unlike, x = int((x.isfinite() ^ self.actual.isfinite()).sum()), x[known]
            norm, error = float(x.norm()), float((self.actual[known] - x).norm())
        found = error / (limit * (norm + self.size) + 1e-6)
        return found + 1.0 + (unlike / max(1, len(x))) ** 0.5 / limit if unlike else found


def compared(
    trial: Trial, outputs: Outputs, told: tuple[Alternative, ...], names: Collection[str], as_it_is: Exact
) -> Iterator[tuple[str, Compared]]:
    """Yield tensors of a call with what they are if a kernel computes some alternatives, beside those of the trial.

    ``as_it_is`` are the exact quantities of the call without them.

    Raises LookupError or RuntimeError if these can't be told of the call.
    """
    p = trial.problem
    for view in views(given_of(p, outputs, trial.alignment), (*trial.alternatives, *told), names):
        e = view.rescaled(_exact_of(trial, outputs, view, as_it_is))
        expected, moved = values(view.changed, e, view.names), view.moved(e)
        for name in view.names:
            actual, (value, size) = view.changed[name].double(), expected[name]
            if name in moved:
                value, bound = moved[name](value, torch.zeros_like(value))
                value = torch.where(
                    bound.isposinf() & ~value.isnan(), actual, value
                )  # it may be anything there
            yield name, Compared(actual, value, size)


def _exact_of(trial: Trial, outputs: Outputs, view: View, as_it_is: Exact) -> Exact:
    """Return the exact quantities of a call as a view has it, which are often those of the call ``as_it_is``."""
    if view.scores is None and all(view.changed[name] is view.given[name] for name in ARGUMENTS):
        return as_it_is
    return exact_of(trial, as_changed(trial.problem, outputs, view.changed)[0], view.scores)


def limit_of(trial: Trial) -> float:
    """Return what part of its norm a tensor may miss a value by that it is not far from."""
    return max(LEAST_FAR, FAR * torch.finfo(trial.problem.dout.dtype).eps)


@dataclass(frozen=True, eq=False)
class Known:
    """A call that was made: its trial, what it returned, and which tensors are wrong by themselves.

    If the trial has alternatives, these are known bugs of the kernel: they count as right, beside any others.

    ``measured`` and ``refuted`` keep the answers of ``distances`` and ``unexplained``.
    """

    trial: Trial
    outputs: Outputs
    wrong: frozenset[str]
    measured: dict[tuple[tuple[Alternative, ...], str], float] = field(default_factory=dict, init=False)
    refuted: dict[tuple[tuple[Alternative, ...], frozenset[str], bool], set[str]] = field(
        default_factory=dict, init=False
    )

    def unexplained(
        self, told: tuple[Alternative, ...], names: Collection[str], *, surely: bool = True
    ) -> set[str]:
        """Return which of some tensors lie outside of the bounds around what the alternatives compute.

        All are returned if an alternative can't be told of the call. With ``surely=False``, they are judged by two
        arithmetics that round at least as much as each design that the kernel may have, which takes less time: one that
        computes P again from lse, and one that keeps it.
        """
        told = tuple(x.always for x in told if x.concerns(self.given))
        asked = told, frozenset(names), surely
        if asked not in self.refuted:
            self.refuted[asked] = self._refuted(told, names, surely=surely)
        return {*self.refuted[asked]}

    def _refuted(self, told: tuple[Alternative, ...], names: Collection[str], *, surely: bool) -> set[str]:
        widest = self.trial.arithmetic
        roughly = Family((replace(widest, saved_weights=False), replace(widest, saved_weights=True)))
        family = self.trial.family if surely else roughly
        asked = self.trial.replayed(family)
        asked.alternatives = (*asked.alternatives, *told)
        try:
            judge(asked, asked.problem, self.outputs, names=names)
        except OutOfBounds as broken:
            return {*broken.tensors}.intersection(names)
        except LeavesMemory:
            return self.unknown_of(told, names)
        except (LookupError, RuntimeError):  # shapes that do not fit
            return {*names}
        return set()

    def unknown_of(self, told: tuple[Alternative, ...], names: Collection[str]) -> set[str]:
        """Return which tensors refute alternatives of which one reads memory behind a tensor, so that nothing is known.

        None do if it is alone, and the call is wrong: then other calls have to tell.
        """
        return set() if self.wrong and len(told) == 1 else {*names}

    def is_told_by(self, told: tuple[Alternative, ...], name: str) -> bool:
        """Whether alternatives tell what a tensor is, without memory behind a tensor, or an out or lse of NaN.

        Nothing is known of gradients that follow from NaN, unless an alternative says where these are NaN too.
        """
        try:
            (view,) = views(self.given, told, (name,))
        except LookupError:
            return False
        changes = (x.change for x in view.alternatives)
        return (name in OUT_AND_LSE or self.is_clear) or any(
            x.results is not None and x.call is None and x.scores is None for x in changes
        )

    def distances(self, told: tuple[Alternative, ...], names: Collection[str]) -> dict[str, float]:
        """Return how far some tensors are from what alternatives compute, by norms in place of bounds: above 1 is far.

        All are infinitely far if an alternative can't be told of the call.
        """
        told = tuple(x.always for x in told if x.concerns(self.given))
        left = [name for name in names if (told, name) not in self.measured]
        try:
            for name, each in compared(self.trial, self.outputs, told, left, self.exact) if left else ():
                self.measured[told, name] = each.distance(limit_of(self.trial))
        except LeavesMemory:
            refuting = self.unknown_of(told, left)
            self.measured.update({(told, name): math.inf if name in refuting else 0.0 for name in left})
        except (LookupError, RuntimeError):  # shapes that do not fit
            self.measured.update({(told, name): math.inf for name in left})
        return {name: self.measured[told, name] for name in names}

    @cached_property
    def given(self) -> Given:
        """Return the call as alternatives take it."""
        return given_of(self.trial.problem, self.outputs, self.trial.alignment)

    @cached_property
    def is_clear(self) -> bool:
        """Whether neither NaN nor infinity is in out or lse, from which gradients follow; rows may see no key."""
        own = (self.outputs.out, self.outputs.lse)
        return not any(x is not None and bool((x.isnan() | x.isposinf()).any()) for x in own)

    @cached_property
    def exact(self) -> Exact:
        """Return the exact quantities of the call."""
        return exact_of(self.trial, self.trial.problem)

    @cached_property
    def conditions(self) -> list[str]:
        """Return the conditions that the call meets, of those to which an alternative may be restricted."""
        return [condition for condition, is_met in CONDITIONS.items() if is_met(self.given)]

    def missed(self, told: tuple[Alternative, ...], names: Collection[str]) -> set[str]:
        """Return which of some tensors are far from what the alternatives compute."""
        return {name for name, x in self.distances(told, names).items() if x > 1.0}

    def follow(self, names: Collection[str]) -> bool:
        """Whether some gradients are right for the right out and lse, which are not those that the kernel returned."""
        asked = self.trial.replayed(self.trial.family)
        asked.apart = False
        try:
            judge(asked, asked.problem, self.outputs, names=names)
        except OutOfBounds:
            return False
        return True


def known_call(trial: Trial, *, has_gradients: bool = True) -> Known | None:
    """Make the call of a trial, and return it with the tensors that are wrong; None if nothing can be said of it.

    It is asked for gradients if the kernel has some, unless ``has_gradients`` is false.
    """
    p = trial.problem
    if is_large(p):
        return None
    made = trial.gradients() if has_gradients and trial.kernel.capabilities.backward else trial.forward()
    # A kernel that returns the same memory again would have later calls write over what this one returned.
    kept: dict[str, Any] = {name: x.clone() for name, x in made.named().items()}
    outputs = replace(made, **kept)
    if trial.changed_input() is not None:  # what is right follows from the inputs as they were
        return None
    try:
        judge(trial.replayed(trial.family), p, outputs)
    except OutOfBounds as broken:
        return Known(trial, outputs, frozenset(broken.tensors))
    except LawBroken:
        return None
    return Known(trial, outputs, frozenset())


def candidates_of(call: Known, parts: tuple[Alternative, ...], name: str) -> Iterator[Alternative]:
    """Yield the alternatives that may explain a tensor of a call that has other alternatives, ``parts``, too."""
    with suppress(LookupError, RuntimeError):  # strides that leave the memory, shapes that do not fit
        whole = (*call.trial.alternatives, *parts)
        for view in views(call.given, of_tensors(whole, (name,)), (name,)):
            e = view.rescaled(_exact_of(call.trial, call.outputs, view, call.exact))
            for told in candidates(view.changed, e, (name,)):
                if told.changes(view.changed):
                    yield told


def differ(
    trial: Trial, one: tuple[Alternative, ...], other: tuple[Alternative, ...], names: Collection[str]
) -> bool:
    """Whether some tensors of a call are far apart, by what two sets of alternatives say of them."""
    given = given_of(trial.problem, Outputs(out=trial.problem.q, lse=None), trial.alignment)
    e = exact_of(trial, trial.problem)
    heads, dtype = trial.problem.heads_q, trial.problem.q.dtype
    forward = Outputs(out=unfold(e.out, heads).to(dtype), lse=unfold(e.lse, heads).float())
    likely = {"dq": given["q"], "dk": given["k"], "dv": given["v"]}
    if not {*BACKWARD}.isdisjoint(names):
        with_out = {**given, "dout": trial.problem.dout, **forward.named(), **likely}
        likely = {x: y.to(dtype) for x, (y, _) in values(with_out, e).items() if x in BACKWARD}
        forward = replace(forward, **likely)
    first, second = (dict(compared(trial, forward, of_tensors(x, names), names, e)) for x in (one, other))
    for name, x in first.items():
        y = second[name]
        # What a kernel returned may be changed back: then its distance from what is expected tells.
        moved = Compared(x.actual - x.expected + y.expected, y.actual, max(x.size, y.size))
        if moved.distance(limit_of(trial)) > 1.0:
            return True
    return False


def of_tensors(told: tuple[Alternative, ...], names: Collection[str]) -> tuple[Alternative, ...]:
    """Return alternatives as they concern these tensors."""
    return tuple(x.of(tuple(name for name in names if name in x.tensors)) for x in told)
