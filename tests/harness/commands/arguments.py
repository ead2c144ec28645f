"""Arguments of commands that are no pytest runs."""

from argparse import ArgumentParser
from typing import NoReturn


class OneLine(ArgumentParser):
    """A parser of arguments whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)
