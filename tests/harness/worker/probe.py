"""Calls of a kernel before any case is drawn: whether it can be run here, and returns what a kernel returns.

What keeps it from that is no matter of numbers, so it is told once, before every law finds it separately.
"""

import time
import traceback
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kernels.contract import AttentionKernel, Capabilities
from kernels.contract.signature import expected, keywords, rejects_keyword
from kernels.registry import PlainFunction
from reference import safe_softmax
from reference.bounds.accumulation import SAFETY
from strategies.case import LAYOUT_FIELDS, Case
from tests.harness.device.environments import why_not_here
from tests.harness.device.process_state import put_back
from tests.harness.device.sync import wait_for_device
from tests.harness.device.tuning import configured
from tests.harness.trial.outputs import WrongKind, departures, out_and_lse, shape_of_lse
from tests.harness.trial.trial import Trial, run_kernel

SEQLEN = 16
"""The length of both sequences, if the claims allow it."""

NEAR = 0.05
"""If the largest error is below this, an answer is the right one: entries are about 1, and have 16 bits."""

LONG_SECONDS = 5.0
"""Seconds after which a first call has taken so long that there is no second one."""

FRAMES_OF_OURS = 2
"""Frames of a first call and of ``PlainFunction``: a traceback with only these has none of the function called."""

DIMENSIONS = ("batch", "heads", "seqlen", "head_dim")
OTHER_ORDER = "(batch, seqlen, heads, head_dim)"
LSE_DIMENSIONS = {"bhn": "(batch, heads, seqlen)", "bnh": "(batch, seqlen, heads)"}
"""The dimensions of lse, by the claim ``lse_layout``."""


def probe(kernel: AttentionKernel, device: str) -> str | None:
    """Say in one line why a kernel can't be run here, or returns no answer; None if nothing of that is known.

    It is called for the simplest case that it claims, and if that does not take long also for gradients, if it claims
    any, and under a causal mask, since a launcher may ask what it runs on in each of its branches. An exception that
    says nothing of the machine or its packages is left to the laws, which report it with a case, unless the function
    cannot be called with these arguments at all.
    """
    case, start = simplest_case(kernel.capabilities), time.perf_counter()
    told = _first_call(kernel, case, device)
    if told is None and time.perf_counter() - start < LONG_SECONDS:
        told = _second_call(kernel, replace(case, causal=max(kernel.capabilities.causal)), device)
    return told


def _first_call(kernel: AttentionKernel, case: Case, device: str) -> str | None:
    """Say why the forward can't be called here or, of a plain function, what is wrong with what it returns."""
    trial = Trial(kernel, case, device, SAFETY)
    call, claims = trial.prepared(trial.problem), kernel.capabilities
    q, k, v = call.problem.q, call.problem.k, call.problem.v
    # A law tells what is wrong with the calls of a kernel that states its claims, with a case.
    is_declared = not isinstance(kernel.forward, PlainFunction)
    try:
        with put_back(set()), torch.no_grad(), configured(kernel.tuners, call.launch) as chosen:
            returned = kernel.forward(q, k, v, **call.problem.options, **chosen.passed)
        wait_for_device(device)
        out, lse = out_and_lse(returned)
    except Exception as error:
        told = None if is_declared else _of_the_call(error, keywords(claims))
        return told or why_not_here(error, q.device.type)
    if is_declared:
        return None
    wrong = wrong_form(out, lse, q, v, claims.lse_layout)
    # With unequal lengths, or keys in pages, tensors in another order do not fit together.
    may_be_swapped = claims.dense and q.shape[2] == k.shape[2]
    return wrong or (_wrong_order(out, q, k, v, claims, call.problem.options) if may_be_swapped else None)


def _second_call(kernel: AttentionKernel, case: Case, device: str) -> str | None:
    """Say why the forward, or the gradients that are claimed, can't be had here."""
    trial = Trial(kernel, case, device, SAFETY)
    call = trial.prepared(trial.problem)
    backward = call.has_gradients and kernel.capabilities.gives_gradients(causal=case.causal)
    try:
        with put_back(set()), configured(kernel.tuners, call.launch) as chosen:
            run_kernel(kernel, call.problem, chosen.passed, backward=backward)
        wait_for_device(device)
    except Exception as error:
        return why_not_here(error, trial.problem.q.device.type)
    return None


