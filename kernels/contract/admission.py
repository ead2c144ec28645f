"""What claims have in common: which calls they admit, and the keywords that they add."""

from typing import Any

from kernels.contract.declaration import claim
from kernels.contract.names import RAGGED_KEYWORDS, WITH_KEY_PADDING, default_scale
from kernels.contract.spelling import integers


def keywords_of_ragged(claimed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the keywords of several kinds of sequences of different lengths, each once."""
    return tuple(dict.fromkeys(name for kind in claimed for name in RAGGED_KEYWORDS[kind]))


def takes_scale(claimed: Any, sm_scale: float, head_dim: int) -> bool:
    """Whether a kernel with this value of the claim ``sm_scale`` takes an ``sm_scale`` at a head_dim."""
    if claimed == "default":
        return sm_scale == default_scale(head_dim)
    return sm_scale in claimed if isinstance(claimed, tuple) else claimed == "any" or sm_scale > 0


def can_be_ragged(case: Any) -> bool:
    """Whether a case says a kind of the claim ``ragged`` in which the plain call that it describes can be made."""
    return (
        case.ragged != "none"
        and (case.ragged != "document" or case.seqlen_q == case.seqlen_k)
        and (case.ragged != "append" or case.seqlen_k > 0)
        and (case.key_padding == "none" or case.ragged in WITH_KEY_PADDING)
    )


def sizes(name: str, meaning: str) -> Any:
    """Declare the claim of a part of a mask's pattern: the values with which ``forward`` and ``backward`` take it."""
    return claim(
        (0,),
        f"""{meaning} 0 stands for none, and is not passed.""",
        integers(0, "0,128", "0-4096"),
        fields=(name,),
        admits=lambda claimed, case: getattr(case, name) in (0, *claimed),
        less=(0,),
        keywords=lambda claimed: (name,) if any(claimed) else (),
    )
