"""What NaN and infinity behind a mask may do, by the claim ``nonfinite``, and what they must not do in any case."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.contract import Capabilities, flash_arithmetic
from kernels.registry import load
from reference.bounds import ForwardBounds, GradientBounds, backward_bounds, exact, forward_bounds
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from tests.harness.bugs.suggested_claims import MAY_LEAK, other_answers
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.panel.planted import Planted
from tests.panel.planted_nonfinite import OF_SEEN, OF_STRICT
from tests.properties.test_special import LEAK

ADDED = "tests.panel.nonfinite:added_mask"
NAN_BEHIND = Case(
    heads_kv=2,
    seqlen_q=3,
    seqlen_k=3,
    dtype="float32",
    causal=True,
    spikes=(Spike("k", (0, 0, 1, 0), "nan"),),
)
"""The first row does not see NaN, the others do; the second head has none."""
BEHIND_A_WINDOW = replace(NAN_BEHIND, window=1)
"""The second row sees NaN; a causal mask hides it from the first, and a window from the last."""
OVERFLOW_BEHIND = replace(
    NAN_BEHIND,
    seqlen_q=4,
    spikes=tuple(Spike(tensor, (0, 0, at, 0), 3e38) for tensor, at in (("q", 0), ("k", 2))),
)
"""The first row sees no key, and its hidden score of the last key is beyond float32."""


def tried(law: str, spec: str, case: Case, *claims: str) -> tuple[str, dict[str, bool]]:
    """Return the tensor in which a law is broken, "" if it holds, and what was noted."""
    trial = Trial(load(spec, claims), case, "cpu", SAFETY)
    try:
        law_named(law)(trial)
    except LawBroken as broken:
        return broken.finding.tensor, trial.notes
    return "", trial.notes


def spec_of(name: str) -> str:
    return f"tests.panel.planted_nonfinite:{name}"


@pytest.mark.usefixtures("nothing_left_to_interpreter")
@pytest.mark.parametrize("bug", OF_STRICT, ids=lambda bug: bug.name)
def test_what_leaks_through_a_mask_is_a_bug_if_that_is_claimed_and_else_a_note(bug: Planted) -> None:
    claims = ("window=0,1",)
    assert tried("special", spec_of(bug.name), BEHIND_A_WINDOW, *claims, "nonfinite=strict") == ("out", {})
    assert tried("special", spec_of(bug.name), BEHIND_A_WINDOW, *claims, "nonfinite=seen") == (
        "",
        {LEAK: True},
    )
    sound = f"{bug.edit.module}:{bug.function}"
    assert tried("special", sound, BEHIND_A_WINDOW, *claims, "nonfinite=strict") == ("", {})
    assert tried("special", sound, BEHIND_A_WINDOW, *claims, "nonfinite=seen") == ("", {LEAK: False})


@pytest.mark.parametrize("bug", OF_SEEN, ids=lambda bug: bug.name)
def test_what_a_row_sees_and_other_heads_are_judged_all_the_same(bug: Planted) -> None:
    value = "-inf" if bug.name.endswith("sentinel") else "nan"
    case = replace(NAN_BEHIND, spikes=(Spike("k", (0, 0, 0, 0), value),), q_values="ones", k_values="zeros")
    assert tried("special", ADDED, case)[0] == ""
    assert tried("special", spec_of(bug.name), case)[0] == "out"


def test_nothing_is_asked_of_nan_and_infinity_if_nothing_is_claimed() -> None:
    special = law_named("special")
    assert special.applies_to(Capabilities(nonfinite="seen"), "float32")
    assert not special.applies_to(Capabilities(nonfinite="none"), "float32")


@pytest.mark.parametrize("law", ["forward", "backward", "invariance", "determinism", "memory", "additivity"])
def test_finite_scores_that_overflow_behind_a_mask_may_leak_too(law: str) -> None:
    assert tried(law, ADDED, OVERFLOW_BEHIND, "nonfinite=none")[0] == ""
    assert tried(law, ADDED, OVERFLOW_BEHIND)[0] == ""
    assert law != "forward" or tried(law, ADDED, OVERFLOW_BEHIND, "nonfinite=strict")[0] == "lse"


def bounds_of(*, hides_all: bool) -> tuple[ForwardBounds, GradientBounds]:
    """Return the bounds of a call of two heads, in the first of which the score of row 1 and key 2 overflows.

    Of four rows, the first one sees no key.
    """
    q, k, v, dout = (torch.ones(1, 2, n, 4) for n in (4, 3, 3, 4))
    q[0, 0, :, 0] = k[0, 0, :, 0] = 0.0
    q[0, 0, 1, 0], k[0, 0, 2, 0] = 1e30, 1e10
    e = exact(q, k, v, causal=True, sm_scale=1.0, hides_all=hides_all)
    a = flash_arithmetic("float32", "cpu", {})
    forward = forward_bounds(e, a)
    return forward, backward_bounds(e, dout.double(), a, forward=forward)


def test_nothing_is_known_of_a_row_from_which_an_overflow_is_hidden_and_of_the_keys_of_its_head() -> None:
    forward, backward = bounds_of(hides_all=False)
    assert forward.lse.isposinf()[0].tolist() == [[False, True, False, False], [False] * 4]
    assert torch.equal(forward.out.isposinf().all(-1), forward.lse.isposinf())
    assert torch.equal(backward.dq_bound.isposinf().all(-1), forward.lse.isposinf())
    for bound in (backward.dk_bound, backward.dv_bound):
        assert bound.isposinf().all((2, 3))[0].tolist() == [True, False]
        assert not bound[0, 1].isposinf().any()
    strict, of_strict = bounds_of(hides_all=True)
    assert all(x.isfinite().all() for x in (strict.out, strict.lse, of_strict.dk_bound, of_strict.dv_bound))


def test_a_row_that_sees_no_key_is_fixed_unless_a_hidden_score_may_reach_it() -> None:
    q, k = torch.ones(1, 1, 2, 4), torch.full((1, 1, 1, 4), 1e38)
    a = flash_arithmetic("float32", "cpu", {})
    known, unknown = (
        forward_bounds(exact(q, k, k, causal=True, sm_scale=1.0, hides_all=x), a).lse[0, 0, 0]
        for x in (True, False)
    )
    assert (known, unknown) == (0.0, math.inf)


def test_the_claim_is_tried_where_all_failing_cases_have_nan_or_infinity() -> None:
    claims = Capabilities()
    assert MAY_LEAK in other_answers(["out"], [NAN_BEHIND], claims)
    assert MAY_LEAK not in other_answers(["out"], [NAN_BEHIND, OVERFLOW_BEHIND], claims)
    assert MAY_LEAK not in other_answers(["out"], [NAN_BEHIND], replace(claims, nonfinite="seen"))
