"""Every law can fail: each alone catches a planted bug, and a sound kernel passes all."""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.algorithms.flash_v2 import KERNEL as FLASH_V2
from kernels.contract import FP8_INPUTS, ROTARY, AttentionKernel
from reference.bounds.accumulation import SAFETY
from strategies.case import Case, Spike
from strategies.cases import cases
from strategies.rotary import Rotation, rows_from
from tests.harness.law import law_named
from tests.harness.session import subject
from tests.harness.trial.trial import LawBroken, Trial
from tests.mutation.schedule import LAWS, is_quick
from tests.unit.support.emulator import aligned
from tests.unit.support.sound import CLAIMS, Pair, Sound, Triple, plain

EXAMPLES, QUICK_EXAMPLES = 40, 6
"""Cases of each law that a sound kernel has to hold in, or a kernel whose bug another law has to catch."""
ROUNDS = 10
"""How often ``EXAMPLES`` cases are drawn until a bug is caught: long sequences are drawn seldom."""
FEW = {"max_scores": 2**14, "heads": ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (1, 2, 2), (3, 1, 1))}
"""What keeps cases small, as kernels here are loops over heads and tiles in Python."""


@cache
def drawn(law: str, dtype: str, round_: int, number: int) -> list[Case]:
    """Return cases as the law's own items draw them, the same in every run."""
    ragged = ("cache",) if law == "ragged" else ()
    claims = replace(CLAIMS, ragged=ragged, rotary=ROTARY, fp8_inputs=FP8_INPUTS)
    draws = {**FEW, **law_named(law).draws}
    return subject.drawn(cases(claims, dtype=dtype, **draws), round_, number)


def few(law: str, dtype: str) -> list[Case]:
    """Return the first cases of a law: fewer in a quick run."""
    return drawn(law, dtype, 0, QUICK_EXAMPLES if is_quick() else EXAMPLES)


def many(law: str, dtype: str) -> Iterator[Case]:
    """Yield as many cases as a law may need to catch a bug of its own."""
    return chain.from_iterable(drawn(law, dtype, round_, EXAMPLES) for round_ in range(ROUNDS))


def failure(
    law: str,
    make: Callable[[], AttentionKernel],
    dtype: str,
    tried: Callable[[str, str], Iterable[Case]] = few,
) -> str:
    """Return what the law says of the first case that breaks it; "" if all hold, or it needs what is not claimed."""
    if not law_named(law).applies_to(make().capabilities, dtype):
        return ""
    for case in tried(law, dtype):
        kernel = make()
        launch = tuple(setting for setting in case.launch if setting[0] in kernel.capabilities.launch)
        try:
            law_named(law)(Trial(kernel, replace(case, launch=launch), "cpu", SAFETY))
        except LawBroken as broken:
            return f"{broken.finding}\n{case}"
    return ""


class Cached(Sound):
    """A sound kernel that takes a cache of which each sequence fills a part."""

    def kernel(self) -> AttentionKernel:
        return replace(super().kernel(), capabilities=replace(CLAIMS, ragged=("cache",)))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, cache_seqlens: Tensor | None = None, **options: Any
    ) -> Pair:
        if cache_seqlens is None:
            return super().forward(q, k, v, **options)
        parts = [
            super(Cached, self).forward(q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], **options)
            for b, n in enumerate(self.lengths(cache_seqlens))
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    def lengths(self, cache_seqlens: Tensor) -> list[int]:
        """Return the number of keys of each sequence."""
        return cache_seqlens.tolist()


