"""Designs of less precision as exact arithmetic in which single kinds of steps round, and which of them is nearest.

Bounds alone do not tell a scaled q from a scaled k. Designs that bounds do not tell apart are compared by how near a
result is to what each of them gives.
"""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from reference.arithmetic import FP32_ROUNDOFF
from reference.heads import fold, unfold
from reference.masks import LOWEST, hide, visible
from tests.harness.trial.judge import is_large, pieces
from tests.harness.trial.problem import Outputs, Problem

FURTHER = 2.0
"""A design is not the kernel's if it misses a result by this many times the error of the nearest design."""
FEWEST_NUMBERS = 16
"""Of fewer different numbers, a design that is not the kernel's may come near all of them by luck."""
MOSTLY = 0.75
"""A rival gives a result if it has the very numbers of so many of those that tell it from exact arithmetic."""
LOG2_E = 1 / math.log(2)


@dataclass(frozen=True)
class Design:
    """Which steps of exact attention round to the inputs' dtype, and which products are in tf32.

    ``prescaled`` is the operand, if any, that is multiplied by sm_scale and ``base`` and rounded; "qk" stands for both,
    multiplied by the root of that. ``steps`` are others: "products" of q and k, scaled "scores", "slopes" of ALiBi and
    what is "added" to scores, both times ``base``, "weights" after the softmax, the weights in its "sum", "dp", and the
    running sums of dk and dv over the heads of a "group". ``tf32`` says whose products have operands in tf32: those of
    "P and dS", or of "all". dS is then truncated before it is scaled.
    """

    prescaled: str = ""
    base: float = 1.0
    steps: frozenset[str] = frozenset()
    tf32: Literal["", "P and dS", "all"] = ""

    def results(self, p: Problem, given: Outputs, alignment: str) -> dict[str, list[Tensor]]:
        """Return out, lse and gradients in float64, each once for every way in which a kernel of the design gets it.

        There are two ways to get delta, P dP and out. P is truncated to tf32 before or after its division by the sum.
        The heads of a group are added from the first to the last or, as autograd does it, from the last to the first.
        """
        p = self._with_operands(p)
        added, sink = self._added(p, alignment), p.rule.sink(p.q, p.k)
        group = p.heads_q // p.heads_kv
        q, k, v, dout = (fold(x, p.heads_kv).double() for x in (p.q, p.k, p.v, p.dout))
        q_in, k_in, v_in, dout_in = (self._operand(x) if self.tf32 == "all" else x for x in (q, k, v, dout))
        seen = visible(
            p.q.shape[2], p.k.shape[2], p.causal, alignment, p.q.device, group=group, pattern=p.pattern
        )
        scores = self._cast("scores", self._cast("products", q_in @ k_in.mT, p) * p.sm_scale, p)
        capped = p.rule.capped(scores)
        scores = hide(capped + added, seen, -math.inf)
        m = torch.maximum(scores.amax(-1, keepdim=True), sink).clamp_min(LOWEST)
        weights = (scores - m).exp()
        total = self._cast("sum", weights, p).sum(-1, keepdim=True) + (sink - m).exp()
        before, divisor = weights, total.clamp_min(0.5)
        weights = self._cast("weights", before / divisor, p)
        of_v = [self._operand(before) / divisor, self._operand(weights)] if self.tf32 else [weights]
        dp = self._cast("dp", dout_in @ v_in.mT, p)
        own_out = fold(given.out, p.heads_kv).double()
        deltas = [x.sum(-1, keepdim=True) for x in (weights * dp, dout * own_out)]
        slope = p.rule.slope(capped) * p.sm_scale
        ds = [self._operand(hide(weights * (dp - delta), seen)) * slope for delta in deltas]
        return {
            "out": [unfold(x @ self._operand(v), p.heads_q) for x in of_v],
            "lse": [unfold((m + total.log())[..., 0], p.heads_q)],
            "dq": [unfold(x @ self._operand(k), p.heads_q) for x in ds],
            "dk": [whole for x in ds for whole in self._over_heads(x, self._operand(q), group, p)],
            "dv": self._over_heads(self._operand(weights), dout_in, group, p),
        }

    def can_show(self, p: Problem, *, in_forward: bool) -> bool:
        """Whether a call has anything for it to round beside the weights, which every design casts.

        ``in_forward``, that has to be a step of the forward. Designs of which no step is known can show in any call.
        """
        steps = self.steps - {"weights"}
        idle = {"dp", "group"} if in_forward else {"group"} if p.heads_q == p.heads_kv else set()
        idle |= set() if p.rule.is_biased else {"added"}
        idle |= set() if p.rule.alibi_slopes is not None else {"slopes"}
        return not steps or not steps <= idle

    def _operand(self, x: Tensor) -> Tensor:
        """Return an operand of a product as the product takes it: as it is, or its first 10 fraction bits."""
        return (x.float().view(torch.int32) & ~0x1FFF).view(torch.float32).double() if self.tf32 else x

    def _over_heads(self, x: Tensor, y: Tensor, group: int, p: Problem) -> list[Tensor]:
        """Return the sum of x^T y over the query heads of a group, whose rows are folded; also in reverse order."""
        if "group" not in self.steps:
            return [x.mT @ y]
        parts = [a.mT @ b for a, b in zip(x.chunk(group, -2), y.chunk(group, -2), strict=True)]
        parts = [self._cast("group", part, p) for part in parts]
        return [
            reduce(lambda a, b: self._cast("group", a + b, p), order) for order in (parts, reversed(parts))
        ]

    def _with_operands(self, p: Problem) -> Problem:
        scale = p.sm_scale * self.base
        factor = (scale if len(self.prescaled) == 1 else math.sqrt(abs(scale))) or 1.0
        scaled = {name: (getattr(p, name).float() * factor).to(p.dout.dtype) for name in self.prescaled}
        return replace(p, **{name: x.double() / factor for name, x in scaled.items()})

    def _added(self, p: Problem, alignment: str) -> Tensor:
        """Return what is added to scores, (batch or 1, heads_kv, group * seqlen_q, seqlen_k) float64, heads folded."""
        rule = p.rule
        if rule.alibi_slopes is not None:
            slopes = self._cast("slopes", rule.alibi_slopes.double() * self.base, p) / self.base
            rule = replace(rule, alibi_slopes=slopes)
        return self._cast("added", rule.added(p.q, p.k, alignment) * self.base, p) / self.base

    def _cast(self, step: str, x: Tensor, p: Problem) -> Tensor:
        return x.to(p.dout.dtype).double() if step in self.steps else x


