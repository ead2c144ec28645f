"""Claims: those of plain functions, their ``--claims key=value`` overrides, and how they are printed."""

import difflib
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal, get_type_hints

from kernels.contract.arithmetic import ArithmeticOf, FamilyOf, Launch, flash_arithmetic
from kernels.contract.capabilities import CLAIMS, Capabilities
from kernels.contract.names import DTYPES
from kernels.contract.spelling import BOOLEAN, RELATIVE_ERROR, Spelling, integer, one_of
from kernels.contract.tuners import AT_WORK, has, is_tuner
from reference.arithmetic import FLOAT32, FP32_ROUNDOFF, Arithmetic, Format
from reference.family import LESS_PRECISE, Family, at_dtype, concerns, full_precision

LAUNCH = "launch."
"""How the key of a claim about a launch setting begins."""
WITHOUT = "not "
"""How the value of such a claim begins if it leaves out what it names."""


class ClaimError(ValueError):
    """A ``key=value`` claim that cannot be read: one line with the claim, its value and what was expected."""


def plain_function_designs(dtype: str, device: str, launch: Launch) -> Family:
    """Return every design of full precision, since the source of a plain function is not known."""
    return _unknown_design(dtype, device)


@cache
def _unknown_design(dtype: str, device: str) -> Family:
    base = flash_arithmetic(dtype, device, {})
    if (dtype, device) == ("bfloat16", "cpu"):
        # PyTorch's products on a CPU take subnormal operands as 0, as VDPBF16PS and AMX do (Intel, Architecture
        # Instruction Set Extensions). With this ``operand_rounding``, ``Arithmetic.operand_floor`` allows for that.
        base = replace(base, operand_rounding=FP32_ROUNDOFF)
    return full_precision(base)


PLAIN_FUNCTION = Capabilities(
    nonfinite="seen",
    deterministic=(),
    by_autograd=True,
    validates=False,
    may_refuse=True,
    designs=plain_function_designs,
)
"""The claims that are assumed of a plain function ``f(q, k, v, *, causal, sm_scale)``: the contract and nothing beyond.

The function has not stated them, so it may refuse a claimed case. Whether it returns lse, and whether gradients flow
through its output, is only known after a call. Both are claimed here, and a call without them is taken for a function
that claims neither.
"""


CAPABILITIES = {name: claim.spelling for name, claim in CLAIMS.items() if claim.spelling is not None}
"""How each claim is spelled that can be made on the command line."""

NOT_CLAIMED = ("smallest_operand", "accumulate_terms", "lse_in_base_2")
"""Fields of ``Arithmetic`` that follow from hardware and dtype, or from the claim ``lse_base``."""

_BY_TYPE: Mapping[Any, Spelling] = {
    bool: BOOLEAN,
    bool | Literal["any"]: BOOLEAN,
    float: RELATIVE_ERROR,
    int: integer(1),
    int | None: integer(1),
    Literal["out", "probabilities", "weights", "any"]: one_of("out", "probabilities", "weights"),
}

ARITHMETIC: Mapping[str, Spelling] = {
    "precision": one_of("ieee", "tf32"),
    **{
        name: _BY_TYPE[hint]
        for name, hint in get_type_hints(Arithmetic).items()
        if hint in _BY_TYPE and name not in NOT_CLAIMED
    },
}
"""How each claim about the arithmetic is spelled."""

_PRECISION: Mapping[str, Mapping[str, Any]] = {
    "ieee": {"weights": FLOAT32, "operand_rounding": 0.0},
    "tf32": LESS_PRECISE["precision=tf32"],
}


