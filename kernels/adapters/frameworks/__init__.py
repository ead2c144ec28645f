"""Attention of JAX, Keras and Transformers, frameworks and collections of models.

JAX would take three quarters of a GPU in each process, and where it finds no room there it goes on without a GPU.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
