"""The case: everything that decides one run of a kernel, in one flat record.

This module imports neither torch nor Triton, so a case can be drawn, printed, saved and read on any machine.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, TypeVar, get_type_hints

from kernels.contract.names import FP8_INPUTS, POOLS, RAGGED_KEYWORDS, ROTARY, default_scale
from reference.mask_pattern import MaskPattern

TENSORS = ("q", "k", "v", "dout")
SIZES = ("batch", "heads_kv", "group", "seqlen_q", "seqlen_k", "head_dim")
"""The fields of a case that its tensors' shapes follow from."""
LAYOUT_FIELDS = tuple(f"{tensor}_layout" for tensor in TENSORS)
NONFINITE = ("nan", "inf", "-inf")
DEFAULT_BLOCK = 64
"""Rows of a tile where no launch setting says."""
OF_SEED = "of_seed"
"""A table of blocks of a case that an older version wrote: its sequences and its pages follow from its seed."""
TABLES = ("in_order", "shuffled", "shared", OF_SEED)
"""Which pages sequences have: one after the other, any, or some sequences the same first ones."""
LARGE = 1e30
"""An entry of q or k above this may have products beyond float32, since entries of most families are below 1e5."""

Record = TypeVar("Record")


@dataclass(frozen=True)
class Spike:
    """One entry of a tensor set to a value.

    ``index`` is (batch, head, row, column), each taken modulo the tensor's shape. ``value`` is a float,
    clipped to the finite range of the case's dtype, or one of "nan", "inf" and "-inf", which JSON cannot
    write as numbers and ``==`` cannot compare.
    """

    tensor: str
    index: tuple[int, int, int, int]
    value: float | str


def _declared(simplest: Any, called: str, *, tried: tuple[Any, ...] = (), since: int = 1) -> Any:
    """Return a field of a case that a failure may be traced to.

    Args:
        simplest: its default. A failing case is shrunk to it; if the failure then goes away, the field matters.
        called: the name that a report has for values other than the simplest.
        tried: for an option of the call, the values that tell whether it matters, the simplest first.
        since: the version of the JSON that brought the field; older ones have it at its default.
    """
    return field(default=simplest, metadata={"called": called, "tried": tried, "since": since})