class Rotating(Sound):
    """A sound kernel that rotates q and k by their positions, where it is given tables."""

    def kernel(self) -> AttentionKernel:
        return replace(super().kernel(), capabilities=replace(CLAIMS, rotary=ROTARY))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Pair:
        if "rotary_cos" in options:
            rotation, (of_q, of_k) = rotation_of(options), self.positions(q, k)
            q, k = rotation.forth(q, of_q), rotation.forth(k, of_k)
        return super().forward(q, k, v, **options)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, *args: Tensor, **options: Any) -> Triple:
        if "rotary_cos" not in options:
            return super().backward(dout, q, k, *args, **options)
        rotation, (of_q, of_k) = rotation_of(options), self.positions(q, k)
        turned = rotation.forth(q, of_q), rotation.forth(k, of_k)
        dq, dk, dv = super().backward(dout, *turned, *args, **options)
        return rotation.back(dq, of_q), rotation.back(dk, of_k), dv

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the rows of q and of k."""
        of_q = rows_from([k.shape[2] - q.shape[2]], q.shape[2], q.device)
        return of_q, rows_from([0], k.shape[2], k.device)


def rotation_of(options: dict[str, Any]) -> Rotation:
    """Take the tables out of the options of a call, and return them."""
    return Rotation(*map(options.pop, ("rotary_cos", "rotary_sin", "rotary_interleaved")))


class Scaling(Sound):
    """A sound kernel that multiplies 8-bit inputs by their scales first."""

    def kernel(self) -> AttentionKernel:
        return replace(super().kernel(), capabilities=replace(CLAIMS, fp8_inputs=FP8_INPUTS))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Pair:
        scales = [options.pop(f"{name}_scale", None) for name in "qkv"]
        return super().forward(*map(self.scaled, (q, k, v), scales), **options)

    def scaled(self, x: Tensor, scale: Tensor | None) -> Tensor:
        """Return what the 8-bit numbers in x stand for, or x itself in a call without scales."""
        if scale is None:
            return x
        by_head = scale.repeat_interleave(x.shape[1] // scale.shape[1], 1)[..., None, None]
        return (x.float() * by_head).bfloat16()


@pytest.mark.parametrize("dtype", CLAIMS.dtypes)
@pytest.mark.parametrize("law", LAWS)
def test_law_holds_for_a_sound_kernel(law: str, dtype: str) -> None:
    kernel = {"ragged": Cached, "rotary": Rotating, "eight_bits": Scaling}.get(law, Sound)
    assert failure(law, kernel().kernel, dtype) == ""


@pytest.mark.parametrize("law", [law for law in LAWS if law != "rejection"])
def test_law_holds_for_a_sound_plain_function(law: str) -> None:
    assert failure(law, plain, "float16") == ""


class CentredKeys(Sound):
    """Subtracts a constant from all keys, which leaves out as it is, but does not move lse back."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, sm_scale: float, **options: Any) -> Pair:
        out, lse = super().forward(q, k, v, sm_scale=sm_scale, **options)
        return out, lse - sm_scale * q[..., 0].float() * 2.0**-15


class ScaleOfTwoDigits(Sound):
    """Has a scale of two digits in the backward pass, so that dq and dk are both 1 % too large."""

    def backward(self, *args: Tensor, **options: Any) -> Triple:
        dq, dk, dv = super().backward(*args, **options)
        return dq * 1.01, dk * 1.01, dv


class ShortLoop(Sound):
    """Stops at key 512 in the backward pass, as a grid of 8 tiles does."""

    def backward(self, *args: Tensor, **options: Any) -> Triple:
        dq, dk, dv = super().backward(*args, **options)
        dk[:, :, 512:], dv[:, :, 512:] = 0.0, 0.0
        return dq, dk, dv


class TileByStride(Sound):
    """Takes other tiles if rows do not follow each other in memory."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, block_n: int = 64, **options: Any) -> Pair:
        tile = block_n if k.stride(2) == k.shape[3] else 8
        return super().forward(q, k, v, block_n=tile, **options)


class ShortWindow(Sound):
    """Sees only the last 512 keys, in the forward pass and in the backward pass."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Pair:
        self.check(q, k, v)
        return super().forward(q, k[:, :, -512:], v[:, :, -512:], **options)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> Triple:
        dq, dk, dv = super().backward(dout, q, k[:, :, -512:], v[:, :, -512:], out, lse, **options)
        unseen = (0, 0, max(0, k.shape[2] - 512), 0)
        return dq, torch.nn.functional.pad(dk, unseen), torch.nn.functional.pad(dv, unseen)


