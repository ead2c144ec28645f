"""Random small Triton programs: from a seed to the source of a kernel and what it is launched with.

``program`` draws one: the same seed gives the same program. It is free of races between programs (each writes its own
places, or combines integers in a way whose order does not show), of accesses outside of its tensors, and of all that a
GPU leaves undefined. ``python -m tests.unit.support.programs OUT.npz SEED...`` runs some and keeps what they computed.
"""

from tests.unit.support.programs.drawing import FEATURES, Program, program

__all__ = ["FEATURES", "Program", "program"]