def simplest_case(capabilities: Capabilities) -> Case:
    """Return two heads of a short sequence, not causal if that is claimed, in the first claimed head_dim and dtype."""
    c = capabilities
    seqlen_k = c.length_from(max(SEQLEN, c.min_seqlen_k))
    most = seqlen_k if c.max_seqlen_q is None else c.max_seqlen_q - c.max_seqlen_q % c.seqlen_multiple
    may_differ = c.may_differ(causal=min(c.causal))
    seqlen_q = min(c.length_from(SEQLEN) if may_differ else seqlen_k, most)
    layouts: dict[str, Any] = dict.fromkeys(LAYOUT_FIELDS, c.layouts[0])
    return Case(
        heads_kv=2,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k if may_differ else seqlen_q,
        sm_scale=c.sm_scale[0] if isinstance(c.sm_scale, tuple) else None,
        ragged="none" if c.dense else c.ragged[0],
        **layouts,
        head_dim=c.head_dims[0],
        v_head_dim=c.v_head_dim[0],
        v_in_k=min(c.v_in_k),
        dtype=c.dtypes[0],
        causal=min(c.causal),
    )


def wrong_form(out: Tensor, lse: Tensor | None, q: Tensor, v: Tensor, lse_layout: str) -> str | None:
    """Say which of shape, dtype and device of out or lse is not what the contract says; None if all are.

    ``lse_layout`` is the claim of that name, by which lse is expected.
    """
    returned = {"out": out} if lse is None else {"out": out, "lse": lse}
    for name, what, actual, wanted in departures(returned, q, q, v, None, lse_layout):
        told = f"returned {name} of {what} {actual}, expected {wanted}"
        if what != "shape":
            return told
        return told + (_of_lse(actual, q, lse_layout) if name == "lse" else _explained(actual, wanted))
    return None


def _of_lse(actual: Any, q: Tensor, claimed: str) -> str:
    """Name the dimensions that the claim expects of lse, and the other claim if that is the one which fits."""
    other = next(layout for layout in LSE_DIMENSIONS if layout != claimed)
    fits = f": --claims lse_layout={other} fits it" if actual == shape_of_lse(q.shape, other) else ""
    return f", which is {LSE_DIMENSIONS[claimed]}{fits}"


def _explained(actual: Any, wanted: Any) -> str:
    """Name the dimensions, and say if heads and seqlen are in each other's place."""
    names = f", which is ({', '.join(DIMENSIONS[: len(wanted)])})"
    swapped = (wanted[0], wanted[2], wanted[1], *wanted[3:])
    return f"{names}: it has the shape for tensors of {OTHER_ORDER}" if actual == swapped else names


def _wrong_order(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, capabilities: Capabilities, options: dict[str, Any]
) -> str | None:
    """Whether the answer is wrong as it is, but right for tensors in which heads and seqlen are swapped."""
    options = {**options, "alignment": capabilities.causal_alignment}
    asked, _ = safe_softmax.forward(q, k, v, **options)
    swapped, _ = safe_softmax.forward(*(x.transpose(1, 2) for x in (q, k, v)), **options)
    if _error(out, asked) < NEAR or _error(out, swapped.transpose(1, 2)) >= NEAR:
        return None
    order = f"({', '.join(DIMENSIONS)})"
    return f"returned the answer for tensors of {OTHER_ORDER}, expected the one for {order}"


def _error(out: Tensor, answer: Tensor) -> float:
    return float((out.double() - answer).abs().max().nan_to_num(nan=torch.inf))


def _of_the_call(error: Exception, names: tuple[str, ...]) -> str | None:
    """Say what is wrong with the call if an exception is about that; None if it comes from within the function."""
    if isinstance(error, WrongKind):
        return str(error)
    if not isinstance(error, TypeError):
        return None
    raised_inside = len(traceback.extract_tb(error.__traceback__)) > FRAMES_OF_OURS
    if raised_inside and not rejects_keyword(error, names):
        return None
    text = " ".join(str(error).split())
    return f"expected a function {expected(names)}, but the call raised TypeError: {text:.200}"
