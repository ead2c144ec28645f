"""A bug in words: how bad it is, where it showed and its conditions; and which of several bugs is the worst."""

import math
from typing import Any

from kernels.contract.tuners import AT_WORK, CONFIG, is_tuner
from kernels.contract.tuners import told as common_to
from strategies.case import DECLARED, KINDS, OPTIONS
from strategies.earlier import KINDS as KINDS_OF_CALLS
from strategies.features import (
    BLIND,
    DIFFERENT,
    EMPTY,
    HEADS,
    HUGE,
    LENGTHS,
    MASKED,
    NAN,
    SCORES,
    SLICES,
    UNEQUAL,
    VALUES_OF,
    WORK,
    feature,
    text,
)
from strategies.size_rules import Rule
from strategies.size_rules import told as told_of_sizes
from strategies.ways import WAYS
from tests.harness.bugs.bug import Bug, Condition, Occurrences, Severity
from tests.harness.bugs.failure import headline
from tests.harness.law import law_named
from tests.harness.verdict import NUMBERS, Finding, in_ulps

MANY_ULPS = 1e6
"""An error of this many units in the last place or more is plainly wrong, so that their number is not reported."""


def told(bug: Bug, seen: Occurrences) -> list[tuple[str, str]]:
    """Return how bad a bug is, where it showed and its conditions, each as a label and a text that stands alone.

    Example: ("needs", "only with seqlen_k above 64").
    """
    facts = []
    if bug.severity.uses or bug.severity.tried:
        facts.append(("how bad", f"shows in {_hit(bug.severity)}{_size(bug.failure.finding)}"))
    if seen.total:
        places = [seen.names(place) for place in (0, 1, 2)]
        where = "; ".join(", ".join(names) for names in places if names)
        facts.append(("seen", f"{seen.total} failing example{'s' * (seen.total > 1)}: {where}"))
    if conditions := conditions_of(bug, seen):
        facts.append(("needs", conditions))
    return facts


def conditions_of(bug: Bug, seen: Occurrences | None = None) -> str:
    """Return a bug's conditions in words; "" if it has none. ``seen`` are its failing examples, as far as known.

    What the kernel computes instead says by itself where that differs from attention, unless it is known of some calls
    alone.
    """
    if bug.is_certified:
        return ""
    needs = map((seen or Occurrences()).needed, bug.needs)
    return f"only with {', '.join(map(_need, needs))}" if bug.needs else ""


def _hit(severity: Severity) -> str:
    """Say which uses a bug hits, those that it hits first, as in "each of 6 decode steps, none of 20 prefills"."""
    counts = sorted(severity.uses, key=lambda x: -x[1] / x[2]) or [
        ("ordinary cases", severity.shown, severity.tried)
    ]
    shares = (
        (f"each of {tried}" if shown == tried else f"{shown or 'none'} of {tried}", use)
        for use, shown, tried in counts
    )
    return ", ".join(f"{share} {use}" for share, use in shares)


def _size(finding: Finding) -> str:
    """Return the size of the error, such as "; 12 ulps off, 0.03 of dk's norm"; "" if the finding has no numbers."""
    if finding.kind == "nonfinite":
        return "; NaN is lost" if finding.of_nan == ("lost",) else "; not finite"
    if finding.ulps is None or finding.relative is None:
        return ""
    ulps, relative = float(finding.ulps), float(finding.relative)
    sizes = [in_ulps(ulps)] if ulps < MANY_ULPS else []
    sizes += [f"{relative:.2g} of {finding.tensor}'s norm"] if math.isfinite(relative) else []
    return f"; {', '.join(sizes)}" if sizes else ""