@dataclass(frozen=True, kw_only=True, repr=False)
class Case:
    """One run of a kernel. ``sm_scale=None`` stands for 1 / sqrt(head_dim), and a v_head_dim of 0 for head_dim.

    heads_q is ``heads_kv * group``. Each tensor has a memory layout (``strategies.layouts``) and a family of
    values (``strategies.values``) drawn from ``seed``; then ``spikes`` are set. With ``v_in_k``, v is the first columns
    of k, unless it has more columns than k; its own layout and family mean nothing then. ``key_padding`` is none, or a
    family of masks (``strategies.padding``). ``window`` to ``prefix`` make up a ``MaskPattern``, ``softcap`` to
    ``sinks`` say what is done to scores (``strategies.score_rules``). ``ragged``, ``fp8_cache``, ``fp8_inputs`` and
    ``rotary`` are values of the claims of these names: they say what calls are made that are no plain ones.

    In a call of a kind of ``ragged``, sequence b of the batch has ``seqlens_q[b]`` queries and ``seqlens_k[b]`` keys,
    as far as seqlen_q, seqlen_k and the kernel's claims allow it: see ``strategies.sequences``. Where one of these is
    empty, all sequences have seqlen_q queries, or seqlen_k keys. They count in the law ``ragged`` alone; in calls of
    other laws all sequences have all of both. ``rows_behind`` is the number of packed rows that no sequence has. A
    ``page_size`` of 0 is the smallest that is claimed. ``block_table`` is one of ``TABLES`` and ``pool`` a value of the
    claim ``pools``. ``way`` is none, or a way of ``strategies.ways``. ``launch`` holds the kernel's own launch
    settings as (name, value) pairs.

    ``earlier`` are kinds of calls that come before the judged one, in this order and ``rounds`` times over: see
    ``strategies.earlier``. In ``inference`` no call is asked for gradients. The law ``sequences`` alone heeds these.
    """

    batch: int = _declared(1, "several batch elements")
    heads_kv: int = _declared(1, "several key heads")
    group: int = _declared(1, "grouped heads")
    seqlen_q: int = 1
    seqlen_k: int = 1
    head_dim: int = 16
    v_head_dim: int = _declared(0, "a head_dim of v of its own", tried=(0,), since=6)
    v_in_k: bool = _declared(False, "v being the first columns of k", tried=(False,), since=7)
    dtype: str = _declared("float32", "the dtype")
    causal: bool = _declared(False, "the causal mask", tried=(False, True))
    sm_scale: float | None = _declared(None, "sm_scale", tried=(None, 1.0, -1.0))
    key_padding: str = _declared("none", "the key padding mask", tried=("none",), since=3)
    dropout_p: float = _declared(0.0, "dropout", tried=(0.0,), since=2)
    window: int = _declared(0, "the sliding window", tried=(0,), since=4)
    window_right: int = _declared(0, "the window to the right", tried=(0,), since=5)
    chunk: int = _declared(0, "the chunks", tried=(0,), since=5)
    first_keys: int = _declared(0, "the first keys that are always seen", tried=(0,), since=5)
    prefix: int = _declared(0, "the prefix", tried=(0,), since=5)
    softcap: Annotated[float, "any size"] = _declared(0.0, "the soft-cap of scores", tried=(0.0,), since=5)
    alibi_slopes: bool = _declared(False, "the ALiBi slopes", tried=(False,), since=5)
    bias: str = _declared("none", "the bias of scores", tried=("none",), since=5)
    sinks: bool = _declared(False, "the sinks", tried=(False,), since=5)
    ragged: str = _declared(
        "none", "sequences of different lengths", tried=("none", *RAGGED_KEYWORDS), since=8
    )
    seqlens_q: tuple[int, ...] = _declared((), "different numbers of queries", since=9)
    seqlens_k: tuple[int, ...] = _declared((), "different numbers of keys", since=9)
    rows_behind: int = _declared(0, "rows behind the last sequence", tried=(0,), since=9)
    page_size: int = _declared(0, "the size of pages", since=9)
    block_table: str = _declared("in_order", "the order of pages", tried=("in_order",), since=9)
    pool: str = _declared("apart", "the layout of the pools of pages", tried=POOLS, since=9)
    fp8_cache: str = _declared("none", "the 8-bit numbers of the cache", tried=("none",), since=8)
    fp8_inputs: str = _declared("none", "the 8-bit numbers of q and k", tried=("none", *FP8_INPUTS), since=8)
    rotary: str = _declared("none", "the rotation of q and k", tried=("none", *ROTARY), since=8)
    way: str = _declared("none", "the way of calling", tried=("none",), since=10)
    earlier: tuple[str, ...] = _declared((), "earlier calls", tried=((),), since=10)
    rounds: int = _declared(1, "the number of earlier calls", tried=(1,), since=10)
    inference: bool = _declared(False, "calls without gradients", tried=(False,), since=10)
    q_layout: str = _declared("contiguous", "the memory layout of q")
    k_layout: str = _declared("contiguous", "the memory layout of k")
    v_layout: str = _declared("contiguous", "the memory layout of v")
    dout_layout: str = _declared("contiguous", "the memory layout of dout")
    q_values: str = "normal"
    k_values: str = "normal"
    v_values: str = "normal"
    dout_values: str = "normal"
    seed: int = 0
    spikes: tuple[Spike, ...] = ()
    launch: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        """The fields that are not the default; pastes back as Python."""
        shown = (f"{f.name}={value!r}" for f in fields(self) if (value := getattr(self, f.name)) != f.default)
        return f"Case({', '.join(shown)})"

    @property
    def heads_q(self) -> int:
        """Number of query heads."""
        return self.heads_kv * self.group

    @property
    def scores(self) -> int:
        """Number of scores, over all heads: what the time to judge a call follows."""
        return self.batch * self.heads_q * self.seqlen_q * self.seqlen_k

    @property
    def longer(self) -> str:
        """Which tensor has more rows, "q" or "k"; "" where both have as many."""
        if self.seqlen_q == self.seqlen_k:
            return ""
        return "q" if self.seqlen_q > self.seqlen_k else "k"

    @property
    def products(self) -> int:
        """Number of multiplications in a product of q and k, over all heads."""
        return self.scores * self.head_dim

    @property
    def layouts(self) -> tuple[str, ...]:
        """The memory layouts of q, k, v and dout."""
        return tuple(getattr(self, name) for name in LAYOUT_FIELDS)

    @property
    def scale(self) -> float:
        """The sm_scale that the kernel is called with."""
        return default_scale(self.head_dim) if self.sm_scale is None else self.sm_scale

    @property
    def v_is_of_k(self) -> bool:
        """Whether v is the first columns of k. It is not where it would have more columns than k."""
        return self.v_in_k and self.v_head_dim <= self.head_dim

    @property
    def pattern(self) -> MaskPattern:
        """What hides keys by their places, beside the causal mask."""
        return MaskPattern(**{x.name: getattr(self, x.name) for x in fields(MaskPattern)})

    @property
    def changes_scores(self) -> bool:
        """Whether scores are soft-capped or biased, or sinks take part in the softmax."""
        return bool(self.softcap or self.alibi_slopes or self.bias != "none" or self.sinks)

    @property
    def may_overflow(self) -> bool:
        """Whether products of q and k may leave float32: either is of the family ``huge``, or has such an entry set."""
        entries = (abs(float(spike.value)) for spike in self.spikes if spike.tensor in ("q", "k"))
        return "huge" in (self.q_values, self.k_values) or max(entries, default=0.0) > LARGE

    @property
    def blocks(self) -> dict[str, int]:
        """The launch settings that say how many rows a tile has."""
        return {name: value for name, value in self.launch if name.startswith("block_")}

    @property
    def dropout_seed(self) -> int:
        """The seed that dropout is called with: 63 bits, made so that both of its 32-bit words depend on ``seed``."""
        return self.seed << 31 | self.seed

    def shape(self, tensor: str) -> tuple[int, int, int, int]:
        """Shape (batch, heads, seqlen, head_dim) of ``q``, ``k``, ``v`` or ``dout``."""
        of_query = tensor in ("q", "dout")
        of_value = tensor in ("v", "dout")
        return (
            self.batch,
            self.heads_q if of_query else self.heads_kv,
            self.seqlen_q if of_query else self.seqlen_k,
            self.v_head_dim if of_value and self.v_head_dim else self.head_dim,
        )


