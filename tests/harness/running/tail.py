"""The end of what a process prints, read as it prints, so that no amount of it fills a disk or the memory."""

import os
from threading import Thread
from typing import IO

KEPT_BYTES = 1 << 14
"""Bytes that are kept, from the end."""
PIECE_BYTES = 1 << 20
"""The most bytes that are read at once."""
CLOSE_SECONDS = 2.0
"""Seconds to wait for the end of the output. It has none where a process that the kernel has started lives on."""


class Tail:
    """The last ``KEPT_BYTES`` that come through a pipe, whose writer never waits longer than a thread takes to read."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self.pipe = pipe
        self.kept = b""
        self.thread = Thread(target=self._read, daemon=True)
        self.thread.start()

    def text(self) -> str:
        """Return what is kept, once the writer has ended."""
        self.thread.join(CLOSE_SECONDS)
        return self.kept.decode(errors="replace")

    def _read(self) -> None:
        with self.pipe:
            while piece := os.read(self.pipe.fileno(), PIECE_BYTES):
                self.kept = (self.kept + piece)[-KEPT_BYTES:]