class PaddedDenominator(Sound):
    """Adds a small number to the denominator, so that it is never 0, but no quotient is exact."""

    def normalised(self, acc: Tensor, l: Tensor) -> Tensor:
        return acc / (l + 1e-7)[:, None]


class StalePlan(Sound):
    """Chooses its tile size by the shape of the previous call."""

    seqlen_q: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, block_n: int = 64, **options: Any) -> Pair:
        tile = block_n if self.seqlen_q in (None, q.shape[2]) else 8
        self.seqlen_q = q.shape[2]
        return super().forward(q, k, v, block_n=tile, **options)


class KeptKeys(Sound):
    """Reads the keys as they were in its first call with the same tensor, which a decoder writes to."""

    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Pair:
        if self.kept is None or self.kept[0] is not k:
            self.kept = k, k.clone()
        return super().forward(q, self.kept[1], v, **options)


class TailCleared(Sound):
    """Fills the last tile of v up with zeros, behind v in its storage, in the backward pass."""

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Tensor, **options: Any) -> Any:
        end = (
            v.storage_offset()
            + sum((n - 1) * stride for n, stride in zip(v.shape, v.stride(), strict=True))
            + 1
        )
        storage = v.new_empty(0).set_(v.untyped_storage())
        if v.numel() and q.shape[2] > 1:  # the keys of one query may be the first of more, as a law has them
            storage[end : end + -v.shape[2] % 16 * v.shape[3]] = 0.0
        return super().backward(dout, q, k, v, *args, **options)


class NanToZero(Sound):
    """Sets NaN to 0 after the division, for rows that see no key, and so hides every other NaN."""

    def normalised(self, acc: Tensor, l: Tensor) -> Tensor:
        return (acc / l[:, None]).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


class DtypesMixed(Sound):
    """Casts k and v to the dtype of q instead of refusing another one."""

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k.to(q.dtype), v.to(q.dtype))


class LengthOfTheFirst(Cached):
    """Gives all sequences of a batch as many keys as the first."""

    def lengths(self, cache_seqlens: Tensor) -> list[int]:
        return cache_seqlens[:1].tolist() * len(cache_seqlens)


