"""Stand-ins for other packages, in plain PyTorch, which the adapters of ``docs/adapters.md`` are tried with.

Each has a function's documented signature, layout and conventions, and no bug. The test puts these files beside the
adapters, which import them by the package's name.
"""
