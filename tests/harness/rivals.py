"""Which of several less precise designs a result is nearest to.

Bounds alone do not tell a scaled q from a scaled k. Rivals are told apart by comparing what a call returned with exact
arithmetic in which a single kind of step rounds, as in their design.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF
from reference.heads import fold, unfold
from reference.masks import LOWEST, hide, visible
from tests.harness.judge import pieces
from tests.harness.problem import Outputs, Problem

FURTHER = 2.0
"""A design is not the kernel's if it misses a result by this many times the error of the nearest design."""
FEWEST_NUMBERS = 16
"""Of fewer different numbers, a design that is not the kernel's may come near all of them by luck."""
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Design:
    """Which steps of exact attention round to the inputs' dtype, and which products are in tf32.

    ``prescaled`` is the operand, if any, that is multiplied by sm_scale and ``base`` and rounded. ``steps`` are others:
    "products" of q and k, scaled "scores", "weights" after the softmax, the weights in its "sum", and "dp". ``tf32``
    says whose products have operands in tf32: those of "P and dS", or of "all". dS is then truncated before it is
    scaled.
    """

    prescaled: str = ""
    base: float = 1.0
    steps: frozenset[str] = frozenset()
    tf32: Literal["", "P and dS", "all"] = ""

    def results(self, p: Problem, given: Outputs, alignment: str) -> dict[str, list[Tensor]]:
        """Return out, lse, dq and dk in float64, each once for every way in which a kernel of the design may get it.

        There are two ways to get delta, P dP and out. P is truncated to tf32 before or after its division by the sum.
        """
        p = self._with_operand(p)
        group = p.heads_q // p.heads_kv
        q, k, v, dout = (fold(x, p.heads_kv).double() for x in (p.q, p.k, p.v, p.dout))
        q_in, k_in, v_in, dout_in = (self._operand(x) if self.tf32 == "all" else x for x in (q, k, v, dout))
        seen = visible(
            p.q.shape[2], p.k.shape[2], p.causal, alignment, p.q.device, group=group, pattern=p.pattern
        )
        scores = self._cast("scores", self._cast("products", q_in @ k_in.mT, p) * p.sm_scale, p)
        scores = hide(scores, seen, -math.inf)
        m = scores.amax(-1, keepdim=True).clamp_min(LOWEST)
        weights = (scores - m).exp()
        total = self._cast("sum", weights, p).sum(-1, keepdim=True)
        before, divisor = weights, total.clamp_min(0.5)
        weights = self._cast("weights", before / divisor, p)
        of_v = [self._operand(before) / divisor, self._operand(weights)] if self.tf32 else [weights]
        dp = self._cast("dp", dout_in @ v_in.mT, p)
        own_out = fold(given.out, p.heads_kv).double()
        deltas = [x.sum(-1, keepdim=True) for x in (weights * dp, dout * own_out)]
        ds = [self._operand(hide(weights * (dp - delta), seen)) * p.sm_scale for delta in deltas]
        return {
            "out": [unfold(x @ self._operand(v), p.heads_q) for x in of_v],
            "lse": [unfold((m + total.log())[..., 0], p.heads_q)],
            "dq": [unfold(x @ self._operand(k), p.heads_q) for x in ds],
            "dk": [x.mT @ self._operand(q) for x in ds],
        }

    @property
    def is_of_gradients(self) -> bool:
        """Whether it rounds steps of the backward alone, beside the cast that every design makes of its weights."""
        return self.steps - {"weights"} == {"dp"}

    def _operand(self, x: Tensor) -> Tensor:
        """Return an operand of a product as the product takes it: as it is, or its first 10 fraction bits."""
        return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double() if self.tf32 else x

    def _with_operand(self, p: Problem) -> Problem:
        if not self.prescaled:
            return p
        factor, x = p.sm_scale * self.base or 1.0, getattr(p, self.prescaled)
        return replace(p, **{self.prescaled: (x.float() * factor).to(x.dtype).double() / factor})

    def _cast(self, step: str, x: Tensor, p: Problem) -> Tensor:
        return x.to(p.dout.dtype).double() if step in self.steps else x


def _all_of(*steps: str) -> list[frozenset[str]]:
    """Return every set of some of these steps, the empty one included."""
    counts = range(len(steps) + 1)
    return [frozenset(x) for count in counts for x in itertools.combinations(steps, count)]


def _any_cast(prescaled: str = "", *steps: str) -> tuple[Design, ...]:
    """Return designs whose weights are cast after the softmax, or not, with the base of their exponentials e or 2."""
    bases = (1.0, LOG2_E) if prescaled else (1.0,)
    return tuple(Design(prescaled, base, cast | {*steps}) for base in bases for cast in _all_of("weights"))


RIVALS: Mapping[str, tuple[Design, ...]] = {
    "exp_error=1e-4": _any_cast(),
    "l_from_rounded_p=true": _any_cast("", "sum"),
    "k_prescaled=true": _any_cast("k"),
    "q_prescaled=true": _any_cast("q"),
    "rounded_scores=true": tuple(
        Design(steps=steps) for steps in _all_of("products", "scores", "dp", "weights") if steps - {"weights"}
    ),
    "precision=tf32": (Design(tf32="all"), Design(tf32="P and dS")),
}
"""Claims whose bounds are alike, each with its designs."""


def likeliest(
    claims: Sequence[str], wrong: Collection[str], p: Problem, given: Outputs, alignment: str
) -> list[str]:
    """Return the claims without those that a rival explains much better.

    ``given`` is what the call with the arguments ``p`` returned. Designs are compared by lse, or else out, and by those
    of out, dq and dk that are ``wrong``.
    """
    rivals = {claim: RIVALS[claim] for claim in claims if claim in RIVALS}
    known = p.key_padding_mask is None and not p.dropout_p and not p.rule and p.k.shape[2] > 0
    if len(rivals) < 2 or not known:
        return [*claims]
    piece = next(pieces(p, given))
    left = set(claims)
    forward = "out" if given.lse is None else "lse"
    made = {
        claim: [(design, design.results(piece.problem, piece.outputs, alignment)) for design in designs]
        for claim, designs in rivals.items()
    }
    for name in dict.fromkeys((forward, *(x for x in ("out", "dq", "dk") if x in wrong))):
        actual = getattr(piece.outputs, name).double()
        if len(actual.unique()) < FEWEST_NUMBERS:
            continue
        # A design that rounds nothing in the forward can't be what makes the forward's results wrong.
        only_forward = name in ("out", "lse") and not {"out", "lse"}.isdisjoint(wrong)
        missed = {
            claim: min(
                miss(actual, expected, name)
                for design, results in of_claim
                if not (only_forward and design.is_of_gradients)
                for expected in results[name]
            )
            for claim, of_claim in made.items()
        }
        limit = FURTHER * min(missed.values()) + 8 * FP32_ROUNDOFF
        left -= {claim for claim, error in missed.items() if error > limit}
    return [claim for claim in claims if claim in left]


def miss(actual: Tensor, expected: Tensor, name: str) -> float:
    """Return the root mean square of the errors, each over the sum of the entry's size and that of usual entries.

    Usual entries of out and lse are of size 1, those of gradients have the size of their root mean square.
    """
    square = expected.square()
    usual = 1.0 if name in ("out", "lse") else square[square.isfinite()].mean().sqrt()
    error = ((actual - expected) / (usual + expected.abs())).square()
    return math.sqrt(error[error.isfinite()].mean().nan_to_num(0.0).item())
