"""Triton kernels without a GPU: their IR (TTIR) becomes Python code that calls NumPy, for all programs at once.

``front`` gets the IR of a kernel from Triton's front end, ``parse`` reads its text, and ``analyse`` finds out what is
the same in all programs. ``writer`` has the lines of the code, ``arithmetic``, ``tensors``, ``places`` and ``regions``
write one kind of operation each, and ``translate`` the whole; ``store`` keeps it on disk. ``launch`` stands between
``kernel[grid](...)`` and that code, which calls ``numbers``, ``shapes``, ``memory``, ``atomics`` and ``control``;
``nearest`` says of an access outside of a tensor what lies there. What can't be run so is left to Triton's interpreter,
which ``tests.harness.interpreter.repaired`` repairs.
"""
