"""Kernels of packages that people use, one small file each: see ``kernels.registry.PUBLIC``.

The claims of each are what the documentation of its package and its own tests promise, quoted beside them.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
"""Each process with JAX would take three quarters of a GPU, and one that finds no room there goes on without a GPU."""
