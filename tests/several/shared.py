"""Bugs that are planted in what all designs of the panel share: head maps, masks, what is saved for the backward."""

from strategies.case import Case, Spike
from tests.several.bug import HEADS, Edit, PlantedBug
from tests.several.memory import read_by_strides

ALL = ("out", "lse", "dq", "dk", "dv")
GRADIENTS = ("dq", "dk", "dv")

OPERANDS = "k, v = (for_each_query_head(x, q).float() for x in (k, v))"
SUM_OF_GROUP = "dk, dv = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))"
HEADS_OF_BACKWARD = "heads = heads_of(q, k, v, o.causal, o.sm_scale)"
GRADIENTS_OF_HEADS = "backward(heads, dout.float(), out.float(), lse[..., None])"
READ_BY_STRIDES = f"from {read_by_strides.__module__} import read_by_strides"
CORNER = "every.tril(seqlen_k - seqlen_q)"


def before_operands(statement: str) -> tuple[Edit, ...]:
    """Return an edit that runs a statement before k and v are read."""
    return (Edit(f"{HEADS}:heads_of", OPERANDS, f"{statement}\n    {OPERANDS}"),)


LSE_IN_BASE_2 = PlantedBug(
    name="lse_in_base_2",
    what="lse is returned as a logarithm to base 2; the backward has the right one",
    edits=(Edit(f"{HEADS}:_Attention", "return out, lse", "return out, lse * LOG2_E"),),
    tensors=("lse",),
    law="forward",
    case=Case(seqlen_k=64, causal=True),
    fields=("seqlen_k",),
    can_show=lambda case: case.seqlen_q > 0 and case.seqlen_k > 0,
)

DV_OF_FIRST_HEAD = PlantedBug(
    name="dv_of_first_head",
    what="dv of a group is that of its first query head alone",
    edits=(
        Edit(
            f"{HEADS}:_each_head",
            SUM_OF_GROUP,
            "dk, dv = (x.unflatten(1, (k.shape[1], -1)) for x in (dk, dv))\n    dk, dv = dk.sum(2), dv[:, :, 0]",
        ),
    ),
    tensors=("dv",),
    law="backward",
    case=Case(group=2, seqlen_k=64),
    fields=("group",),
    can_show=lambda case: case.group > 1,
)

WRONG_HEAD_MAP = PlantedBug(
    name="wrong_head_map",
    what="query head h reads key head h % heads_kv instead of h // group",
    edits=(
        Edit(
            f"{HEADS}:for_each_query_head",
            "x.repeat_interleave(q.shape[1] // x.shape[1], 1)",
            "x.repeat(1, q.shape[1] // x.shape[1], 1, 1)",
        ),
    ),
    tensors=ALL,
    law="forward",
    case=Case(heads_kv=2, group=2, seqlen_k=2, dtype="float16"),
    fields=("heads_kv", "group"),
    can_show=lambda case: case.heads_kv > 1 and case.group > 1,
)

