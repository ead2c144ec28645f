"""Comparison of two calls of a kernel, with allowances for the rounding errors between them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch
from torch import Tensor

from kernels.contract import LAYOUTS, OUTPUTS, can_be_ragged
from reference.bounds import Exact, ForwardBounds, backward_bounds, forward_bounds, fused_overflow
from reference.heads import fold, unfold
from strategies.layouts import changed_together, laid_out, lies_as, place, writable
from tests.harness.trial.judge import exact_of
from tests.harness.trial.problem import Outputs, Problem
from tests.harness.trial.trial import Check, Trial, gradients_given

Allowed = Callable[[], Mapping[str, Tensor]]
"""How far two results may be apart, by tensor. It is called only where they differ: bounds take longer than most calls.
"""


ALONE = "a sequence alone has the same {}"
"""The claim of laws that compare a sequence among others with a call for it alone, in a batch or in a ragged call."""


def allowances(trial: Trial, p: Problem, *, gradients: bool) -> Allowed:
    """Return rule-1 bounds of all outputs of a call, shaped like these; they do not depend on the kernel's own lse."""
    (allowed,) = allowances_of_each(trial, [p], gradients=gradients)
    return allowed


def allowances_of_each(trial: Trial, problems: Sequence[Problem], *, gradients: bool) -> list[Allowed]:
    """Return the allowances of calls whose problems differ in dout alone."""
    first = problems[0]

    @cache
    def of_forward() -> tuple[Exact, ForwardBounds]:
        e = exact_of(trial, first)
        return e, forward_bounds(e, trial.arithmetic).unknown_in(fused_overflow(e.row_max.abs(), e.v))

    @cache
    def of_call(at: int) -> Mapping[str, Tensor]:
        (e, forward), heads_q = of_forward(), first.heads_q
        found = {"out": unfold(forward.out, heads_q), "lse": unfold(forward.lse, heads_q)}
        if gradients:
            # A backward that reads the stored out and lse has their errors on top of its own.
            names = gradients_given(trial.kernel, first)
            bias_shape = first.rule.bias.shape if first.rule.bias is not None and "dbias" in names else None
            dout = fold(problems[at].dout, first.heads_kv).double()
            b = backward_bounds(e, dout, trial.arithmetic, forward=forward, bias_shape=bias_shape)
            found |= {"dq": unfold(b.dq_bound, heads_q), "dk": b.dk_bound, "dv": b.dv_bound}
            found |= {} if b.dbias_bound is None else {"dbias": b.dbias_bound}
        return found

    return [partial(of_call, at) for at in range(len(problems))]


def settled(trial: Trial) -> Trial:
    """Return the trial itself or, if inputs are quantised, one whose inputs pass quantisation unchanged.

    A change of the problem that regroups what is quantised together then changes nothing else. Every entry has 3
    significant bits, which each 8-bit format holds, and lies in [1/16, 16] or is 0: no scale makes it underflow.
    """
    if trial.arithmetic.quantisation is None:
        return trial
    other = copy.copy(trial)
    p, case = trial.problem, trial.case
    of_k, of_v = (partial(_settled, layout=layout) for layout in (case.k_layout, case.v_layout))
    k, v = changed_together(p.k, p.v, of_k, of_v)
    other.problem = replace(p, q=_settled(p.q, case.q_layout), k=k, v=v)
    return other


def _settled(x: Tensor, layout: str) -> Tensor:
    values = torch.where(x.abs() < 1 / 16, 0.0, x.float().clamp(-16.0, 16.0)).contiguous()
    # A float32 has 23 fraction bits, of which 2 stay.
    rounded = ((values.view(torch.int32) + (1 << 20)) & -(1 << 21)).view(torch.float32)
    return place(rounded.to(x.dtype), layout, device=x.device).tensor


def of_a_repeat(trial: Trial, allowed: Allowed) -> Allowed:
    """Return how far two runs of one call may be apart: not at all if the kernel claims to be deterministic."""
    claimed = trial.kernel.capabilities.deterministic
    return lambda: {name: _no_bit(x) if name in claimed else 2 * x for name, x in allowed().items()}


def _no_bit(bound: Tensor) -> Tensor:
    # Infinite allowances stay: where float32 may overflow, the results are not numbers to compare.
    return torch.where(bound.isposinf(), bound, 0.0)


def asked(trial: Trial, p: Problem) -> Problem | None:
    """Return a problem that a law has made as the kernel can be asked it: its tensors lie in claimed layouts.

    Returns None if the kernel does not claim to answer it: for its lengths, its heads, its sm_scale or its mask, or
    because no claimed layout can hold its numbers.
    """
    case, claims = trial.case, trial.kernel.capabilities
    changed = replace(
        case,
        batch=len(p.q),
        heads_kv=p.heads_kv,
        group=p.heads_q // max(1, p.heads_kv),
        seqlen_q=p.q.shape[2],
        seqlen_k=p.k.shape[2],
        v_in_k=p.v_in_k if p.v.numel() else case.v_in_k,
        causal=p.causal,
        sm_scale=case.sm_scale if p.sm_scale == case.scale else p.sm_scale,
    )
    can_be_made = changed.ragged == "none" or can_be_ragged(changed)
    is_claimed = changed == case or (can_be_made and claims.admits(changed))
    return in_claimed_layouts(trial, p) if is_claimed else None


