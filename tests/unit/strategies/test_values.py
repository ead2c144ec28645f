"""The values of each family are what its name says."""

import math

import pytest
import torch

from kernels.contract import DTYPES
from strategies.values import FAMILIES
from tests.unit.support.drawing import Shape, bits, drawn


def logits(q_family: str, k_family: str, head_dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return scores (1, 8, 64, 96) at the default scale, in float64."""
    q = drawn(q_family, (1, 8, 64, head_dim), dtype, start=1).double()
    k = drawn(k_family, (1, 8, 96, head_dim), dtype, start=2).double()
    return q @ k.mT / math.sqrt(head_dim)


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
@pytest.mark.parametrize("family", FAMILIES)
def test_family_is_finite_deterministic_and_rounded_once(family: str, dtype: torch.dtype) -> None:
    shapes: list[Shape] = [(2, 3, 37, 24), (1, 1, 1, 1)]
    for shape in shapes:
        data = drawn(family, shape, dtype)
        assert data.dtype == dtype
        assert tuple(data.shape) == shape
        assert data.isfinite().all()
        assert torch.equal(bits(data), bits(drawn(family, shape, dtype)))
        if family not in ("subnormal", "huge", "constant"):  # the range of these depends on the dtype
            assert torch.equal(data, drawn(family, shape).to(dtype))
    assert drawn(family, (2, 0, 5, 8), dtype).shape == (2, 0, 5, 8)
    assert drawn(family, (2, 1, 0, 8), dtype).shape == (2, 1, 0, 8)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"zeros", "ones"}))
def test_family_depends_on_the_generator(family: str) -> None:
    shape = (1, 2, 16, 8)
    assert not torch.equal(drawn(family, shape, start=0), drawn(family, shape, start=1))


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"family: got 'normals', expected one of .*'normal'"):
        drawn("normals", (1, 1, 1, 1))


def test_zeros_come_first_and_constants_are_constant() -> None:
    assert FAMILIES[0] == "zeros"
    assert not drawn("zeros", (1, 2, 8, 8)).any()
    assert (drawn("ones", (1, 2, 8, 8)) == 1).all()
    constant = drawn("constant", (1, 2, 8, 8))
    assert constant.min() == constant.max()


def test_constants_reach_both_large_and_small_values() -> None:
    constants = torch.stack([drawn("constant", (1, 1, 1, 1), start=start) for start in range(100)])
    assert constants.min() < 0.1
    assert constants.max() > 1e5


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_wide_logits_have_standard_deviation_three_to_eight(head_dim: int) -> None:
    assert 3 < logits("wide", "normal", head_dim).std() < 8


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_one_sided_rows_pass_the_range_of_exp(head_dim: int) -> None:
    overflow = math.log(torch.finfo(torch.float32).max)
    negative = logits("positive", "negative", head_dim)
    assert (negative.logsumexp(-1) < -overflow).all()
    assert (logits("negative", "negative", head_dim) > overflow).any(-1).all()
    assert (logits("positive", "positive", head_dim) > overflow).any(-1).all()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_near_ties_differ_little_at_a_large_magnitude(dtype: torch.dtype) -> None:
    scores = logits("normal", "near_ties", 64, dtype)
    assert scores.abs().median() > 2
    # The noise has sd 0.1 against the common vector's 8, and 0.1 more at most from rounding to bfloat16.
    assert scores.std(-1).median() < 0.05 * scores.abs().median()
    assert (scores.std(-1) > 0).all()


def test_one_key_dominates_most_rows_that_it_is_aligned_with() -> None:
    weights = logits("normal", "dominant", 64).softmax(-1)
    owner = weights.argmax(-1).mode(-1).values  # (1, 8): the row that was scaled up
    weight = weights.gather(-1, owner[..., None, None].expand(1, 8, 64, 1))
    assert 0.35 < (weight > 0.99).double().mean() < 0.6  # the score has standard deviation 32 and either sign


@pytest.mark.parametrize("seqlen", [3, 512])
def test_outliers_are_one_in_a_thousand_and_in_every_head(seqlen: int) -> None:
    data = drawn("outliers", (32, 32, seqlen, 16))
    # Normal data exceed 6 in 2e-9 of the entries, an outlier does so with probability P(|N| > 0.6) = 0.55.
    seen = (data.abs() > 6).sum((-2, -1)).double()
    expected = 0.55 * max(1.0, 1e-3 * seqlen * 16)
    assert 0.8 * expected < seen.mean() < 1.3 * expected
    assert (seen > 0).double().mean() > 0.4


def test_integers_are_sparse_and_small() -> None:
    data = drawn("integers", (2, 2, 64, 64))
    assert set(data.flatten().tolist()) == {-2.0, -1.0, 0.0, 1.0, 2.0}
    assert 0.7 < (data == 0).double().mean() < 0.9


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_subnormals_are_subnormal(dtype: torch.dtype) -> None:
    # In float64, where a float32 subnormal is a normal number that no hardware mode flushes.
    data = drawn("subnormal", (2, 2, 64, 64), dtype).double()
    finfo = torch.finfo(dtype)
    multiples = data / (finfo.tiny * finfo.eps)
    assert (data.abs() < finfo.tiny).all()
    assert torch.equal(multiples, multiples.round())
    assert (multiples != 0).double().mean() > 0.9
    assert (data > 0).any()
    assert (data < 0).any()


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES])
def test_huge_reaches_the_maximum_and_otherwise_sums_to_finite_scores(dtype: torch.dtype) -> None:
    maximum = torch.finfo(dtype).max
    peaks = {drawn("huge", (1, 2, 64, 64), dtype, start).double().abs().max().item() for start in range(20)}
    assert max(peaks) > 0.99 * maximum
    finite = [peak for peak in peaks if 256 * peak**2 < torch.finfo(torch.float32).max]
    assert finite


def test_tiny_logits_give_nearly_uniform_weights() -> None:
    weights = logits("tiny_logits", "normal", 64).softmax(-1)
    assert (weights * 96 - 1).abs().max() < 0.01  # logits of sd 1e-3, ten standard deviations


def test_duplicates_repeat_few_rows() -> None:
    data = drawn("duplicates", (2, 2, 64, 16))
    for head in data.flatten(0, 1):
        assert len(set(map(tuple, head.tolist()))) == 4
