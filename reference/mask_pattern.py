"""Which keys a row sees by their places, beside a causal mask: windows, chunks, first keys and prefixes, as one record.

This module imports no torch, so that a case can be drawn and printed on any machine.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class MaskPattern:
    """What hides keys from rows, or lets them be seen, by the places of both; 0 stands for none of it.

    The diagonal of row i is key ``i + seqlen_k - seqlen_q``, or key ``i`` where masks are aligned top-left.

    Attributes:
        window: keys that lie ``window`` or more before the diagonal are hidden (Beltagy et al. 2020, arXiv 2004.05150,
            and Mistral's ``sliding_window``).
        window_right: keys that lie ``window_right`` or more after the diagonal are hidden; 1 is a causal mask.
        chunk: keys of other chunks of ``chunk`` keys than the diagonal's are hidden (the local layers of Llama 4).
        first_keys: so many first keys are seen whatever window and chunk hide (the sink tokens of Xiao et al. 2023,
            arXiv 2309.17453); a causal mask still hides them from rows before them.
        prefix: so many first keys are seen by every row, whatever a causal mask and the rest hide (the prefix LM of
            Raffel et al. 2019, arXiv 1910.10683).
    """

    window: int = 0
    window_right: int = 0
    chunk: int = 0
    first_keys: int = 0
    prefix: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The keywords with which a kernel is asked for it."""
        return {name: value for name, value in vars(self).items() if value}

    def __bool__(self) -> bool:
        """Whether it may change what a row sees."""
        return bool(self.options)


NO_PATTERN = MaskPattern()
"""A row sees all keys that a causal mask leaves it."""