def changed(case: Case, **values: Any) -> Case:
    """Return a case with other values of some fields, as ``dataclasses.replace`` does in twenty times the time.

    Drawing a case takes many changes. Names that are no fields are not noticed.
    """
    result = object.__new__(Case)
    vars(result).update(vars(case), **values)
    return result


DECLARED = {x.name: x.metadata for x in fields(Case) if x.metadata}
"""What is declared of each field that a failure may be traced to."""
SIMPLEST: dict[str, Any] = {name: getattr(Case, name) for name in DECLARED}
"""The value that each of these fields is shrunk to."""
OPTIONS: dict[str, tuple[Any, ...]] = {name: x["tried"] for name, x in DECLARED.items() if x["tried"]}
"""The options of the call among these fields, with the values that tell whether an option matters."""
OF_CALLS = ("ragged", "fp8_cache", "fp8_inputs", "rotary")
"""The options that say which call is made by a law whose calls are not those of every kernel."""
KINDS = tuple(name for name, values in OPTIONS.items() if len(values) > 1 and isinstance(SIMPLEST[name], str))
"""The options that have several kinds beside none, each of which is tried."""
VERSION = max(x["since"] for x in DECLARED.values())


def to_json(case: Case) -> str:
    """The case as a JSON object: its version, its fields, spikes and launch settings as objects.

    Raises ValueError for a number that is not finite, TypeError for a launch setting that JSON cannot hold.
    """
    return json.dumps(to_record(case), indent=2, allow_nan=False)


def to_record(case: Case) -> dict[str, Any]:
    """The case as what JSON has: its version, its fields, spikes and launch settings as objects."""
    spikes = [{**vars(spike), "index": [*spike.index]} for spike in case.spikes]
    return {"version": VERSION, **vars(case), "spikes": spikes, "launch": dict(case.launch)}


def from_json(text: str) -> Case:
    """The case that ``to_json`` wrote, in this version or an older one.

    Reads strictly, so that a misspelt or outdated file cannot run as some other case: raises ValueError,
    naming the field, its value and what was expected, for anything that ``to_json`` would not write.
    """
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"case: {text!r:.80} is not JSON: {error}") from None
    return from_record(record)


def from_record(record: Any) -> Case:
    """Return the case that a record of ``to_record`` describes.

    The record may have been written as JSON and read again. It is checked as strictly as ``from_json`` checks a text.
    """
    _expect(isinstance(record, dict), "case", record, "an object")
    version, rest = record.get("version"), {name: x for name, x in record.items() if name != "version"}
    _expect(type(version) is int and 1 <= version <= VERSION, "case.version", version, f"1 to {VERSION}")
    later = {name: SIMPLEST[name] for name, x in DECLARED.items() if x["since"] > version}
    for name in later:
        _expect(name not in rest, f"case.{name}", rest.get(name), f"no such field in version {version}")
    if "block_table" in later and rest.get("ragged", "none") != "none":
        later["block_table"] = OF_SEED
    return _read_record(Case, "case", {**later, **rest})


