"""PyTorch's ``scaled_dot_product_attention`` on nested tensors of the layout jagged. It has run on a CPU and a GPU."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.nested import nested_tensor_from_jagged
from torch.nn.functional import scaled_dot_product_attention

from kernels.adapters.bridge import CLAIMS, packed
from kernels.adapters.known_failures import TORCH_NESTED
from kernels.contract import AttentionKernel
from kernels.contract.parsing import parse_claims


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, **sequences: Any
) -> tuple[Tensor, None]:
    (rows, keys, values), (starts_q, starts_k, *_) = packed(q, k, v, **sequences)
    given = ((rows, starts_q), (keys, starts_k), (values, starts_k))
    # "If inputs are nested tensors they must be contiguous after transposing."
    q_, k_, v_ = (nested_tensor_from_jagged(x.contiguous(), s.long()).transpose(1, 2) for x, s in given)
    out = scaled_dot_product_attention(q_, k_, v_, is_causal=causal, scale=sm_scale)
    # The backward of values() needs a gradient of its own storage: docs/findings/torch_nested_values.md.
    return (out.transpose(1, 2).values() * 1.0).unflatten(0, (q.shape[0], -1)).transpose(1, 2), None


# The math backend rounds q and k after their scaling, the scores and the weights, all to 16 bits.
KERNEL = AttentionKernel(
    name="torch_nested",
    forward=_forward,
    known_failures=TORCH_NESTED,
    capabilities=replace(
        parse_claims(["rounded_scores=true", "q_prescaled=true", "k_prescaled=true"], CLAIMS),
        causal=(False,),  # on a CPU: "Nested tensors for query / key are not supported when is_causal=True."
        grouped_heads=False,  # "This path is currently not implemented for jagged layout NT."
        ragged=("packed",),
        rows_behind="none",  # a jagged tensor has no rows beside those of its sequences
    ),
)
