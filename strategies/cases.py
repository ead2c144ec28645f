"""Hypothesis strategies: cases that a kernel claims to answer, drawn where kernels have been wrong."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis.strategies import SearchStrategy

from kernels.contract import CLAIMS, LAYOUTS, WITH_KEY_PADDING, Capabilities, default_scale, takes_scale
from reference.mask_pattern import MaskPattern
from strategies.by_device import ByDevice
from strategies.case import NONFINITE, SIMPLEST, TENSORS, Case, Spike, changed
from strategies.earlier import MOST_EARLIER, ROUNDS, kinds_of, with_calls_at_most
from strategies.lengths import MAX_SEQLEN, claimed_length_pairs, longest, often, shortest_lengths
from strategies.limits import (
    KEPT,
    MOST_SCORES,
    USUAL_HEAD_DIM,
    WORK_SHARES,
    Heads,
    blocks,
    cut_down,
    is_affordable,
    with_fewer_heads,
)
from strategies.padding import FAMILIES as PADDINGS
from strategies.padding import several_attended
from strategies.scales import MOST_LARGE, scales_claimed, with_scale
from strategies.score_rules import SHAPES
from strategies.sequences import (
    as_decoding,
    with_long_cache,
    with_pages,
    with_sequences,
    with_several_sequences,
)
from strategies.values import FAMILIES
from strategies.ways import as_its_way_has_it, ways_of

# In each tuple the simplest value comes first. What is written several times is drawn that much more often.
BATCHES = (1, 1, 2, 3)
HEADS_KV = (1, 1, 2, 3)
GROUPS = (1, 1, 1, 1, 2, 2, 3, 4, 5, 8)
LARGE_GROUPS = (16, 128)
"""Groups that models of few key heads have."""
MANY_HEADS = ByDevice[tuple[tuple[int, int, int], ...]](cpu=(), accelerator=((2, 160, 1), (1, 160, 2)))
"""(batch, heads_kv, group) of cases that have more tasks than a GPU has multiprocessors, by device type.

A persistent kernel has one program for each multiprocessor, 132 on an H200, which walks over its tasks. What a program
keeps from one task to the next, such as the phase of a barrier, shows only where programs have several tasks: query
tiles of a query head, or, for dk and dv, key tiles of a key head.
"""
USUAL_HEADS = 24
"""For each case for a GPU that has many heads, so many cases have few."""
SM_SCALES = (*(None,) * 90, *(0.5, 0.3, -0.125) * 20, *(1.0, -1.0) * 10, *(1e-4, 30.0) * 2, 0.0)
EXTREME_VALUES = ("huge", "subnormal")
"""Families at the ends of a dtype's range. Two of them, or one with a spike, overflow or vanish: a poor test."""
FLAT_VALUES = ("zeros", "ones", "constant")
"""Families whose rows are all alike. In v they make dq and dk 0, in k dq, and zeros in dout every gradient."""
# Logits of a whole row are large, or far below 0, only if q and k are each of one sign: these families come twice.
VALUES = (
    *(family for family in FAMILIES if family not in (*EXTREME_VALUES, *FLAT_VALUES)),
    *("normal",) * 6,
    *("positive", "negative"),
)
MODERATE_VALUES = ("normal", "integers", "duplicates")
BEYOND_FLOAT16 = 1e5
"""A number that float16 has not, as where a kernel takes tensors of another dtype through it."""
SPIKES = (*(1.0, -1.0, 0.0, 4.0, 10.0, 100.0, -100.0, BEYOND_FLOAT16) * 12, 1e4, 3e38)
MAX_SPIKES = 4
COARSE = 2.0**-12
"""Rounding of the operands of a product, as by tf32, after which large scores say nothing of the weights."""
LARGEST_SPREAD = 2.0
"""The largest sm_scale times the root of head_dim, for such operands: the spread of scores of normal numbers."""
FAR_BELOW = 30.0
"""An sm_scale by which scores of q and k of opposite signs lie below -1e4, to which some masks set hidden ones.

That is so from a head_dim of 16 on.
"""
ORDINARY = 32
"""For each case with extreme values in one tensor, and each with flat values in one, so many have neither."""
ALIKE, ONE_DIFFERS, MIXTURES = 3, 2, 1
"""How often all tensors have the same layout, one has another, or each has its own: relative to each other."""
FEW = 3
"""For each case that may have many options, so many have few."""
SELDOM = 5
"""How often an option is left out of a case with few of them, for each time that it is there."""
HUGE = ByDevice[tuple[tuple[str, ...], ...]](
    cpu=(*((),) * 10, *((name,) for name in TENSORS), *(TENSORS,) * 3),
    accelerator=(*((),) * 60, *((name,) for name in TENSORS)),
)
"""Which tensors have huge strides together, by device type. Memory that is never touched costs a CPU nothing; a
GPU has to find gigabytes for each, and the time to get them."""

