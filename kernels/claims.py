"""Claims: those of plain functions, their ``--claims key=value`` overrides, and how they are printed."""

import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from kernels.contract import (
    DTYPES,
    LAYOUTS,
    OUTPUTS,
    ArithmeticOf,
    Capabilities,
    FamilyOf,
    Launch,
    flash_arithmetic,
)
from reference.arithmetic import FLOAT32, FP32_ROUNDOFF, TF32_TRUNCATED, Arithmetic
from reference.family import Family, full_precision


class ClaimError(ValueError):
    """A ``key=value`` claim that cannot be read: one line with the claim, its value and what was expected."""


def plain_function_designs(dtype: str, device: str, launch: Launch) -> Family:
    """Every design of full precision: the source of a plain function is not known."""
    return _unknown_design(dtype, device)


@cache
def _unknown_design(dtype: str, device: str) -> Family:
    base = flash_arithmetic(dtype, device, {})
    if (dtype, device) == ("bfloat16", "cpu"):
        # PyTorch's products on a CPU take subnormal operands as 0, as VDPBF16PS and AMX do (Intel, Architecture
        # Instruction Set Extensions); ``Arithmetic.operand_floor`` makes that of it.
        base = replace(base, operand_rounding=FP32_ROUNDOFF)
    return full_precision(base)


PLAIN_FUNCTION = Capabilities(
    deterministic=(), validates=False, may_refuse=True, designs=plain_function_designs
)
"""Claims of a plain function ``f(q, k, v, *, causal, sm_scale)``: the contract itself, and nothing beyond it.

They are ours and not the function's, so it may refuse what they promise.
Whether it returns lse, and whether gradients flow through its output, is only known after a call: ``lse`` and
``backward`` stay claimed here, and a call without them counts as not claiming them.
"""


@dataclass(frozen=True)
class _Values:
    """The values of one key: ``read`` turns the text into a value, or raises ValueError or KeyError."""

    expected: str
    read: Callable[[str], Any]


def _words(**values: Any) -> _Values:
    return _Values(" or ".join(values), values.__getitem__)


def _one_of(*names: str) -> _Values:
    return _words(**{name: name for name in names})


def _subset(names: tuple[str, ...], **words: tuple[str, ...]) -> _Values:
    words = {"all": names, **words}

    def read(text: str) -> tuple[str, ...]:
        if text in words:
            return words[text]
        chosen = [name.strip() for name in text.split(",")]
        if not set(chosen) <= set(names):
            raise ValueError
        return tuple(name for name in names if name in chosen)

    return _Values(f"{' or '.join(words)}, or some of {','.join(names)}", read)


def _integer(least: int) -> _Values:
    def read(text: str) -> int:
        if (value := int(text)) < least:
            raise ValueError
        return value

    return _Values(f"an integer of at least {least}", read)


def _head_dims(text: str) -> tuple[int, ...]:
    head_dims: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not span or span[0] < 1:
            raise ValueError
        head_dims.update(span)
    return tuple(sorted(head_dims))


def _probabilities(text: str) -> tuple[float, ...]:
    values = tuple(sorted(float(part) for part in text.split(",")))
    if not 0.0 <= values[0] <= values[-1] < 1.0:
        raise ValueError
    return values


def _relative_error(text: str) -> float:
    if not 0.0 <= (value := float(text)) < 1.0:
        raise ValueError
    return value


_BOOLEAN = _words(true=True, false=False)
_ERROR = _Values("a relative error from 0 up to 1", _relative_error)

_CAPABILITIES: Mapping[str, _Values] = {
    "dtypes": _subset(DTYPES),
    "head_dims": _Values("integers and ranges of at least 1, such as 64,128 or 1-256", _head_dims),
    "grouped_heads": _BOOLEAN,
    "unequal_lengths": _BOOLEAN,
    "min_seqlen": _integer(0),
    "seqlen_multiple": _integer(1),
    "causal": _words(true=(True,), false=(False,), both=(False, True)),
    "causal_alignment": _one_of("bottom_right", "top_left"),
    "causal_unequal_lengths": _BOOLEAN,
    "sm_scale": _one_of("any", "positive"),
    "layouts": _subset(LAYOUTS),
    "key_padding": _BOOLEAN,
    "dropout": _Values("probabilities from 0 up to 1, such as 0,0.1", _probabilities),
    "backward": _BOOLEAN,
    "lse": _BOOLEAN,
    "deterministic": _subset(OUTPUTS, none=()),
    "ragged": _words(none="", cache="cache", packed="packed"),
    "batch_invariant": _BOOLEAN,
    "validates": _BOOLEAN,
    "may_refuse": _BOOLEAN,
}

