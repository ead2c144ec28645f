"""A stand-in for modules of PyTorch: it notes what is called, and calls nothing."""

from typing import Any


class Recorded:
    """An object whose attributes are such objects again; a call of one of them is noted as text.

    A call returns ``answer``, or an object of the same kind if a class of that name is called, as names of classes
    begin with a capital letter.
    """

    def __init__(self, answer: Any, name: str = "", calls: list[str] | None = None) -> None:
        self.answer, self.name = answer, name
        self.calls: list[str] = [] if calls is None else calls

    def __getattr__(self, name: str) -> "Recorded":
        return Recorded(self.answer, f"{self.name}.{name}".lstrip("."), self.calls)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Note the call."""
        told = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.calls.append(f"{self.name}({', '.join(told)})")
        is_class = self.name.rpartition(".")[2][:1].isupper()
        return Recorded(self.answer, self.name, self.calls) if is_class else self.answer

    def __repr__(self) -> str:
        return self.name