def _all_of(*steps: str) -> list[frozenset[str]]:
    """Return every set of some of these steps, the empty one included."""
    counts = range(len(steps) + 1)
    return [frozenset(x) for count in counts for x in itertools.combinations(steps, count)]


def _any_cast(prescaled: str = "", *steps: str, bases: Sequence[float] = (1.0,)) -> tuple[Design, ...]:
    """Return designs whose weights are cast after the softmax, or not, with each base of their exponentials."""
    return tuple(Design(prescaled, base, cast | {*steps}) for base in bases for cast in _all_of("weights"))


E_OR_2 = (1.0, LOG2_E)
"""What scores are multiplied by for exponentials to base e, and to base 2."""


RIVALS: Mapping[str, tuple[Design, ...]] = {
    "exp_error=1e-4": _any_cast(),
    "l_from_rounded_p=true": _any_cast("", "sum"),
    "rounded_group_sums=true": _any_cast("", "group"),
    "k_prescaled=true": _any_cast("k", bases=E_OR_2),
    "q_prescaled=true": _any_cast("q", bases=E_OR_2),
    "qk_prescaled=true": _any_cast("qk", bases=E_OR_2),
    "rounded_bias=true": tuple(
        design
        for steps in (("added",), ("slopes",), ("slopes", "added"))
        for design in _any_cast("", *steps, bases=E_OR_2)
    ),
    "rounded_scores=true": (
        *(Design(steps=x) for x in _all_of("products", "scores", "dp", "weights") if x - {"weights"}),
        *(Design("qk", steps=x | {"scores"}) for x in _all_of("dp", "weights")),
    ),
    "precision=tf32": (Design(tf32="all"), Design(tf32="P and dS")),
}
"""Claims whose bounds are alike, each with its designs."""


