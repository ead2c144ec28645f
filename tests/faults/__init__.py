r"""Kernels with faults, and runs whose processes are killed.

The whole of it, in ten minutes each, in a checkout:

    python -m pytest tests/properties --minutes 10 -n 2 --kernel tests.panel.eager:float32 \
        $(for f in reading_outside writing_outside corrupting aborting hanging exiting leaking racing \
              slow_to_compile talking; do echo --kernel tests.faults.planted:$f; done)
    python -m tests.faults.killing --minutes 10 --every 20 --whole 10
"""
