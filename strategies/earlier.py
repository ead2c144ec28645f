"""Earlier calls: what a kernel is called with before the call that is judged, by names of kinds that a case has.

A case's ``earlier`` are kinds of calls, which are made in this order, ``rounds`` times over. What a kernel keeps from
one call to the next shows only so: numbers, lengths, tables, a flag, or the number of calls.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kernels.contract import Capabilities, default_scale, takes_scale
from strategies.case import TENSORS, Case, changed

FIELDS = ("earlier", "rounds", "inference")
"""The fields of a case that say which calls come before the judged one, and how they are made."""
KINDS: Mapping[str, str] = {
    "same": "the same call",
    "values": "a call with other numbers in the same tensors",
    "keys": "a call with other keys and values in the same tensors",
    "memory": "a call with other tensors in the same memory",
    "freed": "a call with tensors whose memory is used again",
    "tables": "a call with other lengths in the same tensors",
    "shorter": "a call with shorter sequences",
    "longer": "a call with longer sequences",
    "heads": "a call with more heads or sequences",
    "head_dim": "a call with another head_dim",
    "scale": "a call with another sm_scale",
    "mask": "a call with another mask",
    "dtype": "a call in another dtype",
    "refused": "a call that raises an exception",
}
"""What each kind of earlier call is, the simplest first."""
MOST_EARLIER = 5
"""So many kinds of earlier calls a case has, at most."""
ROUNDS = (*(1,) * 40, 2, 3, 9, 70, 300)
"""How often the earlier calls are made. Kernels have tables and rings of 2, 8, 64 or 256 entries."""
MOST_CALLS = 300
"""The most earlier calls of a case."""
MOST_MORE = 4
"""An earlier call has so many more heads or sequences, at most."""
MANY_CALLS = 12
"""A case with more earlier calls than this is tiny."""
FEW_ROWS = 8
"""The longest sequence of such a case, where so few rows are claimed."""


def kinds_of(claims: Capabilities) -> tuple[str, ...]:
    """Return the kinds of earlier calls that a kernel claims to take, the simplest first."""
    own = [
        "same",
        "values",
        "keys",
        "memory",
        "freed",
        *(["tables"] if claims.ragged else []),
        "shorter",
        "longer",
        "heads",
    ]
    own += ["head_dim"] if len(claims.head_dims) > 1 else []
    own += ["scale"] if claims.sm_scale != "default" else []
    own += ["mask"] if len(claims.causal) > 1 else []
    own += ["dtype"] if len(claims.dtypes) > 1 else []
    return (*own, *(["refused"] if claims.dense else []))


def with_last_earlier(case: Case, kind: str) -> Case:
    """Return a case whose last earlier call is of a kind."""
    return changed(case, earlier=(*case.earlier[:-1], kind))


def last_earlier(case: Case) -> str | None:
    """Return the kind of a case's last earlier call; None if it has none."""
    return case.earlier[-1] if case.earlier else None


