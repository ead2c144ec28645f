"""What a wrong kernel computes instead is certified, and what is sound is not."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.registry import load
from reference.alternatives import Alternative
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from strategies.features import SCORES
from tests.harness.certificates.probes import probes
from tests.harness.fitting.known import known_call
from tests.harness.fitting.search import Certificate, Search
from tests.harness.fitting.widening import calls_of
from tests.harness.trial.trial import Trial
from tests.unit.support import instead

SECONDS = 60.0
"""Far more than a search takes, so that a slow machine changes nothing."""
FAILING = Case(batch=2, heads_kv=2, group=2, seqlen_q=40, seqlen_k=70, head_dim=32, causal=True, sm_scale=0.3)
OVERFLOWING = Case(
    group=16,
    seqlen_q=78,
    seqlen_k=80,
    head_dim=32,
    causal=True,
    sm_scale=0.5,
    q_values="integers",
    dout_values="dominant",
    seed=6945210,
    spikes=(
        Spike(tensor="k", index=(1192, 3814, 2956, 19537), value=-100.0),
        Spike(tensor="q", index=(3235, 573, 821, 202), value=10.0),
    ),
)
"""A case whose scores are so large that their exponentials overflow."""


def not_subtracted(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Exponentiates scores without their maximum, and leaves all gradients to autograd."""
    heads, rows, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    kk, vv = (x.float().repeat_interleave(heads, 1) for x in (k, v))
    seen = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows if causal else keys)
    p = (q.float() @ kk.mT * sm_scale).masked_fill(~seen, -torch.inf).exp()
    total = p.sum(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 1.0)
    lse = total.log().masked_fill(~seen.any(-1, keepdim=True), -torch.inf)[..., 0].detach()
    return ((p / total) @ vv).to(q.dtype), lse


def told_by(spec: str, cases: Iterable[Case], further: Sequence[Case] = ()) -> Certificate:
    """Return what explains calls of a kernel with these cases, of which the first is the one that failed."""
    kernel, end = load(spec), time.process_time() + SECONDS

    def trial_of(case: Case) -> Trial:
        return Trial(kernel, case, "cpu", SAFETY)

    calls = calls_of(cases, trial_of, end)
    return Search(calls, end, further, trial_of, first=calls[0]).certificate()


def told_of(name: str, cases: Iterable[Case], further: Sequence[Case] = ()) -> Certificate:
    return told_by(f"{instead.__name__}:{name}", cases, further)


def certificate(name: str, dtype: str = "float32") -> Certificate:
    failing = Case(heads_kv=2, group=2, head_dim=32, dtype=dtype)
    return told_of(name, probes(failing, load(f"{instead.__name__}:{name}").capabilities, ()))


@pytest.mark.parametrize("name", sorted({*instead.INSTEAD}.difference(instead.OF_FEW_BITS)))
def test_one_wrong_line_is_told_by_what_it_computes(name: str) -> None:
    found = certificate(name)
    assert not found.unexplained
    assert tuple(x.words for x in found.alternatives) == instead.INSTEAD[name]


def test_a_gradient_that_follows_from_what_is_told_needs_no_calls_of_its_own() -> None:
    """Of most calls no gradient is judged, as out or lse is not finite; the few that are wrong agree."""
    kernel = load(f"{__file__}:not_subtracted")
    found = told_by(
        f"{__file__}:not_subtracted", [OVERFLOWING, *probes(OVERFLOWING, kernel.capabilities, {SCORES})]
    )
    assert found.words == ["no maximum is subtracted from scores before their exponential"]
    assert not found.unexplained


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["top_left", "tail_of_rows", "no_delta"])
def test_in_few_bits_too(name: str, dtype: str) -> None:
    found = certificate(name, dtype)
    assert tuple(x.words for x in found.alternatives) == instead.INSTEAD[name]


@pytest.mark.parametrize("name", instead.OF_FEW_BITS)
def test_numbers_that_are_rounded(name: str) -> None:
    assert tuple(x.words for x in certificate(name, "bfloat16").alternatives) == instead.INSTEAD[name]


def test_two_wrong_lines_in_different_tensors_are_both_told() -> None:
    found = certificate("base_2_and_tail_of_rows")
    assert not found.unexplained
    assert {x.words for x in found.alternatives} == {
        *instead.INSTEAD["base_2"],
        *instead.INSTEAD["tail_of_rows"],
    }
    of_lse, of_dk = found.of_bug("lse"), found.of_bug("dk")
    assert (tuple(of_lse.words), tuple(of_dk.words)) == (
        instead.INSTEAD["base_2"],
        instead.INSTEAD["tail_of_rows"],
    )


