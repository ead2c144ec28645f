"""Unbiased: over many elements the mean signed error of out, lse and the gradients is what rounding to nearest gives.

A mean is the slope of a tensor along the exact one, along its size or, for dq and dk, along what an error of delta
does to them. Roundings to nearest have mean 0, so that of n elements about a unit roundoff over sqrt(n) is left:
``reference.bounds.means`` derives the bound. Catches what no single element shows, and what makes training drift: P or
out cut instead of rounded, an lse or a delta shifted by .001, a scale that is off by as little, accumulators in too
few bits. It is tried on a CPU alone, as the drift of the sums of tensor cores is not measured.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from reference.bounds.means import DELTA, FACTOR, SHIFT, Mean, means
from reference.heads import fold
from tests.harness.law import law
from tests.harness.trial.judge import exact_of, is_large
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.relate import asked
from tests.harness.trial.trial import Check, LawBroken, OutOfBounds, Trial

FEWEST = 1024
"""The fewest elements of q, of k and of v whose errors are averaged."""
DEVIATIONS = 1.125
"""Times rule 2's standard deviations: each of the 12 means of a call exceeds 4.5 with a probability of 1e-13."""


@law(place=6, sets=("numbers",), only_on="cpu")
def unbiased(trial: Trial) -> None:
    """Compare the means of one call of ordinary numbers with those of exact attention."""
    p = trial.problem
    few = min(p.q.numel(), p.k.numel(), p.v.numel(), p.dout.numel()) < FEWEST
    if few or not p.sm_scale or is_large(p) or trial.arithmetic.quantisation:
        return
    given = asked(trial, with_ordinary_numbers(trial, p))
    if given is None:
        return
    got = trial.gradients(given)
    found = [*judged(trial, given, got)]
    try:
        trial.hold([check for _, check in found])
    except OutOfBounds as broken:
        mean = next(mean for mean, check in found if check is broken.worst)
        error = float(broken.worst.actual - mean.of(mean.exact))
        dtype = torch.float32 if mean.tensor == "lse" else given.dout.dtype
        ulps, words = in_ulps(mean, abs(error), dtype), in_words(mean, error, dtype)
        raise LawBroken(replace(broken.finding, ulps=ulps, certificate=words)) from None


def with_ordinary_numbers(trial: Trial, p: Problem) -> Problem:
    """Return the problem with normal numbers, q being so large that scores have a size of about 1."""
    spread = abs(p.sm_scale) * math.sqrt(p.q.shape[-1])
    random = torch.Generator().manual_seed(trial.case.seed)

    def normal(x: Tensor, factor: float = 1.0) -> Tensor:
        return (torch.randn(x.shape, generator=random) * factor).to(x)

    q, dout = normal(p.q, 2.0 ** -round(math.log2(spread))), normal(p.dout)
    k = normal(p.k)
    if p.v_in_k:
        given = p.with_both(torch.clone)
        given.k.copy_(k)
        return replace(given, q=q, dout=dout)
    return replace(p, q=q, k=k, v=normal(p.v), dout=dout)


def judged(trial: Trial, p: Problem, o: Outputs) -> Iterator[tuple[Mean, Check]]:
    """Yield each mean of what a call returned with its check; none if a row sees no key, or a number is not finite."""
    e, heads_kv = exact_of(trial, p), p.heads_kv
    named = {name: x if name in ("dk", "dv") else fold(x, heads_kv) for name, x in o.named().items()}
    if bool((e.empty | e.overflow).any()) or not all(bool(x.isfinite().all()) for x in named.values()):
        return  # the law forward says of these what is right
    found = means(
        e,
        fold(p.dout, heads_kv).double() if o.gradients else None,
        trial.family.of_keys(p.k.shape[2]).envelope,
        out=named["out"].double(),
        lse=named["lse"].double() if "lse" in named else None,
        deviations=DEVIATIONS * trial.safety,
        drifts=trial.case.dtype != "float32" or bool(trial.arithmetic.operand_rounding),
    )
    for mean in found:
        if mean.tensor in named:
            number = e.out.new_tensor
            check = Check(
                claim=f"the mean error of {mean.tensor} is that of rounding to nearest",
                tensor=mean.tensor,
                actual=mean.of(named[mean.tensor]).reshape(1),
                expected=number([mean.expected]),
                bound=number([mean.bound]),
                call=o.call,
                expression=expression(trial, p, mean, has_lse="lse" in named),
            )
            yield mean, check


