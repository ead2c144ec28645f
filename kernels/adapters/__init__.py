"""Kernels of other people's packages, one small file each: see ``kernels.registry.PUBLIC``.

The claims of each are what the documentation of its package and its own tests promise, quoted beside them.
"""
