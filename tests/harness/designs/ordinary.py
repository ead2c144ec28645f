"""What the errors of a call of ordinary numbers are like, by which some designs do not explain what is wrong elsewhere.

A bound says how far roundings may carry one element, and so it excuses an error of half its size that every element
has. No design has such errors: roundings to nearest leave nothing in the mean, and what they leave beside it looks like
that of the same steps in exact arithmetic.
"""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kernels.contract import OUTPUTS
from reference.bounds.accumulation import SAFETY
from reference.family import OF_16_BITS, Family
from strategies.case import LAYOUT_FIELDS, Case
from tests.harness.designs.rivals import RIVALS, Design
from tests.harness.law import law_named
from tests.harness.trial.judge import Piece, pieces
from tests.harness.trial.trial import CannotRun, LawBroken, Refused, Trial
from tests.harness.verdict import Finding

ORDINARY = {"batch": 2, "heads_kv": 4, "seqlen_q": 128, "seqlen_k": 128}
"""The sizes of a call of ordinary numbers whose mean errors a design has to explain."""
ALIKE = 0.1
"""The errors of a kernel with tf32 products are correlated at least so much with those of such a kernel that is known.

Truncated and rounded operands have errors with a correlation of -1/2, and so have sums of their products.
"""
MOST_OF_GROUP = 4
"""The most query heads that read a key head of such a call."""
QUIETER = 16.0
"""An error that is so many times smaller than that of a design in the same call does not come of its roundings."""
TF32, EXP, EXP_ERROR = "precision=tf32", "exp_error=1e-4", 1e-4
LEAST_OF_EXP = 2.0**-16
"""What an exponential that errs by up to 1e-4 makes lse err by, in the root mean square, in a call of 128 keys.

Errors of that size with random signs are 1e-4 / sqrt(3) in the root mean square. In a row whose 128 weights are powers
of e to a normal number of variance 1, the squares of the weights add up to e / 128: lse errs by 2^-17.0 if all errors
are independent, and by up to 1e-4, which is 2^-13.3, if they have one sign.
"""
MULTIPLE = 4.0
"""No design errs by so many times as much along the exact tensor, and along what delta adds to it, as in other ways.

Roundings to nearest err along a tensor of n elements by the root of 1 / n of what they err by. Truncated numbers lose
half a unit in the last place in the mean and scatter by 0.29 of it around that; an exponential that errs in one
direction has a mean that is up to twice what it scatters by. In sums of products with normal numbers of random signs
a mean counts as much as what scatters, so that an error is at most twice as large along a tensor as in other ways. An
exponential that errs by 1e-4 everywhere makes each of P, delta and their product err by that part of itself or less.
"""
CHANCE = 8.0
"""How far a sum of n squares of errors of stores is from its mean at most, in units of its mean over sqrt(n).

The square of an error that is uniform in an interval around 0 scatters by 0.9 of its mean, and the difference of two
sums of such squares by 1.3 / sqrt(n) of it: these are six standard deviations.
"""
INDEPENDENT = 1.5
"""A design is not the kernel's if it misses a tensor by this many times what a multiple of the exact one misses it by.

Of a kernel that has roundings of the same size in other places than the design, it misses sqrt(2) times the errors.
"""


def asked_whether(trial: Trial, family: Family) -> Trial:
    """Return the trial as if the kernel were of another family, to be asked whether a law holds, and not how not."""
    again = trial.replayed(family)
    again.to_first_breach = True
    return again


def left_by(trial: Trial, law: Callable[[Trial], None]) -> Finding | None:
    """Return what a law finds wrong with a trial; None if nothing is."""
    with suppress(Refused, CannotRun):
        try:
            law(trial)
        except LawBroken as broken:
            return broken.finding
    return None


def ordinary_call(trial: Trial, wrong: Collection[str]) -> "Ordinary | None":
    """Make a call of ordinary numbers, by which the errors of the tensors that are ``wrong`` in a trial are looked at.

    It has the sizes ``ORDINARY``, and else the shape, the layouts and the launch settings of the trial's. None is
    returned if the kernel does not claim such calls, or does not answer this one, and where the law on means is not
    tried.
    """
    case, claims = trial.case, trial.kernel.capabilities
    kept = ("head_dim", "v_head_dim", "v_in_k", "dtype", "seed", "launch", *LAYOUT_FIELDS)
    fields_: dict[str, Any] = {name: getattr(case, name) for name in kept}
    fields_ |= ORDINARY | {"group": min(case.group, MOST_OF_GROUP)}
    # The first rows of a causal mask have few keys, and a largest weight of 1 that no cast changes.
    asked = next(filter(claims.admits, (Case(**fields_, causal=causal) for causal in (False, True))), None)
    if asked is None:
        return None
    made = trial.replayed(trial.family).on(asked)
    made.safety, made.answered, made.given = SAFETY, [], []
    made.ignored = trial.ignored.union(OUTPUTS).difference(wrong)
    of_means = left_by(made, law_named("unbiased"))
    return Ordinary(made, frozenset(wrong), of_means) if made.given else None


