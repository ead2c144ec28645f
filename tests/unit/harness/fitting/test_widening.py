"""What is told of calls near a failing one is refuted, restricted or confirmed by calls of more kinds."""

from dataclasses import replace
from math import inf

from kernels.registry import load
from reference.alternatives import Alternative
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.fitting.search import Certificate
from tests.harness.fitting.widening import Asked, calls_of, certificate
from tests.harness.trial.trial import Trial
from tests.unit.support import instead

SECONDS = 60.0
"""Far more than a search takes, so that a slow machine changes nothing."""
FAILING = Case(heads_kv=2, group=2, seqlen_q=40, seqlen_k=70, head_dim=32, causal=True, sm_scale=0.3)
NEAR = [FAILING, *(replace(FAILING, seqlen_k=n, seed=n) for n in (20, 79, 85, 100))]
UNMASKED = [replace(case, causal=False) for case in NEAR]
TAIL = ("tail_dropped", (("tile", 32),))


def told(
    name: str, *kinds: list[Case], known: tuple[Alternative, ...] = (), tensor: str = "out"
) -> tuple[Certificate, bool]:
    kernel = load(f"{instead.__name__}:{name}")

    def trial_of(case: Case) -> Trial:
        return Trial(kernel, case, "cpu", SAFETY, alternatives=known)

    return certificate([Asked(cases) for cases in kinds], trial_of, SECONDS, tensor)


def names(found: Certificate) -> list[str]:
    return [x.name for x in found.alternatives]


def test_what_calls_of_all_kinds_agree_with_is_told_of_all() -> None:
    found, is_of_all = told("tail_of_keys", NEAR, UNMASKED)
    assert (names(found), is_of_all) == (["tail_dropped"], True)
    assert found.words == [*instead.INSTEAD["tail_of_keys"]]


def test_calls_of_another_kind_that_hold_restrict_it() -> None:
    found, is_of_all = told("causal_tail", NEAR, UNMASKED)
    assert (names(found), is_of_all) == (["tail_dropped"], True)
    assert found.words == [*instead.INSTEAD["causal_tail"]]


def test_what_calls_with_another_bug_do_not_explain_is_told_of_some() -> None:
    """Near the failing call heads are not grouped, so that the wrong order of grouped heads does not show."""
    near = [replace(case, group=1) for case in NEAR]
    found, is_of_all = told(
        "tail_of_keys_and_interleaved", near, [replace(x, seed=x.seed + 9) for x in NEAR[:2]]
    )
    assert names(found) == ["tail_dropped"]
    assert not is_of_all


def test_what_a_known_bug_explains_is_not_told_again() -> None:
    known = Alternative("interleaved", ("out", "lse", "dq", "dk", "dv"))
    found, is_of_all = told("tail_of_keys_and_interleaved", NEAR, UNMASKED, known=(known,))
    assert (names(found), is_of_all) == (["tail_dropped"], True)


def test_what_only_calls_without_gradients_show_is_told_of_these() -> None:
    found, _ = told(instead.AT_INFERENCE, NEAR, UNMASKED)
    (only,) = found.alternatives
    assert only.words.endswith("the causal mask is aligned top-left, only in calls without gradients")


def test_without_time_for_several_calls_nothing_is_told() -> None:
    kernel, asked = load(f"{instead.__name__}:top_left"), list[Case]()

    def trial_of(case: Case) -> Trial:
        asked.append(case)
        return Trial(kernel, case, "cpu", SAFETY)

    assert calls_of(NEAR, trial_of, -inf) == []
    assert asked == NEAR[:1]
    assert certificate([Asked(NEAR)], trial_of, 0.0, "out") == (Certificate(), False)
