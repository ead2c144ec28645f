"""What a wrong kernel computes instead: the alternatives under which every known call is right.

Each tensor is solved by itself. An alternative (``reference.alternatives``) explains a tensor if it lies within the
bounds around the alternative's own values in every call, those that fail and those that hold; so a call that holds
refutes an alternative that would differ there. What explains several tensors is told once, of all of them. Gradients
are judged at the kernel's own out and lse, or else at the right ones, where these explain more.
"""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from reference.alternatives import Alternative
from reference.alternatives.declaration import BACKWARD, EVERY, OF_TENSORS, OUT_AND_LSE
from strategies.case import Case
from tests.harness.fitting.known import Known, candidates_of, differ, known_call, of_tensors
from tests.harness.trial.trial import Trial

MOST_TOGETHER = 4
"""How many alternatives may explain a tensor together."""
WIDTH, SAMPLE = 4, 3
"""How many sets of alternatives are grown by a further one at a time, and on how many failing calls that is tried.

These are from the smallest to the largest.
"""
PAIRED = 6
"""How many of the best conditions are tried with each other one."""
LEAST_SHOWN = 3
"""How many calls have to show that a change is there in calls of a kind, and as many that it is in no others."""
LEAST_GAIN = 0.05
"""By how much the logarithm of the distance has to shrink where a set of alternatives grows."""
MOST_ASKED = 8
"""How many further calls are made to tell apart what explains the same."""


@dataclass
class Certificate:
    """What explains the wrong tensors of all calls: ``alternatives``. Nothing explains the tensors ``unexplained``.

    ``tied`` has, by name of one of them, each set that explains the same tensors in its place. ``first`` is the call
    that failed first, if it is among them.
    """

    alternatives: list[Alternative] = field(default_factory=list)
    tied: dict[str, list[tuple[Alternative, ...]]] = field(default_factory=dict)
    unexplained: set[str] = field(default_factory=set)
    first: Known | None = None

    def add(self, told: Alternative, tensors: Collection[str]) -> None:
        """Add an alternative as it concerns these tensors; they count for the same one if that is known already."""
        told = replace(told, tensors=_in_order({*tensors}.intersection(told.tensors)))
        for at, each in enumerate(self.alternatives):
            if (each.name, each.values) == (told.name, told.values):
                self.alternatives[at] = each.beside(told.tensors)
                return
        self.alternatives.append(told)

    def of_bug(self, tensor: str) -> "Certificate":
        """Return what explains one bug: the tensor, and what is explained by the same.

        What explains other tensors alone is another bug, and so is what the first call does not need to be explained.
        What changes out or lse is a bug of these: gradients that are computed from them follow.
        """
        if tensor in self.unexplained:
            return replace(self, alternatives=[])
        own = {x: {*x.tensors}.intersection(OUT_AND_LSE) or {*x.tensors} for x in self.alternatives}
        linked, before = {tensor}, set[str]()
        if not any(tensor in tensors for tensors in own.values()):
            linked.update(*(tensors for x, tensors in own.items() if tensor in x.tensors))
        while linked != before:
            before = {*linked}
            linked.update(*(tensors for tensors in own.values() if not linked.isdisjoint(tensors)))
        kept = [x for x, tensors in own.items() if not linked.isdisjoint(tensors)]
        there = self.first.wrong.intersection(linked) if self.first else set[str]()
        for told in (*kept,):
            rest = tuple(x for x in kept if x != told)
            if self.first and there and rest and not self.first.unexplained(of_tensors(rest, there), there):
                kept.remove(told)
        return replace(self, alternatives=kept)

    @property
    def words(self) -> list[str]:
        """Say what the kernel computes instead, and what no call has told apart from that.

        Of gradients that nothing explains it is not said that they are free of it.
        """
        found, is_known = [], self.unexplained.isdisjoint(BACKWARD)
        for told in self.alternatives:
            words, tied = told.words, self.tied.get(told.name, [])
            others = dict.fromkeys(" and ".join(x.words for x in of_tensors(y, told.tensors)) for y in tied)
            others.pop(words, None)  # a number that is fitted twice
            if others:
                words += f" (or {next(iter(others))}{', among others' if len(others) > 1 else ''})"
            found.append(words if is_known else words.replace(OF_TENSORS[OUT_AND_LSE], "in the forward, "))
        return found