MOST_SEEDS = 8
"""So many seeds are tried for a key padding mask that leaves keys to attend; one seed in as many keeps its mask."""

T = TypeVar("T")
Four = tuple[str, ...]
"""A name for each of ``TENSORS``."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """The cases of one dtype that a law is tried on: what is claimed and nothing else.

    Attributes:
        capabilities: the kernel's claims.
        dtype: one of ``capabilities.dtypes``.
        device_type: ``cpu``, or the type of an accelerator such as ``cuda``.
        heads: the (batch, heads_kv, group) that are drawn; by default any of some small ones.
        max_seqlen: the longest sequence; by default ``MAX_SEQLEN``, or as many lengths as these are from the shortest
            that is claimed.
        max_scores: the most entries of the score matrix, over all heads: what a reference's memory follows. Most
            cases keep to a fraction of the products that so many scores have (``WORK_SHARES``). On the CPU they are
            ``MOST_SCORES`` at most.
        nonfinite: one or two entries, of otherwise moderate tensors, are NaN or infinite.
        key_padding: keys may be padded, where that is claimed; else none are.
        dropout: weights may be dropped, where that is claimed; else none are.
        patterns: patterns of masks may change what rows see, where that is claimed.
        variants: so they may, and soft-caps, ALiBi, biases and sinks may change the scores.
        gradients: only calls of which gradients are claimed.
        calls: fields of the case that say what call a law makes which is no plain one: the first is one of the values
            of the claim of its name, or of ``ways_of`` for the way of calling, the others may be ``none``. Without
            ``dense`` calls each case has a kind of ``ragged``.
        kinds: some of the calls are of a kind of ``ragged``, where that is claimed. Each of their sequences has all
            queries and keys, unless ``calls`` has "ragged".
        far: all tensors have huge strides, where that is claimed.
        earlier: cases have earlier calls, and no huge strides.
        large: cases have sizes of ``strategies.scales``, normal numbers and no huge strides.

    Raises ValueError for a dtype that is not claimed and for another device type.
    """

    capabilities: Capabilities
    dtype: str
    device_type: str = "cpu"
    heads: tuple[Heads, ...] | None = None
    max_seqlen: int | None = None
    max_scores: int = MOST_SCORES.accelerator
    nonfinite: bool = False
    key_padding: bool = False
    dropout: bool = False
    patterns: bool = False
    variants: bool = False
    gradients: bool = False
    calls: tuple[str, ...] = ()
    kinds: bool = False
    far: bool = False
    earlier: bool = False
    large: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in self.capabilities.dtypes:
            raise ValueError(
                f"dtype: got {self.dtype!r}, expected one of the claimed {self.capabilities.dtypes}"
            )

    @cached_property
    def claims(self) -> Capabilities:
        """What is claimed of the calls that the law makes."""
        claims = with_gradients(self.capabilities) if self.gradients else self.capabilities
        return without_huge_strides(claims) if self.large or self.earlier else claims

    @cached_property
    def scales(self) -> tuple[str, ...]:
        """The names of the sizes of a large space."""
        return scales_claimed(self.claims, self.device_type, self.max_seqlen)

    @cached_property
    def call_fields(self) -> tuple[str, ...]:
        """The fields of ``calls``, with ``ragged`` before them if the law or the kernel has such calls."""
        has_kinds = self.kinds and bool(self.claims.ragged)
        is_dense = self.claims.dense and not has_kinds
        return self.calls if is_dense else tuple(dict.fromkeys(("ragged", *self.calls)))

    @property
    def has_sequences(self) -> bool:
        """Whether the sequences of a call of a kind of ``ragged`` may differ in length."""
        return "ragged" in self.calls

    def values_of_call(self, name: str) -> tuple[str, ...]:
        """Return what a field of ``call_fields`` may be, the simplest first; the first of ``calls`` is never that."""
        own: tuple[str, ...] = ways_of(self.claims) if name == "way" else getattr(self.claims, name)
        is_always_one = name in self.calls[:1] or (name == "ragged" and not self.claims.dense)
        return own if is_always_one else (SIMPLEST[name], *own)

    @cached_property
    def options(self) -> dict[str, tuple[Any, ...]]:
        """The values, beside the simplest, of each option of a call that may be drawn and is claimed."""
        return _claimed_options(
            self.claims,
            key_padding=self.key_padding,
            dropout=self.dropout,
            patterns=self.patterns or self.variants,
            variants=self.variants,
        )

    @cached_property
    def longest(self) -> int:
        """The largest length that is drawn."""
        return longest(max(shortest_lengths(self.claims)), MAX_SEQLEN, self.max_seqlen)

    @cached_property
    def limits(self) -> dict[str, Any]:
        """How large a case may be: arguments of ``is_affordable``."""
        most = MOST_LARGE[self.device_type] if self.large else self.max_scores
        if self.device_type == "cpu" and not self.large:
            most = min(most, MOST_SCORES[self.device_type])
        return {"max_scores": most, "shortest": shortest_lengths(self.claims)}

    def within(self, share: int) -> dict[str, Any]:
        """Return the limits of a case that has a part of the most products: one of so many parts."""
        return self.limits | {"max_products": USUAL_HEAD_DIM * self.limits["max_scores"] // share}

    def strategy(self) -> SearchStrategy[Case]:
        """Return what draws the cases."""
        capabilities = self.claims
        if self.nonfinite:
            values = _each_of_four(st.sampled_from(MODERATE_VALUES))
            entries = st.builds(_present, spikes(NONFINITE), st.one_of(st.none(), spikes(NONFINITE)))
        elif self.large:
            values, entries = st.just(("normal",) * len(TENSORS)), st.just(())
        else:
            values = _values()
            # Each place may stay empty. From a list, Hypothesis could hardly delete a spike, which takes too many
            # choices.
            entry = st.one_of(st.none(), spikes(SPIKES))
            entries = st.one_of(st.just(()), st.builds(_present, *[entry] * MAX_SPIKES))
        huge = st.just(TENSORS) if self.far else st.sampled_from(HUGE[self.device_type])
        # What has one value only is left out here: to draw a constant takes Hypothesis nearly as long as any other
        # draw.
        drawn = st.builds(
            partial(_of_parts, dtype=self.dtype),
            claimed_length_pairs(capabilities, self.longest),
            _heads(capabilities, self.device_type) if self.heads is None else st.sampled_from(self.heads),
            _layouts(_claimed_layouts(capabilities)),
            values,
            **({"huge": huge} if "huge" in capabilities.layouts else {}),
            **({"options": _few_or_many(self.options)} if self.options else {}),
            head_dim=head_dims(capabilities.head_dims),
            **_v_head_dim(capabilities),
            **({"v_in_k": st.sampled_from(capabilities.v_in_k)} if True in capabilities.v_in_k else {}),
            causal=st.sampled_from(capabilities.causal),
            sm_scale=st.sampled_from(claimed_scales(capabilities)),
            seed=st.integers(0, 2**32 - 1),
            spikes=entries,
            **({"launch": _launch_settings(capabilities)} if capabilities.launch else {}),
            **self._own_calls(),
        )
        if self.large:
            drawn = st.builds(self.with_scale, drawn, st.sampled_from(self.scales))
            return _independent(drawn.map(self.fitted).filter(partial(is_affordable, **self.limits)))
        parts = [self.within(share) for share in WORK_SHARES[self.device_type]]
        # The first of the parts is the whole.
        cut = partial(cut_down, capabilities, MANY_HEADS[self.device_type], parts[0])
        drawn = st.builds(cut, st.sampled_from(parts), st.sampled_from(KEPT), drawn)
        return _independent(drawn.map(self.fitted).filter(partial(is_affordable, **self.limits)))

    def with_scale(self, case: Case, name: str) -> Case:
        """Return a case of one of the ``scales``."""
        return with_scale(self.claims, self.device_type, case, name)

    def fitted(self, case: Case) -> Case:
        """Return a case with changes by which the kernel claims to answer it, and its numbers test something."""
        capabilities = self.claims
        for name in self.call_fields[1:]:  # a kind of call may be claimed without this
            if not CLAIMS[name].admits(getattr(capabilities, name), case):
                case = changed(case, **{name: SIMPLEST[name]})
        case = as_its_way_has_it(capabilities, case)
        if capabilities.bias_gradient and case.bias != "none":
            case = _with_several_to_sum(capabilities, case)
        if case.v_in_k and not case.v_is_of_k:
            case = _with_v_apart_or_narrower(capabilities, case)
        if case.window_right and case.causal and False in capabilities.causal:
            case = _with_a_mask_that_shows_windows(case)
        case = _as_its_kind_has_it(case)
        if self.has_sequences:
            case = as_decoding(capabilities, with_several_sequences(case))
            if self.max_seqlen is None and self.heads is None:
                case = with_long_cache(capabilities, case)
        case = _with_attended_keys(_with_claimed_lengths(capabilities, case))
        if not self.nonfinite:
            case = _with_scores_far_below(capabilities, case)
            case = _with_scores_that_can_be_judged(capabilities, self.device_type, case)
        case = with_fewer_heads(case, **self.limits)
        if self.earlier:
            case = with_calls_at_most(capabilities, case)
        if case.ragged == "none":
            return case
        return (with_sequences if self.has_sequences else with_pages)(capabilities, case)

    def _own_calls(self) -> dict[str, SearchStrategy[Any]]:
        """Return what each field is drawn from that says what calls a law makes; most are often ``none``."""
        drawn: dict[str, SearchStrategy[Any]] = _earlier_calls(self.claims) if self.earlier else {}
        for name in self.call_fields:
            none, *others = dict.fromkeys((SIMPLEST[name], *self.values_of_call(name)))
            usual = (none,) * 2 * len(others) if none in self.values_of_call(name) else ()
            if others:
                drawn[name] = st.sampled_from((*usual, *others))
        return drawn


def _earlier_calls(capabilities: Capabilities) -> dict[str, SearchStrategy[Any]]:
    kind = st.sampled_from(kinds_of(capabilities))
    one, few, many = (st.lists(kind, min_size=1, max_size=most) for most in (1, 2, MOST_EARLIER))
    kinds = st.one_of(
        *often(one, 3), *often(few, 2), many
    )  # what one call leaves behind, the next may take away
    modes = {"inference": st.booleans()} if capabilities.backward else {}
    return {"earlier": kinds.map(tuple), "rounds": st.sampled_from(ROUNDS), **modes}


def cases(capabilities: Capabilities, **options: Any) -> SearchStrategy[Case]:
    """Return what draws cases of a ``Space``, whose other attributes are the options."""
    return Space(capabilities=capabilities, **options).strategy()


def without_huge_strides(capabilities: Capabilities) -> Capabilities:
    """Return the claims without the layout ``huge``, unless that is the only one."""
    others = tuple(layout for layout in capabilities.layouts if layout != "huge")
    return replace(capabilities, layouts=others or capabilities.layouts)


def with_gradients(capabilities: Capabilities) -> Capabilities:
    """Return the claims about calls of which gradients are claimed."""
    kinds = capabilities.ragged if capabilities.dense else capabilities.kinds_with_gradients
    causal = (True,) if capabilities.backward == "causal" else capabilities.causal
    return replace(capabilities, causal=causal, ragged=kinds)


def _independent(strategy: SearchStrategy[T]) -> SearchStrategy[T]:
    """Return a strategy for the same values, each drawn independently of the one before.

    Hypothesis makes most examples from the one before, copying one of its choices over a similar one: of 500
    cases a hundred had a seed of their own, and fifty were repeats. It leaves unique lists' elements alone.
    """
    return st.lists(strategy, min_size=1, max_size=1, unique=True).map(_only)


def _only(values: list[T]) -> T:
    return values[0]


def _heads(capabilities: Capabilities, device_type: str) -> SearchStrategy[Heads]:
    groups = st.sampled_from((*GROUPS, *LARGE_GROUPS) if capabilities.grouped_heads else (1,))
    usual = st.tuples(st.sampled_from(BATCHES), st.sampled_from(HEADS_KV), groups)
    many = [heads for heads in MANY_HEADS[device_type] if capabilities.grouped_heads or heads[2] == 1]
    return st.one_of(*often(usual, USUAL_HEADS), st.sampled_from(many)) if many else usual


def _of_parts(
    pair: tuple[int, int],
    heads: Heads,
    layouts: Four,
    values: Four,
    huge: tuple[str, ...] = (),
    options: Mapping[str, Any] = MappingProxyType({}),
    **fields: Any,
) -> Case:
    fields |= dict(zip(("batch", "heads_kv", "group"), heads, strict=True))
    fields |= {f"{tensor}_layout": layout for tensor, layout in zip(TENSORS, layouts, strict=True)}
    fields |= {f"{tensor}_values": family for tensor, family in zip(TENSORS, values, strict=True)}
    fields |= {f"{tensor}_layout": "huge" for tensor in huge}
    return Case(seqlen_q=pair[0], seqlen_k=pair[1], **options, **fields)


def _each_of_four(strategy: SearchStrategy[str]) -> SearchStrategy[Four]:
    """One for each tensor."""
    return st.tuples(*[strategy] * len(TENSORS))


def _values() -> SearchStrategy[Four]:
    """A family for each tensor: any that vary or, seldom, one that is flat or at an end of the range among those."""
    place = st.integers(0, len(TENSORS) - 1)
    usual, moderate = (_each_of_four(st.sampled_from(x)) for x in (VALUES, MODERATE_VALUES))
    flat = st.builds(_with_one, usual, place, st.sampled_from(FLAT_VALUES))
    extreme = st.builds(_with_one, moderate, place, st.sampled_from(EXTREME_VALUES))
    return st.one_of(*often(usual, ORDINARY), flat, extreme)


def _layouts(claimed: tuple[str, ...]) -> SearchStrategy[Four]:
    """A layout for each tensor: one for all or one that differs, as models have them, seldom any mixture."""
    layout = st.sampled_from(claimed)
    # If the rows of k or v are all one row, dq and dk test nothing, so not all tensors get this layout at once.
    of_all = [name for name in claimed if name != "expanded_rows"] or list(claimed)
    alike = st.sampled_from(of_all).map(lambda name: (name,) * len(TENSORS))
    one_differs = st.builds(_with_one, alike, st.integers(0, len(TENSORS) - 1), layout)
    return st.one_of(
        *often(alike, ALIKE), *often(one_differs, ONE_DIFFERS), *often(_each_of_four(layout), MIXTURES)
    )


def _with_one(four: Four, place: int, other: str) -> Four:
    return (*four[:place], other, *four[place + 1 :])


def head_dims(claimed: tuple[int, ...]) -> SearchStrategy[int]:
    """Draw powers of two as often as all others together, which kernels pad to the next power."""
    powers = [head_dim for head_dim in claimed if head_dim.bit_count() == 1]
    others = [head_dim for head_dim in claimed if head_dim.bit_count() != 1]
    return st.one_of(*(st.sampled_from(found) for found in (powers, others) if found))


def _v_head_dim(capabilities: Capabilities) -> dict[str, SearchStrategy[int]]:
    """Return what a head_dim of v is drawn from if one is claimed; every other case has that of q and k, if it may."""
    others = tuple(x for x in capabilities.v_head_dim if x)
    if not others:
        return {}
    own = head_dims(others)
    return {"v_head_dim": st.one_of(st.just(0), own) if 0 in capabilities.v_head_dim else own}


def _with_v_apart_or_narrower(capabilities: Capabilities, case: Case) -> Case:
    """Return a case whose v is not the first columns of k or, where that is not claimed, has no more columns than k."""
    if False in capabilities.v_in_k:
        return changed(case, v_in_k=False)
    return changed(case, v_head_dim=max(x for x in capabilities.v_head_dim if x <= case.head_dim))


def spikes(values: tuple[float | str, ...]) -> SearchStrategy[Spike]:
    """One entry, anywhere in any tensor, set to one of the values."""
    position = st.integers(0, 2**16)
    return st.builds(
        Spike,
        tensor=st.sampled_from(TENSORS),
        index=st.tuples(position, position, position, position),
        value=st.sampled_from(values),
    )


def _present(*places: Spike | None) -> tuple[Spike, ...]:
    return tuple(spike for spike in places if spike is not None)


def _claimed_options(
    capabilities: Capabilities, *, key_padding: bool, dropout: bool, patterns: bool, variants: bool
) -> dict[str, tuple[Any, ...]]:
    """Return the values, beside the simplest, of each option of a call that may be drawn and is claimed."""
    claimed: dict[str, tuple[Any, ...]] = {}
    if key_padding and capabilities.key_padding:
        claimed["key_padding"] = tuple(PADDINGS)
    if dropout:
        claimed["dropout_p"] = capabilities.dropout
    if patterns:
        claimed |= {x.name: _sizes(getattr(capabilities, x.name)) for x in fields(MaskPattern)}
    if variants:
        claimed |= {"softcap": capabilities.softcap, "bias": capabilities.bias}
        claimed |= {name: (getattr(capabilities, name),) for name in ("alibi_slopes", "sinks")}
    others = {name: tuple(x for x in values if x != SIMPLEST[name]) for name, values in claimed.items()}
    return {name: values for name, values in others.items() if values}


def _sizes(claimed: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes as often as they are drawn: seldom 1, as dq and dk are 0 with a window of a single key."""
    return tuple(size for size in claimed for _ in range(1 if size == 1 else 3))


