"""Tests of what reads compiled kernels."""
