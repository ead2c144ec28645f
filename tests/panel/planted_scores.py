"""Bugs planted in ``tests.panel.scores``; ``tests.panel.planted_scores:NAME`` is the function with the bug NAME."""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

SCORES = "tests.panel.scores"
CAPPED, ADDED, ALL_SCORES = f"{SCORES}:capped", f"{SCORES}:added", f"{SCORES}:scores_of"
EAGER, EXPANDED, TILED, GATED = f"{SCORES}:eager", f"{SCORES}:expanded", f"{SCORES}:tiled", f"{SCORES}:gated"
FIRST_STATE, EVERYTHING = f"{SCORES}:first_state", f"{SCORES}:everything"

PLANTED = (
    Planted(
        "softcap__left_out",
        "scores are not capped",
        Edit(CAPPED, "if softcap else x", "if False else x"),
    ),
    Planted(
        "softcap__not_multiplied_again",
        "the tanh is not multiplied by the soft-cap again",
        Edit(CAPPED, "torch.tanh(x / softcap) * softcap", "torch.tanh(x / softcap)"),
    ),
    Planted(
        "softcap__before_the_scale",
        "products are capped before they are scaled",
        Edit(
            ALL_SCORES,
            "capped(q.float() @ k.mT * sm_scale, softcap)",
            "capped(q.float() @ k.mT, softcap) * sm_scale",
        ),
    ),
    Planted(
        "softcap__after_alibi",
        "the bias of ALiBi is capped as well",
        Edit(
            ALL_SCORES,
            "capped(q.float() @ k.mT * sm_scale, softcap) + added(q, k, alibi_slopes, bias)",
            "capped(q.float() @ k.mT * sm_scale + added(q, k, alibi_slopes, bias), softcap)",
        ),
    ),
    Planted(
        "softcap__gradient_of_none",
        "the gradient goes past the soft-cap as if there were none",
        Edit(
            CAPPED,
            "torch.tanh(x / softcap) * softcap",
            "x + (torch.tanh(x / softcap) * softcap - x).detach()",
        ),
    ),
    Planted(
        "softcap__clamped",
        "scores are clamped instead of capped",
        Edit(CAPPED, "torch.tanh(x / softcap) * softcap", "x.clamp(-softcap, softcap)"),
    ),
    Planted(
        "softcap__sigmoid_of_once",
        "the sigmoid that makes the tanh of a tile has x where it should have 2 x",
        Edit(TILED, "torch.sigmoid(2 * x / softcap)", "torch.sigmoid(x / softcap)"),
        function="tiled",
    ),
    Planted(
        "alibi_slopes__of_the_first_head",
        "every head has the slope of the first",
        Edit(ADDED, "- slopes[:, None, None]", "- slopes[:1, None, None]"),
    ),
    Planted(
        "alibi_slopes__of_the_row",
        "distances are counted from the number of the row, also where the lengths differ",
        Edit(ADDED, "+ (seqlen_k - seqlen_q)", "+ 0"),
    ),
    Planted(
        "alibi_slopes__not_absolute",
        "keys after the diagonal gain from their distance, rather than lose",
        Edit(ADDED, ".abs()", ""),
    ),
    Planted(
        "alibi_slopes__in_another_base",
        "slopes are multiplied by ln 2, as if scores were in base 2",
        Edit(ADDED, "- slopes[:, None, None]", "- slopes[:, None, None] * LN_2"),
    ),
    Planted(
        "alibi_slopes__in_bfloat16",
        "slopes are rounded to bfloat16, as in a model that is cast as a whole",
        Edit(ADDED, "- slopes[:, None, None]", "- slopes.bfloat16().float()[:, None, None]"),
    ),
    Planted(
        "alibi_slopes__not_in_base_2",
        "in base 2, the bias is added after the conversion",
        Edit(TILED, "(x + total[..., tile]) * LOG2_E", "x * LOG2_E + total[..., tile]"),
        function="tiled",
        also="bias",
    ),
    Planted(
        "alibi_slopes__of_other_heads",
        "the heads have the slopes of each other, in reverse order",
        Edit(ADDED, "- slopes[:, None, None]", "- slopes.flip(0)[:, None, None]"),
    ),
    Planted(
        "bias__scaled",
        "the bias is multiplied by sm_scale like the products",
        Edit(ALL_SCORES, "alibi_slopes, bias)", "alibi_slopes, None if bias is None else bias * sm_scale)"),
    ),
    Planted(
        "bias__of_the_first_head",
        "every head has the bias of the first",
        Edit(ADDED, "bias.float()", "bias[:, :1].float()"),
    ),
    Planted(
        "bias__of_the_first_sequence",
        "every sequence has the bias of the first",
        Edit(ADDED, "bias.float()", "bias[:1].float()"),
    ),
    Planted(
        "bias__of_the_last_row",
        "every row has the bias of the last",
        Edit(ADDED, "bias.float()", "bias[:, :, -1:].float()"),
    ),
    Planted(
        "bias__left_out_with_alibi",
        "with ALiBi, there is no bias",
        Edit(ADDED, "total - slopes[:, None, None]", "-slopes[:, None, None]"),
    ),
    Planted(
        "bias__of_the_first_tile",
        "every tile of keys has the bias of the first",
        Edit(TILED, "total[..., tile]", "total[..., : tile.stop - tile.start]"),
        function="tiled",
        also="alibi_slopes",
    ),
    Planted(
        "bias_gradient__none",
        "the bias is detached, so that its gradient is 0",
        Edit(ADDED, "bias.float()", "bias.detach().float()"),
        also="bias",
    ),
    Planted(
        "bias_gradient__of_the_first_head",
        "a bias that the heads share has the gradient of the first",
        Edit(
            EXPANDED,
            "bias.expand(*q.shape[:3], k.shape[2])",
            "torch.cat([bias.expand(*q.shape[:3], k.shape[2])[:, :1], bias.detach().expand(*q.shape[:3], k.shape[2])"
            "[:, 1:]], 1) if bias.shape[1] == 1 else bias.expand(*q.shape[:3], k.shape[2])",
        ),
        function="expanded",
        also="bias",
    ),
    Planted(
        "bias_gradient__of_the_last_sequence",
        "a bias that the batch shares has the gradient of the last sequence",
        Edit(
            EXPANDED,
            "bias.expand(*q.shape[:3], k.shape[2])",
            "torch.cat([bias.detach().expand(*q.shape[:3], k.shape[2])[:-1], bias.expand(*q.shape[:3], k.shape[2])"
            "[-1:]]) if bias.shape[0] == 1 else bias.expand(*q.shape[:3], k.shape[2])",
        ),
        function="expanded",
        also="bias",
    ),
    Planted(
        "bias_gradient__scaled",
        "the gradient of the bias is multiplied by sm_scale",
        Edit(
            ALL_SCORES,
            "alibi_slopes, bias)",
            "alibi_slopes, None if bias is None else bias.detach().float() + sm_scale * (bias - bias.detach()))",
        ),
        also="bias",
    ),
    Planted(
        "bias_gradient__mean_over_the_batch",
        "the gradient of the bias is divided by the number of sequences",
        Edit(
            ADDED,
            "bias.float()",
            "bias.detach().float() + (bias - bias.detach()).float() / q.shape[0]",
        ),
        also="bias",
    ),
    Planted(
        "sinks__left_out",
        "sinks have no part in the softmax",
        Edit(EAGER, "if sinks is not None:", "if False:"),
    ),
    Planted(
        "sinks__not_in_lse",
        "lse is that of the keys alone",
        Edit(EAGER, "lse = torch.logaddexp(lse, sinks[:, None])", "pass"),
    ),
    Planted(
        "sinks__scaled",
        "sinks are multiplied by sm_scale",
        Edit(EAGER, "(s, sinks[None, :, None, None].", "(s, sm_scale * sinks[None, :, None, None]."),
    ),
    Planted(
        "sinks__of_the_first_head",
        "every head has the sink of the first",
        Edit(GATED, "torch.sigmoid(lse - sinks[:, None])", "torch.sigmoid(lse - sinks[:1, None])"),
        function="gated",
    ),
    Planted(
        "sinks__not_in_base_2",
        "the running maximum begins with the sink in base e, where scores are in base 2",
        Edit(FIRST_STATE, " * LOG2_E", ""),
        function="tiled",
    ),
    Planted(
        "sinks__not_counted",
        "the running maximum begins with the sink, and the running sum with 0",
        Edit(FIRST_STATE, "nothing + 1.0", "nothing"),
        function="tiled",
    ),
    Planted(
        "sinks__in_delta",
        "the gradient does not know that the sink takes part",
        Edit(GATED, "torch.sigmoid(lse - sinks[:, None])", "torch.sigmoid(lse.detach() - sinks[:, None])"),
        function="gated",
    ),
)
"""At least five bugs of each claim."""

