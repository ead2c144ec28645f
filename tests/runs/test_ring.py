"""Ring attention over several processes gives the same bits as the same ring in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from kernels.algorithms import flash_v2, ring
from tests.harness.interpreter.installation import repair_interpreter
from tests.unit.support.calling import DEVICE

BATCH, HEADS_KV, GROUP, HEAD_DIM = 2, 1, 2, 16
CASES = {
    2: (((21, 21), (21, 21), True, torch.bfloat16), ((9, 30), (30, 5), False, torch.float32)),
    3: (((11, 11, 11), (11, 11, 11), True, torch.float32), ((4, 0, 17), (0, 9, 20), True, torch.float32)),
    4: (((16,) * 4, (16,) * 4, True, torch.bfloat16), ((7, 1, 0, 13), (5, 0, 9, 2), False, torch.float32)),
}
"""Cases by the number of ranks: the shares of seqlen_q and of seqlen_k, causal, and the dtype."""


def tensors(queries: int, keys: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v and dout, the same in every process."""
    made = torch.Generator().manual_seed(queries + keys)
    shapes = [(HEADS_KV * GROUP, queries), (HEADS_KV, keys), (HEADS_KV, keys), (HEADS_KV * GROUP, queries)]
    return [torch.randn(BATCH, *shape, HEAD_DIM, generator=made).to(dtype) for shape in shapes]


def one_process(number: int, sizes: tuple[int, ...], folder: str) -> None:
    """Be one process of a ring of each size, on a GPU of its own if there are any."""
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(number)
    else:
        repair_interpreter()
    for size in sizes:
        if number < size:
            one_rank(number, size, folder)


def one_rank(number: int, size: int, folder: str) -> None:
    """Compute one share of the cases of a size, and save the results in the folder."""
    store = dist.FileStore(f"{folder}/store-{size}", size)
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=size)
    results = []
    for queries, keys, causal, dtype in CASES[size]:
        whole = tensors(sum(queries), sum(keys), dtype)
        shares = (queries, keys, keys, queries)
        q, k, v, dout = (x.split(share, 2)[number] for x, share in zip(whole, shares, strict=True))
        inputs = [x.to(DEVICE, copy=True).requires_grad_() for x in (q, k, v)]
        out, lse = ring.ring_attention(*inputs, causal=causal, sm_scale=0.3)
        out.backward(dout.to(DEVICE))
        results.append([x.detach().cpu() for x in (out, lse, *(x.grad for x in inputs))])
    torch.save(results, f"{folder}/{size}-{number}")
    dist.destroy_process_group()


def in_one_process(queries: tuple[int, ...], keys: tuple[int, ...], causal: bool, dtype: torch.dtype) -> Any:
    """Compute in one process what ``ring.forward`` and ``ring.backward`` do, with the given shares."""
    q, k, v, dout = (x.to(DEVICE) for x in tensors(sum(queries), sum(keys), dtype))
    n = len(queries)
    ranks = [
        ring.Rank(number, part, queries, keys, causal, 0.3) for number, part in enumerate(q.split(queries, 2))
    ]
    shards = list(zip(k.split(keys, 2), v.split(keys, 2), strict=True))
    for step in range(n):
        for rank in ranks:
            rank.attend((rank.number - step) % n, *shards[(rank.number - step) % n])
    results = [rank.results() for rank in ranks]
    for rank, part, (out, lse) in zip(ranks, dout.split(queries, 2), results, strict=True):
        rank.begin_backward(part, out, lse)
    dk_dv: dict[int, Tensor] = {}
    for step in range(n):
        for rank in ranks:
            shard = (rank.number - step) % n
            part = rank.gradients(shard, *shards[shard])
            dk_dv[shard] = dk_dv[shard] + part if step else part
    return [
        [*result, rank.dq.to(dtype), *dk_dv[rank.number].to(dtype)]
        for rank, result in zip(ranks, results, strict=True)
    ]


def test_processes_give_the_bits_of_one(tmp_path: Path) -> None:
    most = torch.cuda.device_count() if DEVICE == "cuda" else max(CASES)
    sizes = tuple(size for size in CASES if size <= most)
    if not sizes:
        pytest.skip("two processes need two GPUs")
    mp.spawn(one_process, (sizes, str(tmp_path)), nprocs=max(sizes))
    for size in sizes:
        by_rank = [torch.load(tmp_path / f"{size}-{number}") for number in range(size)]
        for case, (queries, keys, causal, dtype) in enumerate(CASES[size]):
            expected = in_one_process(queries, keys, causal, dtype)
            for number in range(size):
                names = ("out", "lse", "dq", "dk", "dv")
                for name, x, y in zip(names, by_rank[number][case], expected[number], strict=True):
                    assert torch.equal(x, y.cpu()), f"{name} of rank {number} of {CASES[size][case]}"


def test_even_shares_are_those_of_the_kernel() -> None:
    """The ring in one process, which the processes are compared with, is what the laws verify."""
    queries, keys, causal, dtype = CASES[3][0]
    q, k, v, dout = (x.to(DEVICE) for x in tensors(sum(queries), sum(keys), dtype))
    out, lse = ring.forward(q, k, v, causal=causal, sm_scale=0.3, shards=3)
    grads = ring.backward(dout, q, k, v, out, lse, causal=causal, sm_scale=0.3, shards=3)
    expected = in_one_process(queries, keys, causal, dtype)
    for i, x in enumerate((out, lse, *grads)):
        assert torch.equal(x.cpu(), torch.cat([of_rank[i].cpu() for of_rank in expected], 2))


@pytest.mark.parametrize("causal", [False, True])
def test_one_shard_is_flash_v2(causal) -> None:
    """Merging with nothing rounds nothing, because a weight of exp(0) = 1 is exact, and so is a sum of 1."""
    q, k, v, _ = (x.to(DEVICE) for x in tensors(33, 21, torch.float32))
    out, lse = ring.forward(q, k, v, causal=causal, sm_scale=0.3, shards=1)
    rows = slice(33 - 21 if causal else 0, None)  # rows before these see no key
    expected = flash_v2.forward(q[:, :, rows], k, v, causal=causal, sm_scale=0.3)
    assert torch.equal(out[:, :, rows], expected[0])
    assert torch.equal(lse[:, :, rows], expected[1])


def test_what_is_modified_before_the_backward_is_told() -> None:
    q, k, v, _ = (x.to(DEVICE).requires_grad_() for x in tensors(8, 8, torch.float32))
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        doubled = 2 * q
        out, _ = ring.ring_attention(doubled, k, v)
        with torch.no_grad():
            doubled.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    finally:
        dist.destroy_process_group()


def test_refusals() -> None:
    q, k, v, _ = (x.to(DEVICE) for x in tensors(8, 8, torch.float32))
    with pytest.raises(ValueError, match=r"shards: got 5, expected one of \(2, 1, 3, 4\)"):
        ring.forward(q, k, v, causal=False, sm_scale=1.0, shards=5)
    with pytest.raises(ValueError, match="k: got shape"):
        ring.ring_attention(q, k[..., :8], v)
