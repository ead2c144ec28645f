"""What a wrong kernel computes instead is certified, and what is sound is not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case
from tests.harness.certificates.probes import probes
from tests.harness.fitting.known import known_call
from tests.harness.fitting.search import Certificate, search
from tests.harness.trial.trial import Trial
from tests.unit.support import instead

SECONDS = 60.0
"""Far more than a search takes, so that a slow machine changes nothing."""
FAILING = Case(batch=2, heads_kv=2, group=2, seqlen_q=40, seqlen_k=70, head_dim=32, causal=True, sm_scale=0.3)


def certificate(name: str, dtype: str = "float32") -> Certificate | None:
    kernel = load(f"{instead.__name__}:{name}")
    cases = probes(Case(heads_kv=2, group=2, head_dim=32, dtype=dtype), kernel.capabilities, ())
    return search(cases, lambda case: Trial(kernel, case, "cpu", SAFETY), SECONDS)


def told_of(name: str, cases: list[Case], further: Sequence[Case] = ()) -> Certificate:
    kernel = load(f"{instead.__name__}:{name}")
    found = search(cases, lambda case: Trial(kernel, case, "cpu", SAFETY), SECONDS, further)
    assert found is not None
    return found


@pytest.mark.parametrize("name", instead.INSTEAD)
def test_one_wrong_line_is_told_by_what_it_computes(name: str) -> None:
    found = certificate(name)
    assert found is not None
    assert not found.unexplained
    assert tuple(x.words for x in found.alternatives) == instead.INSTEAD[name]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["top_left", "tail_of_rows", "no_delta"])
def test_in_few_bits_too(name: str, dtype: str) -> None:
    found = certificate(name, dtype)
    assert found is not None
    assert tuple(x.words for x in found.alternatives) == instead.INSTEAD[name]


def test_two_wrong_lines_in_different_tensors_are_both_told() -> None:
    found = certificate("base_2_and_tail_of_rows")
    assert found is not None
    assert not found.unexplained
    assert {x.words for x in found.alternatives} == {
        *instead.INSTEAD["base_2"],
        *instead.INSTEAD["tail_of_rows"],
    }


def test_two_wrong_lines_in_one_tensor_are_both_told() -> None:
    found = certificate("first_of_group_and_tail_of_rows")
    assert found is not None
    assert not found.unexplained
    assert {x.name for x in found.alternatives} == {"one_of_group", "tail_rows_lost"}


def test_two_wrong_lines_that_meet_in_every_call_are_both_told() -> None:
    """Neither explains a call alone, as no call has whole tiles of keys and ungrouped heads."""
    found = told_of(
        "tail_of_keys_and_interleaved", [FAILING, replace(FAILING, seqlen_q=65, causal=False, seed=1)]
    )
    assert not found.unexplained
    assert {x.name for x in found.alternatives} == {"tail_dropped", "interleaved"}


def test_a_further_call_tells_apart_what_explains_the_same() -> None:
    """With one key more than queries, the mask is aligned top-left, or each row sees a key less."""
    cases = [replace(FAILING, seqlen_q=69), replace(FAILING, seqlen_q=32, seqlen_k=33)]
    (words,) = told_of("top_left", cases).words
    assert " (or each row sees -1 keys " in words
    assert told_of("top_left", cases, [FAILING]).words == [*instead.INSTEAD["top_left"]]


def test_a_further_call_with_another_bug_tells_nothing() -> None:
    cases = [replace(FAILING, seqlen_q=69, heads_kv=1), replace(FAILING, seqlen_q=32, seqlen_k=33, group=1)]
    plain = told_of("top_left_and_interleaved", cases)
    assert plain.tied
    assert told_of("top_left_and_interleaved", cases, [FAILING]).words == plain.words


def test_a_sound_function_has_none() -> None:
    assert certificate("sound") is None


def test_a_call_that_writes_to_its_inputs_tells_nothing() -> None:
    kernel = load("tests.unit.support.toys:writing")
    assert known_call(Trial(kernel, FAILING, "cpu", SAFETY)) is None


def test_an_empty_time_gives_no_certificate() -> None:
    kernel = load(f"{instead.__name__}:top_left")
    found = search([FAILING], lambda case: Trial(kernel, case, "cpu", SAFETY), 0.0)
    assert found is not None
    assert found.unexplained
    assert not found.alternatives


@pytest.mark.parametrize("name", [instead.FEW, instead.CUT])
def test_what_no_alternative_says_has_none(name: str) -> None:
    """Few queries are in too few calls to say more than that these are wrong."""
    kernel = load(f"{instead.__name__}:{name}")
    few = Case(heads_kv=1, group=4, seqlen_q=3, seqlen_k=33, head_dim=32, causal=True)
    case = few if name == instead.FEW else replace(few, dtype="float16", seqlen_q=64, seqlen_k=400)
    cases = [case, *probes(case, kernel.capabilities, ("causal", "heads_kv"))]
    found = search(cases, lambda case: Trial(kernel, case, "cpu", SAFETY), SECONDS)
    assert found is None or found.unexplained or not found.alternatives
