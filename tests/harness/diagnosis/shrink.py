"""Deep shrinking: from a failing case to the smallest one, in sizes and in data, that fails in the same way.

Hypothesis shrinks the choices by which a case was drawn, which do not include the entries of a tensor. Here entries
are shrunk too: a tensor becomes zeros with single entries set, as many of these as possible are removed (delta
debugging: Zeller and Hildebrandt, *Simplifying and Isolating Failure-Inducing Input*, 2002), and the others become
simple numbers. Then sizes and settings are tried again.

A failure that ends the process makes each run cost the start of a new one. Then few runs are made: the fields of a
group, such as all layouts, are set to their simplest values together (``shrunk_in_few_runs``).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kernels.contract import Capabilities
from reference.mask_pattern import MaskPattern
from strategies.case import LAYOUT_FIELDS, OPTIONS, SIMPLEST, SIZES, TENSORS, Case, Spike
from strategies.earlier import FIELDS as OF_EARLIER
from strategies.earlier import KINDS
from strategies.features import EMPTY, HUGE, LENGTHS, UNEQUAL, VALUES_OF, value_of, with_value
from strategies.tensors import tensors
from strategies.values import FAMILIES
from tests.harness.bugs.bug import Condition
from tests.harness.clock import BudgetSpent
from tests.harness.verdict import as_number

MOST_ENTRIES = 2**13
"""A tensor with more entries than this is not written out entry by entry: they are sent to the child at each run."""
MOST_SET = 32
"""The most set entries of a smallest case: nobody can read more."""
SIMPLE_VALUES = (1.0, -1.0, 2.0, -2.0, 4.0, -4.0)
"""Values of an entry, simplest first."""

MASK_SIZES = tuple(part.name for part in fields(MaskPattern))
"""Fields of a case that are sizes of a mask, such as a window. The claim of the same name lists what a kernel takes."""

Fails = Callable[[Case], bool]
"""Whether a case fails as the case that is shrunk does."""
Change = Callable[[Case], Iterator[Case]]
"""Yields smaller cases that differ from a case in one respect, the smallest first."""

RUNS = 10
"""The most runs where each takes a new process, halvings of a length included: together they take a minute or two."""

SHORT = 16
"""A length at which few rows are left, but more than the one or two that a kernel may treat as special cases."""

HALVINGS = 3
"""How often the distance between a failing and a passing length is halved."""
MOST_HEAD_DIMS = 3
"""How many values of head_dim are tried between the failing one and the passing one. For any that is not tried it stays
unknown whether it ends the process, so that later cases avoid it.
"""

GENERAL = "gap"
"""A layout whose strides differ from contiguous ones in every shape."""
AMBIGUOUS = ("bnhd", "packed", "offset")
"""Layouts whose strides equal contiguous ones in some shapes, such as bnhd with only one head."""


def reduced(case: Case, fails: Fails, capabilities: Capabilities) -> Case:
    """Return a smallest case that fails: each further change that is tried makes it pass.

    ``fails`` is called with claimed cases only. An exception that it raises ends the search.
    """
    search = _Search(fails, capabilities)
    while True:
        before = case
        case = search.descend(case, [*_plainer(case, capabilities), *_shorter(capabilities)])
        for tensor in TENSORS:
            case = _with_fewer_entries(case, tensor, search)
        case = search.descend(case, [*_simpler(case)])
        if case == before:
            return case


def is_step(case: Case) -> bool:
    """Whether a case is only a step on the way to a smaller one: too many entries are set for a report."""
    return len(case.spikes) > MOST_SET


class _Search:
    """A search that runs each case only once, and only claimed cases."""

    def __init__(self, fails: Fails, capabilities: Capabilities) -> None:
        self.fails = fails
        self.capabilities = capabilities
        self.known: dict[Case, bool] = {}

    def accepts(self, case: Case) -> bool:
        """Whether the case is claimed, and fails."""
        if case not in self.known:
            self.known[case] = self.capabilities.admits(case) and self.fails(case)
        return self.known[case]

    def descend(self, case: Case, changes: Sequence[Change]) -> Case:
        """Make each change in turn, repeatedly while the case still fails, until no change makes it smaller."""
        while True:
            before = case
            for change in changes:
                while smaller := next((x for x in change(case) if x != case and self.accepts(x)), None):
                    case = smaller
            if case == before:
                return case


def _plainer(case: Case, capabilities: Capabilities) -> Iterator[Change]:
    """Yield changes: one option or setting gets its simplest value, one tensor a simpler family, or one entry goes."""
    for name in (*OPTIONS, "seed", *LAYOUT_FIELDS):
        yield partial(_with_one_of, name=name, values=[getattr(Case, name)])
    for name, _ in case.launch:
        yield partial(_with_one_of, name=name, values=[capabilities.launch[name][0]])
    for tensor in TENSORS:
        yield partial(_of_simpler_family, tensor=tensor)
    yield _without_an_entry


def _with_one_of(case: Case, name: str, values: Iterable[Any]) -> Iterator[Case]:
    return (with_value(case, name, value) for value in values)


def _of_simpler_family(case: Case, tensor: str) -> Iterator[Case]:
    for family in FAMILIES[: FAMILIES.index(getattr(case, f"{tensor}_values"))]:
        yield _of_family(case, tensor, family)


def _without_an_entry(case: Case) -> Iterator[Case]:
    for at in range(len(case.spikes)):
        yield replace(case, spikes=case.spikes[:at] + case.spikes[at + 1 :])


def _of_family(case: Case, tensor: str, family: Any) -> Case:
    return replace(case, **{f"{tensor}_values": family})


def _shorter(capabilities: Capabilities) -> Iterator[Change]:
    """Yield changes: one size, or both lengths by the same difference, becomes as small as possible."""
    for name in (*SIZES, *MASK_SIZES, "page_size"):
        yield partial(_of_smaller, name=name, allowed=_values_of(name, capabilities))
    yield _of_smaller_lengths
    for name in EMPTY:
        yield partial(_of_shorter_sequences, name=name)
    yield _of_fewer_earlier_calls


def _of_smaller(case: Case, name: str, allowed: Sequence[int]) -> Iterator[Case]:
    return _with_one_of(case, name, _smaller(getattr(case, name), allowed))


def _of_smaller_lengths(case: Case) -> Iterator[Case]:
    for less in _smaller(min(case.seqlen_q, case.seqlen_k), range(2**30)):
        cut = min(case.seqlen_q, case.seqlen_k) - less
        yield replace(case, seqlen_q=case.seqlen_q - cut, seqlen_k=case.seqlen_k - cut)


def _of_shorter_sequences(case: Case, name: str) -> Iterator[Case]:
    """Yield the case with all rows in each sequence, without numbers of no sequence, and with fewer rows of one."""
    lengths = getattr(case, name)
    yield with_value(case, name, ())
    yield with_value(case, name, lengths[: case.batch])
    for at, n in enumerate(lengths):
        for less in _smaller(n, range(n + 1)):
            yield with_value(case, name, (*lengths[:at], less, *lengths[at + 1 :]))


def _of_fewer_earlier_calls(case: Case) -> Iterator[Case]:
    """Yield the case with fewer kinds of earlier calls, with these made less often, and with a simpler kind."""
    kinds = case.earlier
    for at in range(len(kinds)):
        yield from (
            with_value(case, "earlier", some) for some in (kinds[at : at + 1], kinds[:at] + kinds[at + 1 :])
        )
    yield from (with_value(case, "rounds", x) for x in _smaller(case.rounds, range(1, 2**30)))
    for at, kind in enumerate(kinds):
        for simpler in list(KINDS)[: list(KINDS).index(kind)]:
            yield with_value(case, "earlier", (*kinds[:at], simpler, *kinds[at + 1 :]))


def _values_of(name: str, capabilities: Capabilities) -> Sequence[int]:
    if name == "head_dim":
        return capabilities.head_dims
    if name in MASK_SIZES:
        return sorted(getattr(capabilities, name))
    if name == "page_size":
        return capabilities.page_sizes
    if name in ("seqlen_q", "seqlen_k"):
        return range(capabilities.min_seqlen, 2**30)
    return range(1, 2**30)


def _smaller(value: int, allowed: Sequence[int]) -> Iterator[int]:
    """Yield smaller allowed values, the smallest first, then nearer to the value each time.

    Of 1, 2, 3 and so on, for 9: 1, 5, 7, 8.
    """
    below = allowed.index(value) if value in allowed else 0
    step = below
    while step:
        yield allowed[below - step]
        step //= 2


def _with_fewer_entries(case: Case, tensor: str, search: _Search) -> Case:
    """Return the case with a tensor written out entry by entry, with as few entries as the failure requires.

    Groups of entries are removed (delta debugging), at first all entries together, then groups of half the size each
    time. If too many entries are left to be read, or zeros with all entries set pass, the tensor stays as it is.
    """
    if tensor == "v" and case.v_is_of_k:
        return case  # its entries are those of k
    if math.prod(case.shape(tensor)) > MOST_ENTRIES or not (kept := _entries(case, tensor)):
        return case
    others = [spike for spike in case.spikes if spike.tensor != tensor]
    plain = _of_family(case, tensor, "zeros")

    def with_entries(entries: Sequence[Spike]) -> Case:
        return replace(plain, spikes=(*others, *entries))

    if not search.accepts(with_entries(kept)):
        return case
    size = len(kept)
    while size:
        at = 0
        while at < len(kept):
            fewer = kept[:at] + kept[at + size :]
            if search.accepts(with_entries(fewer)):
                kept = fewer
            else:
                at += size
        if is_step(with_entries(kept[::size])):  # each group has at least one entry that the failure requires
            return case
        size //= 2
    return with_entries(kept)


def _entries(case: Case, tensor: str) -> list[Spike]:
    """Return the entries of a tensor that are not 0."""
    values = getattr(tensors(case, "cpu"), tensor).tensor
    places = map(tuple, values.nonzero().tolist())
    return [Spike(tensor, place, as_number(values[place].item())) for place in places]


def _simpler(case: Case) -> Iterator[Change]:
    """Yield changes: one entry gets a simpler value."""
    return (partial(_with_simpler_value, at=at) for at in range(len(case.spikes)))


def _with_simpler_value(case: Case, at: int) -> Iterator[Case]:
    spike = case.spikes[at]
    for value in _simpler_values(spike.value):
        yield replace(case, spikes=(*case.spikes[:at], replace(spike, value=value), *case.spikes[at + 1 :]))


def _simpler_values(value: float | str) -> Iterator[float]:
    """Yield simpler values of a finite number: ``SIMPLE_VALUES``, then a power of two and an integer close to it.

    For 5.3: 1, -1, 2, -2, 4, -4, then 4 and 5.
    """
    if isinstance(value, str) or value == 0.0:
        return
    if value in SIMPLE_VALUES:
        yield from SIMPLE_VALUES[: SIMPLE_VALUES.index(value)]
        return
    yield from SIMPLE_VALUES
    power = math.copysign(2.0 ** round(math.log2(abs(value))), value)
    if value != power:
        yield power
        if value != round(value):
            yield float(round(value)) or power


def smallest(
    case: Case, fails: Callable[[Case], bool], capabilities: Capabilities, spend: Callable[[], None]
) -> tuple[Case, tuple[Condition, ...]]:
    """Return the smallest case found with ``shrunk_in_few_runs``, with its conditions; ``spend`` may end the search."""
    found: tuple[Case, tuple[Condition, ...]] = (case, ())

    def tried(smaller: Case) -> bool:
        spend()
        return fails(smaller)

    with suppress(BudgetSpent):
        for smaller in shrunk_in_few_runs(case, tried, capabilities):
            found = smaller
    return found


def shrunk_in_few_runs(
    case: Case,
    fails: Callable[[Case], bool],
    capabilities: Capabilities,
    needs: tuple[Condition, ...] = (),
) -> Iterator[tuple[Case, tuple[Condition, ...]]]:
    """Yield ever smaller failing cases, each with the conditions known so far. ``fails`` may end the search.

    For each group of fields, the case gets their simplest values together. If that passes, one of the fields is a
    condition, and only the others are simplified. Smaller failing values of a length or a head_dim are then tried.
    ``needs`` are conditions that are known before, whose fields stay as they are.
    """
    fixed = {name for need in needs for name in (OF_EARLIER if need.name in OF_EARLIER else (need.name,))}
    for fields_of_group in _groups(case, capabilities):
        group = {name: x for name, x in fields_of_group.items() if name not in fixed}
        smaller = _put(case, group)
        if smaller == case or not capabilities.admits(smaller):
            continue
        if group.keys() <= set(LENGTHS) and any(need.name == UNEQUAL for need in needs):
            continue  # that lengths are unequal is a condition already, and short lengths would add none
        if UNEQUAL in group and any(need.name in LENGTHS and need.fails == (0,) for need in needs):
            continue  # a length of 0 is a condition already, and makes lengths unequal by chance
        if fails(smaller):
            case = smaller
        else:
            case, found = _without_one(case, group, fails, capabilities)
            for need in found:
                yield case, (*needs, need)  # before further runs, for which there may be no time
                if need.name in LENGTHS:
                    case, need = _nearer(case, need, fails, capabilities)
                elif need.name == "head_dim":
                    case, need = _with_head_dims(case, need, fails, capabilities)
                needs += (need,)
        yield case, needs


def _groups(case: Case, capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """Yield groups of fields with their simplest values. A failure hardly ever requires two fields of one group."""
    yield dict.fromkeys(LAYOUT_FIELDS, "contiguous")
    simple = {name: values[0] for name, values in capabilities.launch.items() if name in dict(case.launch)}
    seldom = [name for name in ("batch", "heads_kv", *OPTIONS) if name != "causal"]
    yield {**simple, **dict.fromkeys(VALUES_OF, "normal"), **{name: SIMPLEST[name] for name in seldom}}
    yield {"group": 1}
    yield {"causal": False}
    yield {name: 1 for name in LENGTHS if getattr(case, name) == 0}
    longest = max(case.seqlen_q, case.seqlen_k)
    yield {UNEQUAL: longest} if case.seqlen_q != case.seqlen_k else {}
    yield {name: min(SHORT, getattr(case, name)) for name in LENGTHS}
    yield {"head_dim": min(capabilities.head_dims)}


def _put(case: Case, group: dict[str, Any]) -> Case:
    for name, value in group.items():
        case = with_value(case, name, value)
    return case


def _without_one(
    case: Case, group: dict[str, Any], fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, tuple[Condition, ...]]:
    """Return the case with all fields of a group but one at their simplest values, and a condition on that field.

    Each field is tried as the only one left as it is. If no such case fails, the case is returned unchanged, with a
    condition on a huge layout if it has one.
    """
    changed = [name for name, value in group.items() if value_of(case, name) != value]
    if len(changed) > 1:
        for name in changed:
            others = _put(case, {other: value for other, value in group.items() if other != name})
            if capabilities.admits(others) and fails(others):
                general = in_general_layout(others, name, fails, capabilities)
                return general, (_need(general, name, group[name]),)
        huge = [name for name in changed if name in LAYOUT_FIELDS and getattr(case, name) == "huge"]
        return case, (_need(case, huge[0], "contiguous"),) if huge else ()
    if changed:
        case = in_general_layout(case, changed[0], fails, capabilities)
        return case, (_need(case, changed[0], group[changed[0]]),)
    return case, ()


def in_general_layout(
    case: Case, name: str, fails: Callable[[Case], bool], capabilities: Capabilities
) -> Case:
    """Replace an ambiguous layout by ``gap``, whose strides differ in every shape, if the case still fails."""
    if name in LAYOUT_FIELDS and getattr(case, name) in AMBIGUOUS:
        general = with_value(case, name, GENERAL)
        if capabilities.admits(general) and fails(general):
            return general
    return case


def _nearer(
    case: Case, need: Condition, fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, Condition]:
    """Halve the distance between the failing length and the longest passing one, ``HALVINGS`` times.

    Example: 100 fails and 16 passes: 58 is tried. If it fails, 37 is next, else 79.
    """
    for _ in range(HALVINGS):
        middle = (getattr(case, need.name) + max(need.holds)) // 2
        halved = with_value(case, need.name, middle)
        if middle in need.fails + need.holds or not capabilities.admits(halved):
            break
        if fails(halved):
            case, need = halved, replace(need, fails=(middle,))
        else:
            need = replace(need, holds=(*need.holds, middle))
    return case, need


def _with_head_dims(
    case: Case, need: Condition, fails: Callable[[Case], bool], capabilities: Capabilities
) -> tuple[Case, Condition]:
    """Try values of head_dim between the failing one and the largest passing one, the largest first."""
    between = [x for x in capabilities.head_dims if max(need.holds) < x < case.head_dim]
    others = (with_value(case, "head_dim", x) for x in sorted(between, reverse=True)[:MOST_HEAD_DIMS])
    for other in (x for x in others if capabilities.admits(x)):
        if fails(other):
            case, need = other, replace(need, fails=(other.head_dim,))
        else:
            need = replace(need, holds=(*need.holds, other.head_dim))
    return case, need


def _need(case: Case, name: str, simple: Any) -> Condition:
    if name == UNEQUAL:
        return Condition(name, (value_of(case, name),), ("equal",))
    if name in LAYOUT_FIELDS and getattr(case, name) == "huge":
        return Condition(HUGE, (True,), (False,))
    return Condition(name, (value_of(case, name),), (simple,))
