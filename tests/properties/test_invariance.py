"""Invariance: changes of the input that must not change the answer, or change it in a known way.

Permuting keys and values together, the batch, the heads; adding one vector to all keys (lse moves by
sm_scale * q.c); moving a power of two between q and sm_scale; changing keys that no or not every row sees; repeating
the key heads of a group; laying the same numbers out contiguously. Where the kernel claims that bits depend on
nothing but what a row sees, they must be the same bits. Catches wrong strides and head maps, state shared
between rows or heads, tiles treated unequally, masks that leak.
"""

from dataclasses import replace

import torch
from torch import Tensor

from reference.bounds.relations import only_exponents_change, sum_bound
from reference.heads import fold, unfold
from tests.harness.law import law
from tests.harness.trial.problem import Outputs
from tests.harness.trial.relate import (
    Allowed,
    Derived,
    agree,
    allowances,
    asked,
    settled,
    twice,
    with_v_apart,
)
from tests.harness.trial.trial import Trial

GRID = 2.0**-4
"""Keys that a vector is added to are first rounded to this grid and cut to [-4, 4], so that bfloat16 holds the sums."""


@law(key_padding=True, kinds=True, place=12, compares=("calls",))
def invariance(trial: Trial) -> None:
    """Check each change on one problem."""
    trial = settled(trial)
    p = trial.problem
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # nothing to permute
    base, allowed = trial.gradients(), allowances(trial, p, gradients=True)
    permuted_heads(trial, base, allowed)
    moved_power_of_two(trial, base, allowed)
    if not trial.arithmetic.rotates:  # else other keys are quantised together, or to other numbers
        permuted_keys(trial, base, allowed)
        shifted_keys(trial)
        unseen_keys(trial, base, allowed)
    repeated_heads(trial, base, allowed)
    masked_keys(trial, base, allowed)
    contiguous(trial, base, allowed)


