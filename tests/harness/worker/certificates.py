"""What a wrong kernel computes instead: the alternatives under which every known call is right.

Each tensor is solved by itself. An alternative (``reference.alternatives``) explains a tensor if it lies within the
bounds around the alternative's own values in every call, those that fail and those that hold; so a call that holds
refutes an alternative that would differ there. What explains several tensors is told once, of all of them. Gradients
are judged at the kernel's own out and lse, or else at the right ones, where these explain more.
"""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice

import torch
from torch import Tensor

from reference.alternatives import Alternative, Given, candidates
from reference.alternatives.backward import gradients, has_gradients
from reference.alternatives.declaration import BACKWARD, EVERY, OUT_AND_LSE
from reference.alternatives.views import views
from reference.bounds import Exact
from reference.family import Family
from reference.heads import unfold
from strategies.case import Case
from tests.harness.trial.judge import exact_of, is_large, judge
from tests.harness.trial.problem import Outputs, as_changed, given_of
from tests.harness.trial.trial import LawBroken, OutOfBounds, Trial

FAR, LEAST_FAR = 8.0, 2.0**-10
"""A tensor is far from a value if it misses it by so many roundings of its dtype, or by that part of its norm.

So an alternative that computes something else is mostly left out without a bound. Roundings of a design of full
precision add up to fewer: P and dS are rounded once each, and so is what is stored.
"""
MOST_TOGETHER = 2
"""How many alternatives may explain a tensor together."""
MOST_PAIRED = 12
"""How many of the alternatives that explain some failing calls are tried in pairs."""


def values(g: Given, e: Exact) -> dict[str, tuple[Tensor, float]]:
    """Return what attention gives for a call, in float64, each with the norm of what its roundings are relative to.

    Gradients follow from the out and lse that the call returned. dq and dk are differences of two sums, and the norms
    of both count.
    """
    heads = g["q"].shape[1]
    found = {"out": unfold(e.out, heads), "lse": unfold(e.lse, heads)}
    sizes = dict.fromkeys(found, 0.0)
    if has_gradients(g):
        whole, of_delta = gradients(g, e)
        for name, x in whole.items():
            lost = of_delta.get(name, torch.zeros_like(x))
            found[name], sizes[name] = x - lost, float(x.norm() + lost.norm())
        found["dq"] = unfold(found["dq"], heads)
    return {name: (x, sizes[name]) for name, x in found.items()}


def is_far(actual: Tensor, expected: Tensor, size: float, limit: float) -> bool:
    """Whether a tensor is further from what is expected than a part of that, or not finite elsewhere.

    ``size`` is the norm of larger terms of which it is the sum, or 0.
    """
    if actual.shape != expected.shape or not torch.equal(actual.isfinite(), expected.isfinite()):
        return True
    known = expected.isfinite()
    x = expected[known]
    return bool((actual[known] - x).norm() > limit * (x.norm() + size) + 1e-6)


@dataclass(frozen=True, eq=False)
class Known:
    """A call that was made: its trial, what it returned, and which tensors are wrong by themselves."""

    trial: Trial
    outputs: Outputs
    wrong: frozenset[str]

    def unexplained(
        self, told: tuple[Alternative, ...], names: Collection[str], *, surely: bool = True
    ) -> set[str]:
        """Return which of some tensors lie outside of the bounds around what the alternatives compute.

        All are returned if an alternative can't be told of the call. With ``surely=False``, they are judged by two
        arithmetics that round at least as much as each design that the kernel may have, which takes less time: one that
        computes P again from lse, and one that keeps it.
        """
        widest = self.trial.arithmetic
        roughly = Family((replace(widest, saved_weights=False), replace(widest, saved_weights=True)))
        family = self.trial.family if surely else roughly
        asked = self.trial.replayed(family)
        asked.alternatives = told
        try:
            judge(asked, asked.problem, self.outputs, names=names)
        except OutOfBounds as broken:
            return {*broken.tensors}.intersection(names)
        except (LookupError, RuntimeError):  # strides that leave the memory, shapes that do not fit
            return {*names}
        return set()

    def missed(self, told: tuple[Alternative, ...], names: Collection[str]) -> set[str]:
        """Return which of some tensors are far from what the alternatives compute, by norms in place of bounds."""
        p, found = self.trial.problem, set[str]()
        limit = max(LEAST_FAR, FAR * torch.finfo(p.dout.dtype).eps)
        try:
            for view in views(given_of(p, self.outputs, self.trial.alignment), told, names):
                changed, _ = as_changed(p, self.outputs, view.changed)
                e = view.rescaled(exact_of(self.trial, changed, view.scores))
                expected, moved = values(view.changed, e), view.moved(e)
                for name in view.names:
                    (value, size), actual = expected[name], view.changed[name].double()
                    if name in moved:
                        value, _ = moved[name](value, torch.zeros_like(value))
                    found |= {name} if is_far(actual, value, size, limit) else set()
        except (LookupError, RuntimeError):  # strides that leave the memory, shapes that do not fit
            return {*names}
        return found

    def follow(self, names: Collection[str]) -> bool:
        """Whether some gradients are right for the right out and lse, which are not those that the kernel returned."""
        asked = self.trial.replayed(self.trial.family)
        asked.apart = False
        try:
            judge(asked, asked.problem, self.outputs, names=names)
        except OutOfBounds:
            return False
        return True


