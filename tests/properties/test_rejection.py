"""Rejection: what is not claimed is refused with an error, before anything is launched.

Tensors whose shapes or dtypes do not fit together must be refused, and so must a dtype, head_dim, group, length, mask
or scale that the kernel does not claim. The law applies to kernels that claim ``validates``. Catches kernels that read
past the end of a shorter tensor, or that give wrong answers to what they do not claim.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kernels.contract import DTYPES, Capabilities
from strategies.layouts import changed_together
from tests.harness.accelerators.lookup import accelerator_of
from tests.harness.device.memory import lacks_memory
from tests.harness.device.process_state import put_back
from tests.harness.law import law
from tests.harness.trial.problem import Problem
from tests.harness.trial.ragged_form import Prepared
from tests.harness.trial.relate import in_claimed_layouts, with_v_apart
from tests.harness.trial.trial import CannotRun, Trial, in_short, run_kernel


@law(needs="validates", on_device=True, place=5, stands_alone=True, expects_refusal=True)
def rejection(trial: Trial) -> None:
    """Check that each call raises an exception and leaves its inputs as they are."""
    p = with_v_apart(trial, trial.problem)
    if 0 in p.q.shape or 0 in p.k.shape:
        return  # slices of an empty tensor do not mismatch
    c = trial.kernel.capabilities
    for what, problem in mismatches(p) if c.dense else ():
        refuses(trial, what, problem, plain_call(trial))
    for what, problem in unclaimed(trial, p):
        refuses(trial, what, problem, trial.prepared)
    if not c.dense:
        refuses(trial, "a dense call, which is not claimed", p, plain_call(trial))
    if c.backward == "causal":
        p = replace(p, causal=False)
        refuses(
            trial, "gradients without a causal mask, which are not claimed", p, trial.prepared, backward=True
        )


def plain_call(trial: Trial) -> Callable[[Problem], Prepared]:
    """Return what makes a problem a plain call, whether or not the kernel claims to answer such calls."""
    return lambda p: Prepared(p, trial.launch, {})


def mismatches(p: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield calls that have no meaning, because their tensors do not fit together, each with words for it."""
    # No size is 1, because some libraries repeat such a tensor along the dimension, which gives the call a meaning.
    wide = torch.cat((p.k, p.k, p.k), -1)
    q = torch.cat((p.q, p.q), -1)
    yield "k with another head_dim than q", replace(p, q=q, dout=q, k=wide, v=wide)
    keys = torch.cat((p.k, p.k), 2)
    if not p.v_in_k:
        yield "v with another seqlen than k", replace(p, k=keys, v=torch.cat((p.v, p.v, p.v), 2))
    pair, three = (_repeated(p, 0, times) for times in (2, 3))
    yield "k with another batch than q", replace(pair, k=three.k, v=three.v)
    three_heads = p.with_both(partial(_heads, heads=3))
    heads = replace(three_heads, q=_heads(p.q, 2), dout=_heads(p.dout, 2))
    yield "heads_q that is no multiple of heads_kv", heads
    k, v = changed_together(p.k, p.v, partial(Tensor.to, dtype=_other(p.k.dtype)), lambda v: v)
    yield "k with another dtype than q", replace(p, k=k, v=v)
    yield "integer tensors", _mapped(p, partial(torch.ones_like, dtype=torch.int32))


