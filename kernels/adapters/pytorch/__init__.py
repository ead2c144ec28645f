"""PyTorch's own kernels, and what is known to fail in them."""