def in_claimed_layouts(trial: Trial, p: Problem, *, is_written: bool = False) -> Problem | None:
    """Return a problem with a copy of each tensor that lies in no claimed layout; None if no such copy can be made.

    Views are left as they are if every layout is claimed, since any strides are then. If the kernel writes to k and v,
    ``is_written``, a copy of these lies in a layout in which no two entries share memory.
    """
    claimed, case = trial.kernel.capabilities.layouts, trial.case
    if set(LAYOUTS) <= set(claimed):
        return p
    of_keys = writable(claimed) if is_written else claimed
    k = laid_out(p.k, of_keys, case.k_layout)
    q, dout = laid_out(p.q, claimed, case.q_layout), laid_out(p.dout, claimed, case.dout_layout)
    v = k if p.v_in_k else laid_out(p.v, of_keys, case.v_layout)
    if q is None or k is None or v is None or dout is None:
        return None
    return replace(p, q=q, k=k, v=v[..., : p.v.shape[3]], dout=dout)


def lies_in_claimed_layout(trial: Trial, x: Tensor) -> bool:
    """Whether a tensor (batch, heads, seqlen, head_dim) lies as the kernel claims to take tensors."""
    claimed = trial.kernel.capabilities.layouts
    return set(LAYOUTS) <= set(claimed) or any(lies_as(x, layout) for layout in claimed)


def with_v_apart(trial: Trial, p: Problem) -> Problem:
    """Return a problem whose v has memory of its own, if the kernel takes that; else the problem as it is."""
    if not p.v_in_k or False not in trial.kernel.capabilities.v_in_k:
        return p
    v = laid_out(p.v.clone(), trial.kernel.capabilities.layouts, trial.case.k_layout)
    return p if v is None else replace(p, v=v)


def claimed_length(trial: Trial, length: int) -> int:
    """Return the longest length up to this one that is a multiple of what the kernel claims."""
    return length - length % trial.kernel.capabilities.seqlen_multiple


def bits_repeat(trial: Trial, tensor: str) -> bool:
    """Whether the kernel claims that the bits of a row depend only on what the row sees."""
    c = trial.kernel.capabilities
    return c.batch_invariant and tensor in c.deterministic


@dataclass(frozen=True)
class Derived:
    """Tensors made from those of a call, for comparison with another call; without a call, numbers to compare with.

    ``expressions`` say how they are made, in the names of the call's tensors, unless they are just its first rows. The
    stand-alone script of a failure uses them to make the tensors again.
    """

    call: int | None
    tensors: Mapping[str, Tensor]
    expressions: Mapping[str, str] = field(default_factory=dict)

    def named(self) -> Mapping[str, Tensor]:
        """Return the tensors by name, as ``Outputs.named`` does."""
        return self.tensors


def agree(
    trial: Trial,
    claim: str,
    actual: Outputs,
    expected: Outputs | Derived,
    allowed: Allowed,
    *,
    only: tuple[str, ...] = OUTPUTS,
    exactly: bool = False,
) -> None:
    """Compare the outputs of two calls: they must agree within ``allowed``, or bit for bit if that is claimed.

    Args:
        trial: the trial that made the calls.
        claim: what is claimed, with ``{}`` for the tensor.
        actual: outputs of one call.
        expected: outputs of the other call, or tensors made from them.
        allowed: how far apart correct results may be.
        only: the tensors that the law is about.
        exactly: whether the two must have the same bits in tensors for which ``bits_repeat``.
    """
    others = expected.named()
    expressions = expected.expressions if isinstance(expected, Derived) else {}
    pairs = {name: x for name, x in actual.named().items() if name in only and name in others}
    if all(_are_alike(x, others[name]) for name, x in pairs.items()):
        return
    checks, bounds = [], allowed()
    for name, value in pairs.items():
        maximum = torch.inf if name == "lse" else trial.arithmetic.output.maximum
        # Close to the largest number of the format, either of the two may have become infinite.
        other = others[name].double().clamp(-maximum, maximum)
        bound = bounds[name]
        if exactly and bits_repeat(trial, name):
            bound = _no_bit(bound)
        # Two calls that both return NaN agree; whether it should have been a number is for another law to say.
        bound = bound.masked_fill(value.isnan() & other.isnan(), torch.inf)
        checks.append(
            Check(
                claim=claim.format(name),
                tensor=name,
                actual=value,
                expected=other,
                bound=bound,
                maximum=maximum,
                call=actual.call,
                other=expected.call,
                other_expression=expressions.get(name, ""),
            )
        )
    trial.settle(checks)


def _are_alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors hold the same numbers, or NaN in the same places: then they agree within any bound."""
    return torch.allclose(x.double(), y.double(), rtol=0.0, atol=0.0, equal_nan=True)


def twice(allowed: Allowed, other: Allowed | None = None) -> Allowed:
    """Return the allowances of two calls added up."""

    def both() -> Mapping[str, Tensor]:
        first = allowed()
        second = first if other is None else other()
        return {name: bound + second[name] for name, bound in first.items()}

    return both
