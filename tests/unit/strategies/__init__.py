"""Tests of cases and of the tensors that they describe."""