class QueriesFromZero(Rotating):
    """Counts the positions of queries from 0 in a call with tables, however many keys there are."""

    def positions(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        _, of_k = super().positions(q, k)
        return rows_from([0], q.shape[2], q.device), of_k


class ScaleOfTheFirst(Scaling):
    """Takes the scales of the first batch element for all."""

    def scaled(self, x: Tensor, scale: Tensor | None) -> Tensor:
        return super().scaled(x, None if scale is None else scale[:1])


class OfTheMainThread(Sound):
    """Has its factor of 1 on the thread that imports it alone; on any other it is a half."""

    factor = threading.local()

    def normalised(self, acc: Tensor, l: Tensor) -> Tensor:
        return super().normalised(acc, l) * getattr(self.factor, "value", 0.5)


OfTheMainThread.factor.value = 1.0


class TilesSkipped(Sound):
    """Skips a tile of dout if its first columns are 0, as if it had no rows."""

    def backward(self, dout: Tensor, *args: Tensor, **options: Any) -> Triple:
        kept = dout.clone()
        for rows in range(0, dout.shape[2] - 15, 16):
            tile = kept[:, :, rows : rows + 16]
            tile *= tile[..., :16].any(-1, keepdim=True).any(-2, keepdim=True)
        return super().backward(kept, *args, **options)


class DtypeLeft(Sound):
    """Leaves torch's default dtype changed."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Pair:
        returned = super().forward(q, k, v, **options)
        torch.set_default_dtype(torch.float64)
        return returned


class LseShifted(Sound):
    """Makes gradients of whole tiles with an lse that is too small by a third of a roundoff of float16."""

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, **options: Any
    ) -> Triple:
        shift = 1.3e-4 if min(q.shape[2], k.shape[2]) >= 32 else 0.0
        return super().backward(dout, q, k, v, out, lse - shift, **options)


BUGS: dict[str, tuple[type[Sound], str]] = {
    "forward": (CentredKeys, "float16"),
    "additivity": (TilesSkipped, "float16"),
    "backward": (ScaleOfTwoDigits, "float16"),
    "identities": (ShortLoop, "float32"),
    "invariance": (TileByStride, "float32"),
    "composition": (ShortWindow, "float32"),
    "exact": (PaddedDenominator, "float32"),
    "determinism": (StalePlan, "float32"),
    "sequences": (KeptKeys, "float32"),
    "memory": (TailCleared, "float16"),
    "process": (DtypeLeft, "float16"),
    "special": (NanToZero, "bfloat16"),
    "rejection": (DtypesMixed, "float16"),
    "ragged": (LengthOfTheFirst, "float16"),
    "rotary": (QueriesFromZero, "float16"),
    "eight_bits": (ScaleOfTheFirst, "bfloat16"),
    "calls": (OfTheMainThread, "float16"),
    "unbiased": (LseShifted, "float16"),
}
"""For each law, a bug that no other law catches, and a dtype in which it shows."""


@pytest.mark.parametrize("law", LAWS)
def test_law_alone_catches_its_bug(law: str) -> None:
    bug, dtype = BUGS[law]
    # Each case gets a new kernel, so that nothing is carried over from one to the next.
    found = {
        name: failure(name, lambda: bug().kernel(), dtype, many if name == law else few) for name in LAWS
    }
    assert found.pop(law), f"{law} misses {bug.__name__}"
    if law == "forward":  # backward judges out and lse too, because a call with gradients may return others
        del found["backward"]
    if law in (
        "forward",
        "backward",
    ):  # these two judge the same of calls in other ways, and after other calls
        del found["calls"], found["sequences"]
    if law == "backward":  # the mean of what is too large everywhere is too large as well
        del found["unbiased"]
    assert not any(found.values()), "\n".join(f"{name}: {text}" for name, text in found.items() if text)


def test_bits_of_subnormal_scores_that_a_tensor_core_changes_are_no_finding_of_invariance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On an H200, scores of subnormal q times 4 have other bits, which must not be an alarm of this law."""

    def scores(q: Tensor, k: Tensor, keys: slice, causal: bool, sm_scale: float) -> Tensor:
        return aligned(q, k[keys]).float() * sm_scale

    monkeypatch.setattr("tests.unit.support.sound.scores", scores)
    spike = Spike("k", (0, 0, 0, 0), 100.0)
    case = Case(seqlen_q=20, head_dim=16, dtype="float16", q_values="subnormal", spikes=(spike,))
    trial = Trial(Sound().kernel(), case, "cpu", SAFETY)
    p = trial.problem
    moved = trial.forward(replace(p, q=4 * p.q, sm_scale=p.sm_scale / 4)).lse
    assert not torch.equal(moved, trial.forward().lse)  # type: ignore[arg-type]  # lse is claimed
    law_named("invariance")(trial)


def test_products_that_overflow_before_a_scale_of_zero_are_no_finding_of_identities() -> None:
    """With products of inf in float32, inf * 0 is NaN: on an H200 flash_v2 was accused of this by a false alarm."""
    spike = Spike("q", (0, 0, 0, 0), 3e38)
    case = Case(seqlen_k=2, head_dim=1, dtype="bfloat16", sm_scale=0.0, seed=2, spikes=(spike,))
    case = replace(case, v_values="zeros", dout_values="zeros")
    trial = Trial(FLASH_V2, case, "cuda" if torch.cuda.is_available() else "cpu", SAFETY)
    assert trial.forward().out.isnan().any()
    law_named("identities")(trial)
