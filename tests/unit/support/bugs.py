"""What tests of bugs share: a kernel is a function of a case, which says at once which tensors are wrong in it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import Case
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Bug, Condition
from tests.harness.bugs.failure import Failure
from tests.harness.verdict import Finding

CLAIMS = Capabilities(head_dims=(16, 64), launch={"block_m": (64, 128)})
CASE = Case(seqlen_q=70, seqlen_k=90, group=2, heads_kv=2, causal=True, launch=(("block_m", 64),))

Wrong = Callable[[Case], set[str]]


def finding(tensors: set[str], **fields: Any) -> Finding | None:
    """Return the finding that these tensors are wrong; None if there are none."""
    names = tuple(sorted(tensors))
    return Finding(claim="so", kind="error", tensor=names[0], tensors=names, **fields) if names else None


def runner(wrong: Wrong) -> Callable[[str, Case, frozenset[str]], Finding | None]:
    """Return a function that runs a law, for a kernel of which ``wrong`` returns the wrong tensors of a case."""

    def run(law: str, case: Case, ignored: frozenset[str]) -> Finding | None:
        return finding(wrong(case) - ignored)

    return run


def bug(case: Case, tensors: tuple[str, ...], *needs: Condition, law: str = "forward", **fields: Any) -> Bug:
    known = finding(set(tensors), **fields) or Finding(claim="it runs", kind="died", **fields)
    environment = {"device": "cpu", "device_name": "abacus"}
    failure = Failure("k.py:f", (), law, case, kernel="k", finding=known, environment=environment)
    return Bug(failure, tensors, needs)


def all_laid_out(case: Case, layout: str) -> Case:
    return replace(case, q_layout=layout, k_layout=layout, v_layout=layout, dout_layout=layout)


CAUSAL = Condition("causal", (True,), (False,))
GROUP = Condition("group", (2,), (1,))
LONG = Condition("seqlen_k", (65,), (0, 64))
UNEQUAL = Condition("lengths", ("more keys than queries",), ("equal",))
OF_V = Condition("v_values", ("set",), ("normal",))


def causal(case: Case) -> set[str]:
    return {"out"} if case.causal else set()


def grouped(case: Case) -> set[str]:
    return {"out"} if case.group > 1 else set()


def long_lse(case: Case) -> set[str]:
    return {"lse"} if case.seqlen_k > 64 else set()


def any_of(*bugs: Wrong) -> Wrong:
    return lambda case: set().union(*(wrong(case) for wrong in bugs))


def left(wrong: Wrong, case: Case, known: Bug) -> tuple[FailingExample | None, list[Bug]]:
    """Return what a known bug leaves of a failure of the forward law, and the bugs that are blamed."""
    run = runner(wrong)
    found = run("forward", case, frozenset())
    assert found is not None
    outcome = explain_by_known_bugs(FailingExample("forward", case, found), [known], run, CLAIMS)
    return outcome.rest, outcome.blamed