def _expect(holds: bool, where: str, value: Any, expected: str) -> None:
    if not holds:
        raise ValueError(f"{where}: got {value!r:.80}, expected {expected}")


def _is_finite(value: Any) -> bool:
    # A comparison, because math.isfinite overflows on integers beyond float's range.
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


_HINTS: dict[type, dict[str, Any]] = {cls: get_type_hints(cls, include_extras=True) for cls in (Spike, Case)}


def _read_record(cls: type[Record], where: str, value: Any) -> Record:
    """An instance of a dataclass from an object that has exactly its fields."""
    _expect(isinstance(value, dict), where, value, "an object")
    hints = _HINTS[cls]
    for name in value:
        _expect(name in hints, f"{where}.{name}", value[name], f"no field but {', '.join(hints)}")
    for name in hints:
        if name not in value:
            raise ValueError(f"{where}.{name}: missing, expected all of {', '.join(hints)}")
    return cls(**{name: _READERS[hint](f"{where}.{name}", value[name]) for name, hint in hints.items()})


def _read_count(where: str, value: Any) -> Any:
    _expect(type(value) is int and value >= 0, where, value, "an integer, 0 or more")
    return value


def _read_flag(where: str, value: Any) -> Any:
    _expect(isinstance(value, bool), where, value, "true or false")
    return value


def _read_name(where: str, value: Any) -> Any:
    _expect(isinstance(value, str), where, value, "a string")
    return value


def _read_optional_number(where: str, value: Any) -> float | None:
    _expect(value is None or _is_finite(value), where, value, "a finite number or null")
    return None if value is None else float(value)


def _read_probability(where: str, value: Any) -> float:
    _expect(_is_finite(value) and 0 <= value < 1, where, value, "a probability from 0 up to 1")
    return float(value)


def _read_size(where: str, value: Any) -> float:
    _expect(_is_finite(value) and value >= 0, where, value, "a number, 0 or more")
    return float(value)


def _read_entry(where: str, value: Any) -> float | str:
    _expect(_is_finite(value) or value in NONFINITE, where, value, f"a finite number or one of {NONFINITE}")
    return value if isinstance(value, str) else float(value)


def _read_index(where: str, value: Any) -> tuple[int, ...]:
    _expect(isinstance(value, list) and len(value) == 4, where, value, "four integers")
    return tuple(_read_count(where, component) for component in value)


def _read_spikes(where: str, value: Any) -> tuple[Spike, ...]:
    _expect(isinstance(value, list), where, value, "a list of spikes")
    return tuple(_read_record(Spike, f"{where}[{i}]", spike) for i, spike in enumerate(value))


def _read_counts(where: str, value: Any) -> tuple[int, ...]:
    _expect(isinstance(value, list | tuple), where, value, "a list of integers")
    return tuple(_read_count(f"{where}[{i}]", count) for i, count in enumerate(value))


def _read_names(where: str, value: Any) -> tuple[str, ...]:
    _expect(isinstance(value, list | tuple), where, value, "a list of strings")
    return tuple(_read_name(f"{where}[{i}]", name) for i, name in enumerate(value))


def _read_launch(where: str, value: Any) -> tuple[tuple[str, Any], ...]:
    _expect(isinstance(value, dict), where, value, "an object")
    for name, setting in value.items():
        is_scalar = setting is None or isinstance(setting, bool | str) or _is_finite(setting)
        _expect(is_scalar, f"{where}.{name}", setting, "a string, a finite number, true, false or null")
    return tuple(value.items())


_READERS: dict[Any, Callable[[str, Any], Any]] = {
    int: _read_count,
    bool: _read_flag,
    str: _read_name,
    float: _read_probability,
    Annotated[float, "any size"]: _read_size,
    float | None: _read_optional_number,
    float | str: _read_entry,
    tuple[int, int, int, int]: _read_index,
    tuple[int, ...]: _read_counts,
    tuple[str, ...]: _read_names,
    tuple[Spike, ...]: _read_spikes,
    tuple[tuple[str, Any], ...]: _read_launch,
}
"""How a field is read, by its type."""
