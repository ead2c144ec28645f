"""Which of several machines a run is, where these share a night: each draws cases of its own."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Number ``index`` of ``count`` runs that together are one; numbers begin at 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def shard_of(text: str) -> Shard:
    """Return the shard that is written as ``index/count``. Raises ValueError, in one line, for anything else."""
    found = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    shard = Shard(int(found[1]), int(found[2])) if found else None
    if shard is None or not 1 <= shard.index <= shard.count:
        raise ValueError(f"got {text!r:.80}, expected i/n with 1 <= i <= n, such as 3/8")
    return shard
