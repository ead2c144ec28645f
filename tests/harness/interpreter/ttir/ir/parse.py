"""Reading TTIR: the text of a kernel's function becomes operations with the values that they take and give."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

Frame = tuple[str, int]
"""A file and a line."""

NAME = re.compile(r"%[\w$.-]+(?:#\d+)?")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
TYPE = re.compile(
    r"tensor<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>|!tt\.\w+<(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*>"
    r"|\b(?:i\d+|bf16|f\d+(?:E\w+)?|index)\b"
)
LOCATION = re.compile(r'\s*\bloc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*"|\([^()]*\))*\))*\)')
OPERATION = re.compile(
    r"(?:(%[\w$.-]+(?:, %[\w$.-]+)*)(?::(\d+))? = )?\"?([a-z]\w*\.[\w.]+)\"?(.*)$", re.DOTALL
)
BLOCK = re.compile(r"\^(\w+)(?:\((.*)\))?:$")
ATTRIBUTES = re.compile(r"<?\{[^{}]*\}>?")
TARGET = re.compile(r"\^(\w+)(?:\(([^)]*)\))?")
ARGUMENT = re.compile(r"(%[\w$.-]+): ")


def told_at(what: str, frames: Sequence[Frame]) -> str:
    """Return what can't be run, with the first of the places where it is, if any is known."""
    return f"{what} ({frames[0][0].rpartition('/')[2]}:{frames[0][1]})" if frames else what


TERMINATORS = {"scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"}
"""Operations at the end of a region, which say what it hands on."""


class Unsupported(Exception):
    """A kernel has something that can't be run as Python code: the message names it, and the line where it is."""


@dataclass(frozen=True)
class Type:
    """The type of a value: the shape of a tensor, () for a scalar, and the type of its elements, such as "f32".

    ``pointee`` is the type that elements point to if they are pointers, else "".
    """

    shape: tuple[int, ...]
    element: str
    pointee: str = ""

    @property
    def rank(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)


@dataclass(eq=False)
class Value:
    """What an operation gives: its type, a name for it in Python, and the operations that take it."""

    type: Type
    name: str
    uses: list["Operation"] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    """A list of operations within another one, with the values that it is entered with."""

    arguments: list[Value]
    operations: list["Operation"]


@dataclass(eq=False)
class Operation:
    """One operation of TTIR.

    Attributes:
        name: such as "arith.addf".
        operands: the values that it takes, in the order of the text.
        results: the values that it gives.
        text: what follows the name, without strings and locations: attributes and types.
        strings: the strings in the text.
        regions: the operations inside of it.
        frames: where it is in the source, the innermost function first.
        targets: for a branch, the names of the blocks it leads to, and the values that each gets.
    """

    name: str
    operands: list[Value]
    results: list[Value]
    text: str
    strings: list[str]
    regions: list[Region]
    frames: tuple[Frame, ...] = ()
    targets: list[tuple[str, list[Value]]] = field(default_factory=list)

    @property
    def result(self) -> Value:
        """Return the only result."""
        return self.results[0]

    def attribute(self, name: str) -> str | None:
        """Return the text of an attribute, such as "1" of ``axis = 1 : i32``; None if there is none."""
        found = re.search(rf"\b{name} = (?:array<\w+: ([^>]*)>|([\w.+-]+))", self.text)
        return (found[1] or found[2]) if found else None

    def integer(self, name: str) -> int:
        """Return the number of an attribute."""
        found = self.attribute(name)
        assert found is not None
        return int(found)


@dataclass
class Function:
    """A kernel: its parameters, and its blocks in the order of the text, the first one being where it begins."""

    name: str
    parameters: list[Value]
    blocks: dict[str, Region]


def walk(operations: list[Operation]) -> Iterator[Operation]:
    """Yield operations, and those inside of them."""
    for operation in operations:
        yield operation
        for region in operation.regions:
            yield from walk(region.operations)


def type_of(text: str) -> Type:
    """Return the type that a text stands for."""
    shape: tuple[int, ...] = ()
    element = text
    if text.startswith("tensor<"):
        found = re.fullmatch(r"tensor<((?:\d+x)*)(.*)>", text)
        assert found is not None  # of every text that TYPE finds
        sizes, element = found.groups()
        shape = tuple(int(size) for size in sizes.split("x") if size)
    if pointer := re.fullmatch(r"!tt\.ptr<(.*?)(?:, \d+)?>", element):
        return Type(shape, "ptr", pointer[1])
    return Type(shape, element)


