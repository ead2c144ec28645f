"""Which other claim would be true: a claim under which every failing case of a bug holds, or that excludes them all."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kernels.contract import CLAIMS, Capabilities
from kernels.contract.parsing import lesser, parse_claims
from kernels.contract.tuners import is_tuner, wanted
from strategies.case import LAYOUT_FIELDS, NONFINITE, Case
from strategies.features import HUGE
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.clock import BudgetSpent
from tests.harness.running.runs import Runs

TOP_LEFT = "causal_alignment=top_left"
"""The claim that the diagonal of a causal mask begins at the top left corner of the scores."""

IN_BASE_2, ROWS_FIRST = "lse_base=2", "lse_layout=bnh"
"""The claims that lse is returned in another base, and with its rows before its heads."""

OF_NO_KEYS = "lse_of_no_keys=inf"
"""The claim that the lse of a row that sees no key is +inf."""

MAY_LEAK = "nonfinite=seen"
"""The claim that NaN and infinity behind a mask may reach a row."""

ANY_BEHIND = "rows_behind=any"
"""The claim that packed rows behind the last sequence may have any results and gradients."""

OF_ANSWERS = (TOP_LEFT, IN_BASE_2, ROWS_FIRST, OF_NO_KEYS, MAY_LEAK, ANY_BEHIND)
"""Claims that change which result is right, and exclude no case."""

LEAST_LEFT = 1 / 8
"""A list of values is offered if it leaves at least this share of the cases that held.

What some kernels are meant for (``lesser``) is offered however little it leaves, because it may be drawn seldom.
"""
FEW = 12
"""How many failing cases are run under another claim before it is offered; others follow as time allows."""

Ran = tuple[str, Case]


def offered(bug: Bug, failing: Sequence[Ran], runs: Runs, spend: Callable[[], None]) -> tuple[str, ...]:
    """Return claims that change which result is right, under which the failing cases of a bug hold.

    A few of the cases are run under each such claim. ``spend`` may end the search by BudgetSpent.
    """
    found: list[str] = []
    with suppress(BudgetSpent):
        for claim in other_answers(bug.tensors, [case for _, case in failing], runs.info.capabilities):
            if not failing_under(claim, failing[:FEW], runs, spend):
                found.append(claim)
    return tuple(found)


def other_answers(tensors: Sequence[str], cases: Sequence[Case], capabilities: Capabilities) -> Iterator[str]:
    """Yield the claims of ``OF_ANSWERS`` that would make these cases right.

    ``tensors`` are the outputs that are wrong in the cases. Example: if lse alone is wrong, it may be one of base 2.
    """
    if may_be_top_left(cases, capabilities):
        yield TOP_LEFT
    if {*tensors} == {"lse"}:
        if capabilities.lse_base != "2":
            yield IN_BASE_2
        # With one head or one row, both orders have the same numbers.
        if capabilities.lse_layout != "bnh" and all(min(x.heads_q, x.seqlen_q) > 1 for x in cases):
            yield ROWS_FIRST
        if capabilities.lse_of_no_keys != "inf" and all(map(may_have_empty_rows, cases)):
            yield OF_NO_KEYS
    if capabilities.hides_all and all(any(x.value in NONFINITE for x in case.spikes) for case in cases):
        yield MAY_LEAK
    if capabilities.rows_behind in ("gradients", "zero") and all(x.rows_behind for x in cases):
        yield ANY_BEHIND


def may_have_empty_rows(case: Case) -> bool:
    """Whether some row of a case may see no key."""
    is_cut = case.causal and case.longer == "q"
    return not case.seqlen_k or is_cut or bool(case.pattern) or {case.ragged, case.key_padding} != {"none"}


def may_be_top_left(cases: Iterable[Case], capabilities: Capabilities) -> bool:
    """Whether another corner of the causal mask would change the result of every case."""
    return capabilities.causal_alignment != "top_left" and all(
        case.causal and case.seqlen_q != case.seqlen_k for case in cases
    )


def failing_under(claim: str, cases: Sequence[Ran], runs: Runs, spend: Callable[[], None]) -> list[Ran]:
    """Return the first case that fails under another claim, as a list; empty if all hold. Raises BudgetSpent."""
    for law, case in cases:
        spend()
        if runs.judged(law, case, claims=(claim,)) is not None:
            return [(law, case)]
    return []


def spoils(claim: str, answered: Sequence[Case], runs: Runs, spend: Callable[[], None]) -> bool:
    """Whether one of a few ``answered`` cases fails under another claim, and holds without it. Raises BudgetSpent."""
    for case in answered[:: max(1, len(answered) // FEW)]:
        ran = ("forward", case)
        if failing_under(claim, [ran], runs, spend) and runs.judged(*ran) is None:
            return True
    return False


def excluding(
    needs: Sequence[Condition], failing: Sequence[Case], held: Sequence[Case], capabilities: Capabilities
) -> Iterator[str]:
    """Yield the claim that excludes all failing cases and the fewest that held, if one leaves enough of these."""
    found: list[tuple[int, int, str]] = []
    meant = lesser(capabilities).values()
    for claim in candidates(needs, failing, held, capabilities):
        narrow = parse_claims([claim], capabilities)
        if any(narrow.admits(case) for case in failing):
            continue
        left = sum(narrow.admits(case) for case in held)
        if left and (claim in meant or left >= LEAST_LEFT * len(held)):
            found.append((-left, len(found), claim))
    yield from [claim for _, _, claim in sorted(found)[:1]]


def candidates(
    needs: Sequence[Condition], failing: Sequence[Case], held: Sequence[Case], capabilities: Capabilities
) -> Iterator[str]:
    """Yield narrower claims about fields in a bug's conditions, which the kernel may be meant for."""
    names = {need.name for need in needs}
    # A kernel without grouped heads has as many heads of keys as of queries.
    grouped = {"group"} if "heads_kv" in names else set()
    yield from (
        text for key, text in lesser(capabilities).items() if (names | grouped) & {*CLAIMS[key].fields}
    )
    if "head_dim" in names:
        seen = {case.head_dim for case in failing}
        for kept in ([x for x in capabilities.head_dims if x.bit_count() == 1], capabilities.head_dims):
            yield from _listed("head_dims", [x for x in kept if x not in seen])
    if "dtype" in names:
        seen_dtypes = {case.dtype for case in failing}
        yield from _listed("dtypes", [x for x in capabilities.dtypes if x not in seen_dtypes])
    if HUGE in names:
        yield from _listed("layouts", [x for x in capabilities.layouts if x != "huge"])
    for need in (need for need in needs if is_tuner(need.name)):
        seen_failing = [str(x) for x in need.fails] + [
            str(dict(case.launch).get(need.name)) for case in failing
        ]
        failed = tuple(dict.fromkeys(x for x in capabilities.launch[need.name] if x in seen_failing))
        fine = tuple(x for x in capabilities.launch[need.name] if x not in failed)
        yield f"launch.{need.name}=not {','.join(wanted(failed, fine))}"
    for name in names & {*LAYOUT_FIELDS}:
        sound = {getattr(case, name) for case in held} - {getattr(case, name) for case in failing}
        for left in (sound, {*capabilities.layouts[:1]}):
            yield from _listed("layouts", [x for x in capabilities.layouts if x in left])


def _listed(key: str, values: Sequence[object]) -> list[str]:
    return [f"{key}={','.join(map(str, values))}"] if values else []
