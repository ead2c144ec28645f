"""The calls that a certificate is asked of: lengths about the ends of tiles, with ordinary numbers."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import Case
from strategies.features import with_normal_numbers

LENGTHS = (
    (33, 65),
    (65, 33),
    (64, 64),
    (65, 65),
    (1, 70),
    (70, 7),
    (97, 129),
    (17, 40),
    (130, 100),
    (128, 190),
)
"""Queries and keys of the calls: whole tiles of 16 to 128, a row or a key more, rows that see no key, one query."""
SCALES = (None, 0.3, None, -0.125)
"""The scales of the calls, in turns: the default one, and others."""
SMALL = 2**17
"""The most scores of a call."""


def probes(case: Case, capabilities: Capabilities, needs: Collection[str]) -> Iterator[Case]:
    """Yield claimed cases that show what a kernel does where a failing case has what its bug ``needs``.

    They have the dtype, the layouts and the options of the failing case. With what is no need they have several values:
    batch, heads, groups and the causal mask.
    """
    dense = replace(with_normal_numbers(case), earlier=(), way="none")
    for number, (seqlen_q, seqlen_k) in enumerate(LENGTHS):
        for causal in (case.causal,) if "causal" in needs else (True, False):
            varied: dict[str, Any] = {
                "batch": 1 + number % 2,
                "heads_kv": 2,
                "group": 1 + number % 3,
                "sm_scale": SCALES[number % len(SCALES)],
                "causal": causal,
            }
            kept = {name: value for name, value in varied.items() if name not in needs}
            probe = replace(dense, seqlen_q=seqlen_q, seqlen_k=seqlen_k, seed=dense.seed + number, **kept)
            if probe.scores <= SMALL and capabilities.admits(probe):
                yield probe