@cache
def types_in(text: str) -> tuple[Type, ...]:
    """Return the types that a text has, in their order."""
    return tuple(type_of(found[0]) for found in TYPE.finditer(text))


def parse(text: str) -> Function:
    """Return the only function of a module. Raises Unsupported if there are several, or parts that are not known."""
    return Parser(text).function()


class Parser:
    """Reads a module line by line."""

    def __init__(self, text: str) -> None:
        lines = text.splitlines()
        found = (re.match(r"(#loc\d*) = loc\((.*)\)$", line) for line in lines if line.startswith("#loc"))
        self.locations = {x[1]: x[2] for x in found if x}
        self.frames_of: dict[str, tuple[Frame, ...]] = {}
        self.lines = [line.strip() for line in lines if not line.startswith("#")]
        self.at = 0
        self.count = 0
        self.scopes: list[dict[str, Value]] = [{}]
        self.strings: list[str] = []

    def function(self) -> Function:
        """Read the function of the module."""
        headers = [i for i, line in enumerate(self.lines) if line.startswith("tt.func")]
        if len(headers) != 1:
            call = next(line for line in self.lines if "tt.call @" in line)
            raise Unsupported(told_at("a call of a function that is not inlined", self._located(call)[0][:1]))
        self.at = headers[0]
        header = LOCATION.sub("", self.lines[self.at])
        name = re.search(r'@"?([\w.$-]+)', header)
        declared = header[header.index("(") + 1 :]
        parameters = [
            self._define(found[1], types_in(declared[found.end() :])[0])
            for found in ARGUMENT.finditer(declared)
        ]
        self.at += 1
        blocks = {"": Region([], self._operations())}
        while block := BLOCK.match(re.sub(r"\s*//.*", "", LOCATION.sub("", self.lines[self.at]))):
            self.at += 1
            arguments = self._arguments(block[2] or "")
            blocks[block[1]] = Region(arguments, self._operations())
        assert name is not None
        return Function(name[1], parameters, blocks)

    def _define(self, name: str, of: Type) -> Value:
        self.count += 1
        value = self.scopes[-1][name] = Value(of, f"v{self.count}")
        return value

    def _value(self, name: str) -> Value:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise Unsupported(f"the value {name}, which is not defined before it is used")

    def _arguments(self, text: str) -> list[Value]:
        parts = [(found[1], found.end()) for found in ARGUMENT.finditer(text)]
        return [self._define(name, types_in(text[end:])[0]) for name, end in parts]

    def _region(self, arguments: list[tuple[str, Type]]) -> Region:
        """Read a region up to the line that closes it, which is read next."""
        self.scopes.append({})
        values = [self._define(*argument) for argument in arguments]
        line = LOCATION.sub("", self.lines[self.at])
        if block := BLOCK.match(line):
            self.at += 1
            values += self._arguments(block[2] or "")
        operations = self._operations()
        if (
            not operations or operations[-1].name not in TERMINATORS
        ):  # which hands nothing on, and is not printed
            operations.append(Operation("scf.yield", [], [], "", [], []))
        self.scopes.pop()
        return Region(values, operations)

    def _operations(self) -> list[Operation]:
        found = []
        while not self.lines[self.at].startswith(("}", "^")):
            found.append(self._operation())
        return found

    def _operation(self) -> Operation:
        line = self.lines[self.at]
        self.at += 1
        frames, line = self._located(line)
        parsed = OPERATION.match(line)
        if parsed is None:
            raise Unsupported(f"the line {line!r} of its IR")
        name, count, operation, rest = parsed.groups()
        strings = [x[1:-1] for x in STRING.findall(rest)] if '"' in rest else []
        rest = STRING.sub('""', rest) if strings else rest
        reader = getattr(self, f"_read_{operation.replace('.', '_')}", self._read_plain)
        made: Operation = reader(operation, rest)
        made.strings, made.frames = strings, frames or made.frames
        for operand in [*made.operands, *(x for _, given in made.targets for x in given)]:
            operand.uses.append(made)
        names = [f"{name}#{i}" for i in range(int(count or 0))] or [*filter(None, (name or "").split(", "))]
        made.results = [self._define(x, self._types[i]) for i, x in enumerate(names)]
        return made

    def _located(self, line: str) -> tuple[tuple[Frame, ...], str]:
        """Return where an operation is in the source, and its line without locations."""
        rest, found, location = line.rpartition(" loc(")
        if not found:
            return (), line
        return self._frames(location[:-1]), rest if "loc(" not in rest else LOCATION.sub("", rest)

    def _frames(self, location: str) -> tuple[Frame, ...]:
        if location not in self.frames_of:
            self.frames_of[location] = tuple(self._resolve(self.locations.get(location, "")))
        return self.frames_of[location]

    def _resolve(self, text: str) -> Iterator[Frame]:
        if place := re.fullmatch(r'"([^"]+)":(\d+):\d+(?: to .*)?', text):
            yield place[1], int(place[2])
        elif text.startswith("fused"):
            first = re.search(r"#loc\d*", text)
            yield from self._frames(first[0]) if first else ()
        else:  # callsite(callee at caller), or a name with a location
            for location in re.findall(r"#loc\d*", text):
                yield from self._frames(location)

    def _close(self) -> str:
        """Return the line that closes a region, and read its location for the operation."""
        line = self.lines[self.at]
        self.at += 1
        self.closing, line = self._located(line)
        return line

    def _read_plain(self, name: str, rest: str) -> Operation:
        if rest.endswith("{"):
            raise Unsupported(f"the operation {name}")
        head = ATTRIBUTES.sub("", rest) if "{" in rest else rest
        operands, _, types = head.partition(" : ")
        values = [self._value(x) for x in NAME.findall(head if name == "tt.print" else operands)]
        self._types = _results(name, types)
        return Operation(name, values, [], rest, [], [])

    def _read_cf_br(self, name: str, rest: str) -> Operation:
        condition = NAME.findall(rest.partition("^")[0])
        targets = [
            (found[1], [self._value(x) for x in NAME.findall(found[2] or "")])
            for found in TARGET.finditer(rest)
        ]
        self._types = ()
        return Operation(name, [self._value(x) for x in condition], [], rest, [], [], targets=targets)

    _read_cf_cond_br = _read_cf_br

    def _read_scf_for(self, name: str, rest: str) -> Operation:
        head = re.match(r"(?: unsigned)? (%\S+) = (%\S+) to (%\S+) step (%\S+)(.*)", rest)
        assert head is not None
        bounds = [self._value(head[i]) for i in (2, 3, 4)]
        carried = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", head[5])
        inits = [self._value(init) for _, init in carried]
        types = [init.type for init in inits]
        region = self._region(
            [(head[1], bounds[0].type), *((x, t) for (x, _), t in zip(carried, types, strict=True))]
        )
        text = ("unsigned " if rest.startswith(" unsigned") else "") + self._close()
        self._types = types
        return Operation(name, [*bounds, *inits], [], text, [], [region], self.closing)

    def _read_scf_if(self, name: str, rest: str) -> Operation:
        condition = self._value(NAME.findall(rest)[0])
        types = types_in(rest.partition("->")[2])
        regions = [self._region([])]
        if self._close().startswith("} else {"):
            regions.append(self._region([]))
            self._close()
        self._types = types
        return Operation(name, [condition], [], "", [], regions, self.closing)

    def _read_scf_while(self, name: str, rest: str) -> Operation:
        carried = re.findall(r"(%[\w$.-]+) = (%[\w$.#-]+)", rest)
        inits = [self._value(init) for _, init in carried]
        before = self._region([(x, init.type) for (x, _), init in zip(carried, inits, strict=True)])
        self._close()
        after = self._region([])
        self._close()
        self._types = types_in(rest.partition("->")[2])
        return Operation(name, inits, [], "", [], [before, after], self.closing)

    def _read_tt_reduce(self, name: str, rest: str) -> Operation:
        operands = [self._value(x) for x in NAME.findall(rest)]
        region = self._region([])
        closing = self._close()
        self._types = types_in(closing.partition("->")[2])
        return Operation(name, operands, [], rest, [], [region], self.closing)

    _read_tt_scan = _read_tt_reduce


def _results(name: str, types: str) -> Sequence[Type]:
    """Return the types of an operation's results: those behind an arrow or "to", or else the last one."""
    for arrow in (" -> ", " to "):
        if arrow in types:
            return types_in(types.rpartition(arrow)[2]) * 2
    found = types_in(types)
    if name == "arith.constant" and not found:  # true or false
        return [Type((), "i1")]
    if name == "tt.addptr":
        return found[:1]
    if name in ("arith.cmpi", "arith.cmpf"):
        return [Type(found[0].shape, "i1")]
    if name == "tt.load":
        return [type_of_pointee(found[0])]
    return found[-1:]


def type_of_pointee(pointers: Type) -> Type:
    """Return the type of what a tensor of pointers, or one pointer, points to."""
    return Type(pointers.shape, pointers.pointee)
