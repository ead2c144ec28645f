"""What a wrong kernel computes instead: changes of exact attention, each declared with its words and its parameters.

A kernel does what an alternative says if each tensor that it returns lies within the rounding bounds around the values
that attention *with that change* has, in every call that is known. So an alternative is a certificate, not a guess: a
rounding bound leaves a change of the mask or of the scale no room to be mistaken for another one, where the calls tell
the two apart.

``declaration`` says how an alternative is declared; each other module declares those of one kind.
"""

from reference.alternatives import (
    backward,
    dropout,
    heads,
    keys,
    masks,
    memory,
    numbers,
    rows,
    scaling,
    softmax,
    splits,
)
from reference.alternatives.declaration import Alternative, Change, Given, candidates, changes_of, named

__all__ = [
    "Alternative",
    "Change",
    "Given",
    "backward",
    "candidates",
    "changes_of",
    "dropout",
    "heads",
    "keys",
    "masks",
    "memory",
    "named",
    "numbers",
    "rows",
    "scaling",
    "softmax",
    "splits",
]
