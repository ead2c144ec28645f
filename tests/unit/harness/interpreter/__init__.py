"""Tests of Triton kernels without a GPU."""
