"""Ring attention: sequences split over devices.

Liu, Zaharia & Abbeel, *Ring Attention with Blockwise Transformers for Near-Infinite Context* (2023), section 3
and algorithm 1. Each rank of a ring holds a shard of the queries and a shard of the keys and values. Queries
stay; key-value shards go round, one rank further at each step, and while a rank computes with one it receives
the next. After as many steps as there are ranks, every query has met every key.

Forward. Attention of a rank's queries to the shard s that it holds is FlashAttention-2, which gives out_s and
lse_s = log sum_{j in s} exp(s_ij), so that over all shards

    lse = log sum_s exp(lse_s)                       out = sum_s exp(lse_s - lse) out_s

which is one more online softmax, over shards: a running maximum m of lse_s, and relative to it the sum l of
exp(lse_s - m) and the sum acc of exp(lse_s - m) out_s. out_s stays in float32.

Backward. FlashAttention-2's, given out and lse of all keys, makes of a shard's keys what they contribute, so
dq = sum_s dq_s, while dk and dv of a shard are sums over the ranks: they travel with it, and a last step brings
them home. All sums are float32.

Rank r works at step t on shard (r - t) mod n, wherever the ranks are: ``forward`` and ``backward`` play all of
them in one process, ``ring_attention`` is one rank of a ``torch.distributed`` group. Both give the same bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.algorithms import flash_v2
from kernels.common.launching import check_settings
from kernels.common.tiles import check_runnable
from kernels.common.validation import check_gradient_inputs, check_inputs, default_scale
from kernels.contract import AttentionKernel, Capabilities, flash_arithmetic
from reference.arithmetic import Arithmetic

NEG_INF = float("-inf")


class Rank:
    """A rank's queries (batch, heads_q, its share of seqlen_q, head_dim), and what they gather from the shards.

    ``queries`` and ``keys`` are the lengths of all ranks' shards, in their order.
    """

    def __init__(
        self,
        number: int,
        q: Tensor,
        queries: Sequence[int],
        keys: Sequence[int],
        causal: bool,
        sm_scale: float,
    ) -> None:
        self.number, self.q, self.causal, self.sm_scale = number, q, causal, sm_scale
        # Row i of this rank sees key j of shard s where j <= i + offset[s]: masks are aligned bottom-right.
        first_row = sum(queries[:number]) + sum(keys) - sum(queries)
        self.offsets = [first_row - first_key for first_key in accumulate(keys, initial=0)]
        self.m, self.l = (q.new_full((*q.shape[:3], 1), x, dtype=torch.float32) for x in (NEG_INF, 0.0))
        self.acc = torch.zeros(q.shape, dtype=torch.float32, device=q.device)

    def parts(self, shard: int, seqlen_k: int) -> Iterator[tuple[slice, slice, bool]]:
        """Yield rows, keys that they see, and whether a causal mask aligned bottom-right cuts these.

        Under a causal mask, the rows that see some of a shard's keys come first, then those that see all of them.
        """
        rows = self.q.shape[2]
        if not self.causal:
            yield slice(0, rows), slice(0, seqlen_k), False
            return
        offset = self.offsets[shard]
        first, all_seen = (min(max(i, 0), rows) for i in (-offset, seqlen_k - offset))
        if first < all_seen:
            yield slice(first, all_seen), slice(0, all_seen + offset), True
        if all_seen < rows:
            yield slice(all_seen, rows), slice(0, seqlen_k), False

    def attend(self, shard: int, k: Tensor, v: Tensor) -> None:
        """Merge attention to the keys of a shard into the running results."""
        for rows, keys, causal in self.parts(shard, k.shape[2]):
            out, lse = flash_v2.forward(
                self.q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                causal=causal,
                sm_scale=self.sm_scale,
                out_dtype=torch.float32,
            )
            m, l, acc, lse = self.m[:, :, rows], self.l[:, :, rows], self.acc[:, :, rows], lse[..., None]
            m_new = torch.maximum(m, lse)
            # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is nan.
            shift = m_new.masked_fill(m_new == NEG_INF, 0.0)
            alpha, weight = (m - shift).exp(), (lse - shift).exp()
            acc.mul_(alpha).add_(weight * out)
            l.mul_(alpha).add_(weight)
            m.copy_(m_new)

    def results(self) -> tuple[Tensor, Tensor]:
        """Return out, like the queries, and lse (batch, heads_q, their length); 0 and -inf if a row saw no key."""
        out = self.acc / self.l.masked_fill(self.l == 0, 1.0)
        return out.to(self.q.dtype), (self.m + self.l.log()).squeeze(3)

    def begin_backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> None:
        """Take the gradient of out and what ``results`` returned; gather dq from here on."""
        self.dout, self.out, self.lse = dout, out, lse
        self.dq = torch.zeros_like(self.acc)

    def gradients(self, shard: int, k: Tensor, v: Tensor) -> Tensor:
        """Add a shard's part of dq; return these queries' part of its dk and dv, (2, batch, heads, keys, head_dim)."""
        dk_dv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
        for rows, keys, causal in self.parts(shard, k.shape[2]):
            dq, *parts = flash_v2.backward(
                self.dout[:, :, rows],
                self.q[:, :, rows],
                k[:, :, keys],
                v[:, :, keys],
                self.out[:, :, rows],
                self.lse[:, :, rows],
                causal=causal,
                sm_scale=self.sm_scale,
                grad_dtype=torch.float32,
            )
            self.dq[:, :, rows] += dq
            dk_dv[:, :, :, keys] += torch.stack(parts)
        return dk_dv


# All ranks in one process.

LAUNCH: Mapping[str, tuple[Any, ...]] = {"shards": (2, 1, 3, 4)}
"""Launch settings: the number of ranks, all of which run in one process."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, shards: int = 2
) -> tuple[Tensor, Tensor]:
    """Return attention of q (batch, heads_q, seqlen_q, head_dim) to k and v (batch, heads_kv, seqlen_k, head_dim).

    Both sequences are split into ``shards`` runs that differ by one row at most. Inputs, results and errors are
    those of ``flash_v2.forward``.
    """
    ranks = _ranks(q, k, v, causal, sm_scale, shards)
    for rank, shard, k_shard, v_shard in _rounds(ranks, k, v):
        rank.attend(shard, k_shard, v_shard)
    outs, lses = zip(*(rank.results() for rank in ranks), strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    sm_scale: float,
    shards: int = 2,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients (dq, dk, dv) of ``sum(dout * forward(q, k, v)[0])``, like q, k and v and contiguous.

    Arguments, results and errors are those of ``flash_v2.backward``.
    """
    ranks = _ranks(q, k, v, causal, sm_scale, shards)
    check_gradient_inputs(dout, q, out, lse)
    for rank, *of_rank in zip(ranks, *(x.tensor_split(shards, 2) for x in (dout, out, lse)), strict=True):
        rank.begin_backward(*of_rank)
    dk_dv: dict[int, Tensor] = {}
    for rank, shard, k_shard, v_shard in _rounds(ranks, k, v):
        part = rank.gradients(shard, k_shard, v_shard)
        dk_dv[shard] = part if shard not in dk_dv else dk_dv[shard] + part
    dk, dv = torch.cat([dk_dv[shard] for shard in range(shards)], 3).to(k.dtype)
    return torch.cat([rank.dq for rank in ranks], 2).to(q.dtype), dk, dv


def _ranks(q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, shards: int) -> list[Rank]:
    check_settings({"shards": shards}, LAUNCH)
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    parts = q.tensor_split(shards, 2)
    queries, keys = ([x.shape[2] for x in split] for split in (parts, k.tensor_split(shards, 2)))
    return [Rank(number, part, queries, keys, causal, sm_scale) for number, part in enumerate(parts)]


def _rounds(ranks: list[Rank], k: Tensor, v: Tensor) -> Iterator[tuple[Rank, int, Tensor, Tensor]]:
    """Yield every rank with every shard, in the order of a ring."""
    n = len(ranks)
    shards = list(zip(k.tensor_split(n, 2), v.tensor_split(n, 2), strict=True))
    for step in range(n):
        for rank in ranks:
            shard = (rank.number - step) % n
            yield rank, shard, *shards[shard]


# One rank of several processes.


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    sm_scale: float | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over the sequences that the ranks of ``group`` hold between them, one shard each.

    q (batch, heads_q, this rank's share of seqlen_q, head_dim), k and v (batch, heads_kv, its share of seqlen_k,
    head_dim). Rank r has the rows after those of rank r - 1; shares may differ. sm_scale is 1 / sqrt(head_dim)
    unless given. All ranks must call it. gloo moves tensors on the CPU, NCCL those on GPUs.

    Returns this rank's out, like q, and lse (batch, heads_q, its share of seqlen_q) float32. out is
    differentiable in q, k and v, if all ranks go backward; lse has no gradient. Errors are those of
    ``flash_v2.forward``; ranks whose arguments do not fit together hang or fail as their backend does.
    """
    sm_scale = default_scale(q) if sm_scale is None else sm_scale
    check_inputs(q, k, v, causal, sm_scale)
    check_runnable(q)
    out, lse = _RingAttention.apply(q, k, v, causal, sm_scale, group)
    return out, lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, sm_scale: float, group: Any
    ) -> tuple[Tensor, Tensor]:
        ring = _Ring(group, q, k)
        rank = Rank(ring.number, q, ring.queries, ring.keys, causal, sm_scale)
        for shard, k_shard, v_shard in ring.shards(k, v):
            rank.attend(shard, k_shard, v_shard)
        out, lse = rank.results()
        ctx.ring, ctx.rank = ring, rank
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        ring, rank = ctx.ring, ctx.rank
        rank.q, k, v, out, lse = ctx.saved_tensors  # which raises where one was modified
        rank.begin_backward(dout if dout.stride(3) == 1 else dout.contiguous(), out, lse)
        arrive: Callable[[], Tensor] | None = None
        for shard, k_shard, v_shard in ring.shards(k, v):
            part = rank.gradients(shard, k_shard, v_shard)
            # The sums so far come from the rank before, which was at this shard a step ago.
            dk_dv = part if arrive is None else arrive() + part
            arrive = ring.pass_on(dk_dv, (shard - 1) % ring.size)
        assert arrive is not None  # a ring has a rank
        dk, dv = arrive().to(k.dtype)
        return rank.dq.to(dout.dtype), dk, dv, None, None, None


