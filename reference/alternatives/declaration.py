"""How an alternative is declared, drawn as a candidate for a failing call, and found again by its name.

An alternative changes attention at one of three places: the arguments of a call (and what it returned), its scores, or
its results. It changes some tensors and leaves others: a mask that is wrong in the kernel of dq alone leaves dk right.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from reference.bounds import Exact
from reference.records import ONLY, SIZES

Given = dict[str, Any]
"""The arguments of a call and what it returned, by name.

q, k, v, dout, causal, sm_scale, key_padding_mask, pattern, rule and diagonals are as in ``bounds.exact``; alignment is
the corner of the causal mask; out, lse, dq, dk and dv are the kernel's, those that it returned.
"""

Scores = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Changes scores (B, H, R, N), -inf where hidden, and which are seen, (R, N) bool or None for all: see ``Exact``."""

Moved = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Changes an expected tensor and its bound."""

OUT_AND_LSE = ("out", "lse")
DQ, DK_AND_DV = ("dq",), ("dk", "dv")
BACKWARD = (*DQ, *DK_AND_DV)
EVERY = (*OUT_AND_LSE, *BACKWARD)

PASSES = (EVERY, OUT_AND_LSE, ("out",), ("lse",), BACKWARD, DQ, DK_AND_DV, ("dk",), ("dv",))
"""The sets of tensors that a change of what both passes compute may concern."""

OF_TENSORS: Mapping[tuple[str, ...], str] = {
    OUT_AND_LSE: "in the forward alone, ",
    ("out",): "in out, ",
    ("lse",): "in lse, ",
    BACKWARD: "in the backward, ",
    DQ: "in dq, ",
    DK_AND_DV: "in dk and dv, ",
    ("dk",): "in dk, ",
    ("dv",): "in dv, ",
}
"""How the words of such a change begin."""


def _up_to(tensors: str, most: int) -> Callable[[Given], bool]:
    return lambda g: all(g[tensor].shape[2] <= most for tensor in tensors)


def _up_to_scores(most: int) -> Callable[[Given], bool]:
    return lambda g: g["q"].shape[2] * g["k"].shape[2] <= most


def _fills(tensors: str, tile: int) -> Callable[[Given], bool]:
    return lambda g: all(g[tensor].shape[2] % tile == 0 for tensor in tensors)


def _unless(condition: Callable[[Given], bool]) -> Callable[[Given], bool]:
    return lambda g: not condition(g)


def _of_lengths() -> Iterator[tuple[str, Callable[[Given], bool]]]:
    """Yield conditions on the numbers of queries and keys: sizes up to which a kernel has a path, and whole tiles."""
    for tensors, up_to, more in (
        ("q", "up to {} queries", "more than {} queries"),
        ("k", "up to {} keys", "more than {} keys"),
        ("qk", "up to {} queries and keys", "more than {} queries or keys"),
    ):
        for most in (2, 4, 8, 16, 32, 64, 128, 256, 512):
            yield f"for {up_to}".format(most), _up_to(tensors, most)
            yield f"for {more}".format(most), _unless(_up_to(tensors, most))
    for most in (64, 256, 1024, 4096):
        yield f"for up to {most} scores of a head", _up_to_scores(most)
        yield f"for more than {most} scores of a head", _unless(_up_to_scores(most))
    for tensors, fills, lacks in (
        ("q", "seqlen_q is a multiple of {}", "seqlen_q is no multiple of {}"),
        ("k", "seqlen_k is a multiple of {}", "seqlen_k is no multiple of {}"),
        ("qk", "seqlen_q and seqlen_k are multiples of {}", "seqlen_q or seqlen_k is no multiple of {}"),
    ):
        for tile in (16, 32, 64, 128):
            yield f"if {fills}".format(tile), _fills(tensors, tile)
            yield f"if {lacks}".format(tile), _unless(_fills(tensors, tile))


CONDITIONS: Mapping[str, Callable[[Given], bool]] = {
    "under the causal mask": lambda g: bool(g["causal"]),
    "without a causal mask": lambda g: not g["causal"],
    "for a single query": lambda g: g["q"].shape[2] == 1,
    "for several queries": lambda g: g["q"].shape[2] > 1,
    "for a single key": lambda g: g["k"].shape[2] == 1,
    "for several keys": lambda g: g["k"].shape[2] > 1,
    "with fewer queries than keys": lambda g: g["q"].shape[2] < g["k"].shape[2],
    "with more queries than keys": lambda g: g["q"].shape[2] > g["k"].shape[2],
    "with as many queries as keys": lambda g: g["q"].shape[2] == g["k"].shape[2],
    "where heads are grouped": lambda g: g["q"].shape[1] > g["k"].shape[1],
    "where heads are not grouped": lambda g: g["q"].shape[1] == g["k"].shape[1],
    "for a single key head": lambda g: g["k"].shape[1] == 1,
    "for several key heads": lambda g: g["k"].shape[1] > 1,
    "for a single sequence": lambda g: len(g["q"]) == 1,
    "for several sequences": lambda g: len(g["q"]) > 1,
    "in calls without gradients": lambda g: all(g.get(name) is None for name in BACKWARD),
    "if sm_scale is 0": lambda g: g["sm_scale"] == 0,
    "if sm_scale is negative": lambda g: g["sm_scale"] < 0,
    "if sm_scale is positive": lambda g: g["sm_scale"] > 0,
    **dict(_of_lengths()),
}
"""The calls to which an alternative may be restricted, as a kernel has other code for them."""
AND = ", "
"""Between two conditions that a call has to meet."""


@dataclass(frozen=True)
class Change:
    """What an alternative changes; what is None stays as it is.

    Attributes:
        call: returns the arguments and outputs of a call with which the change is none: arguments are changed as the
            kernel changes them, outputs are changed back.
        scores: made of the call's arguments, changes the scores.
        results: made of the exact quantities and of the call as it is, changes the expected tensors of these names.
        exact: made of the exact quantities of the changed call and of that call, changes them for the bounds; what is
            returned of a forward does not follow from them.
    """

    call: Callable[[Given], Given] | None = None
    scores: Callable[[Given], Scores] | None = None
    results: Callable[[Exact, Given], Mapping[str, Moved]] | None = None
    exact: Callable[[Exact, Given], Exact] | None = None


@dataclass(frozen=True)
class _Kind:
    """A declared alternative, with the values that each of its parameters may have."""

    name: str
    words: str
    make: Callable[..., Change]
    grid: Mapping[str, tuple[Any, ...]]
    scopes: tuple[tuple[str, ...], ...]
    when: Callable[[Given], bool]
    fits: Callable[[Given, Exact], Iterable[Any]] | None


KINDS: dict[str, _Kind] = {}
"""The declared alternatives by name, those that are told first where several explain the same calls."""


def alternative(
    words: str,
    *,
    scopes: tuple[tuple[str, ...], ...] = PASSES,
    when: Callable[[Given], bool] = lambda g: True,
    fits: Callable[[Given, Exact], Iterable[Any]] | None = None,
    **grid: tuple[Any, ...],
) -> Callable[[Callable[..., Change]], Callable[..., Change]]:
    """Declare the alternative that the decorated function makes of its parameters.

    ``words`` say what the kernel does, with its parameters in braces. ``scopes`` are the sets of tensors that it may
    concern. ``when`` says whether a call can show it. ``grid`` has the values of each parameter; a parameter ``value``
    is computed by ``fits`` from a failing call and its exact quantities.
    """

    def declare(make: Callable[..., Change]) -> Callable[..., Change]:
        name = make.__name__
        if name in KINDS:
            raise ValueError(f"alternative: got {name!r} a second time, expected a new name")
        KINDS[name] = _Kind(name, words, make, grid, scopes, when, fits)
        return make

    return declare


@dataclass(frozen=True)
class Alternative:
    """A declared alternative with a value for each of its parameters, and the tensors that it concerns.

    It may concern only some calls: then ``only`` is a value too, of one of ``CONDITIONS`` or of two.
    """

    name: str
    tensors: tuple[str, ...]
    values: tuple[tuple[str, Any], ...] = ()

    @property
    def words(self) -> str:
        """Say what a kernel does that computes it."""
        kind = KINDS[self.name]
        shown = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in self.values}
        start = OF_TENSORS.get(self.tensors, "") if kind.scopes == PASSES else ""
        told = start + kind.words.format(**shown, tensors=" and ".join(self.tensors))
        return f"{told}, only {shown[ONLY]}" if ONLY in shown else told

    @cached_property
    def change(self) -> Change:
        """Return what it changes."""
        return KINDS[self.name].make(**dict(self.always.values))

    @property
    def is_fitted(self) -> bool:
        """Whether it has a number that is fitted to calls."""
        return KINDS[self.name].fits is not None

    @cached_property
    def always(self) -> "Alternative":
        """Return the alternative that concerns all calls."""
        values = tuple(x for x in self.values if x[0] != ONLY)
        return self if values == self.values else replace(self, values=values)

    def of(self, tensors: tuple[str, ...]) -> "Alternative":
        """Return the alternative as it concerns these tensors."""
        return self if tensors == self.tensors else replace(self, tensors=tensors)

    @property
    def everywhere(self) -> "Alternative":
        """Return the alternative that concerns all calls, and all tensors that it may."""
        return replace(self.always, tensors=_concerned(KINDS[self.name]))

    @property
    def of_other_sizes(self) -> Iterator["Alternative"]:
        """Yield it with other sizes of tiles, rows, or columns, which a kernel may choose by head_dim and dtype."""
        grid, own = KINDS[self.name].grid, dict(self.values)
        sizes = {name: grid[name] for name in SIZES if name in own and name in grid}
        for values in itertools.product(*sizes.values()):
            if sizes and (other := own | dict(zip(sizes, values, strict=True))) != own:
                yield replace(self, values=tuple(other.items()))

    @property
    def conditions(self) -> tuple[str, ...]:
        """Return the conditions that a call has to meet to be concerned: keys of ``CONDITIONS``."""
        only = dict(self.values).get(ONLY)
        return tuple(only.split(AND)) if only else ()

    def restricted(self, *conditions: str) -> "Alternative":
        """Return the alternative that concerns only the calls that meet these conditions, of ``CONDITIONS``."""
        return replace(self.always, values=(*self.always.values, (ONLY, AND.join(conditions))))

    def beside(self, tensors: Collection[str]) -> "Alternative":
        """Return the alternative that concerns further tensors."""
        return replace(self, tensors=tuple(x for x in EVERY if x in (*self.tensors, *tensors)))

    def within(self, tensors: Collection[str], wrong: Collection[str]) -> tuple[str, ...]:
        """Return those of these tensors that it may concern, by sets without others that have a ``wrong`` one each."""
        scopes = [x for x in KINDS[self.name].scopes if {*x} <= {*tensors} and not {*x}.isdisjoint(wrong)]
        return tuple(name for name in EVERY if any(name in scope for scope in scopes))

    def concerns(self, g: Given) -> bool:
        """Whether it changes anything in a call."""
        return KINDS[self.name].when(g) and all(CONDITIONS[only](g) for only in self.conditions)

    def changes(self, g: Given) -> bool:
        """Whether it may change anything in a call that it concerns."""
        change = self.change
        if change.call is None or not (
            change.scores is None and change.results is None and change.exact is None
        ):
            return True
        try:
            changed = change.call(g)
        except LookupError:
            return True
        return any(changed.get(name) is not value for name, value in g.items())

    @property
    def record(self) -> list[Any]:
        """Return it as JSON holds it."""
        return [self.name, list(self.tensors), dict(self.values)]


def named(record: list[Any]) -> Alternative:
    """Return the alternative of a record. Raises ValueError if none is declared by that name, with these values."""
    name, tensors, values = record
    if name not in KINDS:
        raise ValueError(f"alternative: got {name!r}, expected one of {', '.join(KINDS)}")
    expected = {*KINDS[name].grid, *(["value"] if KINDS[name].fits else [])}
    if values.keys() - {ONLY} != expected:
        wanted = f"values of {', '.join(sorted(expected))}" if expected else "no values"
        raise ValueError(f"alternative {name}: got {values}, expected {wanted}, as this version has it")
    return Alternative(name, tuple(tensors), tuple(values.items()))


def _concerned(kind: _Kind) -> tuple[str, ...]:
    """Return the tensors that alternatives of a kind may concern."""
    return tuple(x for x in EVERY if any(x in scope for scope in kind.scopes))


def candidates(g: Given, e: Exact, wrong: Collection[str]) -> Iterator[Alternative]:
    """Yield the alternatives that may explain some of the ``wrong`` tensors of a failing call.

    Each concerns all tensors that it may; which of its sets of tensors it explains is to be seen.
    """
    for kind in KINDS.values():
        tensors = _concerned(kind)
        if not set(tensors).isdisjoint(wrong) and kind.when(g):
            fitted = {} if kind.fits is None else {"value": tuple(kind.fits(g, e))}
            grid = {**kind.grid, **fitted}
            for values in itertools.product(*grid.values()):
                yield Alternative(kind.name, tensors, tuple(zip(grid, values, strict=True)))


def changes_of(
    alternatives: Iterable[Alternative], names: Iterable[str], g: Given
) -> dict[tuple[Alternative, ...], list[str]]:
    """Return which alternatives concern which tensors of a call: by sets of alternatives, names of tensors."""
    found: dict[tuple[Alternative, ...], list[str]] = {}
    told = tuple(x for x in alternatives if x.concerns(g))
    for name in names:
        found.setdefault(tuple(x for x in told if name in x.tensors), []).append(name)
    return found
