"""Exact: some inputs have answers that need no rounding, or a single one.

If each query has all its weight on one key, since the weights of the others underflow, out has rows of v bit for bit.
If q = 0 and v has integers, out has means that only the last division rounds. Catches a key or value from the wrong
row, a mask that is off by one, a padded key that counts, and anything that is only nearly right.
"""

import math
from dataclasses import replace

import torch

from kernels.contract import default_scale
from reference.bounds.answers import keys_may_overflow, mean_bounds, row_bound
from reference.bounds.exact import FLOAT32_SAFE, SCORE_GAP
from reference.masks import blank, visible
from tests.harness.law import law
from tests.harness.trial.relate import asked, settled
from tests.harness.trial.trial import Check, Trial


@law(key_padding=True, place=4, takes_gradients=False, sets=("numbers", "scores"))
def exact(trial: Trial) -> None:
    """Check means and single keys, in the shape of the case and with numbers of this law's own."""
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # there is no row or no key
    means(trial)
    if not trial.arithmetic.rotates:  # rotated sign vectors are not exact in few bits
        one_hot(trial)


def seen_keys(trial: Trial) -> torch.Tensor:
    """Return which keys each row sees, as (batch or 1, seqlen_q or 1, seqlen_k) bool."""
    p = trial.problem
    seqlen_q, seqlen_k = p.q.shape[2], p.k.shape[2]
    mask = p.key_padding_mask
    seen = visible(seqlen_q, seqlen_k, p.causal, trial.alignment, p.q.device, key_padding_mask=mask)
    if seen is None:
        return torch.ones(1, 1, seqlen_k, dtype=torch.bool, device=p.q.device)
    return seen[None] if seen.ndim == 2 else seen[:, 0]


def generator(trial: Trial) -> torch.Generator:
    """Return a generator, seeded by the case, for the numbers of this law's own."""
    return torch.Generator().manual_seed(trial.case.seed)


def means(trial: Trial) -> None:
    """Check that with q = 0 out is the mean of the integers that a row sees, and lse the logarithm of their number."""
    p = trial.problem
    if keys_may_overflow(blank(p.k, p.key_padding_mask), p.sm_scale, trial.arithmetic):
        return
    v = torch.randint(-8, 9, p.v.shape, generator=generator(trial), device="cpu").to(p.v)
    if (given := asked(trial, replace(p.with_values(v), q=torch.zeros_like(p.q)))) is None:
        return
    got = trial.forward(given)
    group, seen = p.heads_q // p.heads_kv, seen_keys(trial)[:, None].double()
    counts = seen.sum(-1, keepdim=True)

    def mean(x: torch.Tensor) -> torch.Tensor:
        """Return the mean of x over the keys that a row sees, shaped like out; sums of integers are exact."""
        return (seen @ x.double() / counts.clamp_min(1)).repeat_interleave(group, 1).expand_as(p.dout)

    expected = mean(v)
    bound, of_lse = mean_bounds(expected, mean(v.abs()), counts, p.k.shape[2], trial.arithmetic)
    claim = "q = 0 gives the mean of the values seen"
    checks = [Check(claim, "out", got.out, expected, bound, call=got.call)]
    if got.lse is not None:
        lse, of_lse = (x.expand_as(got.lse) for x in (counts[..., 0].log(), of_lse))
        claim = "q = 0 gives the logarithm of the number of keys seen"
        checks.append(Check(claim, "lse", got.lse, lse, of_lse, call=got.call))
    trial.hold(checks)


def one_hot(trial: Trial) -> None:
    """Check that a row whose weight is all on one key gets that key's row of v.

    Keys are distinct vectors of signs. A query is a multiple of one key, so large that each weight is 0 or 1, and 0 in
    the columns behind the signs. A v that is the first columns of k has its own numbers there, and else signs.
    """
    p = trial.problem
    seqlen_q, seqlen_k, head_dim = p.q.shape[2], p.k.shape[2], p.q.shape[3]
    bits = max(1, math.ceil(math.log2(seqlen_k)))
    active = 2 ** math.ceil(math.log2(bits))
    is_fit = 2.0**-5 <= abs(p.sm_scale) <= 2.0 or isinstance(trial.kernel.capabilities.sm_scale, tuple)
    scale = p.sm_scale if is_fit and p.sm_scale else default_scale(head_dim)
    # The factor is a power of two, so that the score of that key, and what is subtracted from it, is exact.
    factor = 2.0 ** math.ceil(math.log2(SCORE_GAP / abs(scale)))
    v = _on_tf32_grid(blank(settled(trial).problem.v, p.key_padding_mask))
    largest_v = v.double().abs().amax()
    scores_end = torch.finfo(p.q.dtype).max if trial.arithmetic.rounded_scores else math.inf
    if (
        active > head_dim
        or factor * active >= scores_end
        or factor > torch.finfo(p.q.dtype).max
        or largest_v * seqlen_k >= FLOAT32_SAFE
    ):
        return  # there are more keys than sign vectors, or something on the way may overflow
    index = torch.arange(seqlen_k, device="cpu")
    signs = 1.0 - 2.0 * (index[:, None] >> (torch.arange(active, device="cpu") % bits) & 1).float()
    keys = torch.nn.functional.pad(signs, (0, head_dim - active))
    seen = seen_keys(trial).cpu()
    counts = seen.sum(-1)
    # First a number is chosen among the keys that a row sees; then that becomes a number among all keys.
    chosen = torch.randint(2**31, (seqlen_q,), generator=generator(trial), device="cpu") % counts.clamp_min(1)
    number = seen.cumsum(-1).expand(-1, seqlen_q, -1).contiguous()
    chosen = torch.searchsorted(number, chosen[..., None] + 1)[..., 0].clamp_max(seqlen_k - 1)
    q = (keys[chosen] * math.copysign(factor, scale))[:, None].to(p.q).expand_as(p.q).contiguous()
    k = keys.to(p.k).expand_as(p.k).contiguous()
    if p.v_in_k:
        k[..., active : v.shape[3]] = v[..., active:]
        v = k[..., : v.shape[3]]
    if (given := asked(trial, replace(p, q=q, k=k, v=v, sm_scale=scale))) is None:
        return
    got = trial.forward(given)
    group = p.heads_q // p.heads_kv
    expected = v.take_along_dim(chosen[:, None, :, None].to(v.device), 2).repeat_interleave(group, 1).double()
    expected = torch.where(counts[:, None, :, None].to(v.device) > 0, expected, 0.0)
    bound = row_bound(expected, largest_v, seqlen_k, trial.arithmetic)
    claim = "a query that meets one key returns its row of v, bit for bit"
    trial.hold([Check(claim, "out", got.out, expected, bound, call=got.call)])


def _on_tf32_grid(v: torch.Tensor) -> torch.Tensor:
    """Return float32 values cut to 10 fraction bits, which no tf32 product rounds, and 16-bit values as they are."""
    if v.dtype != torch.float32:
        return v
    return (v.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
