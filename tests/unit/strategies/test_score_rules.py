"""What a case does to its scores: the tensors drawn, and the part of them that a part of a problem has."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.contract import BIASES
from reference import safe_softmax
from reference.score_rule import PLAIN, ScoreRule
from strategies.case import Case
from strategies.score_rules import score_rule
from tests.unit.support.calling import make

CASE = Case(batch=2, heads_kv=2, group=3, seqlen_q=5, seqlen_k=9, seed=3)
FULL = replace(CASE, softcap=3.0, alibi_slopes=True, bias="full", sinks=True)


def test_a_case_without_any_is_plain() -> None:
    rule = score_rule(CASE, "cpu")
    assert not rule
    assert not PLAIN
    assert rule.options == {}


def test_slopes_fall_and_sinks_differ_by_head_and_seed() -> None:
    found = [score_rule(replace(FULL, seed=seed), "cpu") for seed in range(20)]
    assert all(x.alibi_slopes is not None and x.alibi_slopes.dtype == torch.float32 for x in found)
    assert all(
        ((x.alibi_slopes > 0) & (x.alibi_slopes <= 1)).all() for x in found if x.alibi_slopes is not None
    )
    assert len({tuple(x.sinks.tolist()) for x in found if x.sinks is not None}) == 20
    assert max(float(x.sinks.abs().max()) for x in found if x.sinks is not None) > 10


@pytest.mark.parametrize("name", BIASES)
def test_every_shape_of_a_bias_broadcasts(name: str) -> None:
    bias = score_rule(replace(CASE, bias=name, dtype="bfloat16"), "cpu").bias
    assert bias is not None
    assert bias.dtype == torch.bfloat16
    assert bias.is_contiguous()
    assert torch.broadcast_shapes(bias.shape, (2, 6, 5, 9)) == (2, 6, 5, 9)


def test_an_unknown_bias_is_refused() -> None:
    with pytest.raises(ValueError, match="bias: got 'rows', expected none or one of"):
        score_rule(replace(CASE, bias="rows"), "cpu")


@pytest.mark.parametrize("name", BIASES)
def test_a_part_of_a_rule_is_that_of_the_part_of_a_problem(name: str) -> None:
    q, k, v, _ = make(5, 9, batch=2, heads_kv=2, group=3)
    rule = score_rule(replace(FULL, bias=name), q.device)
    options: dict[str, Any] = {"causal": False, "sm_scale": 0.5}
    out, lse = safe_softmax.forward(q, k, v, rule=replace(rule, alibi_slopes=None), **options)
    part = replace(rule, alibi_slopes=None).part(slice(1, 2), slice(3, 6), slice(2, 4))
    some, some_lse = safe_softmax.forward(q[1:, 3:, 2:4], k[1:, 1:], v[1:, 1:], rule=part, **options)
    assert torch.equal(some, out[1:, 3:, 2:4])
    assert torch.equal(some_lse, lse[1:, 3:, 2:4])


def test_an_empty_rule_has_no_tensors_to_change() -> None:
    assert ScoreRule(softcap=2.0).mapped(torch.zeros_like).options == {"softcap": 2.0}