def parse_claims(claims: Iterable[str], base: Capabilities) -> Capabilities:
    """Return ``base`` changed by the ``key=value`` in ``claims``; of two values for one key, the last holds.

    A key of ``CAPABILITIES`` replaces a claim of ``base``. ``launch.NAME`` narrows a launch setting of ``base``, as
    ``_narrowed`` says. A key of ``ARITHMETIC`` replaces a field of the arithmetic
    that ``base`` declares; the family of designs of a plain function is changed by ``Family.claimed``. A dtype before
    a key of ``ARITHMETIC`` restricts the claim to that dtype: ``float16:k_prescaled=true``. ``docs/claims.md``
    explains every key.

    Raises:
        ClaimError: no such key, a value that the key does not take, or claims that contradict each other.
    """
    capabilities: dict[str, Any] = {}
    arithmetic: dict[str, dict[str, Any]] = {dtype: {} for dtype in DTYPES}
    for claim in claims:
        if claim.startswith(LAUNCH):
            settings = capabilities.get("launch", base.launch)
            capabilities["launch"] = {**settings, **_narrowed(claim, base.launch)}
            continue
        dtypes, key, value = _read(claim)
        if key in ARITHMETIC:
            for dtype in dtypes:
                arithmetic[dtype][key] = value
        else:
            capabilities[key] = value
    if any(arithmetic.values()):
        if base.designs is None:
            capabilities["arithmetic"] = partial(_overridden, base.arithmetic, arithmetic)
        else:
            capabilities["designs"] = partial(_extended, base.designs, arithmetic)
    try:
        return replace(base, **capabilities)
    except ValueError as error:
        raise ClaimError(f"claim {error}") from None