CAUSAL_OFF_BY_ONE = PlantedBug(
    name="causal_off_by_one",
    what="the causal mask hides one key more where the lengths differ",
    edits=(Edit(f"{HEADS}:seen_keys", CORNER, "every.tril(seqlen_k - seqlen_q - (seqlen_k != seqlen_q))"),),
    tensors=ALL,
    law="forward",
    case=Case(seqlen_q=1, seqlen_k=2, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.causal and case.seqlen_q != case.seqlen_k,
)

CAUSAL_TOP_LEFT = PlantedBug(
    name="causal_top_left",
    what="the causal mask has its corner at the top left",
    edits=(Edit(f"{HEADS}:seen_keys", CORNER, "every.tril(0)"),),
    tensors=ALL,
    law="forward",
    case=Case(seqlen_q=1, seqlen_k=2, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.causal and case.seqlen_q != case.seqlen_k,
)

SCALE_WITHOUT_SIGN = PlantedBug(
    name="scale_without_sign",
    what="a negative sm_scale is taken for a positive one",
    edits=before_operands("sm_scale = abs(sm_scale)"),
    tensors=ALL,
    law="forward",
    case=Case(seqlen_q=2, seqlen_k=2, sm_scale=-1.0),
    fields=("sm_scale",),
    can_show=lambda case: case.scale < 0,
)

DEFAULT_SCALE_IN_BACKWARD = PlantedBug(
    name="default_scale_in_backward",
    what="the backward takes 1 / sqrt(head_dim) whatever sm_scale is",
    edits=(
        Edit(
            f"{HEADS}:_each_head",
            HEADS_OF_BACKWARD,
            HEADS_OF_BACKWARD.replace("o.sm_scale", "q.shape[3] ** -0.5"),
        ),
    ),
    tensors=GRADIENTS,
    law="backward",
    case=Case(seqlen_q=2, seqlen_k=2, sm_scale=1.0),
    fields=("sm_scale",),
    can_show=lambda case: case.scale != case.head_dim**-0.5,
)

K_BY_STRIDES_OF_V = PlantedBug(
    name="k_by_strides_of_v",
    what="k is read by the strides of v",
    edits=before_operands(f"{READ_BY_STRIDES}\n    k = read_by_strides(k, v.stride())"),
    tensors=ALL,
    law="forward",
    case=Case(heads_kv=2, seqlen_q=2, seqlen_k=2, k_layout="bnhd"),
    fields=("k_layout", "v_layout"),
    can_show=lambda case: case.k_layout != case.v_layout,
)

DOUT_TAKEN_FOR_CONTIGUOUS = PlantedBug(
    name="dout_taken_for_contiguous",
    what="dout is read as if it were contiguous",
    edits=(
        Edit(
            f"{HEADS}:_each_head",
            HEADS_OF_BACKWARD,
            f"{READ_BY_STRIDES}\n"
            "    dout = read_by_strides(dout, torch.empty(dout.shape, device='meta').stride())\n"
            f"    {HEADS_OF_BACKWARD}",
        ),
    ),
    tensors=GRADIENTS,
    law="backward",
    case=Case(heads_kv=2, seqlen_q=2, seqlen_k=2, dtype="bfloat16", dout_layout="bnhd"),
    fields=("dout_layout",),
    can_show=lambda case: case.dout_layout != "contiguous",
)

LAST_BATCH_READS_FIRST = PlantedBug(
    name="last_batch_reads_first",
    what="the last sequence of a batch reads the values of the first",
    edits=before_operands("v = torch.cat((v[:-1], v[:1]))"),
    tensors=("out", "dq", "dk"),
    law="forward",
    case=Case(batch=2),
    fields=("batch",),
    can_show=lambda case: case.batch > 1,
)

NAN_TO_ZERO = PlantedBug(
    name="nan_to_zero",
    what="a score of NaN counts as 0",
    edits=(
        Edit(
            f"{HEADS}:Heads",
            "return torch.where(self.seen[:, keys], s, -torch.inf)",
            "return torch.where(self.seen[:, keys], s.nan_to_num(0.0, torch.inf, -torch.inf), -torch.inf)",
        ),
    ),
    tensors=("out", "dq", "dk", "dv"),
    law="special",
    case=Case(spikes=(Spike("q", (0, 0, 0, 0), "nan"),)),
    fields=("spikes",),
    can_show=lambda case: (
        any(isinstance(spike.value, str) for spike in case.spikes) or "huge" in (case.q_values, case.k_values)
    ),
)


def crash(what: str, condition: str, how: str) -> tuple[Edit, ...]:
    """Return an edit that ends the process before k and v are read."""
    return before_operands(f"if {condition}:  # {what}\n        {how}")


ABORT = "__import__('os').abort()"
WILD_READ = "__import__('ctypes').string_at(0)"

CRASH_OF_HUGE_STRIDES = PlantedBug(
    name="crash_of_huge_strides",
    what="the process is aborted where k has a stride that 32 bits don't hold, or starts so far",
    edits=crash(
        "an offset beyond 32 bits", "k.storage_offset() + max(k.stride()) * max(k.shape) >= 2**31", ABORT
    ),
    law="forward",
    case=Case(seqlen_k=2, k_layout="huge"),
    fields=("k_layout",),
    can_show=lambda case: case.k_layout == "huge",
    kind="died",
)

CRASH_OF_HEAD_DIM_128 = PlantedBug(
    name="crash_of_head_dim_128",
    what="a wild read ends the process for head_dim 128",
    edits=crash("too little shared memory", "q.shape[3] == 128", WILD_READ),
    law="forward",
    case=Case(head_dim=128),
    fields=("head_dim",),
    can_show=lambda case: case.head_dim == 128,
    kind="died",
)

CRASH_OF_EMPTY_ROWS = PlantedBug(
    name="crash_of_empty_rows",
    what="the process is aborted where rows see no key",
    edits=crash("a loop over no key", "causal and q.shape[2] > k.shape[2]", ABORT),
    law="forward",
    case=Case(seqlen_q=2, causal=True),
    fields=("causal", "seqlen_q", "seqlen_k"),
    can_show=lambda case: case.causal and case.seqlen_q > case.seqlen_k,
    kind="died",
)
