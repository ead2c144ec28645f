"""Kernels in PyTorch with several planted bugs, and the bugs that only one of them has."""

from dataclasses import replace

from strategies.case import Case
from tests.several.bug import DEMANDING, EAGER, FLASH, PARTS, Edit, PlantedBug, Several
from tests.several.shared import (
    ALL,
    CAUSAL_OFF_BY_ONE,
    CAUSAL_TOP_LEFT,
    CRASH_OF_EMPTY_ROWS,
    CRASH_OF_HEAD_DIM_128,
    CRASH_OF_HUGE_STRIDES,
    DEFAULT_SCALE_IN_BACKWARD,
    DOUT_TAKEN_FOR_CONTIGUOUS,
    DV_OF_FIRST_HEAD,
    GRADIENTS,
    K_BY_STRIDES_OF_V,
    LAST_BATCH_READS_FIRST,
    LSE_IN_BASE_2,
    NAN_TO_ZERO,
    SCALE_WITHOUT_SIGN,
    WRONG_HEAD_MAP,
)

SOFTMAX, RECOMPUTED = f"{FLASH}:online_softmax", f"{FLASH}:recomputed"
SUM_OF_P = "l = l * alpha + p.sum(-1, keepdim=True)"
RETURN_GRADIENTS = "return dq * after, dk, dv"
DK_OF_TILE = "dk[:, :, keys] = heads.product(ds.mT, heads.q) * after"
DQ_OF_TILE = "dq += heads.product(ds, heads.k[:, :, keys])"

TAIL_UNMASKED = PlantedBug(
    name="tail_unmasked",
    what="without a causal mask, keys past the end of the last tile of 64 count with a score of 0",
    edits=(
        Edit(
            SOFTMAX,
            SUM_OF_P,
            f"{SUM_OF_P}\n        if heads.seen.all() and keys.stop - keys.start < block:\n"
            "            l = l + (block - (keys.stop - keys.start)) * torch.exp(-shift)",
        ),
    ),
    tensors=ALL,
    law="backward",
    case=Case(),
    fields=("causal", "seqlen_k"),
    can_show=lambda case: case.seqlen_k % 64 != 0 and (not case.causal or case.seqlen_q <= 1),
)

DELTA_OF_64_COLUMNS = PlantedBug(
    name="delta_of_64_columns",
    what="delta is summed over the first 64 columns",
    edits=(Edit(RECOMPUTED, "else (dout * out).sum(", "else (dout * out)[..., :64].sum("),),
    tensors=("dq", "dk"),
    law="backward",
    case=Case(head_dim=128, seqlen_q=2, seqlen_k=2),
    fields=("head_dim",),
    can_show=lambda case: case.head_dim > 64,
)

DK_UP_TO_256_KEYS = PlantedBug(
    name="dk_up_to_256_keys",
    what="dk is 0 from the key 256 on",
    edits=(Edit(RECOMPUTED, DK_OF_TILE, f"{DK_OF_TILE} * (keys.start < 256)"),),
    tensors=("dk",),
    law="backward",
    case=Case(seqlen_k=257),
    fields=("seqlen_k",),
    can_show=lambda case: case.seqlen_k > 256,
)

DQ_OF_WHOLE_TILES = PlantedBug(
    name="dq_of_whole_tiles",
    what="dq of rows behind the last whole tile of 64 is not written",
    edits=(
        Edit(
            RECOMPUTED,
            RETURN_GRADIENTS,
            "kept, whole = torch.empty_like(dq), dq.shape[2] // 64 * 64\n"
            "    kept[:, :, :whole] = dq[:, :, :whole] * after\n"
            "    return kept, dk, dv",
        ),
    ),
    tensors=("dq",),
    law="backward",
    case=Case(),
    fields=("seqlen_q",),
    can_show=lambda case: case.seqlen_q % 64 != 0,
)

DQ_OF_DEEP_ROWS = PlantedBug(
    name="dq_of_deep_rows",
    what="a padded key of score 0 makes dq NaN where lse is below -88.7, as exp(0 - lse) is infinite",
    edits=(
        Edit(
            RECOMPUTED,
            DQ_OF_TILE,
            f"{DQ_OF_TILE}\n        if keys.stop - keys.start < block:\n"
            "            dq += torch.exp(-finite_shift(lse)) * 0.0",
        ),
    ),
    tensors=("dq",),
    law="backward",
    case=Case(q_values="positive", k_values="negative"),
    fields=("seqlen_k", "q_values", "k_values", "sm_scale"),
    can_show=lambda case: case.seqlen_k % 64 != 0,
)

P_IN_BFLOAT16 = PlantedBug(
    name="p_in_bfloat16",
    what="P is rounded to bfloat16 in the forward whatever the inputs' dtype is",
    edits=(
        Edit(
            SOFTMAX,
            "heads.product(heads.rounded(p), heads.v[:, :, keys])",
            "heads.product(p.bfloat16().float(), heads.v[:, :, keys])",
        ),
    ),
    tensors=("out", "dq", "dk"),
    law="forward",
    case=Case(seqlen_k=64, dtype="float16"),
    fields=("dtype",),
    can_show=lambda case: case.dtype != "bfloat16" and case.seqlen_k > 1,
)

