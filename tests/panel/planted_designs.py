"""Bugs planted in sound functions of less precise designs; each shows although the design is claimed.

``tests.panel.planted_designs:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

HEAD_BY_HEAD, QK_PRESCALED = "tests.panel.narrow:head_by_head", "tests.panel.narrow:qk_prescaled"
IN_16_BITS = "tests.panel.scores:in_16_bits"

PLANTED = (
    Planted(
        "rounded_group_sums__head_added_twice",
        "the gradients of the second head of a group are added twice",
        Edit(
            HEAD_BY_HEAD,
            "(x[:, shared] for",
            "(x[:, shared] + (x - x.detach())[:, shared] * (head % group == 1) for",
        ),
        function="head_by_head",
    ),
    Planted(
        "rounded_group_sums__last_head_lost",
        "the gradients of the last head of a group are not added",
        Edit(
            HEAD_BY_HEAD,
            "(x[:, shared] for",
            "(x[:, shared].detach() if 1 < group == head % group + 1 else x[:, shared] for",
        ),
        function="head_by_head",
    ),
    Planted(
        "qk_prescaled__of_q_alone",
        "k is not multiplied by the root",
        Edit(QK_PRESCALED, "k * root", "k"),
        function="qk_prescaled",
    ),
    Planted(
        "qk_prescaled__root_of_another_scale",
        "the root is that of 1 / sqrt(head_dim), whatever scale is given",
        Edit(QK_PRESCALED, "math.sqrt(abs(sm_scale))", "q.shape[-1] ** -0.25"),
        function="qk_prescaled",
    ),
    Planted(
        "rounded_bias__scaled_twice",
        "the bias is multiplied by log2(e) twice",
        Edit(IN_16_BITS, "bias * LOG2_E", "bias * LOG2_E * LOG2_E"),
        function="in_16_bits",
    ),
    Planted(
        "rounded_bias__of_the_first_head",
        "every head has the bias of the first",
        Edit(IN_16_BITS, "bias * LOG2_E", "bias[:, :1] * LOG2_E"),
        function="in_16_bits",
    ),
    Planted(
        "rounded_bias__slopes_in_8_bits",
        "slopes are kept in float8_e4m3fn",
        Edit(IN_16_BITS, "(alibi_slopes * LOG2_E)", "(alibi_slopes * LOG2_E).to(torch.float8_e4m3fn)"),
        function="in_16_bits",
    ),
)
"""At least two bugs of each claim."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