def _need(need: Condition) -> str:
    """Return a condition in words, such as "seqlen_k above 64"."""
    if need.name == HUGE:
        return "huge strides"
    if is_tuner(need.name):
        return _configurations(need)
    if need.name in VALUES_OF:
        return f"special numbers in {' or '.join(VALUES_OF[need.name])}"
    if need.name == UNEQUAL:
        return "unequal lengths" if len(need.holds) == 1 else str(need.fails[0])
    if need.name == NAN:
        return "NaN or infinity in an input"
    if need.name == BLIND:
        return "rows that see no key" if len(need.holds) == 1 else str(need.fails[0])
    if need.name in (SLICES, MASKED):
        return str(need.fails[0])
    if need.name == SCORES:
        return "large or special scores"
    if need.name in LENGTHS:
        return _length(need)
    if need.name in WORK:
        return _work(need)
    if need.name == "batch" and need.fails == (0,):
        return "an empty batch"
    if need.rule:
        return f"{need.name} {need.rule if len(need.fails) > 1 else need.fails[0]}"
    if feature(need.name).rows:
        return f"lengths that fill no {need.name}"
    if feature(need.name).is_pair:
        return need.name
    if need.name in (HEADS, *feature(SLICES).made_of) and _are_odd(need):
        return f"odd {need.name}"
    if need.name == "sm_scale":
        return _scale(need)
    if need.name == "earlier":
        return " and ".join(
            KINDS_OF_CALLS[kind].replace("a call", "an earlier call") for kind in need.fails[0]
        )
    if need.name == "inference":
        return str(DECLARED[need.name]["called"])
    if need.name in OF_SEQUENCES:
        return _of_sequences(need)
    if need.name == "way":
        return " or ".join(WAYS[way].told for way in need.fails)
    if need.name == "v_head_dim" and need.holds == (0,):
        return "a head_dim of v unlike that of q and k"
    if _are_above(need):
        return f"{need.name} above {text(max(need.holds))}"
    if need.name == "page_size" and max(need.fails) < min(need.holds):
        return f"page_size below {min(need.holds)}"
    seen = sorted(need.fails, key=OPTIONS[need.name].index) if need.name in KINDS else need.fails[:1]
    return f"{need.name} {' or '.join(map(text, seen))}"


def _length(need: Condition) -> str:
    """Return a condition on a length in words, such as "seqlen_k above 64", or what is not known of it."""
    if need.fails == (0,):
        return f"no {LENGTH_OF[need.name]}"
    told_rule = told_of_sizes(need.fails, need.holds, is_asked=need.is_certain)
    one = ONE_OF_LENGTH[need.name]
    words = {"above 1": f"more than one {one}", "at most 1": f"one {one}"}
    others = " and ".join(
        f"{Rule(kind, size) if kind else 'by another rule'} with {name} {value}"
        for name, value, kind, size in need.others
    )
    return words.get(told_rule, f"{need.name} {told_rule}") + (f" ({others})" if others else "")


def _work(need: Condition) -> str:
    """Return a condition on the tiles of all slices in words, such as "more than 3 tiles of 32 keys in all"."""
    if _are_above(need):
        return f"more than {max(need.holds)} {need.name}"
    return f"{need.fails[0]} {need.name}, say, not {' or '.join(map(str, need.holds))}"


def _configurations(need: Condition) -> str:
    """Say which configurations of a tuner show a bug, such as "BLOCK_N 128 of 12 configurations of _forward"."""
    function = need.name.removesuffix(CONFIG)
    all_values = (need.fails, need.holds, need.untried)
    fails, holds, untried = ([x for x in dict.fromkeys(values) if x != AT_WORK] for values in all_values)
    if not fails:
        return f"the tuner of {function} at work: results of its trial runs stay in what is added to"
    return f"{common_to(fails, holds)} of {len({*fails, *holds, *untried})} configurations of {function}"


OF_SEQUENCES = (*DIFFERENT.values(), *EMPTY.values(), "rows_behind", "block_table", "pool")
"""Features that say how the sequences of a call of ``ragged`` differ, and how their pages lie."""


def _of_sequences(need: Condition) -> str:
    """Return a condition on the sequences of a call in words, such as "a sequence without keys"."""
    if need.name == "pool":
        return f"pools {' or '.join(sorted(need.fails))} by page"
    if need.name == "block_table":
        return "pages that sequences share" if need.fails[0] == "shared" else "pages out of order"
    return str(DECLARED[need.name]["called"]) if need.name in DECLARED else need.name