def _few_or_many(options: Mapping[str, tuple[Any, ...]]) -> SearchStrategy[Mapping[str, Any]]:
    """Draw options: mostly each of them seldom, but in some cases each half of the time.

    Were all drawn independently, three options that a bug needs together would hardly ever meet, or few cases be left
    without any, in which other bugs show best.
    """
    few, many = (
        st.fixed_dictionaries(
            {name: _seldom(SIMPLEST[name], values, times) for name, values in options.items()}
        )
        for times in (SELDOM, 1)
    )
    return st.one_of(*often(few, FEW), many)


def _seldom(usual: T, others: tuple[T, ...], times: int) -> SearchStrategy[T]:
    """Draw the usual value so many times as often as any of the others."""
    return st.sampled_from((*(usual,) * times * len(others), *others))


def _claimed_layouts(capabilities: Capabilities) -> tuple[str, ...]:
    """Return each layout as often as it is drawn: contiguous more, expanded_rows less; huge is drawn by itself."""
    claimed = tuple(x for x in LAYOUTS if x in without_huge_strides(capabilities).layouts)
    several = tuple(layout for layout in claimed if layout != "expanded_rows")
    return (*claimed[:1] * 8, *several * 2, *claimed)


def claimed_scales(capabilities: Capabilities) -> tuple[float | None, ...]:
    """Return each claimed sm_scale as often as it is drawn; None stands for 1 / sqrt(head_dim)."""
    if isinstance(capabilities.sm_scale, tuple):
        return capabilities.sm_scale
    if capabilities.sm_scale == "default":
        return (None,)
    return tuple(scale for scale in SM_SCALES if scale is None or scale > 0 or capabilities.sm_scale == "any")


