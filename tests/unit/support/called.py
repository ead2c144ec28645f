"""Plain functions that are wrong if they are called in one way, and sound ones that answer or refuse it.

Each wrong one differs from ``Attention``, which is right, in one step. The report that it follows stands with it.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.contract import AttentionKernel
from kernels.registry import load

Saved = dict[str, Any]


def expanded(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each query head, in float32."""
    return x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)


def scores_of(q: Tensor, k: Tensor, causal: bool, sm_scale: float, bias: Tensor | None = None) -> Tensor:
    """Return scores in float32, -inf where a causal mask hides the key."""
    scores = q.float() @ expanded(k, q).mT * sm_scale
    scores = scores if bias is None else scores + bias.float()
    if not causal:
        return scores
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    return scores.masked_fill(torch.arange(k.shape[2], device=q.device) > rows, -torch.inf)


def lse_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the natural logarithm of the sum of exponentials, -inf in rows that see nothing."""
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
    if not scores.shape[-1]:
        return scores.new_full(scores.shape[:3], -torch.inf)
    return torch.logsumexp(scores, -1)


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """Return the softmax, 0 in rows that see no key."""
    return torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])


@dataclass
class Attention:
    """Attention with gradients by formulas. Wrong functions replace a step of it.

    ``needs`` says which of q, k, v, bias and sinks require grad.
    """

    kept: Saved = field(default_factory=dict)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        sm_scale: float,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = _Function.apply(self, causal, sm_scale, q, k, v, bias, sinks)
        return out, lse

    def there(self, ctx: Any, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        """Return out and lse of (q, k, v, bias, sinks), and save what the backward needs."""
        q, k, v, bias, sinks = tensors
        causal, sm_scale = ctx.options
        scores = scores_of(q, k, causal, sm_scale, bias)
        lse = lse_of(scores, sinks)
        out = (weights_of(scores, lse) @ expanded(v, q)).to(q.dtype)
        self.save(ctx, tensors, out, lse)
        return out, lse

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        """Save what the backward needs."""
        ctx.save_for_backward(*tensors, out, lse)

    def saved(self, ctx: Any) -> Sequence[Any]:
        """Return q, k, v, bias, sinks, out and lse."""
        found: Sequence[Any] = ctx.saved_tensors
        return found

    def dout_of(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return dout as the kernel reads it."""
        return dout

    def delta_of(self, delta: Tensor, dlse: Tensor | None) -> Tensor:
        """Return delta with the gradient of lse taken into account."""
        return delta if dlse is None else delta - dlse[..., None]

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of q, k, v, bias and sinks that autograd is given."""
        return [x if need else None for x, need in zip(gradients, needs, strict=True)]

    def back(self, ctx: Any, dout: Tensor, dlse: Tensor | None, needs: Sequence[bool]) -> list[Tensor | None]:
        """Return the gradients of q, k, v, bias and sinks."""
        q, k, v, bias, sinks, out, lse = self.saved(ctx)
        causal, sm_scale = ctx.options
        dout = self.dout_of(dout, out).float()
        delta = (dout * out.float()).sum(-1, keepdim=True)
        p = weights_of(scores_of(q, k, causal, sm_scale, bias), lse)
        delta = self.delta_of(delta, dlse)
        ds = p * (dout @ expanded(v, q).mT - delta)

        def of_groups(x: Tensor) -> Tensor:
            return x.unflatten(1, (k.shape[1], -1)).sum(2)

        dq = (ds @ expanded(k, q) * sm_scale).to(q.dtype)
        dk = (of_groups(ds.mT @ q.float()) * sm_scale).to(k.dtype)
        dv = of_groups(p.mT @ dout).to(v.dtype)
        dbias = dsinks = None
        if bias is not None:
            shared = [dim for dim in range(3) if bias.shape[dim] == 1]
            dbias = (ds.sum(shared, keepdim=True) if shared else ds).to(bias.dtype)
        if sinks is not None:
            of_sink = torch.exp(sinks.view(1, -1, 1) - lse) * delta[..., 0]
            dsinks = -of_sink.masked_fill(p.sum(-1) == 0, 0.0).sum((0, 2))
        return self.returned([dq, dk, dv, dbias, dsinks], needs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, kernel, causal, sm_scale, *tensors):
        ctx.kernel, ctx.options = kernel, (causal, sm_scale)
        ctx.set_materialize_grads(False)
        return kernel.there(ctx, tensors)

    @staticmethod
    def backward(ctx, dout, dlse):
        if dout is None:
            return (None,) * 8
        return None, None, None, *ctx.kernel.back(ctx, dout, dlse, ctx.needs_input_grad[3:])


class _DqOfK(Attention):
    """dS is made only if k needs a gradient, although dq is made of it too: q alone gets 0."""

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        dq, *others = gradients
        assert dq is not None
        return super().returned([dq if needs[1] else torch.zeros_like(dq), *others], needs)


class _AsksQ(Attention):
    """The path with gradients is taken if q requires grad: k alone is not asked, and its gradient is lost."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() and q.requires_grad:
            return super().__call__(q, k, v, **options)
        with torch.no_grad():
            return super().__call__(q, k, v, **options)