LSE_OF_LAST_MAXIMUM = PlantedBug(
    name="lse_of_last_maximum",
    what="lse is made of the last tile's maximum, while the sum stands relative to the one last rescaled by",
    edits=(
        Edit(f"{FLASH}:v4_lazy_rescaling", "m = m_new", "m, top = m_new, largest"),
        Edit(f"{FLASH}:v4_lazy_rescaling", "m + l.log()", "(top if heads.tiles(128) else m) + l.log()"),
    ),
    tensors=("lse", *GRADIENTS),
    law="forward",
    case=Case(seqlen_k=129),
    fields=("seqlen_k",),
    can_show=lambda case: case.seqlen_k > 128,
)

REMAINDER_OF_KEYS_DROPPED = PlantedBug(
    name="remainder_of_keys_dropped",
    what="keys that are left over when their number is divided by 4 belong to no part",
    edits=(
        Edit(
            f"{PARTS}:equal_parts",
            "heads.tiles(max(1, math.ceil(heads.k.shape[2] / parts)))",
            "heads.tiles(max(1, heads.k.shape[2] // parts))[:parts]",
        ),
    ),
    tensors=ALL,
    law="backward",
    case=Case(seqlen_k=5),
    fields=("seqlen_k",),
    can_show=lambda case: case.seqlen_k > 4 and case.seqlen_k % 4 != 0,
)

EMPTY_PARTS_GIVE_NAN = PlantedBug(
    name="empty_parts_give_nan",
    what="merging parts of which a row sees nothing gives exp(-inf - -inf), NaN",
    edits=(Edit(f"{PARTS}:merged", "lse.masked_fill(lse == -torch.inf, 0.0)", "lse"),),
    tensors=("out", "dq", "dk"),
    law="forward",
    case=Case(seqlen_q=2, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.causal and case.seqlen_q > case.seqlen_k > 0,
)

FINITE_MASK = PlantedBug(
    name="finite_mask",
    what="hidden scores are -30 instead of -inf, which rows of very negative scores see",
    edits=(Edit(f"{EAGER}:masked", "torch.where(live, -torch.inf, 0.0)", "torch.where(live, -30.0, 0.0)"),),
    tensors=("out", *GRADIENTS),
    law="forward",
    case=Case(seqlen_q=2, seqlen_k=2, causal=True, head_dim=32, q_values="positive", k_values="negative"),
    fields=("causal", "seqlen_q", "seqlen_k", "q_values", "k_values", "sm_scale"),
    can_show=lambda case: case.causal and case.seqlen_q > 1,
)

P_IN_FLOAT16 = PlantedBug(
    name="p_in_float16",
    what="P is rounded to float16 whatever the inputs' dtype is",
    edits=(
        Edit(
            f"{EAGER}:float32",
            "p = torch.softmax(masked(s, seen), -1)",
            "p = torch.softmax(masked(s, seen), -1).half().float()",
        ),
    ),
    tensors=("out", *GRADIENTS),
    law="forward",
    case=Case(seqlen_k=8),
    fields=("dtype",),
    can_show=lambda case: case.dtype != "float16",
)

TORCH = (
    Several("tails", f"{FLASH}:v2", (TAIL_UNMASKED, DV_OF_FIRST_HEAD, LSE_IN_BASE_2)),
    Several(
        "corners", f"{FLASH}:v2_tiles_of_128", (CAUSAL_OFF_BY_ONE, SCALE_WITHOUT_SIGN, K_BY_STRIDES_OF_V)
    ),
    Several("far", f"{FLASH}:v2", (CRASH_OF_HUGE_STRIDES, DELTA_OF_64_COLUMNS, NAN_TO_ZERO)),
    Several("wide", f"{FLASH}:v1", (CRASH_OF_HEAD_DIM_128, DK_UP_TO_256_KEYS, DEFAULT_SCALE_IN_BACKWARD)),
    Several("empty", f"{FLASH}:base_2", (CRASH_OF_EMPTY_ROWS, DOUT_TAKEN_FOR_CONTIGUOUS, LSE_IN_BASE_2)),
    Several("heads", f"{FLASH}:flex", (WRONG_HEAD_MAP, DQ_OF_WHOLE_TILES)),
    Several(
        "precision",
        f"{FLASH}:v2_without_lse",
        (P_IN_BFLOAT16, LAST_BATCH_READS_FIRST, DOUT_TAKEN_FOR_CONTIGUOUS),
    ),
    Several("deep", f"{FLASH}:v2_scaled_ds", (DQ_OF_DEEP_ROWS, CAUSAL_TOP_LEFT)),
    Several(
        "lazy", f"{FLASH}:v4_lazy_rescaling", (LSE_OF_LAST_MAXIMUM, DV_OF_FIRST_HEAD, SCALE_WITHOUT_SIGN)
    ),
    Several(
        "parts",
        f"{PARTS}:split_4",
        (REMAINDER_OF_KEYS_DROPPED, EMPTY_PARTS_GIVE_NAN, DV_OF_FIRST_HEAD, LSE_IN_BASE_2),
    ),
    Several(
        "demanding",
        f"{DEMANDING}:attention",
        (
            replace(CAUSAL_TOP_LEFT, case=Case(seqlen_q=8, seqlen_k=16, causal=True)),
            replace(DEFAULT_SCALE_IN_BACKWARD, case=Case(seqlen_q=8, seqlen_k=8, sm_scale=1.0)),
            replace(DELTA_OF_64_COLUMNS, case=Case(head_dim=128, seqlen_q=8, seqlen_k=8)),
            replace(DV_OF_FIRST_HEAD, case=Case(group=2, seqlen_q=8, seqlen_k=8)),
        ),
    ),
    Several("model", f"{EAGER}:float32", (FINITE_MASK, P_IN_FLOAT16, WRONG_HEAD_MAP)),
)
