"""The speed of our kernels, and of PyTorch's beside them."""
