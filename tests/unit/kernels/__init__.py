"""Tests of our kernels, of the contract, the registry and planted bugs."""
