"""What a kernel claims, each claim with its meaning and with the cases that it admits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kernels.contract.admission import can_be_ragged, keywords_of_ragged, sizes, takes_scale
from kernels.contract.arithmetic import ArithmeticOf, FamilyOf, Launch, flash_arithmetic
from kernels.contract.consistency import check_consistent
from kernels.contract.declaration import Claim, claim, claims_of
from kernels.contract.names import (
    BIASES,
    DTYPES,
    FP8_INPUTS,
    FP8_SCALES,
    LAYOUTS,
    OF_SINKS,
    OUTPUTS,
    POOLS,
    RAGGED_KEYWORDS,
    ROTARY,
    THROUGH_LSE,
    WITH_GRADIENTS,
)
from kernels.contract.spelling import (
    BOOLEAN,
    PROBABILITIES,
    SIZES,
    integer,
    integers,
    numbers,
    one_of,
    subset,
    words,
)
from reference.family import Family, with_8_bit_inputs


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a kernel claims. Cases are drawn from the claims alone.

    Each field is declared with its meaning, from which its key on the command line, its line in a report and its
    entry in ``docs/claims.md`` are made.
    """

    dtypes: tuple[str, ...] = claim(
        DTYPES,
        "Names of the torch dtypes of q, k, v, out and the gradients.",
        subset(DTYPES),
        fields=("dtype",),
        admits=lambda claimed, case: case.dtype in claimed,
    )
    head_dims: tuple[int, ...] = claim(
        (16, 32, 64, 128),
        "Head dimensions, smallest first.",
        integers(1, "64,128", "1-256", "8-256/8"),
        fields=("head_dim",),
        admits=lambda claimed, case: case.head_dim in claimed,
    )
    v_head_dim: tuple[int, ...] = claim(
        (0,),
        """Head dimensions of v, out and dout, where they may differ from that of q and k. 0 stands for the same.""",
        integers(0, "128", "0,64,128", "0-256"),
        fields=("v_head_dim",),
        admits=lambda claimed, case: case.v_head_dim in claimed,
        less=(0,),
    )
    v_in_k: tuple[bool, ...] = claim(
        (False,),
        """v may be the first columns of k, as in multi-head latent attention: where its head_dim is at most that of k,
        v may be a view of k's memory, with k's strides. Calls are as ever, and v is passed. With `true`, it may have
        memory of its own too, as without this claim. With `always`, it has none in any call, so that a kernel which
        takes one buffer needs nothing of v but its head_dim. Each claimed head_dim then needs a claimed `v_head_dim`
        that is at most as large, and what laws ask with values that are no part of the keys is left out. Gradients are
        those of two arguments: neither dk nor dv has a part of the other. A kernel of one buffer gives one gradient for
        it, so `always` needs `backward=false`. With `rotary`, v is the first columns of k before the rotation.
        In calls of `ragged`, v is a part of the cache of keys, or of its pages. If these are 8-bit numbers, `v_scale`
        equals `k_scale`. If keys are appended, `v_new` equals the first columns of `k_new`, and no tables of `rotary`
        are passed.""",
        words(true=(False, True), always=(True,), false=(False,)),
        fields=("v_in_k",),
        admits=lambda claimed, case: case.v_is_of_k in claimed,
        less=(False,),
    )
    causal: tuple[bool, ...] = claim(
        (False, True),
        "The values of `causal` that are accepted.",
        words(true=(True,), false=(False,), both=(False, True)),
        fields=("causal",),
        admits=lambda claimed, case: case.causal in claimed,
    )
    causal_alignment: Literal["bottom_right", "top_left"] = claim(
        "bottom_right",
        """The corner that a causal mask is anchored to where the lengths differ. With `bottom_right`, query i sees
        key j if `j <= i + seqlen_k - seqlen_q`; with `top_left`, if `j <= i`.""",
        one_of("bottom_right", "top_left"),
    )
    causal_unequal_lengths: bool = claim(
        True,
        "`seqlen_q` may differ from `seqlen_k` under a causal mask, as far as `unequal_lengths` allows it at all.",
        BOOLEAN,
        fields=("lengths",),
        admits=lambda claimed, case: claimed or not case.causal or case.seqlen_q == case.seqlen_k,
        less=False,
    )
    unequal_lengths: bool = claim(
        True,
        "`seqlen_q` may differ from `seqlen_k`.",
        BOOLEAN,
        fields=("lengths",),
        admits=lambda claimed, case: claimed or case.seqlen_q == case.seqlen_k,
        less=False,
    )
    min_seqlen: int = claim(
        0,
        "The smallest length of a sequence. With 0, a call with an empty sequence is answered and not refused.",
        integer(0),
        fields=("seqlen_q", "seqlen_k"),
        admits=lambda claimed, case: min(case.seqlen_q, case.seqlen_k) >= claimed,
        less=1,
    )
    min_seqlen_k: int = claim(
        0,
        "The smallest number of keys of a sequence, where that is larger than `min_seqlen`.",
        integer(0),
        fields=("seqlen_k",),
        admits=lambda claimed, case: case.seqlen_k >= claimed,
    )
    max_seqlen_q: int | None = claim(
        None,
        """The largest number of queries of a sequence, such as `1` for a decode kernel; `any` stands for no limit.""",
        integer(1, any=None),
        fields=("seqlen_q",),
        admits=lambda claimed, case: claimed is None or case.seqlen_q <= claimed,
    )
    seqlens: Literal["any", "q_at_most_k"] = claim(
        "any",
        """How `seqlen_q` may differ from `seqlen_k`, as far as `unequal_lengths` allows it at all. With `q_at_most_k`,
        no sequence has more queries than keys, as in a call that continues a sequence whose keys are all given.""",
        one_of("any", "q_at_most_k"),
        fields=("lengths",),
        admits=lambda claimed, case: claimed == "any" or case.seqlen_q <= case.seqlen_k,
        less="q_at_most_k",
    )
    seqlen_multiple: int = claim(
        1,
        "Both lengths are multiples of this number, whatever the launch settings are.",
        integer(1),
        fields=("seqlen_q", "seqlen_k"),
        admits=lambda claimed, case: case.seqlen_q % claimed == case.seqlen_k % claimed == 0,
    )
    empty_batch: bool = claim(
        True,
        """The batch may be 0: such a call is answered with empty tensors. A plain function may refuse it by any
        exception, as long as that is raised before it has answered, and not in its backward.""",
        BOOLEAN,
        fields=("batch",),
        admits=lambda claimed, case: claimed or case.batch > 0,
        less=False,
    )
    sm_scale: Literal["any", "positive", "default"] | tuple[float, ...] = claim(
        "any",
        """The values of `sm_scale` that are accepted: any float, zero and negative ones too; positive ones only; 1 /
        sqrt(head_dim) alone with `default`, as where a kernel has that built in; or these numbers alone.""",
        numbers("any", "positive", "default"),
        fields=("sm_scale",),
        admits=lambda claimed, case: takes_scale(claimed, case.scale, case.head_dim),
        less="positive",
    )
    layouts: tuple[str, ...] = claim(
        LAYOUTS,
        """Memory layouts of q, k, v and dout. `contiguous` is (batch, heads, seqlen, head_dim); `bnhd` is stored as
        (batch, seqlen, heads, head_dim); `packed` is one of three slices of (batch, seqlen, 3, heads, head_dim);
        `gap` has unused elements after each row, so that most rows are not aligned; `offset` starts one element
        late; `expanded` is one head with strides 0 over batch and heads; `expanded_rows` is one row with strides 0
        over batch, heads and seqlen; `huge` has element offsets beyond 2^31.""",
        subset(LAYOUTS),
        fields=("q_layout", "k_layout", "v_layout", "dout_layout"),
        admits=lambda claimed, case: set(case.layouts) <= set(claimed),
    )
    key_padding: bool = claim(
        False,
        """`forward` and `backward` take a `key_padding_mask`, a contiguous bool tensor (batch, seqlen_k) that is True
        where a key may be attended. (FlashAttention has it so; `torch.nn.MultiheadAttention` has the opposite.)
        Masked keys and values may hold anything, NaN included; their weights and gradients are 0. The mask is not
        passed where no key is padded.""",
        BOOLEAN,
        fields=("key_padding",),
        admits=lambda claimed, case: claimed or case.key_padding == "none",
        less=False,
        keywords=lambda claimed: ("key_padding_mask",) if claimed else (),
    )
    dropout: tuple[float, ...] = claim(
        (0.0,),
        """The probabilities that `forward` and `backward` take as `dropout_p`, together with an integer
        `dropout_seed`. Weights are dropped by the rule in `reference/dropout.py`. Neither is passed where the
        probability is 0.""",
        PROBABILITIES,
        fields=("dropout_p",),
        admits=lambda claimed, case: case.dropout_p in (0.0, *claimed),
        less=(0.0,),
        keywords=lambda claimed: ("dropout_p", "dropout_seed") if any(claimed) else (),
    )
    window: tuple[int, ...] = sizes(
        "window",
        """The sizes of a sliding window that `forward` and `backward` take as `window`: query i sees key j only if
        `i + seqlen_k - seqlen_q - j < window` (with `causal_alignment=top_left`, if `i - j < window`), and only if a
        causal mask lets it.""",
    )
    window_right: tuple[int, ...] = sizes(
        "window_right",
        """The sizes of a sliding window to the right that `forward` and `backward` take as `window_right`: query i sees
        key j only if `j - (i + seqlen_k - seqlen_q) < window_right` (with `causal_alignment=top_left`, if
        `j - i < window_right`). Together with `window` it makes a window to both sides.""",
    )
    chunk: tuple[int, ...] = sizes(
        "chunk",
        """The sizes of the chunks of local attention that `forward` and `backward` take as `chunk`: query i sees key j
        only if `(i + seqlen_k - seqlen_q) // chunk == j // chunk` (with `causal_alignment=top_left`, if
        `i // chunk == j // chunk`), and only if a causal mask lets it.""",
    )
    first_keys: tuple[int, ...] = sizes(
        "first_keys",
        """The numbers of first keys, also known as sink tokens, that `forward` and `backward` take as `first_keys`:
        every query sees them whatever `window`, `window_right` and `chunk` hide, if a causal mask lets it.""",
    )
    prefix: tuple[int, ...] = sizes(
        "prefix",
        """The lengths of a prefix that `forward` and `backward` take as `prefix`: every query sees the first `prefix`
        keys, whatever a causal mask and the other parts of the pattern hide.""",
    )
    softcap: tuple[float, ...] = claim(
        (0.0,),
        """The limits that `forward` and `backward` take as `softcap`: each score, once scaled, is replaced by
        `softcap * tanh(score / softcap)`, before any mask and ALiBi. 0 stands for none, and is not passed.""",
        SIZES,
        fields=("softcap",),
        admits=lambda claimed, case: case.softcap in (0.0, *claimed),
        less=(0.0,),
        keywords=lambda claimed: ("softcap",) if any(claimed) else (),
    )
    alibi_slopes: bool = claim(
        False,
        """`forward` and `backward` take `alibi_slopes`, a float32 tensor (heads_q,): from the score of query i and key
        j of head h, `alibi_slopes[h] * abs(i + seqlen_k - seqlen_q - j)` is subtracted (with
        `causal_alignment=top_left`, `alibi_slopes[h] * abs(i - j)`), after a soft-cap. It is not passed where a case
        has none. Its gradient is not asked for.""",
        BOOLEAN,
        fields=("alibi_slopes",),
        admits=lambda claimed, case: claimed or not case.alibi_slopes,
        less=False,
        keywords=lambda claimed: ("alibi_slopes",) if claimed else (),
    )
    bias: tuple[str, ...] = claim(
        (),
        """The shapes in which `forward` and `backward` take `bias`, a contiguous tensor of q's dtype that is added to
        scores after a soft-cap. `full` is (batch, heads_q, seqlen_q, seqlen_k); in `of_heads` batch is 1, in `of_batch`
        heads_q is 1, in `shared` both are, and in `of_keys` (batch, 1, 1, seqlen_k) the queries too. It is not passed
        where a case has none. Its gradient is asked for only with `bias_gradient`.""",
        subset(BIASES, none=()),
        fields=("bias",),
        admits=lambda claimed, case: case.bias in ("none", *claimed),
        less=(),
        keywords=lambda claimed: ("bias",) if claimed else (),
    )
    bias_gradient: bool = claim(
        False,
        """The kernel gives the gradient of `bias` too, where it is passed one: `backward` returns (dq, dk, dv, dbias)
        then. dbias has the shape and the dtype of `bias`, and is summed over the dimensions in which that has size 1.
        With `backward=false` or `bias=none` it means nothing.""",
        BOOLEAN,
    )
    sinks: bool = claim(
        False,
        """`forward` and `backward` take `sinks`, a float32 tensor (heads_q,): to the sum that the softmax of head h
        divides by, `exp(sinks[h])` is added, and so lse has it too. It is not passed where a case has none. The lse of
        a row that sees no key is not judged then. Its gradient is asked for only with `sinks_gradient`.""",
        BOOLEAN,
        fields=("sinks",),
        admits=lambda claimed, case: claimed or not case.sinks,
        less=False,
        keywords=lambda claimed: ("sinks",) if claimed else (),
    )
    sinks_gradient: bool = claim(
        False,
        """Autograd gives the gradient of `sinks` too, where a call is passed one that requires grad: dsinks, float32
        (heads_q,). It means nothing for a kernel that has a `backward` of its own.""",
        BOOLEAN,
        fields=("way",),
        admits=lambda claimed, case: claimed or case.way not in OF_SINKS,
        less=False,
    )
    grouped_heads: bool = claim(
        True,
        "`heads_q` may be a multiple of `heads_kv`.",
        BOOLEAN,
        fields=("group",),
        admits=lambda claimed, case: claimed or case.group == 1,
        less=False,
    )
    dense: bool = claim(
        True,
        """Calls without the keywords of `ragged` are answered: each sequence has all of `seqlen_q` queries and all of
        `seqlen_k` keys. With `false`, the kernel answers only calls of the kinds that `ragged` names. Each law then
        makes its calls in one of these kinds: the sequences of a batch are packed, or their keys lie in pages or in a
        cache. What the kind has no words for is not asked: key padding in pages, a bias, dropout, gradients of a cache.
        """,
        BOOLEAN,
        fields=("ragged",),
        admits=lambda claimed, case: claimed or can_be_ragged(case),
        beside="ragged=paged",
    )
    ragged: tuple[str, ...] = claim(
        (),
        """The kinds of calls that have sequences of different lengths. With `cache`, `forward` takes `cache_seqlens`,
        an int32 tensor (batch,): sequence b has its first `cache_seqlens[b]` keys, and the corner of a causal mask lies
        there. With `packed`, `forward` and `backward` take `cu_seqlens_q` and `cu_seqlens_k`, int32 tensors (sequences
        + 1,), and the integers `max_seqlen_q` and `max_seqlen_k`: batch is 1, and sequence b has the rows from
        `cu_seqlens_q[b]` up to `cu_seqlens_q[b + 1]`, and likewise its keys. No sequence is longer than `max_seqlen_q`
        and `max_seqlen_k` say, and all may be shorter. With `paged`, `forward` takes `cache_seqlens` as with `cache`,
        and `block_table`, an int32 tensor (batch, pages of a sequence) whose rows may lie apart: k and v are then
        (pages, heads_kv, page_size, head_dim), and key j of sequence b is row `j % page_size` of page `block_table[b, j
        // page_size]`. Sequences may share pages. Rows behind the last key of a sequence, pages of no sequence and
        unused entries of the table may hold anything. With `append`, `forward` takes `cache_seqlens`, and `k_new` and
        `v_new`, (batch, heads_kv, new, head_dim) like k and v: the call writes them into k and v, behind the first
        `cache_seqlens[b]` keys of each sequence b, and nothing else; sequence b then has `cache_seqlens[b] + new` keys.
        If `paged` is claimed too, calls with a `block_table` append as well, and if `cache` is not, only those. With
        `packed_paged`, `forward` takes `cu_seqlens_q` and `max_seqlen_q` as with `packed`, and `cache_seqlens`, which
        vLLM calls `seqused_k`, and `block_table` as with `paged`: q is (1, heads_q, rows of all sequences, head_dim),
        and sequence b has `cache_seqlens[b]` keys. With `document`, `forward` and `backward` take `document_ids`, an
        int32 tensor (batch, seqlen), where `seqlen_q == seqlen_k`: query i of batch element b sees key j only if
        `document_ids[b, i] == document_ids[b, j]`. The sequences of an element are its documents. The rows and keys of
        each are adjacent and have one number, which no other document of the element has; numbers are not negative, but
        in no order, and need not start at 0. The keywords of a kind are not passed in other calls. Whatever else is
        claimed counts the rows and keys of each sequence from 0, and the diagonal of its query i by its own lengths.
        Beside `cache`, `packed` and `document`, a `key_padding_mask` is (batch, seqlen_k) as ever; beside `paged`,
        `append` and `packed_paged` there is none, and `bias` and dropout are passed with no kind.""",
        subset(tuple(RAGGED_KEYWORDS), none=()),
        fields=("ragged",),
        admits=lambda claimed, case: case.ragged in ("none", *claimed),
        less=(),
        keywords=keywords_of_ragged,
    )
    page_sizes: tuple[int, ...] = claim(
        (16, 32, 64, 128, 256),
        """The numbers of keys that a page may have, smallest first. It means nothing without a kind of `ragged` that
        has pages.""",
        integers(1, "64", "16,32", "16-256/16"),
        fields=("page_size",),
        admits=lambda claimed, case: case.page_size in (0, *claimed),
    )
    pools: tuple[str, ...] = claim(
        POOLS,
        """How the pages of k and v lie in memory, in calls with a `block_table`. With `apart`, the pool of k and that
        of v have memory of their own, page after page. With `interleaved`, both are views of one buffer, in which each
        page of v follows that of k, as vLLM and FlashInfer have it: (pages, 2, ...). With `padded`, unused memory of
        the size of a page lies between pages. A page itself has one of the claimed `layouts`.""",
        subset(POOLS),
        fields=("pool",),
        admits=lambda claimed, case: case.pool in claimed,
        less=("apart",),
    )
    rows_behind: Literal["gradients", "zero", "any", "none"] = claim(
        "gradients",
        """What packed calls return for rows and keys behind the last sequence, where the last entry of `cu_seqlens_q`
        or `cu_seqlens_k` is smaller than the number of rows, as with buffers of a fixed size. They hold finite numbers
        and belong to no sequence. With `gradients`, their dq, dk and dv are 0, since no result depends on them, and
        their out and lse may be anything; a call that fails because of them is noted and no bug. With `zero`, their out
        is 0 too; with `any`, all of it may be anything. With `none`, there are no such rows.""",
        one_of("gradients", "zero", "any", "none"),
        fields=("rows_behind",),
        admits=lambda claimed, case: claimed != "none" or not case.rows_behind,
    )
    fp8_cache: tuple[str, ...] = claim(
        (),
        """In calls of the kinds `cache` and `paged` of `ragged`, k and v may be `float8_e4m3fn`, where q and out keep
        their dtype. `forward` then takes `k_scale` and `v_scale`, by which the numbers in k and v are to be multiplied:
        float32 tensors (heads_kv,) with `head`, and with `page`, in calls with a `block_table`, (pages, heads_kv).
        Scales are powers of two, so that each product is exact in q's dtype. They are not passed in other calls.""",
        subset(tuple(FP8_SCALES), none=()),
        fields=("fp8_cache",),
        admits=lambda claimed, case: (
            case.fp8_cache == "none"
            or (case.fp8_cache in claimed and case.ragged in FP8_SCALES[case.fp8_cache])
        ),
        less=(),
        keywords=lambda claimed: ("k_scale", "v_scale") if claimed else (),
    )
    fp8_inputs: tuple[str, ...] = claim(
        (),
        """The tensors that `forward` may be passed as `float8_e4m3fn` where cases have bfloat16: q and k with `qk`,
        while v is bfloat16; v too with `qkv`. It then takes `q_scale` and `k_scale`, and with `qkv` `v_scale`, by which
        the numbers in q, k and v are to be multiplied: contiguous float32 tensors (batch, heads_kv), like the descales
        of FlashAttention-3, so that query heads that read one key head have one scale. Scales are powers of two, and
        what the numbers stand for is exact in bfloat16. out is bfloat16, lse float32 and that of scores once scaled;
        everything else is as in other calls. With `qkv`, P may be cast to `float8_e4m3fn`. No gradients are asked for.
        If `v_in_k` is claimed too, v may be the first columns of k in calls with `v_scale`, which then equals
        `k_scale`. `q_scale` is not passed in other calls.""",
        subset(FP8_INPUTS, none=()),
        fields=("fp8_inputs",),
        admits=lambda claimed, case: (
            case.fp8_inputs == "none" or (case.fp8_inputs in claimed and case.dtype == "bfloat16")
        ),
        less=(),
        keywords=lambda claimed: tuple(f"{name}_scale" for name in max(claimed, key=len, default="")),
    )
    rotary: tuple[str, ...] = claim(
        (),
        """The ways to pair columns with which `forward` and `backward` rotate q and k by positions before anything else
        (rotary position embedding). They take `rotary_cos` and `rotary_sin`, contiguous tensors (positions, rotary_dim
        // 2) of q's dtype that hold any angles, and the bool `rotary_interleaved`. Of the first `rotary_dim` columns,
        which is an even number, each pair (x1, x2) becomes (x1 cos - x2 sin, x2 cos + x1 sin) by the tables' row of its
        position; the other columns stay. With `halves`, where `rotary_interleaved` is False, column c is paired with
        c + rotary_dim // 2; with `interleaved`, column 2c with 2c + 1. Key j has position j, and query i has `i +
        seqlen_k - seqlen_q` (with `causal_alignment=top_left`, i), which is never negative. Gradients are those of the
        q and k that are passed, before the rotation. With `append` of `ragged`, calls may have these tables too:
        queries, which have positions by the keys of their sequence, and new keys are rotated, and the rotated keys are
        written; what is in the cache already is not rotated again. Tables have a row for each key at least, and then
        for each key that the cache has room for. They are not passed in other calls.""",
        subset(ROTARY, none=()),
        fields=("rotary",),
        admits=lambda claimed, case: (
            case.rotary == "none"
            or (
                case.rotary in claimed
                and (case.ragged == "none" or (case.ragged == "append" and not case.v_in_k))
            )
        ),
        less=(),
        keywords=lambda claimed: ("rotary_cos", "rotary_sin", "rotary_interleaved") if claimed else (),
    )
    backward: bool | Literal["causal"] = claim(
        True,
        "The kernel gives gradients of q, k and v; with `causal`, of calls with a causal mask alone.",
        words(true=True, causal="causal", false=False),
    )
    lse: bool = claim(
        True,
        "`forward` returns lse beside out. A plain function may return out alone; then no lse is judged.",
        BOOLEAN,
    )
    lse_gradient: bool = claim(
        False,
        """Gradients flow through lse too: autograd differentiates a sum of what is computed from out and from lse. It
        means nothing for a kernel that has a `backward` of its own.""",
        BOOLEAN,
        fields=("way",),
        admits=lambda claimed, case: claimed or case.way != THROUGH_LSE,
        less=False,
    )
    lse_base: Literal["e", "2"] = claim(
        "e",
        """The base of the logarithm that `forward` returns as lse. An lse in base 2 is multiplied by ln 2 in float64
        before it is judged; that of a row that sees no key is -inf in either base. `backward` gets it as `forward`
        returned it.""",
        one_of("e", "2"),
    )
    lse_layout: Literal["bhn", "bnh"] = claim(
        "bhn",
        """The order of the dimensions of the lse that `forward` returns: (batch, heads_q, seqlen_q) with `bhn`, (batch,
        seqlen_q, heads_q) with `bnh`. `backward` gets lse as `forward` returned it.""",
        one_of("bhn", "bnh"),
    )
    lse_of_no_keys: Literal["-inf", "inf"] = claim(
        "-inf",
        """The lse of a row that sees no key: -inf, or with `inf` +inf, as FlashAttention-2's packed forward
        and FlashMLA have it. With `inf`, each infinity in lse changes its sign before it is judged: a report says -inf
        where `forward` returned +inf. `backward` gets lse as `forward` returned it.""",
        one_of("-inf", "inf"),
    )
    nonfinite: Literal["strict", "seen", "none"] = claim(
        "strict",
        """What is asked of calls in which q, k or v have NaN or infinity. With `strict`, these reach the rows that see
        them, and no other row. With `seen`, they reach the rows that see them, and may reach a row from which a causal
        mask or a pattern hides them: it may have any answer if a score that is hidden from it is NaN or infinite. So it
        is where masks are added to scores: NaN plus -inf is NaN, and so is +inf plus -inf. For the same reason, the row
        may have any answer with finite inputs too, if a hidden product of q and k may leave float32; dk and dv of its
        head follow from that. Other heads and batch elements must be as without NaN and infinity. With `none`, the law
        `special` does not apply, and a hidden product that leaves float32 may do what it may with `seen`. Whatever is
        claimed, memory that belongs to no key may hold NaN, and no row may see that: padded keys, what lies behind the
        last key of a sequence, and what lies around tensors.""",
        one_of("strict", "seen", "none"),
    )
    deterministic: tuple[str, ...] = claim(
        OUTPUTS,
        "The outputs that are the same, bit for bit, whenever a call is repeated.",
        subset(OUTPUTS, none=()),
    )
    batch_invariant: bool = claim(
        False,
        """The bits of a row depend on nothing but what the row sees: neither on what else is in the batch or in the
        tile, nor on how the tensors lie in memory.""",
        BOOLEAN,
    )
    autocast: bool = claim(
        False,
        """A call under `torch.autocast`, to the dtype of its inputs, is as precise as any other. Without this claim its
        products may be rounded to that dtype, which is noted and no bug.""",
        BOOLEAN,
    )
    by_autograd: bool = claim(
        False,
        "Gradients come from autograd. It need not be claimed, as it follows from a kernel without `backward`.",
    )
    validates: bool = claim(
        True, "A call that is not claimed raises an error before anything is launched.", BOOLEAN
    )
    may_refuse: bool = claim(
        False,
        """A claimed case may still be refused, by `NotImplementedError`. Refusals are counted, and only a kernel that
        refuses nearly everything fails. Of one that refuses a quarter, most cases are drawn from what it seems to
        answer. This is meant for plain functions, whose claims are assumed and not stated.""",
        BOOLEAN,
    )
    launch: Mapping[str, tuple[Any, ...]] = claim(
        {},
        """The launch settings that `forward` and `backward` take as keywords, each with all the values that it takes.
        The configurations of [tuners](tuners.md) are added to them. `--claims launch.NAME=VALUE,VALUE` keeps some of
        the values, and `--claims 'launch.NAME=not VALUE,VALUE'` all others.""",
        admits=lambda claimed, case: all(value in claimed.get(name, ()) for name, value in case.launch),
    )
    arithmetic: ArithmeticOf = claim(
        flash_arithmetic,
        "A function of dtype, device type and launch settings that returns what the kernel may round, an `Arithmetic`.",
    )
    designs: FamilyOf | None = claim(
        None,
        """For a kernel whose source is not known: a function like `arithmetic` that returns all designs which it may
        have, a `Family`. The error bounds then follow from these, and an answer is right if one of them explains it
        all.""",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for claims that contradict each other."""
        check_consistent(self)

    @property
    def hides_all(self) -> bool:
        """Whether what a mask hides from a row must never reach it, not even NaN or an infinite score."""
        return self.nonfinite == "strict"

    def family(self, dtype: str, device: str, launch: Launch) -> Family:
        """Return the designs of which one has to explain the kernel's answer; a declared arithmetic is the only one.

        The base of lse is a claim of its own, which is added to the arithmetic of each design.
        """
        if self.designs is None:
            family = Family((self.arithmetic(dtype, device, launch),))
        else:
            family = self.in_call(self.designs(dtype, device, launch), device, launch)
        if self.lse_base == "e":
            return family
        return replace(family, bases=tuple(replace(base, lse_in_base_2=True) for base in family.bases))

    def in_call(self, family: Family, device: str, launch: Launch) -> Family:
        """Return the designs that a family of this kernel has in a call with these settings and keywords.

        They are more where inputs are 8-bit numbers. A declared arithmetic has no more than it says.
        """
        if self.designs is None or "q_scale" not in launch:
            return family
        return with_8_bit_inputs(family, device, values="v_scale" in launch)

    def may_differ(self, *, causal: bool) -> bool:
        """Whether `seqlen_q` may differ from `seqlen_k` in calls with or without a causal mask."""
        return self.unequal_lengths and (self.causal_unequal_lengths or not causal)

    def length_from(self, least: int) -> int:
        """Return the shortest length that is claimed and has at least so many rows or keys."""
        return -(-max(least, self.min_seqlen) // self.seqlen_multiple) * self.seqlen_multiple

    def takes_lengths(self, seqlen_q: int, seqlen_k: int, *, causal: bool) -> bool:
        """Whether a sequence may have so many queries and keys in calls with or without a causal mask."""
        return (
            min(seqlen_q, seqlen_k) >= self.min_seqlen
            and seqlen_k >= self.min_seqlen_k
            and (self.max_seqlen_q is None or seqlen_q <= self.max_seqlen_q)
            and seqlen_q % self.seqlen_multiple == seqlen_k % self.seqlen_multiple == 0
            and (self.seqlens == "any" or seqlen_q <= seqlen_k)
            and (seqlen_q == seqlen_k or self.may_differ(causal=causal))
        )

    @property
    def kinds_with_gradients(self) -> tuple[str, ...]:
        """The kinds of calls of which gradients are claimed: ``none`` for a plain call, and kinds of ``ragged``."""
        kinds = ("none", *self.ragged) if self.dense else self.ragged
        return tuple(kind for kind in kinds if self.backward and kind in ("none", *WITH_GRADIENTS))

    def gives_gradients(self, *, causal: bool) -> bool:
        """Whether gradients of a call with or without a causal mask are claimed."""
        return self.backward is True or (self.backward == "causal" and causal)

    def admits(self, case: Any) -> bool:
        """Whether the kernel claims to answer a case, which may have longer lengths than the cases that are drawn."""
        return all(claim.admits(getattr(self, name), case) for name, claim in CLAIMS.items())


CLAIMS: Mapping[str, Claim] = claims_of(Capabilities)
"""What is declared of each field of ``Capabilities``."""