_ARITHMETIC: Mapping[str, _Values] = {
    "precision": _one_of("ieee", "tf32"),
    "operand_rounding": _ERROR,
    "accumulate": _ERROR,
    "exp_error": _ERROR,
    "log_error": _ERROR,
    "div_error": _ERROR,
    "tile_min": _integer(1),
    "tile_max": _integer(1),
    "normalised_first": _BOOLEAN,
    "partial_results": _BOOLEAN,
    "merged": _integer(1),
    "l_from_rounded_p": _BOOLEAN,
    "rounded_partials": _BOOLEAN,
    "k_prescaled": _BOOLEAN,
    "q_prescaled": _BOOLEAN,
    "rounded_scores": _BOOLEAN,
    "delta": _one_of("out", "probabilities", "weights"),
    "saved_weights": _BOOLEAN,
    "ds_from_rounded_p": _BOOLEAN,
    "ds_scaled": _BOOLEAN,
    "dk_dv_per_head": _BOOLEAN,
    "dk_dv_rows": _integer(1),
    "dq_keys": _integer(1),
    "dq_atomic": _BOOLEAN,
}

_FLOAT32_PRECISION: Mapping[str, Mapping[str, Any]] = {
    "ieee": {"weights": FLOAT32, "operand_rounding": 0.0},
    "tf32": {"weights": TF32_TRUNCATED, "operand_rounding": TF32_TRUNCATED.roundoff},
}


def parse_claims(claims: Iterable[str], base: Capabilities) -> Capabilities:
    """``base`` with each ``key=value`` of ``claims`` put in place; the last of two values for one key holds.

    Keys are the fields of ``Capabilities`` except ``launch``, and, for what ``base.arithmetic`` returns,
    ``precision`` (of float32 dot products: ieee or tf32) and the fields of ``Arithmetic`` except its formats. Of a
    kernel that declares its arithmetic they are put in place; to the family of a plain function they add the
    members that have them. Before those of the arithmetic may stand a dtype, for which alone they hold:
    ``float16:k_prescaled=true``.

    Raises:
        ClaimError: no such key, or a value that the key does not take.
    """
    capabilities: dict[str, Any] = {}
    arithmetic: dict[str, dict[str, Any]] = {dtype: {} for dtype in DTYPES}
    for claim in claims:
        dtypes, key, value = _read(claim)
        if key in _ARITHMETIC:
            for dtype in dtypes:
                arithmetic[dtype][key] = value
        else:
            capabilities[key] = value
    if any(arithmetic.values()):
        if base.designs is None:
            capabilities["arithmetic"] = partial(_overridden, base.arithmetic, arithmetic)
        else:
            capabilities["designs"] = partial(_extended, base.designs, arithmetic)
    return replace(base, **capabilities)


