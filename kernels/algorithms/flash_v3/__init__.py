"""FlashAttention-3 (Shah et al. 2024): by tensor descriptors in Triton, and for Hopper in Gluon."""
