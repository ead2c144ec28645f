"""Counts of the cases that were tried, which can be merged over items and processes.

Examples are counted for each cell of the space of cases too: a cell is the part of it with one value of one field.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from kernels.contract import Capabilities
from reference.mask_pattern import MaskPattern
from strategies.case import DECLARED, LAYOUT_FIELDS, OF_CALLS, SIMPLEST, TENSORS, Case
from strategies.cases import BATCHES, GROUPS, HEADS_KV, Space, claimed_scales
from strategies.coverage import Coverage
from strategies.design import Design
from strategies.earlier import FIELDS as OF_EARLIER
from strategies.features import LENGTHS, UNEQUAL, in_plain_layouts, text
from strategies.lengths import MAX_SEQLEN, TILES, shortest_lengths
from strategies.padding import FAMILIES as PADDINGS
from strategies.sequences import FIELDS as OF_SEQUENCES
from strategies.values import FAMILIES
from strategies.ways import ways_of
from tests.harness.law import LAWS, law_named
from tests.harness.verdict import Verdict

BINS = 1000
"""The number of bins of a histogram of error over bound, which range from 0 to 1."""

BARS = 25
"""The number of bars in which a histogram is shown."""

MOST_REASONS = 10
"""The most different reasons that are kept: if they name the sizes of a case, each case has its own."""

MOST_CASES = 100
"""The most different cases that an item keeps of those that were refused, and of those that were answered."""

SLOW_SECONDS = 20.0
"""A case whose kernel takes longer is told: it has compiled, or it may hang. Others take seconds, interpreted too."""

COUNTS = (
    *("examples", "broken", "refusals", "skipped", "known", "set_aside", "moved", "undrawn", "unsorted"),
    *("within", "refused_within", "slow", "slow_seconds", "cut_off"),
)
"""The fields of a tally that are one number, to which every item adds."""

COUNTERS = (
    *("reasons", "skip_reasons", "judged", "idle", "noted", "shown"),
    *("designs", "watched", "cells", "levels"),
)
"""The fields of a tally that count examples by a word."""

CASES = ("refused_cases", "answered_cases")
"""The fields of a tally that hold cases."""

VALUES = tuple(f"{tensor}_values" for tensor in TENSORS)
FIELDS = (*(name for name in DECLARED if name not in (*OF_SEQUENCES, *OF_EARLIER)), *VALUES)
"""The fields of a case of which each value is a cell."""
COMPARED = ("shorter q", "equal", "longer q")
"""The values of ``lengths``: seqlen_q is below seqlen_k, equal to it, or above it."""


@dataclass
class Tally:
    """Counts for one kernel, law and dtype.

    Attributes:
        examples: the number of drawn cases for which the law held or was broken.
        broken: the number of examples that broke the law.
        refusals: the number of cases that the kernel refused.
        skipped: the number of cases that could not be run on this machine.
        known: the number of drawn cases that meet a known failure of the kernel, so that they were not run as drawn.
        set_aside: the number of other drawn cases that meet a bug found in this run, and were not run as drawn.
        moved: how many of both were run with other values of some fields instead, and count among the others as well.
        undrawn: the number of cases that were not drawn because the time was up.
        unsorted: how many of the broken examples were not looked at, because there was no time to tell what is wrong.
        within, refused_within: how many of the examples and refusals, and how many of the refusals, were not drawn from
            all that the kernel claims, but from what it seems to answer.
        slow, slow_seconds: the number of cases that took the kernel over ``SLOW_SECONDS`` or were cut off, and their
            seconds.
        cut_off: how many of these were ended, because the run had no more time for one case of this kernel.
        slowest, slowest_case: the seconds of the slowest of them.
        worst, worst_tensor, worst_case: the largest error over bound in any example that held.
        seconds: the time spent on "kernel", "check" and "tensors" in the child, and in "total", with the drawing.
        histogram: for each tensor, the number of examples by bin of their largest error over bound.
        largest: for each tensor, the largest error over bound.
        reasons, skip_reasons: how often the kernel gave each reason for a refusal, and a case for being skipped.
        judged: for each tensor, the number of examples in which it was held to its bounds.
        idle: for each tensor, how many of these test nothing of it, because an answer of 0 would hold.
        noted, shown: for each note of ``Trial.note``, the number of examples that were asked whether they show it, and
            of those that do.
        designs: the number of examples that each member of a family of designs explained.
        watched: the number of examples that were run once more under each sanitizer.
        cells: the number of examples in each cell of the space of cases: see ``cells``.
        levels: examples that were the first with some three levels of the fields, as ``strategies.coverage`` numbers
            them, by these numbers.
        refused_cases, answered_cases: some of the cases, with plain numbers, since no claim is about numbers. They are
            the keys of a dict, which are merged without computing their hashes anew.
    """

    examples: int = 0
    broken: int = 0
    refusals: int = 0
    skipped: int = 0
    known: int = 0
    set_aside: int = 0
    moved: int = 0
    undrawn: int = 0
    unsorted: int = 0
    within: int = 0
    refused_within: int = 0
    slow: int = 0
    slow_seconds: float = 0.0
    cut_off: int = 0
    slowest: float = 0.0
    slowest_case: str = ""
    worst: float = 0.0
    worst_tensor: str = ""
    worst_case: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    histogram: dict[str, Counter[int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    skip_reasons: Counter[str] = field(default_factory=Counter)
    judged: Counter[str] = field(default_factory=Counter)
    idle: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    shown: Counter[str] = field(default_factory=Counter)
    designs: Counter[str] = field(default_factory=Counter)
    watched: Counter[str] = field(default_factory=Counter)
    cells: Counter[str] = field(default_factory=Counter)
    levels: Counter[str] = field(default_factory=Counter)
    refused_cases: dict[Case, None] = field(default_factory=dict)
    answered_cases: dict[Case, None] = field(default_factory=dict)

    @property
    def drawn(self) -> int:
        """Return the number of cases that were drawn, among which cases that were moved count twice."""
        return self.examples + self.refusals + self.skipped + self.known + self.set_aside

    def add(self, verdict: Verdict, case: Case) -> None:
        """Count one case by its verdict."""
        self.add_seconds(verdict.seconds)
        self.note_slow(verdict.seconds.get("kernel", 0.0), case)
        reasons = self.skip_reasons if verdict.status == "skipped" else self.reasons
        if verdict.reason in reasons or (verdict.reason and len(reasons) < MOST_REASONS):
            reasons[verdict.reason] += 1
        if verdict.status == "refused":
            self.refusals += 1
            _keep(case, self.refused_cases)
        elif verdict.status == "skipped":
            self.skipped += 1
        else:
            self.examples += 1
            self.cells.update(cells(case))
            if verdict.tells_answers:
                _keep(case, self.answered_cases)
            self.broken += verdict.status == "broken"
        self.judged.update(verdict.idle.keys())
        self.idle.update({tensor: int(idle) for tensor, idle in verdict.idle.items()})
        self.noted.update(verdict.notes.keys())
        self.shown.update({text: int(shows) for text, shows in verdict.notes.items()})
        self.designs.update(verdict.designs)
        for tensor, ratio in verdict.worst.items():
            self.histogram.setdefault(tensor, Counter())[min(int(ratio * BINS), BINS)] += 1
            self.largest[tensor] = max(self.largest.get(tensor, 0.0), ratio)
            if ratio > self.worst:
                self.worst, self.worst_tensor, self.worst_case = ratio, tensor, repr(case)

    def note_slow(self, seconds: float, case: Case, *, cut_off: bool = False) -> None:
        """Count a case for which the kernel took so many seconds, if these are many."""
        if seconds > SLOW_SECONDS or cut_off:
            self.slow += 1
            self.slow_seconds += seconds
            self.cut_off += cut_off
            if seconds > self.slowest:
                self.slowest, self.slowest_case = seconds, repr(case)

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add seconds to those spent on the same things before."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    def merge(self, other: "Tally") -> None:
        """Add another tally to this one; the bins of its histogram may be strings, as JSON has them."""
        if other.worst > self.worst:
            self.worst, self.worst_tensor, self.worst_case = other.worst, other.worst_tensor, other.worst_case
        if other.slowest > self.slowest:
            self.slowest, self.slowest_case = other.slowest, other.slowest_case
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.add_seconds(other.seconds)
        for name in COUNTERS:
            getattr(self, name).update(getattr(other, name))
        for tensor, bins in other.histogram.items():
            numbers = {int(at): count for at, count in bins.items()}
            self.histogram.setdefault(tensor, Counter()).update(numbers)
            self.largest[tensor] = max(self.largest.get(tensor, 0.0), other.largest[tensor])
        for name in CASES:
            getattr(self, name).update(getattr(other, name))

    def quantile(self, tensor: str, share: float) -> float:
        """Return the ratio that ``share`` of a tensor's examples stay below, as the upper edge of its bin."""
        bins = self.histogram[tensor]
        left = share * sum(bins.values())
        for at in sorted(bins):
            left -= bins[at]
            if left <= 0:
                return (at + 1) / BINS
        return 1.0

    def bars(self, tensor: str) -> list[int]:
        """Return a tensor's histogram in ``BARS`` bars; the last one has the examples at the bound as well."""
        heights = [0] * BARS
        for at, count in self.histogram[tensor].items():
            heights[min(at * BARS // BINS, BARS - 1)] += count
        return heights

    def to_dict(self) -> dict[str, Any]:
        """Return a record for JSON; of the cases that are kept it has only the fields that are not the default."""
        counts = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**counts, **{name: list(map(_to_fields, counts[name])) for name in CASES}}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Tally":
        """Make a tally from what ``to_dict`` returned, also after JSON."""
        kept = {name: dict.fromkeys(map(_from_fields, fields[name])) for name in CASES}
        tally = cls()
        tally.merge(cls(**{**fields, **kept}))
        return tally


def _keep(case: Case, cases: dict[Case, None]) -> None:
    """Add the case to ``cases`` as far as a claim may be about it, unless these are ``MOST_CASES`` or have it."""
    if len(cases) < MOST_CASES:
        cases[plain(case)] = None


def plain(case: Case) -> Case:
    """Return the case with normal numbers, in plain layouts, and alone, as claims are about nothing else.

    dout gets the layout of q, since few kernels that refuse layouts refuse any of dout, which is no argument of their
    forward.
    """
    numbers: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
    alone = {name: SIMPLEST[name] for name in OF_EARLIER}
    return in_plain_layouts(replace(case, seed=0, spikes=(), dout_layout=case.q_layout, **numbers, **alone))


def _to_fields(case: Case) -> dict[str, Any]:
    return {f.name: value for f in fields(case) if (value := getattr(case, f.name)) != f.default}


def _from_fields(changed: dict[str, Any]) -> Case:
    lists: dict[str, Any] = {
        name: tuple(changed[name]) for name in ("seqlens_q", "seqlens_k", "earlier") if name in changed
    }
    return Case(**{**changed, **lists, "launch": tuple(map(tuple, changed.get("launch", ())))})


def cells(case: Case) -> list[str]:
    """Return the cells that a case is in, as ``field=value``.

    A length of 0 or 1 is a cell of its own. Any other has one cell for each of ``TILES``: see ``remainder``.
    """
    longer = (case.seqlen_q > case.seqlen_k) - (case.seqlen_q < case.seqlen_k)
    return [
        *(f"{name}={text(getattr(case, name))}" for name in FIELDS),
        f"head_dim={of_head_dim(case.head_dim)}",
        *of_length("seqlen_q", case.seqlen_q),
        *of_length("seqlen_k", case.seqlen_k),
        f"lengths={COMPARED[1 + longer]}",
        *(f"{name}={text(value)}" for name, value in case.launch),
    ]


@cache
def of_head_dim(head_dim: int) -> str:
    """Return a power of two as it is, and any other head_dim by the powers around it, as kernels pad it to the next."""
    power = 1 << (head_dim - 1).bit_length()
    return str(head_dim) if head_dim == power else f"between {power // 2} and {power}"


@cache
def of_length(name: str, length: int) -> tuple[str, ...]:
    """Return the cells of a length; ``name`` is seqlen_q or seqlen_k."""
    if length < 2:
        return (f"{name}={length}",)
    return tuple(f"{name} mod {tile}={remainder(length, tile)}" for tile in TILES)


def remainder(length: int, tile: int) -> str:
    """Return what is left of a length after whole tiles: "0", "1", all but one row of a tile, or "other"."""
    left = length % tile
    return str(left) if left in (0, 1, tile - 1) else "other"


def claimed(c: Capabilities) -> list[str]:
    """Return the cells that a kernel claims to answer and that the laws draw, field by field."""
    values: dict[str, Iterable[Any]] = {
        "dtype": c.dtypes,
        "head_dim": map(of_head_dim, c.head_dims),
        "v_head_dim": (0, *c.v_head_dim),
        "v_in_k": c.v_in_k,
        "causal": c.causal,
        UNEQUAL: _compared(c),
        "batch": BATCHES,
        "heads_kv": HEADS_KV,
        "group": GROUPS if c.grouped_heads else (1,),
        "sm_scale": claimed_scales(c),
        "key_padding": ("none", *(PADDINGS if c.key_padding else ())),
        "dropout_p": (0.0, *c.dropout),
        **{x.name: (0, *getattr(c, x.name)) for x in fields(MaskPattern)},
        "softcap": (0.0, *c.softcap),
        "alibi_slopes": (False, *((True,) if c.alibi_slopes else ())),
        "bias": ("none", *c.bias),
        "sinks": (False, *((True,) if c.sinks else ())),
        **{name: ("none", *getattr(c, name)) for name in OF_CALLS},
        "way": ("none", *ways_of(c)),
        **dict.fromkeys(LAYOUT_FIELDS, c.layouts),
        **dict.fromkeys(VALUES, FAMILIES),
        **c.launch,
    }
    found = [f"{name}={text(value)}" for name in values for value in values[name]]
    for name, shortest in zip(LENGTHS, shortest_lengths(c), strict=True):
        most = c.max_seqlen_q if name == "seqlen_q" else None
        end = shortest + MAX_SEQLEN if most is None else most + 1
        lengths = range(shortest, end, c.seqlen_multiple)
        found += [cell for length in lengths for cell in of_length(name, length)]
    return [cell for cell in dict.fromkeys(found) if c.backward or not cell.startswith("dout_")]


def _compared(c: Capabilities) -> tuple[str, ...]:
    """Return the values of ``lengths`` that are claimed."""
    if not c.unequal_lengths:
        return COMPARED[1:2]
    return COMPARED[:2] if c.seqlens == "q_at_most_k" else COMPARED


def is_judged(law: str, cell: str) -> bool:
    """Whether the examples of a law are judged by what the cell's field says.

    They are not if the calls have to be refused, if the law sets the numbers of the tensors, or if nothing reads dout.
    """
    declared = law_named(law)
    if cell.partition("=")[0] in VALUES and "numbers" in declared.sets:
        return False
    return not declared.expects_refusal and (declared.takes_gradients or not cell.startswith("dout_"))


def coverage_of(c: Capabilities, device_type: str) -> Coverage:
    """Return what tells how much was tried of the calls that a kernel claims to answer, under all laws together."""
    found: dict[object, Design] = {}
    for declared in map(law_named, LAWS):
        dtypes = [dtype for dtype in c.dtypes if declared.applies_to(c, dtype)]
        dtypes = dtypes if declared.is_tried_on(device_type) else []
        if dtypes and not declared.expects_refusal:
            spaces = [
                Space(capabilities=c, dtype=dtype, device_type=device_type, **declared.draws)
                for dtype in dtypes
            ]
            design = Design(spaces, numbers="numbers" not in declared.sets)
            found.setdefault(tuple((axis.name, axis.levels) for axis in design.axes), design)
    return Coverage([*found.values()])


def by_field(claims: Iterable[str], examples: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the examples of each value by field, 0 for a claimed one that was never drawn.

    A field is left out if it can have only one value, or if nothing is claimed of it.
    """
    found: dict[str, dict[str, int]] = {}
    for cell in claims:
        field, _, value = cell.partition("=")
        found.setdefault(field, {})[value] = examples.get(cell, 0)
    return {field: values for field, values in found.items() if len(values) > 1}