class _NeedsOfNext(Attention):
    """The flag of k is taken for that of v, as the flags are counted from another argument: dv is None."""

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        return super().returned(gradients, [needs[0], needs[1], needs[1], *needs[3:]])


class _BiasOfQ(Attention):
    """dbias is made by the kernel of dq, which is left out if q needs no gradient."""

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        return super().returned(gradients, [*needs[:3], needs[3] and needs[0], needs[4]])


class _SinksByOut(Attention):
    """The gradient of sinks has delta of the forward's float32 sum without its sign."""

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        *others, dsinks = gradients
        return super().returned([*others, None if dsinks is None else -dsinks], needs)


class _SinksLeftOut(Attention):
    """Without q, k or v that need a gradient the backward returns at once: sinks alone get None."""

    def returned(self, gradients: list[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
        return super().returned(gradients, needs) if any(needs[:3]) else [None] * 5


class _OneWorkspace(Attention):
    """lse stays in a workspace of the kernel, where the next forward of this shape writes its own."""

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        workspace = self.kept.setdefault(str((lse.shape, lse.device)), torch.empty_like(lse))
        ctx.workspace = workspace.copy_(lse)
        ctx.save_for_backward(*tensors, out)

    def saved(self, ctx: Any) -> Sequence[Any]:
        return *ctx.saved_tensors, ctx.workspace


class _LastContext(Attention):
    """What the backward needs is kept by the function and not by the call: the last forward's is taken."""

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        self.kept["last"] = (*tensors, out, lse)

    def saved(self, ctx: Any) -> Sequence[Any]:
        last: Sequence[Any] = self.kept["last"]
        return last


class _ScaleOfLast(Attention):
    """The scale is kept by the function and not by the call, so that a backward has that of the last forward."""

    def there(self, ctx: Any, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        self.kept["scale"] = ctx.options[1]
        return super().there(ctx, tensors)

    def back(self, ctx: Any, *arguments: Any) -> list[Tensor | None]:
        ctx.options = ctx.options[0], self.kept["scale"]
        return super().back(ctx, *arguments)


class _Accumulates(Attention):
    """dq is added by atomics to a buffer that the forward has cleared: a second backward adds to the first."""

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        super().save(ctx, tensors, out, lse)
        ctx.buffer = torch.zeros_like(tensors[0])

    def back(self, ctx: Any, *arguments: Any) -> list[Tensor | None]:
        dq, *others = super().back(ctx, *arguments)
        return [None if dq is None else ctx.buffer.add_(dq).clone(), *others]


class _StridesOfOut(Attention):
    """A dout without strides is read by those of out; what lies behind its memory counts as 1e4."""

    def dout_of(self, dout: Tensor, out: Tensor) -> Tensor:
        if any(dout.stride()) or not dout.numel():
            return dout
        memory = torch.full((out.numel(),), 1e4, dtype=dout.dtype, device=dout.device)
        size = min(
            len(memory), dout.untyped_storage().nbytes() // dout.element_size() - dout.storage_offset()
        )
        memory[:size] = dout.as_strided((size,), (1,))
        return memory.as_strided(out.shape, out.contiguous().stride())


class _TakenForRowsLast(Attention):
    """A dout whose last stride is that of rows is read as it lies in memory, rows for columns."""

    def dout_of(self, dout: Tensor, out: Tensor) -> Tensor:
        return dout.mT.reshape(dout.shape) if dout.mT.is_contiguous() else dout


class _EveryEntry(Attention):
    """The last stride of dout is taken to be 1: of a strided one the entries between are read."""

    def dout_of(self, dout: Tensor, out: Tensor) -> Tensor:
        if dout.stride(-1) != 2:
            return dout
        return dout.as_strided(dout.shape, (*dout.stride()[:3], 1))


class _FirstOfCheckpoint(Attention):
    """Inputs that require grad under no_grad are taken for the first pass of a checkpoint, whose out nobody divides."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = super().__call__(q, k, v, **options)
        if q.requires_grad and not torch.is_grad_enabled():
            return out + out, lse
        return out, lse


class _MaskOfInference(Attention):
    """The positions for the causal mask are kept from call to call, from inference mode too."""

    def there(self, ctx: Any, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        q = tensors[0]
        positions = self.kept.setdefault(q.shape[2], torch.ones(q.shape[2], 1, device=q.device))
        out, lse = super().there(ctx, [q.mul(positions).to(q.dtype), *tensors[1:]])
        ctx.save_for_backward(*ctx.to_save, positions) if ctx.to_save else None
        return out, lse

    def saved(self, ctx: Any) -> Sequence[Any]:
        return super().saved(ctx)[:-1]


class _ScratchOfBoth(Attention):
    """The backward clears a buffer and adds dq to it. Under checkpointing it calls a forward, which writes there."""

    def there(self, ctx: Any, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        out, lse = super().there(ctx, tensors)
        self.kept["scratch"] = tensors[0].float().clone()
        return out, lse

    def back(self, ctx: Any, *arguments: Any) -> list[Tensor | None]:
        self.kept["scratch"].zero_()
        dq, *others = super().back(ctx, *arguments)
        return [None if dq is None else (self.kept["scratch"] + dq).to(dq.dtype), *others]


class _NoGradientOfLse(Attention):
    """The gradient of lse is left out, without an error."""

    def delta_of(self, delta: Tensor, dlse: Tensor | None) -> Tensor:
        return delta


class _OutOnContext(Attention):
    """out is kept as an attribute of the context, by which autograd does not notice that it was written to."""

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        ctx.out = out
        ctx.save_for_backward(*tensors, lse)

    def saved(self, ctx: Any) -> Sequence[Any]:
        *tensors, lse = ctx.saved_tensors
        return *tensors, ctx.out, lse


class _OfOneThread(Attention):
    """A factor is set for the thread that imports the module; on another thread it is the default."""

    factor = threading.local()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        return super().__call__(q, k * getattr(self.factor, "value", 0.5), v, **options)


_OfOneThread.factor.value = 1.0


class _Batched(torch.autograd.Function):
    """Attention that ``torch.func.vmap`` may transform: it folds its dimension into the batch."""

    @staticmethod
    def forward(q, k, v, causal, sm_scale, in_order):
        scores = scores_of(q, k, causal, sm_scale)
        lse = lse_of(scores, None)
        return (weights_of(scores, lse) @ expanded(v, q)).to(q.dtype), lse

    @staticmethod
    def setup_context(ctx, inputs, output):
        q, k, v, *ctx.options, _ = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(q, k, v, None, None, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, _):
        gradients = Attention().back(ctx, dout, None, (*ctx.needs_input_grad[:3], False, False))
        return *gradients[:3], None, None, None

    @staticmethod
    def vmap(info, in_dims, q, k, v, causal, sm_scale, in_order):
        number = info.batch_size
        batched = [
            (x.movedim(dim, 0) if dim is not None else x.expand(number, *x.shape)).flatten(0, 1)
            for x, dim in zip((q, k, v), in_dims, strict=False)
        ]
        found = _Batched.apply(*batched, causal, sm_scale, in_order)
        if in_order:
            return tuple(x.unflatten(0, (number, -1)) for x in found), (0, 0)
        return tuple(x.unflatten(0, (-1, number)).transpose(0, 1) for x in found), (0, 0)


def batched(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> tuple[Tensor, Tensor]:
    """Sound: a function with a rule for vmap, whose backward is no part of a graph, and whose lse has no gradient."""
    found: tuple[Tensor, Tensor] = _Batched.apply(q, k, v, causal, sm_scale, True)
    return found


def batched_out_of_order(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Under vmap, the dimension that was folded into the batch is taken apart in the wrong order."""
    found: tuple[Tensor, Tensor] = _Batched.apply(q, k, v, causal, sm_scale, False)
    return found


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sound: gradients by autograd's own formulas, through lse and of sinks too, whatever autocast says."""
    with torch.autocast(q.device.type, enabled=False):
        scores = scores_of(q, k, causal, sm_scale, bias)
        if sinks is not None:
            sink = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            whole = torch.cat([scores, sink], -1)
        else:
            whole = scores
        is_blind = scores.isneginf().all(-1, keepdim=True)
        if not whole.shape[-1]:
            return torch.zeros_like(q[..., :1] @ v.sum(2, keepdim=True)[:, :1]), lse_of(scores, None)
        whole = whole.masked_fill(is_blind, 0.0)
        lse = torch.logsumexp(whole, -1)
        p = torch.softmax(whole, -1)[..., : scores.shape[-1]].masked_fill(is_blind, 0.0)
        return (p @ expanded(v, q)).to(q.dtype), lse.masked_fill(is_blind[..., 0], -torch.inf)


def eager_under_autocast(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """Under autocast the products of what was cast to float32 are cast back."""
    scores = scores_of(q, k, causal, sm_scale)
    lse = lse_of(scores.float(), None)
    return (weights_of(scores, lse) @ expanded(v, q)).to(q.dtype), lse.detach()


def lean(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Sound: without gradients if no input asks for them, v itself of a single key, and a checkpoint else."""
    if k.shape[2] == 1 and not causal:
        return expanded(v, q).expand(*q.shape[:3], -1).to(q.dtype).clone()
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        with torch.no_grad():
            return eager(q, k, v, causal=causal, sm_scale=sm_scale)[0]
    return eager(q, k, v, causal=causal, sm_scale=sm_scale)[0]


class _OfOneBackward(Attention):
    """Sound: what is saved is dropped by the first backward, so that a second one is an error."""

    def save(self, ctx: Any, tensors: Sequence[Any], out: Tensor, lse: Tensor) -> None:
        ctx.own = [*tensors, out.clone(), lse]

    def saved(self, ctx: Any) -> Sequence[Any]:
        own, ctx.own = ctx.own, None
        if own is None:
            raise RuntimeError("what was saved is gone")
        found: Sequence[Any] = own
        return found


class _OfInference(Attention):
    """Sound: positions are kept as well, but as a copy that autograd can use."""

    def there(self, ctx: Any, tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):
            self.kept.setdefault(tensors[0].shape[2], torch.ones(tensors[0].shape[2], 1))
        return super().there(ctx, tensors)


class _CopiesDout(Attention):
    """Sound: whatever dout is handed down, a contiguous copy of it is read."""

    def dout_of(self, dout: Tensor, out: Tensor) -> Tensor:
        return dout.contiguous()


MODULE = __name__
WITH_BIAS = ("bias=all", "bias_gradient=true")
WITH_SINKS = ("sinks=true", "sinks_gradient=true")


@dataclass(frozen=True)
class Wrong:
    """A wrong function: the one way that shows it, the claims that are needed, and the report that it follows."""

    way: str
    claims: tuple[str, ...] = ()
    source: str = ""


attention, one_backward, of_inference, copies_dout = (
    Attention(),
    _OfOneBackward(),
    _OfInference(),
    _CopiesDout(),
)
dq_of_k, asks_q, needs_of_next, bias_of_q = _DqOfK(), _AsksQ(), _NeedsOfNext(), _BiasOfQ()
sinks_by_out, sinks_left_out, no_gradient_of_lse = _SinksByOut(), _SinksLeftOut(), _NoGradientOfLse()
one_workspace, last_context, scale_of_last, accumulates, out_on_context = (
    _OneWorkspace(),
    _LastContext(),
    _ScaleOfLast(),
    _Accumulates(),
    _OutOnContext(),
)
strides_of_out, taken_for_rows_last, every_entry = _StridesOfOut(), _TakenForRowsLast(), _EveryEntry()
first_of_checkpoint, mask_of_inference, scratch_of_both, of_one_thread = (
    _FirstOfCheckpoint(),
    _MaskOfInference(),
    _ScratchOfBoth(),
    _OfOneThread(),
)

SOUND: Mapping[str, tuple[str, ...]] = {
    "attention": (*WITH_BIAS, *WITH_SINKS, "lse_gradient=true"),
    "eager": (*WITH_BIAS, *WITH_SINKS, "lse_gradient=true", "autocast=true"),
    "batched": (),
    "lean": (),
    "one_backward": (),
    "of_inference": (),
    "copies_dout": (),
}
"""Sound functions with what they claim."""
WRONG: Mapping[str, Wrong] = {
    "dq_of_k": Wrong("q_alone"),
    "asks_q": Wrong("k_alone"),
    "needs_of_next": Wrong("v_alone"),
    "bias_of_q": Wrong("bias_alone", WITH_BIAS, "https://github.com/pytorch/pytorch/pull/188302"),
    "sinks_by_out": Wrong(
        "sinks_too", WITH_SINKS, "https://github.com/Dao-AILab/flash-attention/issues/1973"
    ),
    "sinks_left_out": Wrong("sinks_alone", WITH_SINKS, "https://github.com/pytorch/pytorch/pull/188302"),
    "one_workspace": Wrong("two_forwards", (), "https://github.com/flashinfer-ai/flashinfer/pull/4481"),
    "last_context": Wrong("two_forwards"),
    "scale_of_last": Wrong("other_scale"),
    "accumulates": Wrong("second_backward"),
    "strides_of_out": Wrong("dout_of_sum", (), "https://github.com/ROCm/aotriton/issues/236"),
    "taken_for_rows_last": Wrong(
        "dout_transposed", (), "https://github.com/Dao-AILab/flash-attention/issues/355"
    ),
    "every_entry": Wrong("dout_strided", (), "https://github.com/fla-org/flash-linear-attention/pull/1139"),
    "first_of_checkpoint": Wrong("no_grad"),
    "mask_of_inference": Wrong("inference_mode", (), "https://github.com/Dao-AILab/flash-attention/pull/299"),
    "eager_under_autocast": Wrong(
        "autocast", ("autocast=true",), "https://github.com/SHI-Labs/NATTEN/pull/94"
    ),
    "scratch_of_both": Wrong("checkpoint"),
    "batched_out_of_order": Wrong("vmap", (), "https://github.com/pytorch/pytorch/pull/103159"),
    "no_gradient_of_lse": Wrong(
        "through_lse", ("lse_gradient=true",), "https://github.com/Dao-AILab/flash-attention/issues/1817"
    ),
    "out_on_context": Wrong("out_overwritten", (), "https://github.com/pytorch/pytorch/issues/81223"),
    "of_one_thread": Wrong("another_thread"),
}
"""Wrong functions; each is right in a plain call."""


def kernel(name: str, claims: Sequence[str]) -> AttentionKernel:
    """Return a function as a kernel with the default claims of plain functions, and with these."""
    return load(f"{MODULE}:{name}", claims)


def never_trained(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """Sound: it has no gradients in any call, so that none are lost."""
    with torch.no_grad():
        return eager(q, k, v, causal=causal, sm_scale=sm_scale)[0]


def long_rows_trained(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float) -> Tensor:
    """A kernel for up to 16 queries, whose results are in no graph, is taken whether gradients are needed or not."""
    with torch.set_grad_enabled(q.shape[2] > 16 and torch.is_grad_enabled()):
        return eager(q, k, v, causal=causal, sm_scale=sm_scale)[0]
