"""Claims that leave a part of the contract out: what is drawn, what contradicts itself, what has to be refused."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from kernels.contract import AttentionKernel, Capabilities, default_scale
from kernels.contract.parsing import PLAIN_FUNCTION, ClaimError, parse_claims
from strategies.case import Case
from strategies.cases import cases
from tests.harness.law import LAWS, law_named
from tests.harness.session.subject import drawn
from tests.harness.trial.trial import LawBroken, Trial
from tests.panel import appended
from tests.unit.support.sound import CLAIMS, Sound

Refuses = Callable[..., bool]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "claims",
    [
        ["max_seqlen_q=1"],
        ["max_seqlen_q=8", "seqlen_multiple=4"],
        ["min_seqlen=512"],
        ["min_seqlen=512", "seqlen_multiple=128"],
        ["min_seqlen_k=100", "seqlens=q_at_most_k"],
        ["min_seqlen_k=5", "unequal_lengths=false"],
        ["sm_scale=default"],
        ["sm_scale=0.125,1.0"],
        ["backward=causal"],
        ["ragged=packed,document", "dense=false", "key_padding=true"],
        ["ragged=all", "dense=false", "key_padding=true"],
    ],
    ids=" ".join,
)
def test_cases_of_every_law_are_claimed(claims: list[str], device_type: str) -> None:
    c = parse_claims(claims, PLAIN_FUNCTION)
    for law in LAWS:
        if law_named(law).applies_to(c, "float16"):
            options = {**law_named(law).draws, "dtype": "float16", "device_type": device_type}
            found = drawn(cases(c, **options), 1, 12)
            assert len(found) == 12
            assert all(map(c.admits, found))


def test_lengths_go_on_from_the_shortest_claimed() -> None:
    c = parse_claims(["min_seqlen=512", "seqlen_multiple=128"], PLAIN_FUNCTION)
    lengths = {case.seqlen_k for case in drawn(cases(c, dtype="float16"), 1, 60)}
    assert {512, 640} <= lengths <= {512, 640, 768, 896}


def test_a_law_that_needs_gradients_draws_calls_that_have_them() -> None:
    c = parse_claims(["backward=causal"], PLAIN_FUNCTION)
    assert all(x.causal for x in drawn(cases(c, dtype="float16", gradients=True), 1, 20))
    c = parse_claims(["ragged=paged,packed", "dense=false"], PLAIN_FUNCTION)
    assert {x.ragged for x in drawn(cases(c, dtype="float16", gradients=True), 1, 20)} == {"packed"}
    c = parse_claims(["ragged=paged", "dense=false"], PLAIN_FUNCTION)
    assert not law_named("backward").applies_to(c, "float16")


@pytest.mark.parametrize(
    ("claims", "told"),
    [
        (["max_seqlen_q=0"], "claim max_seqlen_q: got '0', expected an integer of at least 1 or any"),
        (["dense=false"], "claim dense: got false beside ragged=none"),
        (
            ["dense=false", "ragged=paged", "layouts=expanded"],
            "claim dense: got false beside layouts=expanded",
        ),
        (["ragged=cache", "dense=false", "bias=full"], "claim bias: got full beside dense=false"),
        (["ragged=cache", "dense=false", "dropout=0,0.1"], "claim dropout: got 0.0,0.1 beside dense=false"),
        (
            ["ragged=paged", "dense=false", "key_padding=true"],
            "claim key_padding: got true beside dense=false and ragged=paged",
        ),
        (["ragged=paged", "dense=false", "rotary=halves"], "claim rotary: got halves beside dense=false"),
        (["sm_scale="], "claim sm_scale: got '', expected any, positive, default, or finite numbers"),
        (["sm_scale=0.5,nan"], "claim sm_scale: got '0.5,nan'"),
        (["max_seqlen_q=8", "min_seqlen=16"], "claim max_seqlen_q: got 8 beside min_seqlen=16"),
        (["max_seqlen_q=8", "seqlen_multiple=16"], "claim max_seqlen_q: got 8 beside seqlen_multiple=16"),
        (
            ["max_seqlen_q=8", "min_seqlen_k=9", "unequal_lengths=false"],
            "claim max_seqlen_q: got 8 beside min_seqlen_k=9",
        ),
        (["backward=causal", "causal=false"], "claim backward: got causal beside causal=false"),
    ],
)
def test_claims_that_make_no_sense_are_one_line(claims: list[str], told: str) -> None:
    with pytest.raises(ClaimError, match=rf"\A{re.escape(told)}[^\n]*\Z"):
        parse_claims(claims, PLAIN_FUNCTION)


class Restricted(Sound):
    """A sound kernel that refuses what one claim leaves out, or accepts it by mistake."""

    def __init__(self, refuses: Refuses, claims: dict[str, Any], *, accepts: bool) -> None:
        self.refuses, self.accepts = refuses, accepts
        self.claims = replace(CLAIMS, launch={}, **claims)

    def kernel(self) -> AttentionKernel:
        """Return the kernel, with its claims."""
        return AttentionKernel(
            name="restricted", forward=self.forward, backward=self.backward, capabilities=self.claims
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        """Return (out, lse) of what is not refused; all keys of a cache are taken for keys of its sequence."""
        if not self.accepts and self.refuses(q, k, **options):
            raise NotImplementedError("this call is not claimed")
        options.pop("cache_seqlens", None)
        return super().forward(q, k, v, **options)

    def backward(self, *tensors: Tensor, causal: bool, **options: Any) -> Any:
        """Return gradients of what is not refused."""
        if not self.accepts and self.claims.backward == "causal" and not causal:
            raise NotImplementedError("gradients of this call are not claimed")
        return super().backward(*tensors, causal=causal, **options)


def nothing(*tensors: Tensor, **options: Any) -> bool:
    """Refuse no call."""
    return False


REJECTED: dict[str, tuple[dict[str, Any], Refuses]] = {
    "sm_scale 2, which is not claimed": (
        {"sm_scale": (0.5, 0.25)},
        lambda q, k, sm_scale, **_: sm_scale not in (0.5, 0.25),
    ),
    "sm_scale -0.25, which is not claimed": (
        {"sm_scale": "default"},
        lambda q, k, sm_scale, **_: sm_scale != default_scale(q.shape[3]),
    ),
    "seqlen_q 16, which is not claimed": ({"max_seqlen_q": 8}, lambda q, k, **_: q.shape[2] > 8),
    "seqlen_k 4, which is not claimed": ({"min_seqlen_k": 5}, lambda q, k, **_: k.shape[2] < 5),
    "more queries than keys, which are not claimed": (
        {"seqlens": "q_at_most_k"},
        lambda q, k, **_: q.shape[2] > k.shape[2],
    ),
    "a dense call, which is not claimed": (
        {"dense": False, "ragged": ("cache",), "min_seqlen": 1},
        lambda q, k, cache_seqlens=None, **_: cache_seqlens is None or min(q.shape[2], k.shape[2]) < 1,
    ),
    "gradients without a causal mask, which are not claimed": ({"backward": "causal"}, nothing),
}
"""What a kernel must refuse, with the claims that leave it out and what tells such a call."""


@pytest.mark.parametrize("what", REJECTED)
def test_what_is_left_out_must_be_refused(what: str) -> None:
    claims, refuses = REJECTED[what]
    scale = 0.5 if isinstance(claims.get("sm_scale"), tuple) else None
    ragged = "none" if claims.get("dense", True) else "cache"
    case = Case(seqlen_q=8, seqlen_k=8, dtype="float16", sm_scale=scale, ragged=ragged)
    law_named("rejection")(Trial(Restricted(refuses, claims, accepts=False).kernel(), case, "cpu", 4.0))
    accepting = Restricted(refuses, claims, accepts=True).kernel()
    with pytest.raises(LawBroken, match="accepted") as broken:
        law_named("rejection")(Trial(accepting, case, "cpu", 4.0))
    assert what.partition(" ")[0] in broken.value.finding.claim


def test_gradients_that_are_not_given_at_all_are_refused() -> None:
    sound = Restricted(nothing, {"backward": "causal"}, accepts=True)

    def forward(*tensors: Tensor, **options: Any) -> Any:
        return tuple(x.detach() for x in sound.forward(*tensors, **options))

    kernel = replace(sound.kernel(), forward=forward, backward=None)
    case = Case(seqlen_q=8, seqlen_k=8, dtype="float16")
    law_named("rejection")(Trial(kernel, case, "cpu", 4.0))


def test_lengths_that_are_claimed() -> None:
    c = Capabilities(max_seqlen_q=8, min_seqlen_k=4, seqlens="q_at_most_k", seqlen_multiple=2)
    assert c.takes_lengths(8, 8, causal=True)
    for lengths in ((10, 12), (2, 2), (8, 6), (3, 8)):
        assert not c.takes_lengths(*lengths, causal=True)


@pytest.mark.parametrize("lost", ["k", "v"])
def test_a_cache_that_lacks_new_keys_is_told_by_every_law(lost: str) -> None:
    claims = replace(PLAIN_FUNCTION, ragged=("append",), dense=False, backward=False)
    case = Case(batch=2, seqlen_q=3, seqlen_k=9, dtype="float16", ragged="append")

    def forgetful(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        before = {"k": k.clone(), "v": v.clone()}
        answer = appended.in_a_cache(q, k, v, **options)
        {"k": k, "v": v}[lost].copy_(before[lost])
        return answer

    sound = AttentionKernel(name="sound", forward=appended.in_a_cache, capabilities=claims)
    law_named("forward")(Trial(sound, case, "cpu", 4.0))
    with pytest.raises(LawBroken, match=r"the cache has the new rows") as broken:
        law_named("forward")(Trial(replace(sound, forward=forgetful), case, "cpu", 4.0))
    assert broken.value.finding.detail == f"wrong in {lost}"