def known_call(trial: Trial) -> Known | None:
    """Make the call of a trial, and return it with the tensors that are wrong; None if nothing can be said of it."""
    p = trial.problem
    if is_large(p) or p.dropout_p or trial.arithmetic.quantisation:
        return None
    outputs = trial.gradients() if trial.kernel.capabilities.backward else trial.forward()
    if trial.changed_input() is not None:  # what is right follows from the inputs as they were
        return None
    try:
        judge(trial.replayed(trial.family), p, outputs)
    except OutOfBounds as broken:
        return Known(trial, outputs, frozenset(broken.tensors))
    except LawBroken:
        return None
    return Known(trial, outputs, frozenset())


@dataclass
class Certificate:
    """What explains the wrong tensors of all calls: ``alternatives``. Nothing explains the tensors ``unexplained``.

    ``tied`` has, by name, the words of another alternative that explains the same.
    """

    alternatives: list[Alternative] = field(default_factory=list)
    tied: dict[str, str] = field(default_factory=dict)
    unexplained: set[str] = field(default_factory=set)

    @property
    def words(self) -> list[str]:
        """Say what the kernel computes instead, and what no call has told apart from that."""
        return [
            f"{x.words} (or {self.tied[x.name]})" if x.name in self.tied else x.words
            for x in self.alternatives
        ]


