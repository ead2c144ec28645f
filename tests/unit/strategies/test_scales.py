"""Large sizes: each that is claimed is drawn, none beyond what a device holds, and landmarks stand for all numbers."""

from random import Random

import pytest

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.cases import Space
from strategies.landmarks import landmarks
from strategies.scales import MOST_ELEMENTS, MOST_LARGE, SCALES, scale_of, with_scale
from tests.harness.session.subject import drawn

CLAIMS = {
    "the default ones": Capabilities(),
    "one query": Capabilities(max_seqlen_q=1),
    "no empty batch": Capabilities(empty_batch=False),
    "equal lengths": Capabilities(unequal_lengths=False),
    "no more queries than keys": Capabilities(seqlens="q_at_most_k", grouped_heads=False),
    "whole tiles, and large head dims": Capabilities(seqlen_multiple=64, head_dims=(128, 256)),
}
NUMBER = 200


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize("claims", CLAIMS.values(), ids=CLAIMS)
def test_cases_are_claimed_have_each_size_and_fit_the_device(claims: Capabilities, device_type: str) -> None:
    space = Space(capabilities=claims, dtype="float16", device_type=device_type, large=True)
    found = drawn(space.strategy(), 1, NUMBER)
    assert {scale_of(case) for case in found} == {*space.scales}
    assert all(claims.admits(case) for case in found)
    assert max(case.scores for case in found) <= MOST_LARGE[device_type]
    smallest = claims.head_dims[0]
    for case in found:
        rows = case.batch * max(case.heads_q * case.seqlen_q, case.heads_kv * case.seqlen_k)
        assert rows * case.head_dim <= MOST_ELEMENTS[device_type] or case.head_dim == smallest


def test_sizes_that_are_not_claimed_are_not_drawn() -> None:
    one_query = Space(capabilities=CLAIMS["one query"], dtype="float16", device_type="cuda", large=True)
    assert {SCALES[name].of for name in one_query.scales} == {"keys", "heads", "k", "none"}
    short = Space(capabilities=Capabilities(), dtype="float16", large=True, max_seqlen=300)
    assert {SCALES[name].of for name in short.scales} == {"heads", "none"}


@pytest.mark.parametrize("name", SCALES)
def test_a_case_with_a_size_has_reached_it_and_a_case_without_has_not(name: str) -> None:
    for seed in range(20):
        case = with_scale(Capabilities(), "cuda", Case(seqlen_q=17, seqlen_k=19, seed=seed), name)
        assert scale_of(case) == name
    assert scale_of(Case(seqlen_q=512, seqlen_k=4129)) is None


@pytest.mark.parametrize("length", [1, 5, 16, 17, 65, 4097, 2**20 + 1])
def test_landmarks_are_numbers_below_the_length_and_often_the_ends(length: int) -> None:
    ends = 0
    for seed in range(50):
        found = landmarks(length, 8, Random(seed))
        assert found == sorted(set(found))
        assert len(found) == min(length, 8)
        assert 0 <= found[0] <= found[-1] < length
        ends += found[-1] == length - 1
    assert ends == 50


def test_a_single_landmark_is_often_an_end_or_next_to_a_power_of_two() -> None:
    found = {landmarks(65537, 1, Random(seed))[0] for seed in range(50)}
    assert found == {0, 65535, 65536}
