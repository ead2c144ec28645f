"""Find out at which lengths a bug shows when the numbers of its smallest case are replaced by ordinary ones.

In the smallest case of a bug most numbers are 0. The length from which on the bug shows there follows from the few
others as well as from the kernel's tiles. With ordinary numbers in many rows it follows from the tiles alone.
"""

from collections.abc import Mapping

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import LENGTHS, SCORES, VALUES_OF, with_normal_numbers, with_value
from tests.harness.bugs.bug import Bug
from tests.harness.bugs.dense import LONGER
from tests.harness.running.runs import Try
from tests.harness.symptoms import wrong_tensors

TILES = (32, 64, 128)
"""Lengths at which a kernel's last tile may be full, whatever its tiles are."""
MOST_LENGTHS = 14
"""How many lengths are tried at most, the shortest ones first."""


def show_at_same_lengths(one: Bug, other: Bug, run: Try, capabilities: Capabilities) -> bool:
    """Whether two bugs need nothing but one length and numbers, and one rule says at which lengths either shows.

    The lengths that are tried are those of both searches, and whole tiles beyond. The rule is that the length is above
    some other, or no multiple of a tile's. Two bugs of different rules fit none of these together.
    """
    names = {_length_needed(one), _length_needed(other)}
    tensors = {*one.tensors} & {*other.tensors}
    found_by = {one.failure.finding.tensor, other.failure.finding.tensor}
    kinds = {one.failure.finding.kind, other.failure.finding.kind}
    if "" in names or len(names) > 1 or kinds != {"error"} or not found_by <= tensors:
        return False
    (name,) = names
    own = {getattr(bug.failure.case, name) for bug in (one, other)}
    tried = {x for bug in (one, other) for need in bug.needs if need.name == name for x in need.holds}
    beyond = {tile * (max(own) // tile + 1) for tile in TILES}
    shows: dict[int, bool] = {}
    for length in sorted(filter(None, own | tried | beyond))[:MOST_LENGTHS]:
        case = with_ordinary_numbers(one.failure.case, name, length)
        if capabilities.admits(case):
            finding = run(one.failure.law, case, frozenset())
            shows[length] = finding is not None and not tensors.isdisjoint(wrong_tensors(finding))
    return all(shows.get(length, False) for length in own) and _is_of_one_rule(shows)


def _length_needed(bug: Bug) -> str:
    """Return the length that a bug needs, if it needs one and nothing else but numbers, or else ""."""
    names = {need.name for need in bug.needs} - {SCORES, *VALUES_OF}
    return names.pop() if len(names) == 1 and names <= {*LENGTHS} else ""


def with_ordinary_numbers(case: Case, name: str, length: int) -> Case:
    """Return a case with ordinary numbers in which ``name`` is of this length, and the other length is a long one."""
    (other,) = {*LENGTHS} - {name}
    return with_value(with_value(with_normal_numbers(case), other, LONGER), name, length)


def _is_of_one_rule(shows: Mapping[int, bool]) -> bool:
    """Whether failing lengths are those above one, or those that are no multiples of a tile; some have to hold."""
    failing, holding = ([x for x in shows if shows[x] == fails] for fails in (True, False))
    if not holding:
        return False
    above = min(failing) > max(holding)
    return above or any(all((x % tile > 0) == shows[x] for x in shows) for tile in TILES)
