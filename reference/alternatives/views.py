"""A call as it is judged where a kernel is known, or assumed, to compute something else than attention.

Each set of tensors that the same alternatives of ``reference.alternatives`` concern is judged by itself: in a call
whose arguments are changed as the kernel changes them, and whose outputs are changed back.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce

from torch import Tensor

from reference.alternatives.declaration import OUT_AND_LSE, Alternative, Given, Moved, Scores, changes_of
from reference.alternatives.masks import diagonals_of, is_plainly_causal
from reference.bounds import Exact
from reference.heads import fold, unfold


@dataclass(frozen=True)
class View:
    """The tensors ``names`` of a call, with the alternatives that concern them.

    ``given`` is the call as it is, ``changed`` as it is judged.
    """

    names: Sequence[str]
    given: Given
    changed: Given
    alternatives: tuple[Alternative, ...] = ()

    @property
    def scores(self) -> Scores | None:
        """Return what changes the scores, or None if nothing does."""
        made = [x.change.scores(self.given) for x in self.alternatives if x.change.scores is not None]
        if not made:
            return None

        def rescored(scores: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor | None]:
            for change in made:
                scores, seen = change(scores, seen)
            return scores, seen

        return rescored

    def rescaled(self, e: Exact) -> Exact:
        """Return the exact quantities as alternatives change them beside the call.

        Where the kernel's own lse says that a row saw no key in the forward, it has no gradients.
        """
        for change in (x.change.exact for x in self.alternatives if x.change.exact is not None):
            e = change(e, self.changed)
        if (
            self.alternatives
            and self.changed.get("lse") is not None
            and {"out", "lse"}.isdisjoint(self.names)
        ):
            blind = fold(self.changed["lse"], e.k.shape[1]) == -math.inf
            hidden = blind[..., None]
            scores, weights = e.scores.masked_fill(hidden, -math.inf), e.weights.masked_fill(hidden, 0.0)
            e = replace(e, scores=scores, weights=weights, empty=e.empty | blind)
        of_mask = self.changed["diagonals"] is not None and self.given["diagonals"] is None
        return replace(e, is_part=False) if of_mask else e

    def moved(self, e: Exact) -> Mapping[str, Moved]:
        """Return what changes the expected tensors, by name.

        A kernel may divide by 0 in a row of which alternatives hide all keys: then NaN of its own is no error.
        """
        found: dict[str, Moved] = {}
        if self.alternatives and is_plainly_causal(self.given) and self.given["key_padding_mask"] is None:
            hidden = unfold(e.empty, e.q.shape[1] * e.group) & (diagonals_of(self.given) >= 0)
            for name in OUT_AND_LSE if bool(hidden.any()) else ():
                actual = self.given.get(name)
                if actual is not None and actual.shape[:3] == hidden.shape:  # it may be a part of the call
                    found[name] = partial(_unless_divided_by_0, hidden, actual)
        for each in self.alternatives:
            if each.change.results is not None:
                for name, move in each.change.results(e, self.given).items():
                    found[name] = _after(found[name], move) if name in found else move
        return {name: _after(move, _with_nan) for name, move in found.items()}


def _with_nan(value: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return what nothing is known of where NaN is expected, as the NaN of a kernel equals no number."""
    return value, bound.masked_fill(value.isnan(), math.inf)


def _unless_divided_by_0(
    hidden: Tensor, actual: Tensor, value: Tensor, bound: Tensor
) -> tuple[Tensor, Tensor]:
    at = hidden.view(*hidden.shape, *[1] * (value.ndim - hidden.ndim)) & actual.isnan()
    return value.masked_fill(at, math.nan), bound


def _after(first: Moved, second: Moved) -> Moved:
    return lambda value, bound: second(*first(value, bound))


def views(given: Given, alternatives: Sequence[Alternative], names: Collection[str]) -> Iterator[View]:
    """Yield a view of a call for each set of its tensors ``names`` that the same alternatives concern.

    Raises LookupError if an alternative can't be told of this call.
    """
    for told, concerned in changes_of(alternatives, names, given).items():
        calls = (x.change.call for x in told if x.change.call is not None)
        changed: Given = reduce(lambda g, call: call(g), calls, given)
        yield View(concerned, given, changed, told)
