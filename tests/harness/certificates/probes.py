"""The calls that a certificate is asked of: lengths about the ends of tiles, with ordinary numbers."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kernels.contract import Capabilities
from strategies.case import LAYOUT_FIELDS, Case, changed
from strategies.features import LENGTHS, SCORES, made_of, with_normal_numbers

Lengths = Sequence[tuple[int, int]]

EVERYWHERE = (
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
    (3, 66),
    (2, 50),
    (4, 95),
    (4, 600),
    (40, 700),
    (300, 20),
)
"""Queries and keys of the calls: whole tiles of 16 to 128, a row or a key more, rows that see no key, one query."""
OTHERS = (
    (48, 80),
    (40, 128),
    (2, 150),
    (150, 31),
    (257, 258),
    (5, 16),
    (96, 160),
    (129, 257),
    (1, 1),
    (260, 40),
    (12, 90),
    (6, 14),
)
"""Queries and keys of the further calls."""
NEAR = (
    (0, 0),
    (0, 64),
    (64, 0),
    (1, 1),
    (0, 1),
    (128, 128),
    (1, 0),
    (0, 128),
    (0, 300),
    (-1, 0),
    (0, -1),
    (64, 64),
    (0, 13),
    (7, 32),
    (37, 5),
)
"""What is added to the failing case's queries and keys, if the bug needs its lengths: whole tiles, and a few rows."""
OTHERS_NEAR = (
    (128, 0),
    (0, 16),
    (16, 0),
    (2, 3),
    (0, 32),
    (32, 0),
    (96, 192),
    (-2, 0),
    (0, -3),
    (5, 0),
    (0, 70),
    (17, 17),
    (11, 1),
)
"""What is added to them for the further calls."""
SCALES = (None, 0.3, None, -0.125)
"""The scales of the calls, in turns: the default one, and others."""
OF_SIGN = (0.8, 1.4, 0.6, 1.2)
"""Sizes of the scales where the bug needs one, in units of 1 / sqrt(head_dim), with the sign of the failing case's."""
LAID_OUT = (
    {"q_layout"},
    {"dout_layout"},
    {"k_layout", "v_layout"},
    {"q_layout", "dout_layout"},
    {"k_layout"},
    {"q_layout", "v_layout"},
    {"v_layout", "dout_layout"},
)
"""The tensors that are bnhd in calls with unlike layouts, in turns; the others are contiguous."""
ADDED: dict[str, Any] = {
    **dict.fromkeys(("key_padding", "bias", "ragged"), "none"),
    **dict.fromkeys(("dropout_p", "window", "window_right", "chunk", "first_keys", "prefix", "softcap"), 0),
    **dict.fromkeys(("alibi_slopes", "sinks"), False),
}
"""The options that some calls do without, with the values that stand for none."""
WITHOUT = (1, 3)
"""Which of five lengths, in turns, have no options that the bug does not need."""
OF_LARGE_SCORES: tuple[dict[str, Any], ...] = (
    {"q_values": "wide", "k_values": "wide", "sm_scale": None},
    {"q_values": "positive", "k_values": "positive", "sm_scale": None},
    {},
    {"q_values": "wide", "k_values": "wide", "sm_scale": 1.0},
    {"q_values": "positive", "k_values": "negative", "sm_scale": None},
)
"""The numbers of calls for a bug that needs large scores, in turns; those of the third are ordinary."""
OTHER_SEED = 1000
"""By how much the seeds of calls with unlike lengths differ, besides by their queries."""
SMALL = 2**17
"""The most scores of a call."""


def probes(
    case: Case, capabilities: Capabilities, needs: Collection[str], near: Collection[str] = ()
) -> Iterator[Case]:
    """Yield claimed cases that show what a kernel does where a failing case has what its bug ``needs``.

    The fields ``near`` are as in the failing case, or nearly so, though the bug may not need them.

    They have the dtype and the layouts of the failing case, and most have its options. With what is no need they have
    several values: batch, heads, groups and the causal mask. Lengths that are needed are near those of the failing
    case, as all calls of one length would tell too little, and a few are nearly equal, as calls with far more keys than
    queries would take a change of some rows for one of all. Of a scale that is needed only the sign is, so that no
    change of the scale passes for another; if large scores are needed, most calls have some. If the failing case has a
    tensor that is not contiguous, half of the calls have each tensor in another layout, unless layouts are ``near``.
    """
    rows, keys = case.seqlen_q, case.seqlen_k
    alike = ((rows, rows + 1), (max(1, keys - 1), keys), (rows, rows))
    lengths = (*_near(case, NEAR), *alike) if _has_lengths({*needs, *near}) else EVERYWHERE
    for number, probe in enumerate(_of_lengths(lengths, case, capabilities, needs, near)):
        is_mixed = number // 2 % 2 and not {*LAYOUT_FIELDS} <= {*near}
        yield (_laid_out(probe, number, capabilities) if is_mixed else None) or probe