def expression(trial: Trial, p: Problem, mean: Mean, *, has_lse: bool) -> str:
    """Return how the slope of a tensor is computed from the tensors of a call, as text for a stand-alone script."""
    (rows, keys), group, scale = (p.q.shape[2], p.k.shape[2]), p.heads_q // p.heads_kv, p.sm_scale
    k, v = (f"{name}.double().repeat_interleave({group}, 1)" for name in ("k", "v"))
    scores = f"(q.double() @ {k}.mT * {scale!r})"
    if p.causal:
        diagonal = keys - rows if trial.alignment == "bottom_right" else 0
        seen = f"torch.ones({rows}, {keys}, dtype=torch.bool, device=q.device).tril({diagonal})"
        scores += f".masked_fill(~{seen}, -inf)"
    weights = f"({scores} - lse.double()[..., None]).exp()" if has_lse else f"{scores}.softmax(-1)"
    delta = "(dout.double() * out.double()).sum(-1, keepdim=True)"
    of_scores = f"(dout.double() @ {v}.mT - {delta})" if mean.along != DELTA else f"-{delta}"
    of_scores = f"({weights} * {of_scores} * {scale!r})"
    over_heads = f".unflatten(1, ({p.heads_kv}, {group})).sum(2)"
    regressor = {
        "out": f"{scores}.softmax(-1) @ {v}",
        "lse": f"{scores}.logsumexp(-1)",
        "dq": f"{of_scores} @ {k}",
        "dk": f"({of_scores}.mT @ q.double()){over_heads}",
        "dv": f"({weights}.mT @ dout.double()){over_heads}",
    }[mean.tensor]
    if mean.along == SHIFT:
        regressor = "torch.ones_like(lse.double())" if mean.tensor == "lse" else f"({regressor}).abs()"
    slope = "lambda x, r: ((x * r).sum() / r.square().sum()).reshape(1)"
    return f"({slope})({mean.tensor}.double(), {regressor})"


def in_ulps(mean: Mean, error: float, dtype: torch.dtype) -> float:
    """Return the mean error of elements, weighted by the regressor, in units in the last place that they have."""
    info = torch.finfo(dtype)
    exponents = mean.exact.abs().clamp_min(info.smallest_normal).frexp().exponent - 1
    ulps = torch.ldexp(torch.full_like(mean.exact, info.eps), exponents)
    return float(error * mean.regressor.square().sum() / (mean.regressor.abs() * ulps).sum())


def in_words(mean: Mean, error: float, dtype: torch.dtype) -> str:
    """Say by how much a tensor is off in the mean, and what rounding to nearest leaves."""
    over, left = f"over {mean.exact.numel()} elements", "where rounding to nearest leaves 0 +-"
    if mean.along == DELTA:
        how = "large" if error > 0 else "small"
        what = f"is what a delta gives that is too {how} by {abs(error):.2g} of it in the mean"
        return f"{over} {mean.tensor} {what}, {left} {mean.bound:.2g}"
    how = {FACTOR: ("small", "large"), SHIFT: ("low", "high")}[mean.along][error > 0]
    off, most = (in_ulps(mean, x, dtype) for x in (abs(error), mean.bound))
    return f"{over} {mean.tensor} is too {how} by {off:.2g} ulp in the mean, {left} {most:.2g}"