def likeliest(
    claims: Sequence[str], wrong: Collection[str], p: Problem, given: Outputs, alignment: str
) -> list[str]:
    """Return the claims without those that a rival explains much better.

    ``given`` is what the call with the arguments ``p`` returned. Designs are compared by lse, or else out, and by those
    of out, dq, dk and dv that are ``wrong``. If rivals give the very numbers of one that is wrong, theirs are the only
    claims, as a claim without a rival can't be compared.
    """
    rivals = {claim: RIVALS[claim] for claim in claims if claim in RIVALS}
    known = p.key_padding_mask is None and not p.dropout_p and p.k.shape[2] > 0 and not is_large(p)
    if not rivals or not known:
        return [*claims]
    piece = next(pieces(p, given))
    left, shown = set(claims), set[str]()
    forward = "out" if given.lse is None else "lse"

    def made(designs: Sequence[Design]) -> list[tuple[Design, dict[str, list[Tensor]]]]:
        return [(design, design.results(piece.problem, piece.outputs, alignment)) for design in designs]

    plain = made(_any_cast())
    of_rivals = {claim: made(designs) for claim, designs in rivals.items()}
    for name in dict.fromkeys((forward, *(x for x in ("out", "dq", "dk", "dv") if x in wrong))):
        actual = getattr(piece.outputs, name)
        if actual is None or len(actual.unique()) < FEWEST_NUMBERS:  # a call may give no gradients
            continue
        in_forward = name in ("out", "lse") and not {"out", "lse"}.isdisjoint(wrong)
        expected = {
            claim: [
                x
                for design, results in of_claim
                if design.can_show(p, in_forward=in_forward)
                for x in results[name]
            ]
            for claim, of_claim in of_rivals.items()
        }
        missed = {
            claim: min((miss(actual.double(), x, name) for x in of_claim), default=math.inf)
            for claim, of_claim in expected.items()
        }
        limit = FURTHER * min(missed.values()) + 8 * FP32_ROUNDOFF
        left -= {claim for claim, error in missed.items() if error > limit}
        if name in wrong:
            usual = [x for _, results in plain for x in results[name]]
            shown |= {
                claim
                for claim, of_claim in expected.items()
                if any(gives(x, usual, actual) for x in of_claim)
            }
    return [claim for claim in claims if claim in (left & shown or left)]


def gives(expected: Tensor, usual: Sequence[Tensor], actual: Tensor) -> bool:
    """Whether a rival, once its results are stored, gives the actual numbers where it has others than exact arithmetic.

    ``usual`` are the results of exact arithmetic, by each way to get them. Numbers that another design made are seldom
    the same by luck, and those of the rival's own design differ where a sum in float32 fell on the other side of a tie.
    """
    stored = expected.to(actual.dtype)
    apart = torch.stack([stored != x.to(actual.dtype) for x in usual]).all(0)
    same = (stored == actual)[apart].double()
    return len(same) >= FEWEST_NUMBERS and float(same.mean()) > MOSTLY


def miss(actual: Tensor, expected: Tensor, name: str) -> float:
    """Return the root mean square of the errors, each over the sum of the entry's size and that of usual entries.

    Usual entries of out and lse are of size 1, those of gradients have the size of their root mean square.
    """
    square = expected.square()
    usual = 1.0 if name in ("out", "lse") else square[square.isfinite()].mean().sqrt()
    error = ((actual - expected) / (usual + expected.abs())).square()
    return math.sqrt(error[error.isfinite()].mean().nan_to_num(0.0).item())