def further(
    case: Case, capabilities: Capabilities, needs: Collection[str], near: Collection[str] = ()
) -> Iterator[Case]:
    """Yield other claimed cases of this kind, of which a few are asked to tell apart what explains all ``probes``.

    If the failing case has a tensor that is not contiguous, the layouts of all tensors differ.
    """
    lengths = _near(case, OTHERS_NEAR) if _has_lengths({*needs, *near}) else OTHERS
    for number, probe in enumerate(_of_lengths(lengths, case, capabilities, needs, near)):
        yield probe
        if other := _laid_out(probe, number, capabilities):
            yield other


def _laid_out(case: Case, number: int, capabilities: Capabilities) -> Case | None:
    """Return a case with its tensors in unlike layouts; None if all are contiguous, or if that is not claimed."""
    if {getattr(case, name) for name in LAYOUT_FIELDS} == {"contiguous"}:
        return None
    of_bnhd = LAID_OUT[number % len(LAID_OUT)]
    mixed: dict[str, Any] = {name: "bnhd" if name in of_bnhd else "contiguous" for name in LAYOUT_FIELDS}
    return other if capabilities.admits(other := replace(case, **mixed)) else None


def _fields(needs: Collection[str]) -> set[str]:
    return {*needs, *made_of({*needs} - {SCORES})}


def _has_lengths(needs: Collection[str]) -> bool:
    return not _fields(needs).isdisjoint(LENGTHS)


def _near(case: Case, added: Lengths) -> Lengths:
    """Return lengths near those of a case, of which no length of queries is 0."""
    return [(max(1, case.seqlen_q + rows), max(0, case.seqlen_k + keys)) for rows, keys in added]


def _of_lengths(
    lengths: Lengths, case: Case, capabilities: Capabilities, needs: Collection[str], near: Collection[str]
) -> Iterator[Case]:
    needs = _fields(needs)
    dense = replace(with_normal_numbers(case), earlier=(), way="none")
    for number, (seqlen_q, seqlen_k) in enumerate(lengths):
        for causal in (case.causal,) if "causal" in (*needs, *near) else (True, False):
            varied: dict[str, Any] = {
                "batch": 1 + number // 2 % 3,
                "heads_kv": 2,
                "group": 1 + number % 3,
                "sm_scale": SCALES[number % len(SCALES)],
                "causal": causal,
                "seqlen_q": seqlen_q,
                "seqlen_k": seqlen_k,
            }
            without: dict[str, Any] = ADDED if number % 5 in WITHOUT else {}
            fixed = needs.union(near).difference(LENGTHS)
            kept = {name: value for name, value in (varied | without).items() if name not in fixed}
            has_scale = "sm_scale" in needs or ("sm_scale" in near and case.sm_scale is not None)
            if has_scale and case.sm_scale != 0.0:
                size = OF_SIGN[number % len(OF_SIGN)] / math.sqrt(case.head_dim)
                kept["sm_scale"] = math.copysign(size, case.sm_scale or 1.0)
            if SCORES in needs:
                kept |= OF_LARGE_SCORES[number % len(OF_LARGE_SCORES)]
            # Numbers of one seed begin alike, so that a change might explain calls of several lengths by chance.
            probe = changed(dense, seed=dense.seed + seqlen_q + OTHER_SEED * number, **kept)
            if probe.scores > SMALL:
                probe = changed(
                    probe, **{name: 1 for name in ("batch", "heads_kv", "group") if name not in fixed}
                )
            if probe.scores <= SMALL and capabilities.admits(probe):
                yield probe
