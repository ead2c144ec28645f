"""Stands for a module of a model file: rows before heads, a scale of its own, and dropout in training."""

from torch import Tensor, nn

from tests.unit.support.conventions.flash_attn import flash_attn_func


class CoreAttention(nn.Module):
    """Attention with the scale 1 / sqrt(head_dim), of tensors (batch, seqlen, heads, head_dim)."""

    def __init__(self, head_dim: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.scale = head_dim**-0.5
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        """Return out, like q."""
        out: Tensor = flash_attn_func(q, k, v, softmax_scale=self.scale, causal=is_causal)
        return self.dropout(out)
