"""Kernel outputs against the float64 reference: rule 1 on every case, rule 2 on fresh random data."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from reference.bounds import Exact, backward_bounds, exact, forward_bounds
from reference.heads import fold, unfold
from tests.harness.trial import Check, LawBroken, Outputs, Problem, Trial

BLOCK_ELEMENTS = 2**22
"""Scores judged at once: 32 MiB for each float64 matrix over them, of which about 25 are alive."""

WHOLE: Mapping[str, str] = {}
"""No expressions: the outputs judged are those of a call, as they are."""

CERTAIN = "{} is within the rounding bound of float64"
PROBABLE = "{} is within the probable rounding bound of float64 (rule 2: independent roundings)"


@dataclass(frozen=True)
class Piece:
    """A part of a problem, whole key heads of it; ``batch`` and ``head`` (of k) say where it begins."""

    problem: Problem
    outputs: Outputs
    batch: int = 0
    head: int = 0


def pieces(p: Problem, o: Outputs) -> Iterator[Piece]:
    """The problem whole, or one key head at a time where its scores would not fit."""
    batch, heads_kv, seqlen_k, _ = p.k.shape
    if batch * p.heads_q * p.q.shape[2] * seqlen_k <= BLOCK_ELEMENTS:
        yield Piece(p, o)
        return
    group = p.heads_q // heads_kv
    for b in range(batch):
        for h in range(heads_kv):
            at_q = (slice(b, b + 1), slice(h * group, (h + 1) * group))
            at_k = (slice(b, b + 1), slice(h, h + 1))
            first = p.first_head + b * p.heads_q + h * group
            problem = replace(
                p.with_batch(at_k[0]),
                **{name: getattr(p, name)[at_q] for name in ("q", "dout")},
                **{name: getattr(p, name)[at_k] for name in ("k", "v")},
                first_head=first,
            )
            part: dict[str, Any] = {
                name: x[at_k if name in ("dk", "dv") else at_q] for name, x in o.named().items()
            }
            yield Piece(problem, replace(o, **part), b, h)


def exact_of(trial: Trial, p: Problem) -> Exact:
    """The float64 quantities of a problem under the kernel's causal alignment."""
    return exact(
        p.q,
        p.k,
        p.v,
        causal=p.causal,
        sm_scale=p.sm_scale,
        alignment=trial.alignment,
        product_floor=trial.arithmetic.product_floor,
        quantisation=trial.arithmetic.quantisation,
        key_padding_mask=p.key_padding_mask,
        dropout_p=p.dropout_p,
        dropout_seed=p.dropout_seed,
        first_head=p.first_head,
    )


def judge_forward(trial: Trial, p: Problem, o: Outputs, expressions: Mapping[str, str] = WHOLE) -> None:
    """Hold out and lse to both rules. ``expressions`` say how outputs were cut from the tensors of a call."""
    for piece in pieces(p, o):
        e = exact_of(trial, piece.problem)

        def checks(claim: str, piece: Piece = piece, e: Exact = e, **rule: Any) -> list[Check]:
            bounds = forward_bounds(e, trial.arithmetic, **rule)
            expected = {"out": (e.out, bounds.out), "lse": (e.lse, bounds.lse)}
            return _checks(trial, piece, claim, expected, expressions)

        _both_rules(trial, checks)


def judge_backward(trial: Trial, p: Problem, o: Outputs, expressions: Mapping[str, str] = WHOLE) -> None:
    """Hold dq, dk and dv to both rules, at the kernel's own out and lse where it has a backward of its own.

    ``expressions`` as in ``judge_forward``.
    """
    # At the exact out and lse, delta is what the kernel's own out says, or its weights.
    arithmetic = trial.arithmetic if trial.apart else replace(trial.arithmetic, delta="either")
    for piece in pieces(p, o):
        if piece.outputs.dq is None:
            return
        e = exact_of(trial, piece.problem)
        known = own_results(trial, piece, e)

        def checks(
            claim: str, piece: Piece = piece, e: Exact = e, known: dict[str, Any] = known, **rule: Any
        ) -> list[Check]:
            dout = fold(piece.problem.dout, piece.problem.heads_kv).double()
            b = backward_bounds(e, dout, arithmetic, **known, **rule)
            expected = {"dq": (b.dq, b.dq_bound), "dk": (b.dk, b.dk_bound), "dv": (b.dv, b.dv_bound)}
            return _checks(trial, piece, claim, expected, expressions)

        _both_rules(trial, checks)


def own_results(trial: Trial, piece: Piece, e: Exact) -> dict[str, Any]:
    """The kernel's own out and lse, at which its backward is judged; else the bounds of the forward."""
    o = piece.outputs
    if trial.kernel.backward is None or o.lse is None or not trial.apart:
        return {"forward": forward_bounds(e, trial.arithmetic)}
    heads_kv = piece.problem.heads_kv
    out, lse = fold(o.out, heads_kv).double(), fold(o.lse, heads_kv).double()
    # Where these are not finite the bounds are infinite: that is for the forward law to judge.
    return {"out": out, "lse": lse}


def _checks(
    trial: Trial,
    piece: Piece,
    claim: str,
    expected: dict[str, tuple[Tensor, Tensor]],
    expressions: Mapping[str, str],
) -> list[Check]:
    """A check for each tensor that the kernel gave, expected and bound unfolded to its shape."""
    heads_q = piece.problem.heads_q
    group = heads_q // piece.problem.heads_kv if piece.problem.heads_kv else 1
    found = []
    for name, actual in piece.outputs.named().items():
        if name not in expected:
            continue
        value, bound = expected[name]
        of_keys = name in ("dk", "dv")
        found.append(
            Check(
                claim=claim.format(name),
                tensor=name,
                actual=actual,
                expected=value if of_keys else unfold(value, heads_q),
                bound=bound if of_keys else unfold(bound, heads_q),
                maximum=torch.inf if name == "lse" else trial.arithmetic.output.maximum,
                call=piece.outputs.call,
                expression=expressions.get(name, ""),
                origin=(piece.batch, piece.head if of_keys else piece.head * group),
            )
        )
    return found


def _both_rules(trial: Trial, checks: Callable[..., list[Check]]) -> None:
    """Rule 2 without clusters is the lowest of all bounds, and settles nearly every case by itself."""
    try:
        trial.hold(checks(PROBABLE, safety=trial.safety, clustered=False))
    except LawBroken:
        trial.hold(checks(CERTAIN))
        trial.hold(checks(PROBABLE, safety=trial.safety))
