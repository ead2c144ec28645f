"""Kernels in Triton with several planted bugs, and the bugs that only one of them has."""

from strategies.case import Case
from tests.several.bug import SPLIT, TUTORIAL, V2, Edit, PlantedBug, Several
from tests.several.shared import ALL, LSE_IN_BASE_2

OF_QUERIES, OF_KEYS = f"{V2}:_gradients_of_queries", f"{V2}:_gradients_of_keys"
SEEN_TILE = "seen = (n[None, :] < seqlen_k) & (rows[:, None] < seqlen_q)"

TAIL_UNMASKED = PlantedBug(
    name="tail_unmasked",
    what="without a causal mask, keys past the end of the last tile of 32 count with a score of 0",
    edits=(Edit(f"{TUTORIAL}:_forward", "seen = n[None, :] < seqlen_k", "seen = n[None, :] >= 0"),),
    tensors=ALL,
    law="backward",
    case=Case(),
    fields=("causal", "seqlen_k"),
    can_show=lambda case: case.seqlen_k % 32 != 0 and not case.causal,
)

CAUSAL_LOOP_TOO_SHORT = PlantedBug(
    name="causal_loop_too_short",
    what="the causal loop over the keys ends as if both lengths were equal",
    edits=(Edit(f"{TUTORIAL}:_forward", "start + BLOCK_M + seqlen_k - seqlen_q)", "start + BLOCK_M)"),),
    tensors=ALL,
    law="backward",
    case=Case(seqlen_k=96, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.causal and case.seqlen_k > case.seqlen_q and case.seqlen_k > 64,
)

DELTA_OF_FIRST_SEQUENCE = PlantedBug(
    name="delta_of_first_sequence",
    what="the kernel of dk and dv reads the delta of the batch's first sequence",
    edits=(Edit(OF_KEYS, "tl.load(Delta + first + rows", "tl.load(Delta + head * seqlen_q + rows"),),
    tensors=("dk",),
    law="backward",
    case=Case(batch=2, seqlen_q=2, seqlen_k=2),
    fields=("batch",),
    can_show=lambda case: case.batch > 1,
)

FIRST_HEAD_OF_GROUP = PlantedBug(
    name="first_head_of_group",
    what="dk and dv are those of a group's first query head",
    edits=(Edit(OF_KEYS, "for member in range(group):", "for member in range(1):"),),
    tensors=("dk", "dv"),
    law="backward",
    case=Case(group=2, seqlen_q=2, seqlen_k=2),
    fields=("group",),
    can_show=lambda case: case.group > 1,
)

DQ_OF_DEEP_ROWS = PlantedBug(
    name="dq_of_deep_rows",
    what="a padded key of score 0 makes dq NaN where lse is below -88.7, as exp(0 - lse) is infinite",
    edits=(Edit(OF_QUERIES, SEEN_TILE, "seen = (n[None, :] >= 0) & (rows[:, None] < seqlen_q)"),),
    tensors=("dq",),
    law="backward",
    case=Case(head_dim=32, q_values="positive", k_values="negative"),
    fields=("causal", "seqlen_k", "q_values", "k_values", "sm_scale"),
    can_show=lambda case: case.seqlen_k % 64 != 0 and not case.causal,
)

DQ_BY_SCALE_WITHOUT_SIGN = PlantedBug(
    name="dq_by_scale_without_sign",
    what="dq is multiplied with the absolute value of sm_scale",
    edits=(Edit(OF_QUERIES, "dq = dq * sm_scale", "dq = dq * tl.abs(sm_scale)"),),
    tensors=("dq",),
    law="backward",
    case=Case(seqlen_q=2, seqlen_k=64, sm_scale=-1.0),
    fields=("sm_scale",),
    can_show=lambda case: case.scale < 0,
)

EMPTY_SPLITS_GIVE_NAN = PlantedBug(
    name="empty_splits_give_nan",
    what="merging splits of which a row sees nothing gives exp(-inf - -inf), NaN",
    edits=(Edit(f"{SPLIT}:_merge", 'shift = tl.where(top == float("-inf"), 0.0, top)', "shift = top"),),
    tensors=ALL,
    law="forward",
    case=Case(seqlen_q=2, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.seqlen_k == 0 or (case.causal and case.seqlen_q > case.seqlen_k),
)

LAST_KEYS_IN_NO_SPLIT = PlantedBug(
    name="last_keys_in_no_split",
    what="the length of a split is rounded down to whole tiles, so the last keys are in none",
    edits=(
        Edit(
            f"{SPLIT}:launch_forward",
            "triton.cdiv(triton.cdiv(seqlen_k, SPLITS), BLOCK_N) * BLOCK_N",
            "max(1, seqlen_k // (SPLITS * BLOCK_N)) * BLOCK_N",
        ),
    ),
    tensors=ALL,
    law="forward",
    case=Case(seqlen_k=257),
    fields=("seqlen_k",),
    can_show=lambda case: case.seqlen_k > 256 and case.seqlen_k % 256 != 0,
)

V_OF_WRONG_HEAD = PlantedBug(
    name="v_of_wrong_head",
    what="query head h reads v of key head h % heads_kv, and k of the right one",
    edits=(Edit(f"{SPLIT}:_part", "(head // group) * stride_vh", "(head % (heads // group)) * stride_vh"),),
    tensors=("out", "dq", "dk"),
    law="forward",
    case=Case(heads_kv=2, group=2),
    fields=("heads_kv", "group"),
    can_show=lambda case: case.heads_kv > 1 and case.group > 1,
)

TRITON = (
    Several("triton_tails", f"{TUTORIAL}:attention", (TAIL_UNMASKED, CAUSAL_LOOP_TOO_SHORT, LSE_IN_BASE_2)),
    Several(
        "triton_gradients",
        f"{V2}:attention",
        (DELTA_OF_FIRST_SEQUENCE, FIRST_HEAD_OF_GROUP, DQ_OF_DEEP_ROWS, DQ_BY_SCALE_WITHOUT_SIGN),
    ),
    Several(
        "triton_splits",
        f"{SPLIT}:attention",
        (EMPTY_SPLITS_GIVE_NAN, LAST_KEYS_IN_NO_SPLIT, V_OF_WRONG_HEAD),
    ),
)