def _are_odd(need: Condition) -> bool:
    """Whether all failing numbers are odd, and the passing ones are several even numbers."""
    return all(x % 2 for x in need.fails) and len(need.holds) > 1 and not any(x % 2 for x in need.holds)


def _are_above(need: Condition) -> bool:
    """Whether all values are numbers, and the failing ones are above the passing ones."""
    are_numbers = all(type(x) in (int, float) for x in (*need.fails, *need.holds))
    return are_numbers and bool(need.holds) and max(need.holds) < min(need.fails)


def _scale(need: Condition) -> str:
    """Return a condition on sm_scale in words: 0, a negative one, or any except the few that pass."""
    set_by_user = [x for x in need.holds if x is not None]
    if set_by_user and {*need.fails} == {0}:
        return "sm_scale 0"
    if set_by_user and min(set_by_user) > 0 and all(x is not None and x < 0 for x in need.fails):
        return "negative sm_scale"
    return f"sm_scale other than {' or '.join(map(text, need.holds))}"


LENGTH_OF = {"seqlen_q": "queries", "seqlen_k": "keys"}
"""What each length counts."""
ONE_OF_LENGTH = {"seqlen_q": "query", "seqlen_k": "key"}
"""One of what each length counts."""

RANKS = ("numbers", "crashes", "range", "special", "imprecise", "accepted")
"""Kinds of bugs, the worst first: wrong numbers on ordinary data, crashes and exceptions on ordinary data, failures
with special numbers or huge strides only, failures with NaN or infinity in the inputs, results that are only less
precise than claimed, and calls that should have been refused."""


def rank(bug: Bug) -> str:
    """Return which of ``RANKS`` a bug belongs to."""
    finding, share = bug.failure.finding, bug.severity.share
    if finding.kind == "accepted":
        return "accepted"
    if finding.explained_by:
        return "imprecise"
    if law_named(bug.failure.law).draws.get("nonfinite"):
        return "special"
    if share == 0 or (share is None and (bug.needs_numbers or bug.is_huge)):
        return "range"
    return "numbers" if finding.kind in NUMBERS else "crashes"


def severity(bug: Bug) -> tuple[Any, ...]:
    """Return a key that sorts the worst bug first: by rank, share of ordinary cases, and size of the error."""
    f = bug.failure.finding
    relative, ratio = (float("inf") if x is None else float(x) for x in (f.relative, f.ratio))
    return RANKS.index(rank(bug)), -(bug.severity.share or 0.0), -relative, -ratio, bug.key


TOLD_BY_FIELDS = (BLIND, HEADS, SLICES, MASKED, *WORK, *DIFFERENT.values(), *EMPTY.values())
"""Features for which summary.json names the fields of a case that they follow from, such as heads_kv and group."""


def row(bug: Bug, seen: Occurrences) -> dict[str, Any]:
    """Return a bug's entry in summary.json."""
    f = bug.failure.finding
    return {
        "kernel": bug.failure.kernel,
        "law": bug.failure.law,
        "tensor": f.tensor,
        "kind": f.kind,
        "rate": f.rate,
        "tensors": sorted(bug.tensors),
        "laws": seen.names(0),
        "dtypes": seen.names(1),
        "failures": seen.total,
        "headline": headline(bug.failure),
        "causes": bug.failure.explanation.causes,
        "matters": [name for need in bug.needs for name in _names(need)],
        "folder": bug.key,
        "rank": rank(bug),
        "ordinary_shown": bug.severity.shown,
        "ordinary_tried": bug.severity.tried,
        "ratio": "inf" if f.ratio is None else f.ratio,
        "ulps": f.ulps,
        "relative": f.relative,
        "certificate": f.certificate or None,
        "offers": bug.offers,
    }


def _names(need: Condition) -> tuple[str, ...]:
    if feature(need.name).rows:
        return LENGTHS
    return feature(need.name).made_of if need.name in TOLD_BY_FIELDS else (need.name,)