class _Ring:
    """This process's place in the ring, and the lengths of all ranks' shards."""

    def __init__(self, group: Any, q: Tensor, k: Tensor) -> None:
        self.group, self.number, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        mine = torch.tensor([q.shape[2], k.shape[2]], device=q.device)
        lengths = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(lengths, mine, group=group)
        self.queries, self.keys = zip(*(pair.tolist() for pair in lengths), strict=True)

    def shards(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield every shard, this rank's first; while the caller works with one, the next is on its way."""
        held = torch.stack((k, v))
        for step in range(self.size):
            shard = (self.number - step) % self.size
            arrive = self.pass_on(held, (shard - 1) % self.size) if step + 1 < self.size else None
            yield shard, *held
            held = held if arrive is None else arrive()

    def pass_on(self, sent: Tensor, shard: int) -> Callable[[], Tensor]:
        """Begin to send a tensor (2, batch, heads, keys, head_dim) to the next rank.

        Returns a function that waits for the tensor of ``shard`` from the rank before, and returns it.
        """
        if self.size == 1:
            return lambda: sent
        received = sent.new_empty((*sent.shape[:3], self.keys[shard], sent.shape[4]))
        to, source = (self._global((self.number + step) % self.size) for step in (1, -1))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, to, self.group),
                dist.P2POp(dist.irecv, received, source, self.group),
            ]
        )

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return received

        return arrived

    def _global(self, number: int) -> int:
        return number if self.group is None else dist.get_global_rank(self.group, number)


def _arithmetic(dtype: str, device: str, launch: Mapping[str, Any]) -> Arithmetic:
    """FlashAttention-2's for each shard; shards are merged in float32, and torch's cast rounds to nearest."""
    keys = flash_v2.most_keys_in_a_tile(dtype, device, {})
    return replace(flash_arithmetic(dtype, device, launch), tile_max=keys, merged=launch.get("shards", 2))


KERNEL = AttentionKernel(
    name="ring",
    forward=forward,
    backward=backward,
    capabilities=Capabilities(head_dims=tuple(range(1, 257)), launch=LAUNCH, arithmetic=_arithmetic),
)