def _launch_settings(capabilities: Capabilities) -> SearchStrategy[tuple[tuple[str, Any], ...]]:
    pairs = ([(name, x) for x in settings] for name, settings in capabilities.launch.items())
    return st.tuples(*map(st.sampled_from, pairs))


def _as_its_kind_has_it(case: Case) -> Case:
    """Return a case with what its kind of ``ragged`` has: perhaps no padded keys, and a key to append.

    No kind has biases, dropout or 8-bit inputs.
    """
    if case.ragged == "none":
        return case
    return changed(
        case,
        key_padding=case.key_padding if case.ragged in WITH_KEY_PADDING else "none",
        bias="none",
        dropout_p=0.0,
        seqlen_k=max(1, case.seqlen_k) if case.ragged == "append" else case.seqlen_k,
    )


def _with_claimed_lengths(capabilities: Capabilities, case: Case) -> Case:
    """Return a case whose lengths are equal where they have to be, and with no more queries than are claimed."""
    c = capabilities
    least, most = c.length_from(c.min_seqlen_k), case.seqlen_q
    if c.max_seqlen_q is not None:
        most = min(most, c.max_seqlen_q - c.max_seqlen_q % c.seqlen_multiple)
    if case.ragged == "document" or not c.may_differ(causal=case.causal):
        return changed(case, seqlen_q=max(least, most), seqlen_k=max(least, most))
    lengths = most, max(least, case.seqlen_k)
    seqlen_q, seqlen_k = sorted(lengths) if c.seqlens == "q_at_most_k" else lengths
    return changed(case, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def _with_a_mask_that_shows_windows(case: Case) -> Case:
    """Return a case without its causal mask, under which a window to the right hides nothing; a third keep theirs."""
    return case if case.seed % 3 == 0 else changed(case, causal=False)


def _with_attended_keys(case: Case) -> Case:
    """Return a padded case with the next seed that leaves a sequence several keys, but for each eighth seed.

    With one key all weights are 1, and the gradients of q and k are 0 whatever a kernel does.
    """
    if case.key_padding == "none" or case.seed % MOST_SEEDS == 0:
        return case
    # An odd seed stays odd: see ``padding.is_spoiled``.
    others = (changed(case, seed=(case.seed + 2 * i) % 2**32) for i in range(MOST_SEEDS))
    return next(filter(several_attended, others), case)


def _with_several_to_sum(capabilities: Capabilities, case: Case) -> Case:
    """Return a case in which several sequences, heads and tiles of rows share the bias where it has one of all.

    The gradient of the bias is a sum over these, of which a single one tells nothing. Each eighth seed keeps its case.
    """
    if case.seed % MOST_SEEDS == 0:
        return case
    has_batch, has_heads, has_rows, _ = SHAPES[case.bias]
    tile = math.lcm(blocks(case)[0], capabilities.seqlen_multiple)
    rows = tile if not has_rows and 0 < case.seqlen_q <= tile else 0
    return changed(
        case,
        batch=2 if case.batch == 1 and not has_batch else case.batch,
        heads_kv=2 if case.heads_q == 1 and not has_heads else case.heads_kv,
        seqlen_q=case.seqlen_q + rows,
    )


def _with_scores_far_below(capabilities: Capabilities, case: Case) -> Case:
    """Return every other case of default scale whose scores are all negative with a scale that makes them far lower.

    float16 is left out, as scores of that dtype, which a less precise kernel may have, would be infinite.
    """
    are_negative = {case.q_values, case.k_values} == {"positive", "negative"} and case.sm_scale is None
    is_claimed = takes_scale(capabilities.sm_scale, FAR_BELOW, case.head_dim)
    is_chosen = are_negative and case.seed % 2 == 1 and case.dtype != "float16" and is_claimed
    return changed(case, sm_scale=FAR_BELOW) if is_chosen else case


def _with_scores_that_can_be_judged(capabilities: Capabilities, device_type: str, case: Case) -> Case:
    """Return the case with moderate values and scores if the launch settings round the operands of products coarsely.

    Errors of the scores then grow with the scores, and weights that may be off by their own size hold any answer.
    """
    is_small = case.sm_scale is None or abs(case.sm_scale) * math.sqrt(case.head_dim) <= LARGEST_SPREAD
    is_only = not takes_scale(capabilities.sm_scale, default_scale(case.head_dim), case.head_dim)
    fields: dict[str, Any] = {
        f"{tensor}_values": "normal"
        for tensor in TENSORS
        if getattr(case, f"{tensor}_values") not in MODERATE_VALUES
    }
    if not (is_small or is_only):
        fields["sm_scale"] = None
    if not fields:
        return case
    rounding = capabilities.arithmetic(case.dtype, device_type, dict(case.launch)).operand_rounding
    return case if rounding < COARSE else changed(case, **fields)