def with_calls_at_most(claims: Capabilities, case: Case) -> Case:
    """Return a case with at most the most earlier calls, and with few rows and heads if these are many.

    Calls have tables if they are of a kind of ``ragged``, and only others are made with tensors that do not fit.
    """
    others = {"tables": "shorter"} if case.ragged == "none" else {"refused": "tables", "dtype": "tables"}
    case = changed(case, earlier=tuple(others.get(kind, kind) for kind in case.earlier))
    rounds = max(1, min(case.rounds, MOST_CALLS // max(1, len(case.earlier))))
    case = changed(case, rounds=rounds)
    if rounds * len(case.earlier) <= MANY_CALLS:
        return case
    fewer = {
        name: min(getattr(case, name), 2 - (name == "heads_kv")) for name in ("batch", "heads_kv", "group")
    }
    rows, keys = (
        min(n, claims.length_from(max(FEW_ROWS, least)))
        for n, least in ((case.seqlen_q, 0), (case.seqlen_k, claims.min_seqlen_k))
    )
    lengths = (
        {"seqlen_q": rows, "seqlen_k": keys} if claims.takes_lengths(rows, keys, causal=case.causal) else {}
    )
    return changed(case, **fewer, **lengths)


def sequences_of(claims: Capabilities, case: Case, *, of_gradients: bool) -> Iterator[Case]:
    """Yield a case with earlier calls: of each kind alone, of all kinds, and as many as any case has."""
    small = (
        changed(case, **{f"{x}_layout": "contiguous" for x in TENSORS}) if "huge" in case.layouts else case
    )
    kinds = kinds_of(claims)
    for inference in (False,) if of_gradients or not claims.backward else (True, False):
        plain = changed(small, inference=inference)
        yield from (changed(plain, earlier=(kind,)) for kind in kinds)
        yield changed(plain, earlier=kinds)
        for many in (("same",), ("longer",), ("heads", "scale", "values")):
            yield with_calls_at_most(claims, changed(plain, earlier=many, rounds=MOST_CALLS))


def earlier_case(claims: Capabilities, case: Case, kind: str, number: int) -> Case | None:
    """Return the case of a call of a kind before the judged one; None if the kernel does not claim to answer any.

    Its numbers are normal, with a seed that follows from its ``number``, so that successive calls of a kind differ.
    """
    normal: dict[str, Any] = {f"{tensor}_values": "normal" for tensor in TENSORS}
    seed = (case.seed + 1 + number) % 2**32
    plain = changed(case, **normal, spikes=(), seed=seed, seqlens_q=(), seqlens_k=(), rows_behind=0)
    others = (changed(plain, **fields) for fields in _changes(claims, case, kind, number))
    return next((x for x in others if claims.admits(x)), None)


def _changes(claims: Capabilities, case: Case, kind: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield the fields in which a call of a kind differs from the judged one; the first that is claimed is made."""
    step, rows, keys = claims.seqlen_multiple, case.seqlen_q, case.seqlen_k
    match kind:
        case "same" | "values" | "keys" | "memory" | "freed":
            yield {}
        case "shorter" | "tables":
            fewer_rows, fewer_keys = (_fewer(n, step, number) for n in (rows, keys))
            yield from _of_lengths((fewer_rows, fewer_keys), (rows, keys))
        case "longer":
            more = step * (1 + number)
            yield from _of_lengths((rows + more, keys + more), (rows, keys))
        case "heads":
            more = 1 + number // 2 % MOST_MORE
            both = [{"batch": case.batch + more}, {"heads_kv": case.heads_kv + more}]
            yield from both if number % 2 == 0 else reversed(both)
        case "head_dim":
            sizes = [x for x in claims.head_dims if x != case.head_dim]
            yield from (
                {"head_dim": x, "v_head_dim": v} for x in _from(sizes, number) for v in claims.v_head_dim
            )
        case "scale":
            drawn = (number + 2) * default_scale(case.head_dim)
            known = claims.sm_scale if isinstance(claims.sm_scale, tuple) else (drawn,)
            others = [
                x for x in known if x != case.sm_scale and takes_scale(claims.sm_scale, x, case.head_dim)
            ]
            yield from ({"sm_scale": x} for x in _from(others, number))
        case "mask":
            yield {"causal": not case.causal}
        case "dtype":
            yield from ({"dtype": x} for x in _from([x for x in claims.dtypes if x != case.dtype], number))


def _of_lengths(others: tuple[int, int], own: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield other lengths: both of them, or that of keys alone, or that of queries alone."""
    for rows, keys in (others, (own[0], others[1]), (others[0], own[1])):
        if (rows, keys) != own:
            yield {"seqlen_q": rows, "seqlen_k": keys}


def _fewer(length: int, step: int, number: int) -> int:
    """Return half of a length or less, at least one step; a length of one step stays."""
    half = max(step, length // 2 // step * step)
    return min(length, max(step, half - number % max(1, half // step) * step))


def _from(values: list[Any], number: int) -> list[Any]:
    """Return the values in turn, beginning with another one for each number."""
    at = number % len(values) if values else 0
    return [*values[at:], *values[:at]]
