"""Kernels that are judged: their contract, our own in Triton and Gluon, and adapters of other packages' kernels."""