def _read(claim: str) -> tuple[tuple[str, ...], str, Any]:
    """Return the dtypes that a claim is about, its key and its value."""
    keys = {**CAPABILITIES, **ARITHMETIC}
    left, separator, text = (part.strip() for part in claim.partition("="))
    dtype, colon, key = left.rpartition(":")
    if not separator:
        raise ClaimError(f"claim {claim!r}: expected key=value, such as head_dims=64,128")
    if key not in keys:
        close = difflib.get_close_matches(key, keys)
        raise ClaimError(f"claim {claim!r}: no key {key!r}, expected one of {', '.join(close or keys)}")
    if colon and dtype not in DTYPES:
        raise ClaimError(f"claim {claim!r}: got dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if colon and key not in ARITHMETIC:
        names = ", ".join(ARITHMETIC)
        raise ClaimError(f"claim {claim!r}: got {key!r} for one dtype, expected one of {names}")
    try:
        return (dtype,) if colon else DTYPES, key, keys[key].read(text.lower())
    except (ValueError, KeyError, ArithmeticError):
        raise ClaimError(f"claim {key}: got {text!r}, expected {keys[key].expected}") from None


def _narrowed(claim: str, launch: Mapping[str, tuple[Any, ...]]) -> dict[str, tuple[Any, ...]]:
    """Return a launch setting with fewer values: those that are named, or with "not" before them all others.

    Values are divided by commas. A configuration of a tuner is named by some of its parameters:
    "launch._forward.config=not BLOCK_N=128 num_stages=3" leaves out all configurations that have both.
    """
    key, separator, text = (part.strip() for part in claim.partition("="))
    name = key.removeprefix(LAUNCH)
    if not separator or name not in launch:
        names = (
            ", ".join(f"{LAUNCH}{known}=VALUE" for known in launch)
            or "none: the kernel has no launch settings"
        )
        raise ClaimError(f"claim {claim!r}: got launch setting {name!r}, expected {names}")
    is_without, named = text.startswith(WITHOUT), text.removeprefix(WITHOUT)
    asked = [part.strip() for part in named.split(",")]
    found = {part: [x for x in launch[name] if has(str(x), part)] for part in asked}
    meant = {x for values in found.values() for x in values}
    left = tuple(x for x in launch[name] if (x in meant) != is_without)
    if not left or not all(found.values()):
        values = ", ".join(map(str, launch[name]))
        raise ClaimError(
            f"claim {key}: got {text!r}, expected some of {values}, or {WITHOUT.strip()} some of them"
        )
    return {name: left}


ByDtype = Mapping[str, Mapping[str, Any]]
"""Claims about the arithmetic, as values by key, for each dtype."""


def _overridden(base: ArithmeticOf, by_dtype: ByDtype, dtype: str, device: str, launch: Launch) -> Arithmetic:
    """Return a declared arithmetic in which the claimed values replace those that are declared."""
    return replace(base(dtype, device, launch), **_fields(by_dtype[dtype], dtype))


def _extended(base: FamilyOf, by_dtype: ByDtype, dtype: str, device: str, launch: Launch) -> Family:
    """Return a family of designs, changed by ``Family.claimed`` to those that have what is claimed."""
    return base(dtype, device, launch).claimed(_fields(by_dtype[dtype], dtype))


def _fields(claimed: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return claims as fields of ``Arithmetic``. A precision becomes several fields at the dtypes that it concerns."""
    changes = dict(claimed)
    precision = changes.pop("precision", None)
    concerned = dtype == "float32" or (precision == "tf32" and concerns("precision=tf32", dtype))
    return {**at_dtype(_PRECISION[precision], dtype), **changes} if precision and concerned else changes


def lesser(capabilities: Capabilities) -> dict[str, str]:
    """Return, by name, the claims of a kernel that was never meant for something which is claimed here.

    A claim that contradicts another one of the kernel's is left out.
    """
    found = {}
    for name, spelling in CAPABILITIES.items():
        less = CLAIMS[name].less
        if less is None or less == getattr(capabilities, name):
            continue
        with suppress(ValueError):
            replace(capabilities, **{name: less})
            found[name] = f"{name}={spelling.write(less)}"
    return found


def describe(capabilities: Capabilities, device_type: str | None = None) -> dict[str, str]:
    """Return the value of each claim by its key, as ``--claims`` reads it, and the launch settings.

    For a device type, the arithmetic of each dtype is added, in words.
    """
    c = capabilities
    lines = {name: spelling.write(getattr(c, name)) for name, spelling in CAPABILITIES.items()}
    settings = (f"{name} {_values(name, values)}" for name, values in c.launch.items())
    lines["launch"] = ", ".join(settings) or "none"
    if device_type is None:
        return lines
    launch = {name: values[0] for name, values in c.launch.items()}
    families = {f"arithmetic {dtype}": c.family(dtype, device_type, launch) for dtype in c.dtypes}
    return {**lines, **{name: _designs(family) for name, family in families.items()}}


def _values(name: str, values: tuple[Any, ...]) -> str:
    """Return the values of a launch setting, or how many configurations a tuner has."""
    if not is_tuner(name):
        return " or ".join(map(str, values))
    return f"{sum(value != AT_WORK for value in values)} configurations"


def _designs(family: Family) -> str:
    """Describe a declared arithmetic, or how the other bases of a family differ from its first."""
    first, *others = family.bases
    if len(family.forward) * len(family.backward) == 1:
        return "; or ".join(map(_departures, family.bases))
    return "; or with ".join(["any design of full precision", *(_changes(other, first) for other in others)])


def _departures(arithmetic: Arithmetic) -> str:
    """Return the format of the weights, then each field that is not at its default."""
    plain = Arithmetic(weights=arithmetic.weights, output=arithmetic.output)
    changes = _changes(arithmetic, plain)
    return f"weights {arithmetic.weights.name}" + (f", {changes}" if changes else "")


def _changes(arithmetic: Arithmetic, other: Arithmetic) -> str:
    """Return each field in which one arithmetic differs from another; a field that is True by its name alone."""
    changed = {name: value for name, value in vars(arithmetic).items() if value != getattr(other, name)}
    return ", ".join(name if value is True else f"{name} {_number(value)}" for name, value in changed.items())


def _number(value: Any) -> str:
    """Write a power of two as such, another float with six digits, a format by its name, anything else with str."""
    if isinstance(value, Format):
        return value.name
    if not isinstance(value, float):
        return str(value)
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{value:g}"
