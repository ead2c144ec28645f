"""The law ``sequences``: what a kernel keeps from call to call is found, and told with the calls that it needs."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import pytest
import torch

from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from strategies.cases import cases
from strategies.earlier import KINDS
from tests.harness.law import law_named
from tests.harness.session.subject import AT_ONCE, drawn
from tests.harness.trial.trial import LawBroken, Trial
from tests.harness.verdict import Finding
from tests.properties.test_sequences import ordinal
from tests.unit.support import stateful
from tests.unit.support.stateful import BUGS, SOUND, Function, forget

MOST = 120
"""Cases of a dtype within which a bug has to be found."""
FEW = 16
"""Cases of each dtype in which a sound kernel has to hold in a quick run."""
SAID = {
    "workspace_by_shape": "has the dk and dv of earlier calls added to its own",
    "first_scale": "answers with the sm_scale of an earlier call",
    "mask_by_shape": "answers with the mask of an earlier call",
    "ring_of_buffers": "wrong from the 65th call on",
    "full_cache": "wrong from the 65th call on",
    "results_by_pointer": "answers with the result of an earlier call",
    "results_by_version": "answers with the result of an earlier call",
    "results_by_shape": "answers with the result of an earlier call",
    "keys_by_identity": "answers with k as it was in an earlier call",
    "plan_by_batch": "wrong after a call with shorter sequences",
}


@pytest.fixture(autouse=True)
def in_a_new_process() -> None:
    forget()


def broken_by(function: Function, case: Case) -> Finding | None:
    """Return what the law finds wrong with a function on a case, as the first calls of a process."""
    forget()
    try:
        law_named("sequences")(Trial(stateful.kernel(function), case, "cpu", SAFETY))
    except LawBroken as broken:
        return broken.finding
    return None


def cases_of(function: Function, dtype: str, seed: int) -> Iterator[Case]:
    """Yield cases as the items of the law draw them."""
    claims = stateful.kernel(function).capabilities
    strategy = cases(claims, dtype=dtype, **law_named("sequences").draws)
    for turn in range(MOST // AT_ONCE):
        yield from drawn(strategy, f"{seed} {turn}", AT_ONCE)


def shows(name: str) -> Case:
    """Return a case in which a planted bug shows: two calls, or as many as it needs."""
    _function, earlier = BUGS[name]
    is_ragged = "lengths" in name
    return Case(
        batch=2,
        seqlen_q=5,
        seqlen_k=40 if name == "plan_by_batch" else 20,
        earlier=earlier[:1],
        rounds=len(earlier),
        ragged="cache" if is_ragged else "none",
        inference=name.partition("_")[0] != "workspace",
        seed=3,
    )


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_shows_after_the_calls_that_it_needs_and_not_alone(name: str) -> None:
    case, function = shows(name), BUGS[name][0]
    finding = broken_by(function, case)
    assert finding is not None
    assert SAID.get(name, "") in finding.certificate
    assert broken_by(function, replace(case, earlier=(), rounds=1)) is None
    if case.rounds > 1:
        assert broken_by(function, replace(case, rounds=case.rounds - 1)) is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", SOUND)
def test_a_sound_kernel_holds_after_calls_of_each_kind(function: Function, kind: str) -> None:
    for inference in (False, True):
        ragged = "cache" if kind == "tables" and function is stateful.sound_lengths else "none"
        case = Case(
            batch=2,
            group=2,
            seqlen_q=5,
            seqlen_k=9,
            causal=True,
            earlier=(kind, "values", kind),
            inference=inference,
            ragged=ragged,
        )
        assert broken_by(function, case) is None


def finds(function: Function, seed: int) -> Case | None:
    """Return a drawn case that shows a bug; None if there is none among the first of each dtype."""
    tried = (case for dtype in ("float16", "bfloat16", "float32") for case in cases_of(function, dtype, seed))
    return next((case for case in tried if broken_by(function, case)), None)


QUICK = ("workspace_by_shape", "results_by_pointer", "lengths_by_identity", "flag_after_exception")


@pytest.mark.parametrize("name", QUICK)
def test_drawn_cases_show_a_bug(name: str) -> None:
    assert finds(BUGS[name][0], 0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", BUGS)
def test_drawn_cases_of_any_seed_show_each_bug(name: str, seed: int) -> None:
    assert finds(BUGS[name][0], seed)


@pytest.mark.parametrize("function", SOUND)
def test_drawn_cases_hold_for_a_sound_kernel(function: Function) -> None:
    for case in islice(cases_of(function, "float32", 7), FEW):
        assert broken_by(function, case) is None


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("function", SOUND)
def test_drawn_cases_of_any_seed_hold_for_a_sound_kernel(function: Function, seed: int) -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        for case in cases_of(function, dtype, seed):
            assert broken_by(function, case) is None


def test_the_judged_call_has_its_own_numbers_even_if_an_earlier_call_raises() -> None:
    def fails(q, k, v, *, causal, sm_scale):
        raise RuntimeError("out of registers")

    case = Case(seqlen_q=3, seqlen_k=5, earlier=("values",))
    trial = Trial(replace(stateful.kernel(stateful.sound), forward=fails), case, "cpu", SAFETY)
    before = trial.problem.k.clone()
    with pytest.raises(LawBroken, match="out of registers"):
        law_named("sequences")(trial)
    assert torch.equal(trial.problem.k, before)


def test_numbers_are_written_over_as_pytorch_counts_it() -> None:
    versions = []

    def watches(q, k, v, *, causal, sm_scale):
        versions.append((k.data_ptr(), k._version))
        return stateful.sound(q, k, v, causal=causal, sm_scale=sm_scale)

    for kind in ("values", "keys", "memory"):
        versions.clear()
        case = Case(earlier=(kind,), inference=True)
        law_named("sequences")(
            Trial(replace(stateful.kernel(stateful.sound), forward=watches), case, "cpu", SAFETY)
        )
        (pointer, first), (again, last) = versions
        assert pointer == again
        assert last > first


def test_ordinals() -> None:
    assert [ordinal(n) for n in (2, 3, 4, 11, 12, 21, 65, 112)] == [
        *("2nd", "3rd", "4th", "11th", "12th", "21st", "65th", "112th"),
    ]


def test_freed_memory_is_used_again_by_a_tensor_of_the_same_version() -> None:
    seen = []

    def watches(q, k, v, *, causal, sm_scale):
        seen.append((k.data_ptr(), k._version, weakref.ref(k), k.flatten()[0].item()))
        assert all(gone() is None for *_, gone, _ in seen[:-1])
        return stateful.sound(q, k, v, causal=causal, sm_scale=sm_scale)

    kernel = replace(stateful.kernel(stateful.sound), forward=watches)
    law_named("sequences")(Trial(kernel, Case(earlier=("freed",), inference=True), "cpu", SAFETY))
    (pointer, version, _, number), (again, last, _, own) = seen
    assert (pointer, version) == (again, last)
    assert number != own