@dataclass
class Search:
    """The search for a certificate of some calls, until ``deadline``, by ``time.process_time``.

    ``further`` are cases of which the kernel is asked only where they tell apart what explains all of the calls. With
    ``drawn`` only these alternatives are tried, each restricted to calls of a kind where that is needed. ``first`` is
    that of ``Certificate``.
    """

    calls: list[Known]
    deadline: float
    further: Sequence[Case] = ()
    trial_of: Callable[[Case], Trial] | None = None
    drawn: Sequence[Alternative] = ()
    first: Known | None = None

    @cached_property
    def wrong(self) -> frozenset[str]:
        """The tensors that are wrong in any call."""
        return frozenset[str]().union(*(call.wrong for call in self.calls))

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.process_time() > self.deadline

    def certificate(self) -> Certificate:
        """Return what explains the tensors that are wrong in any call.

        Gradients of a bias and of sinks are explained by what explains others, or not at all.
        """
        found = self._of_tensors()
        for name in sorted(self.wrong - {*EVERY}):
            there = [call for call in self.calls if name in call.outputs.named()]
            for other in reversed(EVERY):
                told = [x for x in found.alternatives if other in x.tensors]
                wider = tuple(replace(x, tensors=(*x.tensors, name)) for x in told)
                if wider and not any(call.unexplained(wider, (name,)) for call in there):
                    found.alternatives = [
                        wider[told.index(x)] if x in told else x for x in found.alternatives
                    ]
                    break
            else:
                found.unexplained.add(name)
        return replace(found, first=self.first)

    def _of_tensors(self) -> Certificate:
        """Return what explains out, lse and gradients of q, k and v.

        Gradients are explained by themselves, or together with what explains out and lse, known before or found, if
        that explains more.
        """
        found = Certificate()
        self._explain(found, [x for x in OUT_AND_LSE if x in self.wrong], ())
        wrong = [x for x in BACKWARD if x in self.wrong]
        known = self.calls[0].trial.alternatives if self.calls else ()
        before = tuple(x.of(BACKWARD) for x in known if {*x.tensors} <= {*OUT_AND_LSE})
        of_forward = (*before, *(x.of(EVERY) for x in found.alternatives))
        if wrong and of_forward and not self._apart(wrong, of_forward):
            for each in of_forward:
                found.add(each, wrong)
        elif wrong and not (len(wrong) < len(self.wrong) and self._follow(wrong)):
            return self._of_gradients(found, wrong, of_forward)
        return found

    def _of_gradients(
        self, found: Certificate, wrong: Sequence[str], of_forward: tuple[Alternative, ...]
    ) -> Certificate:
        """Return a certificate with what explains gradients. Sets that are grown are tried last: they take longest."""
        tried = list[Certificate]()
        for is_grown in (False, True):
            for base in dict.fromkeys(((), of_forward)):
                other = Certificate([*found.alternatives], {**found.tied}, {*found.unexplained})
                self._explain(other, wrong, base, is_grown=is_grown)
                tried.append(other)
                if other.unexplained.isdisjoint(wrong):
                    return other
        return min(tried, key=lambda x: len(x.unexplained))

    def _apart(self, names: Sequence[str], told: tuple[Alternative, ...]) -> set[str]:
        """Return which gradients are not explained by what explains out and lse."""
        left = {*names}
        return left - self._held((), left, told)

    def _follow(self, names: Sequence[str]) -> bool:
        """Whether gradients are right for the right out and lse, which the kernel does not return."""
        return all(call.follow(names) for call in self._failing(names))

    def _explain(
        self,
        found: Certificate,
        names: Sequence[str],
        base: tuple[Alternative, ...],
        *,
        is_grown: bool = True,
    ) -> None:
        """Add to a certificate what explains these tensors, beside what is known to concern them: ``base``.

        With ``is_grown``, several alternatives may explain a tensor together. A gradient needs none if it is right for
        the out and lse that the kernel returned.
        """
        explained: dict[tuple[Alternative, ...], set[str]] = {}
        left = {*names}
        for name in self._held((), names, base):
            for each in base:
                found.add(each, (name,))
            left.discard(name)
        for told, tensors in self._solutions(_in_order(left), base, is_grown=is_grown):
            explained.setdefault(told, set()).update(tensors)
        while left:
            self._tell_apart(explained, left, base)
            best = _best(explained, left)
            covered = explained.get(best, set()).intersection(left)
            if not covered:
                found.unexplained |= left
                break
            for each in (*base, *best):
                found.add(each, explained[best] & self.calls[0].outputs.named().keys())
            # A number that is fitted to calls explains whatever a change without one does that is close to it.
            is_fitted = any(x.is_fitted for x in best)
            others = [
                x
                for x in self._tied(explained, left)
                if x[0] != best[0] and (is_fitted or not any(each.is_fitted for each in x))
            ]
            if others:
                found.tied[best[0].name] = others
            left -= covered

    def _tell_apart(
        self,
        explained: dict[tuple[Alternative, ...], set[str]],
        left: Collection[str],
        base: tuple[Alternative, ...],
    ) -> None:
        """Ask further calls that differ under what explains most of the tensors that are left, and drop what is wrong.

        A call that nothing explains has another bug, and tells nothing.
        """
        asked = 0
        for case in self.further:
            tied = self._tied(explained, left)
            if len(tied) < 2 or asked == MOST_ASKED or self.is_late or self.trial_of is None:
                return
            with suppress(Exception):  # a case that can't be run tells nothing
                trial, names = self.trial_of(case), explained[tied[0]].intersection(left)
                if not any(differ(trial, (*base, *tied[0]), (*base, *x), names) for x in tied[1:]):
                    continue
                asked += 1
                call = known_call(trial)
                if call is None:
                    continue
                there = names & call.outputs.named().keys()
                refuted = {x: call.unexplained(of_tensors((*base, *x), there), there) for x in tied}
                if not all(refuted.values()):
                    self.calls.append(call)
                    for told, tensors in refuted.items():
                        explained[told] -= tensors

    def _tied(
        self, explained: Mapping[tuple[Alternative, ...], set[str]], left: Collection[str]
    ) -> list[tuple[Alternative, ...]]:
        """Return the best that explains what is left of the tensors, and what explains each wrong one that it does."""
        best = _best(explained, left)
        if explained.get(best, set()).isdisjoint(left):
            return []
        wrong = explained[best] & self.wrong
        return [best, *(x for x in explained if x != best and len(x) == len(best) and wrong <= explained[x])]

    def _solutions(
        self, names: Sequence[str], base: tuple[Alternative, ...], *, is_grown: bool
    ) -> Iterator[tuple[tuple[Alternative, ...], set[str]]]:
        """Yield what explains some of the tensors, with these; if ``is_grown``, several where no single one does.

        What a single one explains is a set of tensors that it may concern, as declared; a set of them explains any.
        """
        left = {*names}
        for told in self._candidates(names):
            if self.is_late:
                return
            if holding := {*told.within(self._held((told,), names, base, told.tensors), names)}:
                left -= holding
                yield (told,), holding
        for name in _in_order(left) if is_grown else ():
            now = time.process_time()
            until = now + (self.deadline - now) / 2
            for parts in self._grown(name, base, until) if name in left else ():
                if holding := self._held(parts, names, base, {x for each in parts for x in each.tensors}):
                    left -= holding
                    yield parts, holding

    def _candidates(self, names: Sequence[str]) -> Iterator[Alternative]:
        """Yield the alternatives that may explain some tensors, each once, for all of them that it may concern."""
        seen = set[Alternative]()
        for name in names:
            for told in self._candidates_of(self._failing((name,))[0], (), name):
                if told not in seen:
                    seen.add(told)
                    yield told

    def _candidates_of(self, call: Known, parts: tuple[Alternative, ...], name: str) -> Iterable[Alternative]:
        """Return what may explain a tensor of a call, if ``parts`` are known to concern it."""
        return (
            (x for x in self.drawn if name in x.tensors) if self.drawn else candidates_of(call, parts, name)
        )

    def _grown(self, name: str, base: tuple[Alternative, ...], until: float) -> list[tuple[Alternative, ...]]:
        """Return sets of alternatives that explain a tensor, though none does alone in all calls; none after ``until``.

        Sets of them are grown by one at a time that brings the tensor nearer to what they compute in the smallest call
        that they do not explain yet. Each may be restricted to calls of a kind.
        """
        sets: list[tuple[Alternative, ...]] = [()]
        failing = self._failing((name,))
        calls = [*failing, *(x for x in self.calls if name in x.outputs.named())]
        sample = [failing[at * (len(failing) - 1) // (SAMPLE - 1)] for at in range(SAMPLE)]
        for _ in range(MOST_TOGETHER):
            grown: list[tuple[float, tuple[Alternative, ...], Alternative]] = []
            for parts in sets:
                call = self._first_left(parts, name, base)
                if call is None:
                    continue
                for each in self._candidates_of(call, (*base, *parts), name):
                    if time.process_time() > until:
                        return []
                    if self._helps(call, parts, each, name, base):
                        nearest = self._distances(sample, (*parts, each), name, base)
                        before = self._distances(sample, parts, name, base)
                        grown.append((sum(map(min, before, nearest)), parts, each))
            found = dict[frozenset[Alternative], tuple[float, tuple[Alternative, ...]]]()
            for _, parts, each in sorted(grown, key=lambda x: x[0])[: 2 * WIDTH]:
                far, near = (self._distances(calls, told, name, base) for told in (parts, (*parts, each)))
                found.setdefault(frozenset((*parts, each)), (sum(near), (*parts, each)))
                call = self._first_left(parts, name, base)
                if call is None or not any(near):
                    continue  # a restriction would change none of the calls
                for merit, only in _restrictions(call.conditions, calls, far, near):
                    told = each.restricted(*only)
                    found.setdefault(frozenset((*parts, told)), (merit, (*parts, told)))
            best = sorted(found.values(), key=lambda x: x[0])
            sets = [x for _, x in best[:WIDTH]]
            if held := [x for merit, x in best if merit == 0.0 and self._held(x, (name,), base)]:
                return [x for x in held if _restricted(x) == min(map(_restricted, held))]
        return []

    def _helps(
        self,
        call: Known,
        parts: tuple[Alternative, ...],
        each: Alternative,
        name: str,
        base: tuple[Alternative, ...],
    ) -> bool:
        """Whether a further alternative brings a tensor nearer in a call. One that changes nothing alone does not."""
        if each in {x.always for x in parts}:
            return False
        of = partial(self._distances, [call], name=name, base=base)
        if of(parts=(each,)) == of(parts=()):
            return False
        return of(parts=(*parts, each))[0] < of(parts=parts)[0] - LEAST_GAIN

    def _first_left(
        self, parts: tuple[Alternative, ...], name: str, base: tuple[Alternative, ...]
    ) -> Known | None:
        """Return the smallest failing call in which a tensor is far from what alternatives compute, or None."""
        told = of_tensors((*base, *parts), (name,))
        return next((call for call in self._failing((name,)) if call.missed(told, (name,))), None)

    def _distances(
        self,
        calls: Sequence[Known],
        parts: tuple[Alternative, ...],
        name: str,
        base: tuple[Alternative, ...],
    ) -> list[float]:
        """Return how far a tensor is from what alternatives compute in calls: logarithms, 0 where it is not far."""
        told = of_tensors((*base, *parts), (name,))
        return [math.log(max(1.0, call.distances(told, (name,))[name])) for call in calls]

    def _failing(self, names: Collection[str]) -> list[Known]:
        """Return the calls in which one of the tensors is wrong, the smallest first."""
        failing = (call for call in self.calls if not call.wrong.isdisjoint(names))
        return sorted(failing, key=lambda call: call.trial.problem.scores)

    def _held(
        self,
        told: tuple[Alternative, ...],
        names: Collection[str],
        base: tuple[Alternative, ...],
        beside: Collection[str] = (),
    ) -> set[str]:
        """Return which of the tensors, and of further ones ``beside`` them, the alternatives explain in all calls.

        None are returned if none of ``names`` is explained. The failing calls come first. ``base`` has further
        alternatives that concern all of the tensors: other tensors have shown these, so that a single call that agrees
        with them is enough.
        """
        left = {*names, *beside}
        failing = self._failing(names)
        others = [call for call in self.calls if call not in failing]
        steps = Known.missed, partial(Known.unexplained, surely=False), Known.unexplained
        wrong = {*names}
        for call in failing:  # most are refuted so, without a look at the tensors beside
            there = wrong & call.outputs.named().keys()
            wrong -= call.missed(of_tensors((*base, *told), there), there) if there else set()
            if not wrong:
                return set()
        wrong = {x for x in wrong if not told or self._is_known((*base, *told), x)}
        for refutes in steps if wrong else ():
            for call in (*failing, *others):
                there = left & call.outputs.named().keys()
                left -= refutes(call, of_tensors((*base, *told), there), there) if there else set()
                if left.isdisjoint(names):
                    return set()
            if self.is_late:
                return set()
        return {name for name in left if wrong and self._is_shown(told, name, base)}

    def _is_known(self, told: tuple[Alternative, ...], name: str) -> bool:
        """Whether alternatives tell what a tensor is in the calls in which it is wrong, or in several of them.

        A single call is explained by too much.
        """
        failing, told = self._failing((name,)), of_tensors(told, (name,))
        known = sum(call.is_told_by(told, name) for call in failing)
        return not failing or known >= max(2, min(len(failing), LEAST_SHOWN))

    def _is_shown(self, told: tuple[Alternative, ...], name: str, base: tuple[Alternative, ...]) -> bool:
        """Whether calls show what explains a tensor: one in which it is wrong, by what is known.

        Each alternative has to change a call that the others leave unexplained. That one is in calls of a kind alone
        has to be shown by several of them, and for each of its conditions by several calls that lack this one alone.
        """
        if told and not self._is_known((*base, *told), name):
            return False
        there = [call for call in self.calls if name in call.outputs.named()]
        whole = of_tensors((*base, *told), (name,))
        for at, each in enumerate(told):
            rest = of_tensors((*base, *told[:at], *told[at + 1 :]), (name,))
            always = of_tensors((*base, *told[:at], each.always, *told[at + 1 :]), (name,))
            concerned = [call for call in there if each.concerns(call.given)]
            if name in self.wrong and not any(_is_needed(call, whole, rest, name) for call in concerned):
                return False
            shown = sum(bool(call.missed(rest, (name,))) for call in concerned)
            for at_condition in range(len(each.conditions)):
                others = each.conditions[:at_condition] + each.conditions[at_condition + 1 :]
                wider = each.restricted(*others) if others else each.always
                held = (call for call in there if wider.concerns(call.given) and call not in concerned)
                if min(shown, sum(bool(call.missed(always, (name,))) for call in held)) < LEAST_SHOWN:
                    return False
        return True


def _is_needed(call: Known, told: tuple[Alternative, ...], rest: tuple[Alternative, ...], name: str) -> bool:
    """Whether ``rest`` leaves a tensor of a call unexplained, and gives other values than all that is told."""
    is_left = bool(call.unexplained(rest, (name,)))
    return is_left and call.distances(told, (name,)) != call.distances(rest, (name,))


def _restrictions(
    conditions: Sequence[str], calls: Sequence[Known], far: Sequence[float], near: Sequence[float]
) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield the best conditions of calls, one or two, to restrict a change to, each after what it leaves.

    That is the sum of the distances of calls: ``near`` are those of calls that are changed, ``far`` of the others. Two
    conditions are tried if each single one leaves something: each of the best with all others. Several are yielded if
    they leave nothing.
    """
    met = {only: [only in call.conditions for call in calls] for only in conditions}

    def tried(*sets: tuple[str, ...]) -> list[tuple[float, tuple[str, ...]]]:
        found = []
        for only in sets:
            changed = [all(at) for at in zip(*(met[one] for one in only), strict=True)]
            found.append((sum(y if at else x for x, y, at in zip(far, near, changed, strict=True)), only))
        return sorted(found, key=lambda x: x[0])

    best = tried(*((one,) for one in conditions))
    if best and best[0][0] > 0.0:
        pairs = ((*only, other) for _, only in best[:PAIRED] for other in conditions if other not in only)
        best = sorted([*best[:1], *tried(*pairs)], key=lambda x: x[0])
    yield from (x for x in best if x[0] == 0.0 or x is best[0])


def _restricted(told: tuple[Alternative, ...]) -> int:
    """Return how many conditions alternatives have."""
    return sum(len(x.conditions) for x in told)


def _best(
    explained: Mapping[tuple[Alternative, ...], set[str]], left: Collection[str]
) -> tuple[Alternative, ...]:
    """Return what explains most of the tensors that are left, by the fewest alternatives and fitted numbers."""

    def merit(told: tuple[Alternative, ...]) -> tuple[int, int, int]:
        return len(explained[told].intersection(left)), -len(told), -sum(x.is_fitted for x in told)

    return max(explained, key=merit, default=())


def _in_order(names: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in EVERY if name in names)