@dataclass
class Search:
    """The search for a certificate of some calls, until ``deadline``, by ``time.process_time``."""

    calls: Sequence[Known]
    deadline: float

    @cached_property
    def wrong(self) -> frozenset[str]:
        """The tensors that are wrong in any call."""
        return frozenset[str]().union(*(call.wrong for call in self.calls))

    def certificate(self) -> Certificate:
        """Return what explains the tensors that are wrong in any call.

        Gradients are explained by themselves, or together with what explains out and lse, if that explains more.
        """
        found = Certificate()
        self._explain(found, [x for x in OUT_AND_LSE if x in self.wrong], ())
        wrong = [x for x in BACKWARD if x in self.wrong]
        of_forward = tuple(found.alternatives)
        if wrong and of_forward and not self._apart(wrong, of_forward):
            for each in of_forward:
                found.alternatives[found.alternatives.index(each)] = each.beside(wrong)
        elif wrong and not (len(wrong) < len(self.wrong) and self._follow(wrong)):
            self._explain(found, wrong, ())
            if found.unexplained.intersection(wrong) and of_forward:
                other = Certificate([*of_forward], unexplained={*found.unexplained}.difference(wrong))
                self._explain(other, wrong, of_forward)
                return min(other, found, key=lambda x: len(x.unexplained))
        return found

    def _apart(self, names: Sequence[str], told: tuple[Alternative, ...]) -> set[str]:
        """Return which gradients are not explained by what explains out and lse."""
        left = {*names}
        return left - self._held((), left, told)

    def _follow(self, names: Sequence[str]) -> bool:
        """Whether gradients are right for the right out and lse, which the kernel does not return."""
        return all(call.follow(names) for call in self._failing(names))

    def _explain(self, found: Certificate, names: Sequence[str], base: tuple[Alternative, ...]) -> None:
        """Add to a certificate what explains these tensors, beside what is known to concern them: ``base``."""
        explained: dict[tuple[Alternative, ...], set[str]] = {}
        for told, tensors in self._solutions(names, base):
            explained.setdefault(told, set()).update(tensors)
        left, of_call = [*names], self.calls[0].outputs.named().keys()
        while left:
            best = max(explained, key=lambda x: (len(explained[x].intersection(left)), -len(x)), default=())
            covered = explained.get(best, set()).intersection(left)
            if not covered:
                found.unexplained |= {*left}
                break
            for each in best:
                found.alternatives.append(replace(each, tensors=_in_order(explained[best] & of_call)))
            others = (
                x for x, tensors in explained.items() if x[0].name != best[0].name and covered <= tensors
            )
            for other in islice(others, 1):
                found.tied[best[0].name] = " and ".join(x.words for x in other)
            left = [x for x in left if x not in covered]

    def _solutions(
        self, names: Sequence[str], base: tuple[Alternative, ...]
    ) -> Iterator[tuple[tuple[Alternative, ...], set[str]]]:
        """Yield what explains some of the tensors, with these; several together where no single one does."""
        tried, left = list[Alternative](), {*names}
        for told in self._candidates(names):
            if time.process_time() > self.deadline:
                return
            tried.append(told)
            if holding := self._held((told,), told.tensors, base):
                left -= holding
                yield (told,), holding
        for name in left:
            partly = list(
                islice((x for x in tried if name in x.tensors and self._explains_some(x, name)), MOST_PAIRED)
            )
            for pair in itertools.combinations(partly, MOST_TOGETHER):
                if pair[0].name != pair[1].name and self._held(pair, (name,), base):
                    yield pair, {name}

    def _candidates(self, names: Sequence[str]) -> Iterator[Alternative]:
        """Yield the alternatives that may explain some tensors, each once, for all of them that it may concern."""
        seen = set[Alternative]()
        for name in names:
            call = self._failing((name,))[0]
            p = call.trial.problem
            given = given_of(p, call.outputs, call.trial.alignment)
            for told in candidates(given, exact_of(call.trial, p), names):
                if told not in seen:
                    seen.add(told)
                    yield told

    def _failing(self, names: Collection[str]) -> list[Known]:
        """Return the calls in which one of the tensors is wrong, the smallest first."""
        failing = (call for call in self.calls if not call.wrong.isdisjoint(names))
        return sorted(failing, key=lambda call: call.trial.problem.scores)

    def _held(
        self, told: tuple[Alternative, ...], names: Collection[str], base: tuple[Alternative, ...]
    ) -> set[str]:
        """Return which of the tensors the alternatives explain in all calls, if a wrong one is among them.

        The failing calls come first. ``base`` has further alternatives that concern all of the tensors.
        """
        left = {*names}
        failing = self._failing(names)
        others = [call for call in self.calls if call not in failing]
        steps = Known.missed, partial(Known.unexplained, surely=False), Known.unexplained
        for refutes in steps:
            for call in (*failing, *others):
                there = left & call.outputs.named().keys()
                concerned = tuple(replace(x, tensors=tuple(there)) for x in (*base, *told))
                left -= refutes(call, concerned, there) if there else set()
                for each in told:
                    left &= {*each.within(left)}
                if left.isdisjoint(self.wrong) or time.process_time() > self.deadline:
                    return set()
        return left

    def _explains_some(self, told: Alternative, name: str) -> bool:
        """Whether an alternative explains a tensor in some failing call, and is refuted in none that holds."""
        if time.process_time() > self.deadline:
            return False
        alone, failing = (replace(told, tensors=(name,)),), self._failing((name,))
        holding = (call for call in self.calls if call not in failing and name in call.outputs.named())
        return any(not call.missed(alone, (name,)) for call in failing[:4]) and not any(
            call.missed(alone, (name,)) for call in holding
        )


def _in_order(names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in EVERY if name in names)


def search(cases: Iterable[Case], trial_of: Callable[[Case], Trial], seconds: float) -> Certificate | None:
    """Call a kernel on these cases, and return the certificate of what is wrong; None if nothing is.

    ``seconds`` are those of the processor, so that other work on the machine changes nothing; half of them are for the
    calls. A case that can't be run tells nothing.
    """
    start, calls = time.process_time(), list[Known]()
    for case in cases:
        with suppress(Exception):
            calls += filter(None, [known_call(trial_of(case))])
        if time.process_time() > start + seconds / 2:
            break
    return Search(calls, start + seconds).certificate() if any(call.wrong for call in calls) else None
