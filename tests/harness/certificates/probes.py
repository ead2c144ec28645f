"""The calls that a certificate is asked of: lengths about the ends of tiles, with ordinary numbers."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import LAYOUT_FIELDS, Case
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
OTHER_LENGTHS = ((48, 80), (2, 150), (150, 31), (257, 258), (5, 16), (96, 160), (129, 257), (1, 1), (260, 40))
"""Queries and keys of the further calls."""
SCALES = (None, 0.3, None, -0.125)
"""The scales of the calls, in turns: the default one, and others."""
LAID_OUT = ("contiguous", "bnhd", "bnhd")
"""The layouts of the further calls."""
SMALL = 2**17
"""The most scores of a call."""


def probes(case: Case, capabilities: Capabilities, needs: Collection[str]) -> Iterator[Case]:
    """Yield claimed cases that show what a kernel does where a failing case has what its bug ``needs``.

    They have the dtype, the layouts and the options of the failing case. With what is no need they have several values:
    batch, heads, groups and the causal mask.
    """
    yield from _of_lengths(LENGTHS, case, capabilities, needs)


def further(case: Case, capabilities: Capabilities, needs: Collection[str]) -> Iterator[Case]:
    """Yield other claimed cases of this kind, of which a few are asked to tell apart what explains all ``probes``.

    If the failing case has a tensor that is not contiguous, the layouts of all tensors differ.
    """
    layouts = {getattr(case, name) for name in LAYOUT_FIELDS}
    for number, probe in enumerate(_of_lengths(OTHER_LENGTHS, case, capabilities, needs)):
        yield probe
        if layouts != {"contiguous"}:
            mixed: dict[str, Any] = {
                name: LAID_OUT[(number + at) % len(LAID_OUT)] for at, name in enumerate(LAYOUT_FIELDS)
            }
            if capabilities.admits(other := replace(probe, **mixed)):
                yield other


def _of_lengths(
    lengths: Sequence[tuple[int, int]], case: Case, capabilities: Capabilities, needs: Collection[str]
) -> Iterator[Case]:
    dense = replace(with_normal_numbers(case), earlier=(), way="none")
    for number, (seqlen_q, seqlen_k) in enumerate(lengths):
        for causal in (case.causal,) if "causal" in needs else (True, False):
            varied: dict[str, Any] = {
                "batch": 1 + number // 2 % 3,
                "heads_kv": 2,
                "group": 1 + number % 3,
                "sm_scale": SCALES[number % len(SCALES)],
                "causal": causal,
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_k,
            }
            kept = {name: value for name, value in varied.items() if name not in needs}
            probe = replace(dense, seed=dense.seed + seqlen_q, **kept)
            if probe.scores <= SMALL and capabilities.admits(probe):
                yield probe