def permuted_keys(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Reverse keys and values: without a mask, their order does not matter."""
    p = trial.problem
    if p.causal:
        return
    order = torch.arange(p.k.shape[2] - 1, -1, -1, device=p.k.device)
    if (given := asked(trial, p.with_keys(order))) is None:
        return
    got = trial.gradients(given)
    expected = {name: x[:, :, order] if name in ("dk", "dv") else x for name, x in base.named().items()}
    reversed_keys = Derived(base.call, expected, {"dk": "dk.flip(2)", "dv": "dv.flip(2)"})
    bound = twice(
        lambda: {name: x[:, :, order] if name in ("dk", "dv") else x for name, x in allowed().items()}
    )
    agree(trial, "reversing keys and values leaves {} as it was", got, reversed_keys, bound)


def permuted_heads(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Reverse the batch and the key heads, each with its query heads: the answers move and are otherwise the same."""
    p = trial.problem
    if p.k.shape[0] * p.k.shape[1] == 1:
        return

    def moved(x: Tensor) -> Tensor:
        return unfold(fold(x, p.heads_kv).flip(0, 1), x.shape[1])

    mask = None if p.key_padding_mask is None else p.key_padding_mask.flip(0)
    reversed_ = replace(p.with_both(moved), q=moved(p.q), dout=moved(p.dout), key_padding_mask=mask)
    if (given := asked(trial, reversed_)) is None:
        return
    got = trial.gradients(given)
    formula = f"{{}}.unflatten(1, ({p.heads_kv}, -1)).flip(0, 1).flatten(1, 2)"
    outputs = base.named()
    expected = Derived(
        base.call,
        {name: moved(x) for name, x in outputs.items()},
        {name: formula.format(name) for name in outputs},
    )
    bound = twice(lambda: {name: moved(x) for name, x in allowed().items()})
    agree(trial, "reversing batch and heads moves {} and changes nothing", got, expected, bound, exactly=True)


def shifted_keys(trial: Trial) -> None:
    """Add one vector c to all keys: softmax(q (k + c)) = softmax(q k), so out stays and lse moves by sm_scale * q.c.

    A kernel whose v is always the first columns of k is not asked, because c would be added to its values too.
    """
    p = with_v_apart(trial, trial.problem)
    if p.v_in_k:
        return
    # If keys are quantised, they become -1, 0 or 1, to which the shift can be added without rounding.
    grid, limit = (GRID, 4.0) if trial.arithmetic.quantisation is None else (1.0, 1.0)
    keys = ((p.k.float().clamp(-limit, limit) / grid).round() * grid).to(p.k.dtype)
    shift = torch.where(torch.arange(p.k.shape[3], device=p.k.device) % 3 == 0, 2.0, -1.0).to(p.k.dtype)
    low, high = (asked(trial, replace(p, k=k)) for k in (keys, keys + shift))
    if low is None or high is None:
        return
    base, got = trial.forward(low), trial.forward(high)
    bound = twice(allowances(trial, low, gradients=False), allowances(trial, high, gradients=False))
    expected = base.named()
    if base.lse is not None:
        expected["lse"] = base.lse.double() + p.sm_scale * (p.q.double() @ shift.double())
    product = f"q.double() @ torch.tensor({shift.tolist()}).to(q.device).double()"
    moved = f"lse.double() + {p.sm_scale} * ({product})"
    claim = "adding a vector to all keys changes {} as it should"
    agree(trial, claim, got, Derived(base.call, expected, {"lse": moved}), bound)


def moved_power_of_two(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Multiply q by 4 and divide sm_scale by 4: every number on the way keeps its bits apart from its exponent.

    If q has subnormal numbers, bits may differ: tensor cores align products by the exponents of their operands, and
    the exponent of a subnormal number does not change with it (``Arithmetic.smallest_operand``).
    """
    p = trial.problem
    given = asked(trial, replace(p, q=p.q * 4, sm_scale=p.sm_scale / 4))
    if given is None or not only_exponents_change(p.q, p.k, p.sm_scale, 4, trial.arithmetic):
        return
    size = p.q.double().abs()
    normal = not bool(((size > 0) & (size < torch.finfo(p.q.dtype).tiny)).any())
    got = trial.forward(given)
    claim = "a factor 4 moved from sm_scale to q changes no bit of {}"
    agree(trial, claim, got, base, twice(allowed), only=("out", "lse"), exactly=normal)


def unseen_keys(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Change keys and values that the first half of the rows does not see: the answers of these rows stay."""
    p = trial.problem
    rows, seqlen_q, seqlen_k = p.q.shape[2] // 2, p.q.shape[2], p.k.shape[2]
    offset = seqlen_k - seqlen_q if trial.alignment == "bottom_right" else 0
    first = max(0, rows + offset)
    if not p.causal or first >= seqlen_k or rows == 0:
        return
    other = p.with_both(torch.clone)
    other.k[:, :, first:] = 3.0
    other.v[:, :, first:] = -7.0
    if (given := asked(trial, other)) is None:
        return
    got = trial.forward(given)
    part = Outputs(got.out[:, :, :rows], got.lse if got.lse is None else got.lse[:, :, :rows], call=got.call)
    expected = {name: x[:, :, :rows] for name, x in base.named().items()}
    bound = twice(lambda: {name: x[:, :, :rows] for name, x in allowed().items()})
    claim = "keys that a row does not see leave its {} as it was"
    agree(trial, claim, part, Derived(base.call, expected), bound, exactly=True)


def masked_keys(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Change padded keys and their values: all answers stay."""
    p = trial.problem
    if p.key_padding_mask is None:
        return
    masked = ~p.key_padding_mask[:, None, :, None]
    other = p.with_both(lambda x: x.masked_fill(masked, 3.0))
    other.v.masked_fill_(masked, -7.0)
    claim = "keys that are padded leave {} as it was"
    if given := asked(trial, other):
        agree(trial, claim, trial.gradients(given), base, twice(allowed), exactly=True)


def repeated_heads(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Repeat the key head of each group for each query head: out stays, and dk and dv are the sums over the copies."""
    p = trial.problem
    group = p.heads_q // p.heads_kv
    if group == 1:
        return
    repeated = asked(trial, p.with_both(lambda x: x.repeat_interleave(group, 1)))
    if repeated is None:
        return
    got = trial.gradients(repeated)
    of_repeated = allowances(trial, repeated, gradients=True)

    def copies(x: Tensor) -> Tensor:
        return x.double().unflatten(1, (p.heads_kv, group))

    same = ("out", "lse", "dq")
    both = twice(lambda: {name: allowed()[name] for name in same}, of_repeated)
    # A row may take another place in its tile. On a CPU the products are those of its BLAS, which may round differently
    # at another place.
    exactly = trial.device != "cpu"
    claim = "repeating the key heads of a group leaves {} as it was"
    agree(trial, claim, got, base, both, only=same, exactly=exactly)
    if got.dk is not None and got.dv is not None:
        of_copies = {"dk": copies(got.dk), "dv": copies(got.dv)}
        sums = {name: x.sum(2) for name, x in of_copies.items()}

        def bound() -> dict[str, Tensor]:
            return {
                name: sum_bound([allowed()[name], copies(of_repeated()[name]).sum(2)], x.unbind(2))
                for name, x in of_copies.items()
            }

        formula = f"{{}}.double().unflatten(1, ({p.heads_kv}, {group})).sum(2)"
        expected = Derived(got.call, sums, {name: formula.format(name) for name in sums})
        agree(trial, "{} of a shared key head is the sum over its group", base, expected, bound)


def contiguous(trial: Trial, base: Outputs, allowed: Allowed) -> None:
    """Lay the same numbers out contiguously, and v in memory of its own if the kernel takes that: all answers stay."""
    p = with_v_apart(trial, trial.problem)
    dense = asked(
        trial, replace(p.with_both(Tensor.contiguous), q=p.q.contiguous(), dout=p.dout.contiguous())
    )
    if dense is None or (dense.is_like(trial.problem) and dense.v_in_k == trial.problem.v_in_k):
        return
    got = trial.gradients(dense)
    agree(trial, "{} of strided tensors is that of contiguous ones", base, got, twice(allowed), exactly=True)
