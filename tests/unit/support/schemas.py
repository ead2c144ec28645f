"""Whether a value is as a JSON Schema has it, by the few words of JSON Schema that our files need."""

from collections.abc import Iterator, Mapping
from typing import Any

TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
}


def unlike(value: Any, of: Mapping[str, Any], place: str = "root") -> Iterator[str]:
    """Yield where a value is not as a schema has it; a field that the schema does not have is one such place."""
    names = [of["type"]] if isinstance(of["type"], str) else of["type"]
    is_number = not isinstance(value, bool) or "boolean" in names
    if not (is_number and isinstance(value, tuple(TYPES[name] for name in names))):
        yield f"{place}: {value!r} is no {of['type']}"
        return
    if value not in of.get("enum", [value]) or value != of.get("const", value):
        yield f"{place}: {value!r}"
    if isinstance(value, int | float) and not of.get("minimum", value) <= value <= of.get("maximum", value):
        yield f"{place}: {value!r}"
    if isinstance(value, dict):
        fields = of.get("properties", {})
        yield from (f"{place}.{name} is missing" for name in of.get("required", ()) if name not in value)
        for name, each in value.items():
            inner = fields.get(name, of.get("additionalProperties"))
            if inner is None:
                yield f"{place}.{name} is not in the schema"
            else:
                yield from unlike(each, inner, f"{place}.{name}")
    if isinstance(value, list):
        for number, each in enumerate(value):
            yield from unlike(each, of["items"], f"{place}[{number}]")
