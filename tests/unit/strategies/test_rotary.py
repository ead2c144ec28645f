"""Quarter turns rotate rows exactly, as the formula of rotary position embedding has it, and back."""

import math
import random
from dataclasses import replace

import pytest
import torch

from kernels.contract import ROTARY, AttentionKernel
from kernels.registry import load
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from strategies.rotary import Rotation, drawn, rotated, rows_from
from tests.harness.bugs.attribution import FailingExample, explain_by_known_bugs
from tests.harness.bugs.bug import Occurrences, Severity
from tests.harness.bugs.duplicates import is_duplicate, why_same
from tests.harness.law import law_named
from tests.harness.trial.trial import LawBroken, Trial
from tests.panel import rotated as panel
from tests.unit.support.bugs import CASE, CLAIMS, bug, causal, runner

CPU = torch.device("cpu")
SEEDS = range(20)
EXACT = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def turns(angles: list[list[int]], *, interleaved: bool = False) -> Rotation:
    """Return tables of so many quarter turns for each position and pair."""
    quarters = torch.tensor(angles)
    cos, sin = (torch.tensor(x)[quarters] for x in ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0]))
    return Rotation(cos, sin, interleaved)


def test_columns_of_halves_are_paired_with_those_of_the_other_half() -> None:
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0]]]])
    assert turns([[1, 0]]).forth(x, rows_from([0], 1, CPU)).tolist() == [[[[-3.0, 2.0, 1.0, 4.0, 5.0]]]]


def test_interleaved_columns_are_paired_with_their_neighbours() -> None:
    x, at = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0]]]]), rows_from([0], 1, CPU)
    assert turns([[1, 2]], interleaved=True).forth(x, at).tolist() == [[[[-2.0, 1.0, -3.0, -4.0, 5.0]]]]


def test_each_sequence_has_positions_of_its_own() -> None:
    x, rotation = torch.ones(2, 1, 2, 2), turns([[0], [1], [2]])
    found = rotation.forth(x, rows_from([0, 1], 2, CPU))
    assert found[:, 0].tolist() == [[[1.0, 1.0], [-1.0, 1.0]], [[-1.0, 1.0], [-1.0, -1.0]]]


@pytest.mark.parametrize("pairing", ROTARY)
@pytest.mark.parametrize("dtype", EXACT.values(), ids=EXACT)
def test_a_rotation_has_the_numbers_of_the_formula_and_is_undone_exactly(
    dtype: torch.dtype, pairing: str
) -> None:
    x = torch.randn(2, 3, 7, 10, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, 0, 0, 0], x[0, 0, 1, 1] = torch.finfo(dtype).max, -torch.finfo(dtype).smallest_normal / 2
    for seed in SEEDS:
        rotation, at = drawn(x, 9, pairing, random.Random(seed)), rows_from([2, 0], 7, CPU)
        half = rotation.cos.shape[1]
        cos, sin = rotation.cos[at], rotation.sin[at]
        columns = torch.arange(2 * half).view(half, 2).T if rotation.interleaved else torch.arange(2 * half)
        first, second = columns.reshape(2, half)
        wanted = x.clone()
        wanted[..., first] = x[..., first] * cos - x[..., second] * sin
        wanted[..., second] = x[..., second] * cos + x[..., first] * sin
        found = rotation.forth(x, at)
        assert torch.equal(found, wanted)
        assert torch.equal(rotation.back(found, at), x)


def test_what_is_no_number_moves_with_its_column() -> None:
    x = torch.tensor([[[[math.inf, 1.0, math.nan, -0.0]]]])
    cos, sin = torch.tensor([[0.0, -1.0]]), torch.tensor([[1.0, 0.0]])
    first, second, third, last = rotated(x, cos, sin, False).flatten().tolist()
    assert math.isnan(first)
    assert (second, third, last) == (-1.0, math.inf, 0.0)
    assert math.copysign(1.0, last) == 1.0


def test_tables_vary_in_size_pairs_and_angles() -> None:
    found = [drawn(torch.zeros(1, 1, 1, 9), 5, ROTARY[seed % 2], random.Random(seed)) for seed in SEEDS]
    assert {rotation.cos.shape[0] for rotation in found} == {5, 6, 7}
    assert {rotation.cos.shape[1] for rotation in found} == {4, 2}
    assert [rotation.interleaved for rotation in found[:2]] == [False, True]
    pairs = {
        (float(c), float(s)) for r in found for c, s in zip(r.cos.flatten(), r.sin.flatten(), strict=True)
    }
    assert pairs == {(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)}
    assert drawn(torch.zeros(1, 1, 1, 2), 1, ROTARY[0], random.Random(1)).cos.shape[1] == 1


def sound() -> AttentionKernel:
    """Return a sound kernel that rotates."""
    return load("tests.panel.rotated:eager", panel.CLAIMS)


def test_a_gradient_that_overflows_before_it_is_rotated_back_is_no_finding() -> None:
    """A rotation multiplies an infinite gradient by 0 too, which makes NaN of the other column of its pair."""
    spikes = tuple(Spike("k", (0, 0, row, 0), 6e4 * sign) for row, sign in ((0, 1.0), (1, -1.0)))
    case = Case(seqlen_q=4, seqlen_k=8, head_dim=4, dtype="float16", rotary="halves", spikes=spikes)
    nan = 0
    for seed in SEEDS:
        trial = Trial(sound(), replace(case, sm_scale=30.0, q_values="zeros", seed=seed), "cpu", SAFETY)
        law_named("rotary")(trial)
        nan += bool(trial.given[0].named()["dq"].isnan().any())
    assert nan


def test_more_queries_than_keys_are_cut_unless_masks_are_aligned_top_left() -> None:
    case = Case(seqlen_q=5, seqlen_k=3, dtype="float32", rotary="interleaved")
    trial = Trial(sound(), case, "cpu", SAFETY)
    law_named("rotary")(trial)
    assert trial.calls[0].problem.q.shape[2] == 3

    top_left = replace(sound().capabilities, causal_alignment="top_left")
    trial = Trial(replace(sound(), capabilities=top_left), case, "cpu", SAFETY)
    with pytest.raises(LawBroken):  # it has its queries by the bottom-right corner
        law_named("rotary")(trial)
    assert trial.calls[0].problem.q.shape[2] == 5


def test_a_bug_of_tables_explains_nothing_that_other_laws_find() -> None:
    """In every call with tables all tensors may be wrong, and in no call without them."""
    of_tables = replace(bug(CASE, ("out", "lse"), law="rotary"), severity=Severity(20, 20))
    of_mask = bug(CASE, ("out",))
    found = of_mask.failure.finding
    assert not of_tables.is_everywhere
    run = runner(causal)
    assert (
        explain_by_known_bugs(FailingExample("forward", CASE, found), [of_tables], run, CLAIMS).blamed == []
    )
    assert explain_by_known_bugs(FailingExample("rotary", CASE, found), [of_tables], run, CLAIMS).blamed == [
        of_tables
    ]
    assert not why_same(of_tables, of_mask, run, CLAIMS)
    assert not is_duplicate(of_mask, of_tables, Occurrences(), run, CLAIMS)