def unclaimed(trial: Trial, p: Problem) -> Iterator[tuple[str, Problem]]:
    """Yield calls that have a meaning, but that the kernel does not claim, each with words for it."""
    c = trial.kernel.capabilities
    for dtype in DTYPES:
        if dtype not in c.dtypes:
            cast = partial(torch.Tensor.to, dtype=getattr(torch, dtype))
            yield f"dtype {dtype}, which is not claimed", _mapped(p, cast)
    next_head_dim = next(d for d in itertools.count(p.q.shape[3]) if d not in c.head_dims)
    for head_dim in {next_head_dim, max(c.head_dims) + 1}:
        wider = _mapped(p, partial(torch.nn.functional.pad, pad=(0, head_dim - p.q.shape[3])))
        yield f"head_dim {head_dim}, which is not claimed", wider
    if c.min_seqlen:
        short = _mapped(p, lambda x: x[:, :, : c.min_seqlen - 1])
        yield f"seqlen {c.min_seqlen - 1}, which is not claimed", short
    if c.min_seqlen_k > max(1, c.min_seqlen):
        few = c.min_seqlen_k - 1
        short = replace(p.with_both(lambda x: x[:, :, :few]), causal=False)
        yield f"seqlen_k {few}, which is not claimed", short
    if c.max_seqlen_q is not None:
        times = c.max_seqlen_q // p.q.shape[2] + 1
        many = replace(p, q=torch.cat([p.q] * times, 2), dout=torch.cat([p.dout] * times, 2), causal=False)
        yield f"seqlen_q {many.q.shape[2]}, which is not claimed", many
    if c.seqlens == "q_at_most_k" and c.max_seqlen_q is None:
        times = p.k.shape[2] // p.q.shape[2] + 1
        many = replace(p, q=torch.cat([p.q] * times, 2), dout=torch.cat([p.dout] * times, 2))
        yield "more queries than keys, which are not claimed", many
    if c.seqlen_multiple > 1:  # if one call had both wrong, a refusal could be for either
        wrong = f"that is no multiple of {c.seqlen_multiple}, which is not claimed"
        yield f"seqlen_q {wrong}", replace(p, q=p.q[:, :, :-1], dout=p.dout[:, :, :-1], causal=False)
        yield f"seqlen_k {wrong}", replace(p.with_both(lambda x: x[:, :, :-1]), causal=False)
    if not c.grouped_heads:
        twice = replace(p, q=torch.cat((p.q, p.q), 1), dout=torch.cat((p.dout, p.dout), 1))
        yield "grouped heads, which are not claimed", twice
    times = 3 if 2 * p.k.shape[2] == p.q.shape[2] else 2
    longer = p.with_both(lambda x: torch.cat([x] * times, 2))
    if not c.unequal_lengths:
        yield "unequal lengths, which are not claimed", replace(longer, causal=False)
    elif not c.causal_unequal_lengths and True in c.causal:
        yield "unequal lengths under a causal mask, which are not claimed", replace(longer, causal=True)
    for causal in (False, True):
        if causal not in c.causal:
            yield f"causal={causal}, which is not claimed", replace(p, causal=causal)
    for scale in unclaimed_scales(c, p.sm_scale):
        yield f"sm_scale {scale:g}, which is not claimed", replace(p, sm_scale=scale)


def unclaimed_scales(c: Capabilities, claimed: float) -> tuple[float, ...]:
    """Return values of sm_scale that a kernel does not claim, which takes ``claimed``."""
    if isinstance(c.sm_scale, tuple):
        return (2.0 * max(map(abs, c.sm_scale)) + 1.0,)
    others = {"any": (), "positive": (-1.0,), "default": (2.0 * claimed, -claimed)}
    return others[c.sm_scale]


def refuses(
    trial: Trial,
    what: str,
    p: Problem,
    prepared: Callable[[Problem], Prepared],
    *,
    backward: bool = False,
) -> None:
    """Check that a call raises an exception, other than one of the device, and does not write to its inputs.

    A call with ``backward`` may also return out alone, without any gradient.
    """
    if (laid_out := in_claimed_layouts(trial, p)) is None:
        return
    given = prepared(laid_out)
    problem = given.problem
    before = [x.clone() for x in (problem.q, problem.k, problem.v)]
    call, accelerator = trial.record(given, backward=backward), accelerator_of(trial.device)
    try:
        with put_back(set()):
            outputs = run_kernel(trial.kernel, problem, given.launch, backward=backward)
        accelerator.synchronize()
    except Exception as e:
        if lacks_memory(e):
            raise CannotRun(f"out of memory in the kernel: {in_short(e)}") from e
        if any(f"{name} error" in str(e) for name in {"CUDA", accelerator.type.upper()} - {"CPU"}):
            claim = f"{what}: refused before anything is launched, but: {e}"
            trial.fail(claim, kind="exception", call=call, detail=str(e))
    else:
        if not backward or outputs.dq is not None:
            trial.fail(f"{what}: refused with an error, but it was accepted", kind="accepted", call=call)
    after = (problem.q, problem.k, problem.v)
    if not all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(before, after, strict=True)):
        trial.fail(f"{what}: refused, but an input was written to", kind="memory", call=call)


def _heads(x: Tensor, heads: int) -> Tensor:
    return x[:, :1].repeat(1, heads, 1, 1)


def _repeated(p: Problem, dim: int, times: int) -> Problem:
    return _mapped(p, lambda x: torch.cat((x,) * times, dim))


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.float32 else torch.float32


def _mapped(p: Problem, change: Callable[[Tensor], Tensor]) -> Problem:
    return replace(p.with_both(change), q=change(p.q), dout=change(p.dout))
