"""What a bug requires, in words."""

from dataclasses import replace

import pytest

from tests.harness.bugs.bug import Condition, Occurrences
from tests.harness.report.wording import conditions_of
from tests.unit.support.bugs import CASE, CAUSAL, bug

TILES = tuple(f"BLOCK_M={m} BLOCK_N={n}" for m in (32, 64) for n in (32, 64))
"""Configurations of a tuner."""


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (Condition("sm_scale", (None,), (1.0,)), "sm_scale other than 1.0"),
        (Condition("way", ("second_backward",), ("none",)), "a second backward of one forward"),
        (
            Condition("way", ("q_alone", "k_alone"), ("none",)),
            "q alone requiring grad or k alone requiring grad",
        ),
        (Condition("sm_scale", (0.0,), (None, 1.0)), "sm_scale 0"),
        (Condition("sm_scale", (0.0,), (None,)), "sm_scale other than default"),
        (Condition("sm_scale", (-0.125,), (None, 1.0)), "negative sm_scale"),
        (Condition("sm_scale", (-0.125,), (None,)), "sm_scale other than default"),
        (Condition("sm_scale", (-0.125,), (-1.0, 1.0)), "sm_scale other than -1.0 or 1.0"),
        (Condition("seqlen_k", (65,), (0, 64)), "seqlen_k such as 65, not 64: asked too little"),
        (Condition("seqlen_k", (65, 66, 96, 128), (0, 33, 64), is_certain=True), "seqlen_k above 64"),
        (
            Condition("seqlen_k", (66, 67, 96, 128), (33, 48), is_certain=True),
            "seqlen_k above something between 48 and 65: asked too little",
        ),
        (
            Condition("seqlen_k", (129, 191, 257), (17, 127, 128, 256), is_certain=True),
            "seqlen_k above and no multiple of 128",
        ),
        (Condition("seqlen_q", (2, 4, 5, 64), (1,), is_certain=True), "more than one query"),
        (Condition("seqlen_q", (1,), (*range(2, 258),), is_certain=True), "one query"),
        (Condition("seqlen_k", (0,), (1,)), "no keys"),
        (
            Condition("seqlen_k", (17, 35, 41), (39,), is_certain=True),
            "seqlen_k such as 17, not 39: by no rule that was tried",
        ),
        (Condition("page_size", (16,), (32, 64, 128, 256), is_certain=True), "page_size 16"),
        (Condition("head_dim", (80, 48, 16), (32, 64, 96), is_certain=True), "head_dim no multiple of 32"),
        (Condition("batch", (2, 3), (1,), is_certain=True), "batch above 1"),
        (Condition("v_head_dim", (64,), (0,)), "a head_dim of v unlike that of q and k"),
        (Condition("heads_kv", (3,), (2, 4)), "odd heads_kv"),
        (Condition("heads_kv", (3,), (2,)), "heads_kv above 2"),
        (Condition("group", (2, 3), (1, 4)), "group 2"),
        (Condition("window", (116,), (0,)), "window above 0"),
        (Condition("softcap", (5.0,), (0.0,)), "softcap above 0.0"),
        (CAUSAL, "causal True"),
        (Condition("ragged", ("paged", "cache"), ("none",)), "ragged cache or paged"),
        (Condition("bias", ("full", "of_keys"), ("none",)), "bias full"),
        (
            Condition("f.config", (TILES[2], TILES[3]), (*TILES[:2], "tuned")),
            "BLOCK_M 64 of 4 configurations of f",
        ),
        (
            Condition("f.config", (TILES[2],), (TILES[0],), untried=TILES[3:]),
            "BLOCK_M 64 of 3 configurations of f",
        ),
        (
            Condition("f.config", ("tuned",), TILES),
            "the tuner of f at work: results of its trial runs stay in what is added to",
        ),
    ],
)
def test_what_a_bug_needs_in_words(need: Condition, text: str) -> None:
    assert conditions_of(bug(CASE, ("dk",), need)) == f"only with {text}"


def test_failing_examples_tell_more_configurations() -> None:
    need = Condition("f.config", (TILES[2],), TILES[:1], untried=(TILES[1], TILES[3]))
    seen = Occurrences()
    for tiles in (TILES[3], TILES[2], "tuned"):
        seen.add("forward", replace(CASE, launch=(("f.config", tiles),)), "out")
    told = "only with BLOCK_M 64 of 4 configurations of f"
    assert conditions_of(bug(CASE, ("out",), need), seen) == told
