"""Triton kernels without a GPU: their IR (TTIR) becomes Python code that calls NumPy, for all programs at once.

``ir`` gets the IR of a kernel from Triton's front end and reads its text, ``writing`` makes the code, and ``calls`` is
what the code calls. ``store`` keeps code on disk, and ``launch`` stands between ``kernel[grid](...)`` and the code.
What can't be run so is left to Triton's interpreter, which ``tests.harness.interpreter.repaired`` repairs.
"""