def test_two_wrong_lines_in_one_tensor_are_both_told() -> None:
    found = certificate("first_of_group_and_tail_of_rows")
    assert not found.unexplained
    assert {x.name for x in found.alternatives} == {"one_of_group", "tail_rows_lost"}


@pytest.mark.parametrize(
    ("case", "name"),
    [(replace(FAILING, group=1), "tail_dropped"), (replace(FAILING, seqlen_k=64), "interleaved")],
)
def test_what_the_first_call_does_not_need_is_another_bug(case: Case, name: str) -> None:
    cases = [case, FAILING, replace(FAILING, seqlen_q=65, causal=False, seed=1)]
    found = told_of("tail_of_keys_and_interleaved", cases)
    assert {x.name for x in found.alternatives} == {"tail_dropped", "interleaved"}
    assert [x.name for x in found.of_bug("out").alternatives] == [name]


def test_what_is_not_explained_does_not_matter_to_other_tensors() -> None:
    told = Alternative("no_mask", ("out", "lse"))
    found = Certificate([told], unexplained={"dk"})
    assert found.of_bug("out").words == ["in the forward, the causal mask is left out"]
    assert found.of_bug("dk").words == []
    assert Certificate([told], unexplained={"out"}).of_bug("out").words == []
    of_out = Certificate([replace(told, tensors=("out",))], unexplained={"lse"})
    assert of_out.of_bug("out").words == ["in out, the causal mask is left out"]
    assert Certificate([told]).of_bug("out").words == ["in the forward alone, the causal mask is left out"]


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
    further = [replace(FAILING, seqlen_k=300), replace(FAILING, seqlen_k=20)]
    assert told_of("top_left", cases, further).words == [*instead.INSTEAD["top_left"]]


def test_a_further_call_with_another_bug_tells_nothing() -> None:
    cases = [replace(FAILING, seqlen_q=69, heads_kv=1), replace(FAILING, seqlen_q=32, seqlen_k=33, group=1)]
    plain = told_of("top_left_and_interleaved", cases)
    assert plain.tied
    assert told_of("top_left_and_interleaved", cases, [FAILING]).words == plain.words


def test_a_sound_function_has_none() -> None:
    assert not certificate("sound").alternatives


def test_a_call_that_writes_to_its_inputs_tells_nothing() -> None:
    kernel = load("tests.unit.support.toys:writing")
    assert known_call(Trial(kernel, FAILING, "cpu", SAFETY)) is None


def few_unmasked(lengths: Sequence[int]) -> Certificate:
    """Return what explains calls with so many queries, in which two to four of these are not masked."""
    few = Case(heads_kv=1, group=2, seqlen_q=3, seqlen_k=33, head_dim=16, causal=True, sm_scale=0.3)
    others = [
        replace(few, heads_kv=2, seqlen_q=n, seqlen_k=n + 9 * at, seed=n) for at, n in enumerate(lengths)
    ]
    return told_of(instead.FEW, [few, *others])


def test_a_change_in_calls_of_a_kind_has_to_be_shown_by_several_of_them() -> None:
    """One call with few queries is the only one of a single key head, too, and may be of any kind."""
    seldom = few_unmasked((20, 33, 40, 64))
    assert seldom.unexplained
    assert not seldom.alternatives
    (words, *_) = few_unmasked((20, 33, 40, 64, 2, 3, 4)).words
    assert words.startswith("the causal mask is left out, only for up to 4 queries")


def test_a_single_call_is_explained_by_too_much() -> None:
    assert told_of("top_left", [FAILING]).unexplained
    assert not told_of("top_left", [FAILING, replace(FAILING, seqlen_q=50, seed=1)]).unexplained


def test_weights_that_are_cut_are_explained_by_no_number() -> None:
    case = Case(heads_kv=2, group=2, seqlen_q=64, seqlen_k=400, head_dim=32, dtype="float16")
    kernel = load(f"{instead.__name__}:{instead.CUT}")
    call = known_call(Trial(kernel, case, "cpu", SAFETY))
    assert call is not None
    assert not told_of(instead.CUT, [case, replace(case, seqlen_k=200, causal=True, seed=1)]).alternatives


def test_a_number_that_is_fitted_twice_is_told_once() -> None:
    first, again, other = (
        Alternative("delta_times", ("dq",), (("value", x),)) for x in (1.01, 1.0100001, 1.02)
    )
    assert Certificate([first], {first.name: [(again,)]}).words == [first.words]
    assert Certificate([first], {first.name: [(again,), (other,)]}).words == [
        f"{first.words} (or {other.words})"
    ]
