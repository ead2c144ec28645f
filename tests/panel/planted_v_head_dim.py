"""Bugs of a head_dim of v of its own, planted in ``tests.panel.flash``, and the sound functions that may have one.

``tests.panel.planted_v_head_dim:NAME`` is the function with the bug NAME.
"""

from collections.abc import Callable
from typing import Any

from kernels.mutants.mutant import Edit
from tests.panel.planted import Planted, loaded

CLAIMS = ("v_head_dim=0-256",)
"""What each function of ``SOUND`` claims."""

SOUND = (
    *(f"tests.panel.flash:{name}" for name in ("v2", "v2_delta_from_p", "v2_stores_each_head", "cutlass")),
    *(f"tests.panel.eager:{name}" for name in ("float32", "repeated_heads", "scaled_in_product")),
)
"""Sound functions that take any head_dim of v."""

FORWARD, BACKWARD, ENTRY = (f"tests.panel.flash:{name}" for name in ("online_softmax", "recomputed", "v2"))
MEMORY = "tests.several.memory"


def _planted(name: str, what: str, edit: Edit) -> Planted:
    """Return a bug that ``tests.panel.flash:v2`` shows, of the claim ``v_head_dim``."""
    return Planted(f"v_head_dim__{name}", what, edit, function="v2")


PLANTED = (
    _planted(
        "columns_beyond_q_left_out",
        "columns of out that q does not have are left 0",
        Edit(
            FORWARD,
            "return acc / not_zero(l)",
            "acc[..., heads.q.shape[3] :] = 0.0\n    return acc / not_zero(l)",
        ),
    ),
    _planted(
        "tiles_as_wide_as_q",
        "columns of v are taken in tiles as wide as q, of which the last is left out if it is not full",
        Edit(
            FORWARD,
            "return acc / not_zero(l)",
            "width, columns = heads.q.shape[3], acc.shape[3]\n"
            "    acc[..., columns // width * width if columns > width else columns :] = 0.0\n"
            "    return acc / not_zero(l)",
        ),
    ),
    _planted(
        "delta_of_first_columns",
        "delta is summed over as many columns as q has",
        Edit(BACKWARD, "(dout * out).sum", "(dout * out)[..., : heads.q.shape[3]].sum"),
    ),
    _planted(
        "dp_of_first_columns",
        "dP is summed over as many columns as q has",
        Edit(
            BACKWARD,
            "heads.product(dout, heads.v[:, :, keys].mT)",
            "heads.product(dout[..., : heads.q.shape[3]], heads.v[:, :, keys, : heads.q.shape[3]].mT)",
        ),
    ),
    _planted(
        "dv_beyond_q_left_out",
        "columns of dv that q does not have are left 0",
        Edit(
            BACKWARD,
            "dv[:, :, keys] = heads.product(cast.mT, dout)",
            "dv[:, :, keys, : heads.q.shape[3]] = heads.product(cast.mT, dout[..., : heads.q.shape[3]])",
        ),
    ),
    _planted(
        "rows_of_q_apart",
        "the rows of a contiguous v are taken to be as far apart as those of q",
        Edit(
            ENTRY,
            "forward = partial",
            f"from {MEMORY} import read_by_strides\n\n"
            "    if v.is_contiguous():\n"
            "        v = read_by_strides(v, (*v.stride()[:2], q.shape[3], 1))\n"
            "    forward = partial",
        ),
    ),
    _planted(
        "default_scale_of_v",
        "the backward takes the default scale from the head_dim of v",
        Edit(
            BACKWARD,
            "    delta = ",
            "    if heads.sm_scale == heads.q.shape[3] ** -0.5:\n"
            "        after = heads.v.shape[3] ** -0.5\n"
            "    delta = ",
        ),
    ),
)
"""Bugs that only a head_dim of v of its own shows."""


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the function with the bug of this name."""
    return loaded(name, PLANTED)