def _read(claim: str) -> tuple[tuple[str, ...], str, Any]:
    """The dtypes that a claim is about, its key and its value."""
    keys = {**_CAPABILITIES, **_ARITHMETIC}
    left, separator, text = (part.strip() for part in claim.partition("="))
    dtype, colon, key = left.rpartition(":")
    if not separator:
        raise ClaimError(f"claim {claim!r}: expected key=value, such as head_dims=64,128")
    if key not in keys:
        close = difflib.get_close_matches(key, keys)
        raise ClaimError(f"claim {claim!r}: no key {key!r}, expected one of {', '.join(close or keys)}")
    if colon and dtype not in DTYPES:
        raise ClaimError(f"claim {claim!r}: got dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if colon and key not in _ARITHMETIC:
        names = ", ".join(_ARITHMETIC)
        raise ClaimError(f"claim {claim!r}: got {key!r} for one dtype, expected one of {names}")
    try:
        return (dtype,) if colon else DTYPES, key, keys[key].read(text.lower())
    except (ValueError, KeyError):
        raise ClaimError(f"claim {key}: got {text!r}, expected {keys[key].expected}") from None


ByDtype = Mapping[str, Mapping[str, Any]]
"""What is claimed of the arithmetic at each dtype."""


def _overridden(base: ArithmeticOf, by_dtype: ByDtype, dtype: str, device: str, launch: Launch) -> Arithmetic:
    """A declared arithmetic with what is claimed of it."""
    # On the CPU, Triton's interpreter ignores the precision asked for: dot products are IEEE float32.
    ieee = {"precision": "ieee"} if device == "cpu" and "precision" in by_dtype[dtype] else {}
    return replace(base(dtype, device, launch), **_fields({**by_dtype[dtype], **ieee}, dtype))


def _extended(base: FamilyOf, by_dtype: ByDtype, dtype: str, device: str, launch: Launch) -> Family:
    """A family with the members of which this is claimed."""
    return base(dtype, device, launch).claimed(_fields(by_dtype[dtype], dtype))


def _fields(claimed: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Claims as fields of ``Arithmetic``: a precision is several, of float32 alone."""
    changes = dict(claimed)
    precision = changes.pop("precision", None)
    return (
        changes if precision is None or dtype != "float32" else {**_FLOAT32_PRECISION[precision], **changes}
    )


def describe(capabilities: Capabilities, device_type: str | None = None) -> dict[str, str]:
    """Short strings for a report's header, by claim; of a device type, each dtype's arithmetic there too."""
    c = capabilities
    lines = {
        "dtypes": ", ".join(c.dtypes),
        "head_dims": _sequence(c.head_dims),
        "grouped_heads": _yes(c.grouped_heads),
        "unequal_lengths": _yes(c.unequal_lengths),
        "min_seqlen": str(c.min_seqlen),
        "seqlen_multiple": str(c.seqlen_multiple),
        "causal": ", ".join(_yes(causal) for causal in c.causal),
        "causal_alignment": c.causal_alignment,
        "causal_unequal_lengths": _yes(c.causal_unequal_lengths),
        "sm_scale": c.sm_scale,
        "layouts": "all" if set(c.layouts) == set(LAYOUTS) else ", ".join(c.layouts),
        "key_padding": _yes(c.key_padding),
        "dropout": _sequence(c.dropout),
        "backward": _yes(c.backward),
        "lse": _yes(c.lse),
        "deterministic": ", ".join(c.deterministic) or "none",
        "ragged": c.ragged or "none",
        "batch_invariant": _yes(c.batch_invariant),
        "validates": _yes(c.validates),
        "may_refuse": _yes(c.may_refuse),
        "launch": ", ".join(f"{name} {' or '.join(map(str, values))}" for name, values in c.launch.items())
        or "none",
    }
    if device_type is None:
        return lines
    launch = {name: values[0] for name, values in c.launch.items()}
    families = {f"arithmetic {dtype}": c.family(dtype, device_type, launch) for dtype in c.dtypes}
    return {**lines, **{name: _designs(family) for name, family in families.items()}}


def _designs(family: Family) -> str:
    """The one arithmetic that is declared, or what the designs of a family share."""
    bases = "; or ".join(map(_departures, family.bases))
    is_open = len(family.forward) * len(family.backward) > 1
    return f"any design of full precision: {bases}" if is_open else bases


def _yes(claimed: bool) -> str:
    return "yes" if claimed else "no"


def _sequence(values: tuple[Any, ...]) -> str:
    """``1, 2, ..., 256`` for a long run with equal steps, otherwise every value."""
    steps = {b - a for a, b in itertools.pairwise(values)} if len(values) > 4 else set()
    shown = (*values[:2], "...", values[-1]) if len(steps) == 1 else values
    return ", ".join(map(str, shown))


def _departures(arithmetic: Arithmetic) -> str:
    """The weights' format, then each field that is not the default; of one that is true the name alone."""
    plain = Arithmetic(weights=arithmetic.weights, output=arithmetic.output)
    changed = {name: value for name, value in vars(arithmetic).items() if value != getattr(plain, name)}
    names = [name if value is True else f"{name} {_number(value)}" for name, value in changed.items()]
    return ", ".join([f"weights {arithmetic.weights.name}", *names])


def _number(value: Any) -> str:
    """Powers of two as such, other floats in six digits, and anything else as it is."""
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"
