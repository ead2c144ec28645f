"""Planted bugs of key padding, in the first version."""

from kernels.mutants.mutant import Edit, Mutant

FORWARD = "kernels.flash_v1:_forward_kernel"
BACKWARD = "kernels.flash_v1:_backward_kernel"

OF_KEYS = "of_keys = batch * seqlen_k + start_n + keys"
LOAD = "tl.load(key_padding_mask + of_keys, mask=in_keys, other=False)"
V_TILE = "v_tile = load_tile(advance(v_ptrs, j * v_step, ALIGNED), attended, "
OF_DK = "dk_acc * sm_scale, in_keys, "


def _planted(name: str, what: str, *edits: Edit) -> Mutant:
    return Mutant(f"v1_key_padding_{name}", what, edits, kernel="flash_v1")


PADDING = (
    _planted(
        "inverted",
        "True keeps a key from being attended, as in torch.nn.MultiheadAttention",
        *(Edit(where, LOAD, f"in_keys & ({LOAD} == 0)") for where in (FORWARD, BACKWARD)),
    ),
    _planted(
        "of_first_sequence",
        "all sequences have the mask of the first",
        Edit(FORWARD, OF_KEYS, OF_KEYS.replace("batch * seqlen_k + ", "")),
    ),
    _planted(
        "of_first_block",
        "all key blocks of the backward pass have the mask of the first",
        Edit(BACKWARD, OF_KEYS, OF_KEYS.replace(" + start_n", "")),
    ),
    _planted(
        "by_a_finite_score",
        "masked keys have a score of -1e6: where all are, each has the same weight",
        Edit(
            FORWARD,
            "tl.where(attended[None, :], scores, NEG_INF)",
            "tl.where(attended[None, :], scores, -1e6)",
        ),
    ),
    _planted(
        "times_what_is_there",
        "values of masked keys are loaded, and 0 * nan is nan",
        Edit(FORWARD, V_TILE, V_TILE.replace("attended", "in_keys")),
    ),
    _planted(
        "not_in_backward",
        "masked keys have a weight in the backward pass, that of a score of 0",
        Edit(BACKWARD, "seen = seen & attended[:, None]", "seen = seen & in_keys[:, None]"),
    ),
    _planted(
        "dk_not_written",
        "dk of masked keys is memory as it was",
        Edit(BACKWARD, OF_DK, OF_DK.replace("in_keys", "attended")),
    ),
)