@dataclass(frozen=True)
class Ordinary:
    """A call of ordinary numbers, whose ``trial`` judges the tensors alone that are ``wrong`` in another call.

    ``of_means`` is what the law on means finds wrong here, if no design is less precise than usual.
    """

    trial: Trial
    wrong: frozenset[str]
    of_means: Finding | None

    @cached_property
    def piece(self) -> Piece:
        """All of the call, with what it returned."""
        return next(pieces(self.trial.calls[0].problem, self.trial.given[0]))

    @cached_property
    def seen(self) -> dict[str, Tensor]:
        """What the call returned, by name."""
        return self.piece.outputs.named()

    def made(self, design: Design, out: Tensor | None = None) -> dict[str, list[Tensor]]:
        """Return the results of a design, delta being made of ``out`` if that is given, not of the kernel's."""
        outputs = self.piece.outputs if out is None else replace(self.piece.outputs, out=out)
        return design.results(self.piece.problem, outputs, self.trial.alignment)

    @cached_property
    def errors(self) -> dict[str, "SplitError"]:
        """The errors of the wrong tensors, by the ways to get delta that leave the least."""
        exact, no_delta = self.made(Design()), self.made(Design(), out=torch.zeros_like(self.seen["out"]))
        return {
            name: min(
                (SplitError.of(self.seen[name], x, x - no_delta[name][-1]) for x in ways),
                key=lambda error: error.size,
            )
            for name, ways in exact.items()
            if name in self.wrong and name in self.seen
        }

    @cached_property
    def shifted(self) -> dict[str, "SplitError"]:
        """The errors of the tensors whose mean is not that of a usual design."""
        names = self.of_means.tensors if self.of_means else ()
        return {name: error for name, error in self.errors.items() if name in names}

    @property
    def multiples(self) -> set[str]:
        """The tensors with which no more is wrong than a multiple of the exact one, or of what delta adds to it.

        No design explains these.
        """
        keys = self.piece.problem.k.shape[2]
        averaged = {"lse": math.sqrt(keys)}  # over the weights of a row, which have one sign
        return {x for x, error in self.shifted.items() if error.is_multiple(MULTIPLE * averaged.get(x, 1.0))}

    def unlike_seen(self) -> set[str]:
        """Return claims that do not explain the wrong tensors, as their errors are others here.

        If out or lse is wrong, these are claims of which every step of the forward would show in lse, where lse is too
        exact. Their bounds are far above such an lse, so that they would excuse an out that is wrong for another
        reason. Where a multiple of a tensor is wrong, and other roundings hide whether that is all, these are claims
        of casts by which the tensor is further from what is seen, and that of an exponential, if so large a multiple
        does not come of its errors. And tf32 is, if no error is like that of truncated operands beside a multiple.
        """
        in_forward = not {"out", "lse"}.isdisjoint(self.wrong)
        rivals = {
            claim: [self.made(x) for x in designs if x.can_show(self.piece.problem, in_forward=in_forward)]
            for claim, designs in RIVALS.items()
        }
        found = set[str]()
        if "lse" in self.seen and in_forward:
            lse = self.made(Design())["lse"][0]
            shown = {
                claim: min((_size(x["lse"][0] - lse) for x in results), default=0.0)
                for claim, results in rivals.items()
            } | {EXP: LEAST_OF_EXP}
            found |= {x for x, least in shown.items() if _size(self.seen["lse"] - lse) < least / QUIETER}
        for name, error in self.shifted.items():
            found |= {EXP} if error.along > MULTIPLE * EXP_ERROR * float(error.exact.norm()) else set()
            for claim in rivals.keys() & OF_16_BITS:
                missed = [float((self.seen[name] - x).norm()) for y in rivals[claim] for x in y[name]]
                found |= {claim} if min(missed, default=0.0) > INDEPENDENT * error.size else set()
        in_tf32 = {name: [x for y in rivals[TF32] for x in y[name]] for name in self.errors}
        if not any(
            error.is_like(x - error.exact) for name, error in self.errors.items() for x in in_tf32[name]
        ):
            found.add(TF32)
        return found

    def told_beside(self, finding: Finding) -> Finding:
        """Return the finding with what the means say of the same tensors, if they say anything and it says nothing."""
        told = self.of_means
        if finding.certificate or told is None or told.tensor not in self.wrong:
            return finding
        return replace(finding, certificate=told.certificate)


@dataclass(frozen=True)
class SplitError:
    """The error of a tensor: its part along the ``exact`` one and along what delta adds to it, and the rest.

    ``basis`` (elements, 2 at most) has orthonormal columns that span these directions. ``along`` is the norm of the
    part along them, and ``stored`` that of what the store of the exact tensor errs by.
    """

    exact: Tensor
    basis: Tensor
    along: float
    rest: Tensor
    stored: float

    @classmethod
    def of(cls, seen: Tensor, exact: Tensor, of_delta: Tensor) -> "SplitError":
        """Split the error of what is ``seen``. ``of_delta`` is 0 where delta adds nothing."""
        directions = [x.flatten() for x in (exact, of_delta) if bool(x.any())]
        basis, _ = torch.linalg.qr(torch.stack(directions, -1))
        error = (seen.double() - exact).flatten()
        along = basis.mT @ error
        stored = float((exact.to(seen.dtype).double() - exact).norm())
        return cls(exact, basis, float(along.norm()), error - basis @ along, stored)

    @property
    def size(self) -> float:
        """The norm of the rest."""
        return float(self.rest.norm())

    def is_multiple(self, most: float) -> bool:
        """Whether the part along the directions is above so many times what is left, the share of stores taken off."""
        left = max(0.0, self.size**2 - self.stored**2) + CHANCE * self.stored**2 / math.sqrt(len(self.rest))
        return self.along > most * math.sqrt(left)

    def is_like(self, other: Tensor) -> bool:
        """Whether the rest is correlated with that of another error of the tensor."""
        rest = other.flatten() - self.basis @ (self.basis.mT @ other.flatten())
        return abs(float(self.rest @ rest)) > ALIKE * self.size * float(rest.norm())


def _size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
