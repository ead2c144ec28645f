"""Triton kernels without a GPU: what runs them, in which order, and what they touch outside of tensors."""
