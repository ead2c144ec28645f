"""Ordinary cases: normal data at the default scale in one contiguous layout, as most users have them."""

import random
from itertools import product

from kernels.contract import Capabilities
from strategies.case import Case

ORDINARY = 20
"""How many are tried: enough to tell a bug that shows in every case from one that shows in few."""

TILE = 64
LENGTHS = {
    "cpu": (TILE - 1, TILE, TILE + 1, 2 * TILE, 100, 16, 150),
    "cuda": (TILE - 1, TILE, TILE + 1, 4 * TILE, 1000, 16, 128, 300),
}
"""Lengths by device type: whole tiles, one row more or less, lengths between, and one that fits into any tile."""
COMMON_HEAD_DIMS = (64, 128, 32)
SEED = 17


def ordinary_cases(capabilities: Capabilities, dtype: str, device_type: str) -> list[Case]:
    """Return cases, the same for all bugs of a kernel in a dtype: with and without a causal mask, if claimed."""
    c = capabilities
    lengths = LENGTHS[device_type]
    head_dims = [x for x in COMMON_HEAD_DIMS if x in c.head_dims] or list(c.head_dims)[:1]
    launch = tuple((name, values[0]) for name, values in c.launch.items())
    drawn = [
        Case(
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            causal=causal,
            head_dim=head_dims[at % len(head_dims)],
            v_head_dim=min(c.v_head_dim),
            v_in_k=min(c.v_in_k),
            heads_kv=1 + at % 2,
            group=2 if c.grouped_heads and at % 3 == 0 else 1,
            dtype=dtype,
            seed=at,
            launch=launch,
        )
        for at, (seqlen_q, seqlen_k, causal) in enumerate(product(lengths, lengths, c.causal))
    ]
    claimed = [case for case in drawn if c.admits(case)]
    return random.Random(SEED).sample(claimed, min(ORDINARY, len(claimed)))