COMBINED = (
    Planted(
        "softcap__with_window_and_grouped_heads",
        "with a window and grouped heads, scores are not capped",
        Edit(EVERYTHING, ", softcap, alibi", ", softcap * (not window or q.shape[1] == k.shape[1]), alibi"),
        function="everything",
    ),
    Planted(
        "sinks__with_chunk_and_unequal_lengths",
        "with chunks and more keys than queries, sinks are left out",
        Edit(
            EVERYTHING,
            "torch.exp(column - m)",
            "torch.exp(column - m) * (not chunk or k.shape[2] <= q.shape[2])",
        ),
        function="everything",
    ),
    Planted(
        "alibi_slopes__with_softcap_and_causal",
        "under a causal mask and a soft-cap, the bias is halved",
        Edit(
            EVERYTHING,
            "softcap, alibi_slopes, bias)",
            "softcap, alibi_slopes / 2 if alibi_slopes is not None and softcap and causal else alibi_slopes, bias)",
        ),
        function="everything",
    ),
    Planted(
        "sinks__with_softcap_and_first_keys",
        "with a soft-cap and first keys, sinks are capped",
        Edit(EVERYTHING, "column = sinks", "column = capped(sinks, softcap if first_keys else 0.0)"),
        function="everything",
    ),
)
"""Bugs that show only if three things come together."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, (*PLANTED, *COMBINED))
