"""Mutants of a Triton source file: small, general edits of its jitted functions, one at a time.

Jitted functions are those whose body names ``triton.language`` under a decorator, and those under a decorator
that such a function has. Signatures, decorators, annotations and docstrings are left alone, and all that a
mutant does not touch is left byte for byte. Names and constants are edited without knowing their types, so some
mutants do not compile and some mean the same as the original: ``equivalence`` sorts them out.
"""

import ast
import difflib
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SourceMutant:
    """A file with one edit in ``function``, at ``line`` of the original; ``source`` is the whole edited text.

    ``name`` is unique within the file: "function:line:operator", followed by a number if a line has several.
    """

    name: str
    function: str
    line: int
    operator: str
    source: str

    def diff(self, original: str) -> str:
        """Return the edit as a unified diff with one line of context."""
        lines = difflib.unified_diff(
            original.splitlines(), self.source.splitlines(), "original", self.name, n=1, lineterm=""
        )
        return "\n".join(lines) + "\n"


def source_mutants(source: str) -> list[SourceMutant]:
    """Return the mutants of all jitted functions of a file, in reading order. Raises SyntaxError.

    All of them parse, and no two have the same text.
    """
    mutants = []
    seen = {source}
    names: Counter[str] = Counter()
    for function in _jitted_functions(ast.parse(source)):
        code = _Code(source, function)
        for line, change in _changes(code):
            edited = code.edit(change)
            if edited in seen or not code.is_mutant(change):
                continue
            seen.add(edited)
            name = f"{function.name}:{line}:{change.operator}"
            names[name] += 1
            name = name if names[name] == 1 else f"{name}:{names[name]}"
            mutants.append(SourceMutant(name, function.name, line, change.operator, edited))
    return mutants


def _jitted_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    language = _language_names(tree)
    decorated = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.decorator_list]
    named = [
        function
        for function in decorated
        if any(
            isinstance(node, ast.Name) and node.id in language
            for statement in function.body
            for node in ast.walk(statement)
        )
    ]
    decorators = {ast.dump(decorator) for function in named for decorator in function.decorator_list}
    jitted = [f for f in decorated if any(ast.dump(x) in decorators for x in f.decorator_list)]
    return sorted(jitted, key=lambda function: function.lineno)


def _language_names(tree: ast.Module) -> set[str]:
    """Return the names by which the file refers to ``triton.language``."""
    names = {"tl"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            language = (x for x in node.names if f"{package}{x.name}" == "triton.language")
            names |= {x.asname or x.name for x in language}
    return names


@dataclass(frozen=True)
class _Change:
    """One change by an operator: ``edits`` are (start, end, new text), in bytes of the file."""

    operator: str
    edits: tuple[tuple[int, int, str], ...]


class _Code:
    """A function and its text. Positions count bytes of UTF-8, as those of ``ast`` do."""

    def __init__(self, source: str, function: ast.FunctionDef) -> None:
        self.function = function
        self.data = source.encode()
        self.lines = [0]
        for line in self.data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.original = self._parse(_Change("", ()))
        self.parents = {child: node for node in ast.walk(function) for child in ast.iter_child_nodes(node)}

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.lines[node.end_lineno - 1] + node.end_col_offset

    def slice(self, start: int, end: int) -> str:
        return self.data[start:end].decode().strip()

    def bare(self, node: ast.expr) -> str:
        """Return the text of an expression as it is."""
        return self.slice(self.start(node), self.end(node))

    def text(self, node: ast.expr) -> str:
        """Return the text of an expression, in parentheses if the place that it will be moved to needs them."""
        return f"({self.bare(node)})" if isinstance(node, _COMPOUND) else self.bare(node)

    def find(self, symbol: str, after: ast.expr, before: int) -> int:
        """Return where an operator stands between its operands, among parentheses and comments only."""
        position = self.end(after)
        while not self.data.startswith(symbol.encode(), position):
            comment = self.data[position : position + 1] == b"#"
            position = self.data.index(b"\n", position) if comment else position + 1
            assert position < before
        return position

    def inside(self, node: ast.AST, *types: type[ast.AST]) -> bool:
        """Whether the expression is part of a node of one of these types."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
            if isinstance(node, types):
                return True
        return False

    def replace(self, operator: str, node: ast.expr | ast.stmt, text: str) -> _Change:
        """Replace a node by text. The node's own parentheses go too if there is nothing else in them."""
        parent = self.parents[node]
        alone = isinstance(parent, ast.stmt) or (isinstance(parent, ast.Call) and node is not parent.func)
        if alone and _is_enclosed(text):
            text = text[1:-1]
        return _Change(operator, ((self.start(node), self.end(node), text),))

    def rename(self, node: ast.expr, others: Mapping[str, str]) -> Iterator[_Change]:
        """Replace the name at the end of a node, such as ``f`` or ``tl.f``, by what ``others`` has for it."""
        old, end = _name(node), self.end(node)
        if old in others:
            yield _Change(f"{old}-to-{others[old]}", ((end - len(old), end, others[old]),))

    def change_symbol(
        self, operator: str, symbol: str, new: str, *, after: ast.expr, before: ast.expr
    ) -> _Change:
        """Replace the operator that stands between two operands."""
        position = self.find(symbol, after, self.start(before))
        return _Change(operator, ((position, position + len(symbol), new),))

    def edit(self, change: _Change) -> str:
        """Return the whole file, changed."""
        return self._edited(change, 0, len(self.data))

    def is_mutant(self, change: _Change) -> bool:
        """Whether the changed function parses and differs; ``x = x`` is left to the deletion of statements."""
        try:
            changed = self._parse(change)
        except SyntaxError:
            return False
        idle = _idle_assignments(changed) > _idle_assignments(self.original)
        return not idle and ast.dump(changed) != ast.dump(self.original)

    def _parse(self, change: _Change) -> ast.Module:
        first, last = self.lines[self.function.lineno - 1], self.end(self.function)
        return ast.parse(textwrap.dedent(self._edited(change, first, last)))

    def _edited(self, change: _Change, first: int, last: int) -> str:
        data = self.data[first:last]
        for start, end, text in sorted(change.edits, reverse=True):
            data = data[: start - first] + text.encode() + data[end - first :]
        return data.decode()


def _idle_assignments(tree: ast.AST) -> int:
    assignments = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    return sum(ast.unparse(x.targets[0]) == ast.unparse(x.value) for x in assignments)


_COMPOUND = (ast.BinOp, ast.BoolOp, ast.Compare, ast.UnaryOp, ast.IfExp, ast.Lambda)


def _is_enclosed(text: str) -> bool:
    """Whether one pair of parentheses surrounds the whole text, so that it can be taken off."""
    if not (text.startswith("(") and text.endswith(")")):
        return False
    try:
        inner = ast.parse(text[1:-1], mode="eval").body
    except SyntaxError:
        return False
    # "(a), (b)" and "(a) + (b)" arrive here as "a), (b", which does not parse; a tuple keeps its parentheses.
    return not isinstance(inner, ast.Tuple) and "\n" not in text


def _changes(code: _Code) -> Iterator[tuple[int, _Change]]:
    """Yield all changes of a function with their lines, in reading order."""
    deletable = set(_deletable(code.function))
    nodes = [node for statement in code.function.body for node in ast.walk(statement)]
    skipped = {below for node in nodes for part in _untouched(node) for below in ast.walk(part)}
    sites = [node for node in nodes if isinstance(node, ast.expr | ast.stmt) and node not in skipped]
    for node in sorted(sites, key=lambda node: (node.lineno, node.col_offset)):
        for kind, operators in _OPERATORS.items():
            if isinstance(node, kind):
                for operator in operators:
                    for change in operator(code, node):
                        yield node.lineno, change
        if node in deletable:
            yield node.lineno, code.replace("statement-deleted", node, "pass")


def _untouched(node: ast.AST) -> list[ast.AST]:
    """Return the parts that no operator edits: annotations, checks, and lists, which are shapes and hints."""
    if isinstance(node, ast.AnnAssign):
        return [node.annotation]
    # Python 3.11 does not know where the parts of a formatted string are.
    return [node] if isinstance(node, ast.List | ast.Assert | ast.JoinedStr) or _is_check(node) else []


# Operators. Each takes a node and yields its changes.


_BOUNDARIES: dict[type[ast.cmpop], tuple[str, str, str]] = {
    ast.Lt: ("<", "<=", "lt-to-le"),
    ast.LtE: ("<=", "<", "le-to-lt"),
    ast.Gt: (">", ">=", "gt-to-ge"),
    ast.GtE: (">=", ">", "ge-to-gt"),
    ast.Eq: ("==", "!=", "eq-to-ne"),
    ast.NotEq: ("!=", "==", "ne-to-eq"),
}


def _comparison(code: _Code, node: ast.Compare) -> Iterator[_Change]:
    """Move the boundary of a comparison: < for <=, and so on."""
    for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
        if type(op) in _BOUNDARIES:
            symbol, new, operator = _BOUNDARIES[type(op)]
            yield code.change_symbol(operator, symbol, new, after=left, before=right)


_SYMBOLS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
}

_TURNED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("-", "add-to-sub"),
    ast.Sub: ("+", "sub-to-add"),
    ast.FloorDiv: ("%", "div-to-mod"),
    ast.Mod: ("//", "mod-to-div"),
}


def _arithmetic(code: _Code, node: ast.BinOp) -> Iterator[_Change]:
    """Use a wrong operator; drop a term, a factor or a term of a mask; swap the operands of a difference."""
    op = type(node.op)
    if op not in _SYMBOLS:
        return
    symbol = _SYMBOLS[op]
    position = code.find(symbol, node.left, code.start(node.right))
    # The operands keep their own parentheses, so that either can stand alone.
    left = code.slice(code.start(node), position)
    right = code.slice(position + len(symbol), code.end(node))
    # x - 1 for x + 1 shows no more than x does, and an address before its array no more than one without the term.
    weak = _is_sum(node) and (_is_constant(node.right) or (op is ast.Add and _is_address(code, node)))
    if op in _TURNED and not weak:
        new, operator = _TURNED[op]
        yield code.change_symbol(operator, symbol, new, after=node.left, before=node.right)
    if op is ast.BitAnd:
        yield code.replace("mask-term-1-dropped", node, right)
        yield code.replace("mask-term-2-dropped", node, left)
    if op in (ast.Add, ast.Sub):
        yield code.replace("term-dropped", node, left)
    if op is ast.Add and not (_is_constant(node.right) or _is_sum(node.left) or _is_address(code, node)):
        yield code.replace("first-term-dropped", node, right)
    if op is ast.Sub and not _is_constant(node.right) and not _is_sum(node.left):
        yield code.replace("operands-swapped", node, f"{right} - {left}")
    if op in (ast.Mult, ast.Div) and not _is_offset(code, node):
        yield code.replace("factor-dropped", node, left)
    if op is ast.Mult and not _is_constant(node.right) and _is_name(node.left) and not _is_name(node.right):
        yield code.replace("first-factor-dropped", node, right)


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)


def _is_offset(code: _Code, node: ast.BinOp) -> bool:
    """Whether a product is index * stride, a term that is only dropped as a whole."""
    parent = code.parents[node]
    if not (isinstance(parent, ast.BinOp) and _is_sum(parent)):
        return False
    return (_is_name(node.left) and _is_name(node.right)) or _is_address(code, parent)


def _is_sum(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub)


def _is_address(code: _Code, node: ast.BinOp) -> bool:
    """Whether a sum may be a pointer and offsets: it begins with a parameter of the function."""
    first: ast.expr = node
    while isinstance(first, ast.BinOp) and _is_sum(first):
        first = first.left
    parameters = {argument.arg for argument in code.function.args.args}
    return isinstance(first, ast.Name) and first.id in parameters


def _conjunction(code: _Code, node: ast.BoolOp) -> Iterator[_Change]:
    """Drop an operand of ``and`` or ``or``."""
    for i in range(len(node.values)):
        kept = [code.text(value) for value in (*node.values[:i], *node.values[i + 1 :])]
        joined = (" and " if isinstance(node.op, ast.And) else " or ").join(kept)
        yield code.replace(f"condition-{i + 1}-dropped", node, joined)


def _unary(code: _Code, node: ast.UnaryOp) -> Iterator[_Change]:
    """Drop a minus or a ``not``."""
    if isinstance(node.op, ast.USub | ast.Not):
        dropped = "minus" if isinstance(node.op, ast.USub) else "not"
        yield code.replace(f"{dropped}-dropped", node, code.text(node.operand))


def _if(code: _Code, node: ast.If) -> Iterator[_Change]:
    """Make the condition of an ``if`` hold always, or never."""
    if not _is_constant(node.test):
        yield code.replace("if-true", node.test, "True")
        yield code.replace("if-false", node.test, "False")


def _conditional(code: _Code, node: ast.IfExp) -> Iterator[_Change]:
    """Make the condition of a conditional expression hold always, or never."""
    yield code.replace("if-true", node, code.text(node.body))
    yield code.replace("if-false", node, code.text(node.orelse))


_CLAMPS = {"maximum": "minimum", "minimum": "maximum"}


def _selection(code: _Code, node: ast.Call) -> Iterator[_Change]:
    """Keep one arm of ``maximum``, ``minimum`` or ``where``, swap the arms of ``where``, or call the other function."""
    name = _name(node.func)
    if name in _CLAMPS and len(node.args) >= 2:
        for i, arm in enumerate(node.args[:2]):
            if not _is_constant(arm):
                yield code.replace(f"{name}-arm-{i + 1}", node, code.text(arm))
        yield from code.rename(node.func, _CLAMPS)
    if name == "where" and len(node.args) == 3:
        first, second = node.args[1:]
        yield code.replace("where-arm-1", node, code.text(first))
        yield code.replace("where-arm-2", node, code.text(second))
        arms = ((first, second), (second, first))
        edits = tuple((code.start(x), code.end(x), code.bare(y)) for x, y in arms)
        yield _Change("where-swapped", edits)


_SIBLINGS = {"exp2": "exp", "exp": "exp2", "log2": "log", "log": "log2"}


def _base(code: _Code, node: ast.Call) -> Iterator[_Change]:
    """Take an exponential or logarithm to the other base."""
    if isinstance(node.func, ast.Attribute):
        yield from code.rename(node.func, _SIBLINGS)


_NARROWER = {"float32": "float16", "float64": "float32", "int64": "int32"}


def _cast(code: _Code, node: ast.Call) -> Iterator[_Change]:
    """Remove a cast, cast to a narrower type, or narrow an accumulator."""
    name = _name(node.func)
    wide = any(isinstance(argument, ast.Attribute) and argument.attr == "int64" for argument in node.args)
    # An integer that is not made 64 bits wide has 32.
    if name == "to" and isinstance(node.func, ast.Attribute) and not wide:
        dot = code.find(".", node.func.value, code.end(node.func))
        yield code.replace("cast-dropped", node, code.slice(code.start(node), dot))
    if name in ("to", "full", "zeros", "cast"):
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            if isinstance(argument, ast.Attribute):
                yield from code.rename(argument, _NARROWER)


_OPTIONS = ("propagate_nan", "input_precision")
"""Keywords that decide how numbers come out."""


def _keyword(code: _Code, node: ast.Call) -> Iterator[_Change]:
    """Drop a mask, change the value of masked elements, or leave an option to its default."""
    keywords = {keyword.arg: keyword for keyword in node.keywords}
    if "mask" in keywords and _name(node.func) in ("load", "store"):
        # ``other`` without a mask does not compile.
        gone = [keywords[name] for name in ("mask", "other") if name in keywords]
        yield _Change("mask-dropped", tuple(_without(code, node, keyword) for keyword in gone))
    if "other" in keywords and _name(node.func) == "load":
        value = keywords["other"].value
        one = isinstance(value, ast.Constant) and value.value == 0
        yield code.replace("other-changed", value, "1.0" if one else "0.0")
    for name in _OPTIONS:
        if name in keywords:
            yield _Change(f"{name}-dropped", (_without(code, node, keywords[name]),))


def _without(code: _Code, call: ast.Call, keyword: ast.keyword) -> tuple[int, int, str]:
    """Return the edit that removes a keyword and the comma before it; a mask always follows a pointer."""
    values = [*call.args, *(other.value for other in call.keywords)]
    start = code.start(keyword)
    before = max((value for value in values if code.end(value) <= start), key=code.end)
    return code.find(",", before, start), code.end(keyword), ""


def _flag(code: _Code, node: ast.Call) -> Iterator[_Change]:
    """Flip a boolean argument."""
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        if isinstance(argument, ast.Constant) and isinstance(argument.value, bool):
            yield code.replace("flag-flipped", argument, str(not argument.value))


_COUNTED = ("maximum", "minimum", "where", "full", "max", "min")
"""Calls whose integer arguments are counts; integer arguments of other calls are axes and shapes."""


def _number(code: _Code, node: ast.Constant) -> Iterator[_Change]:
    """Change an integer by one; make a float 0, doubled or negative."""
    parent = code.parents[node]
    value = node.value
    if type(value) is int:
        counted = isinstance(parent, ast.BinOp | ast.Compare | ast.Assign | ast.AugAssign)
        called = isinstance(parent, ast.Call) and _name(parent.func) in _COUNTED
        if not (counted or called) or code.inside(node, ast.Subscript):
            return
        yield code.replace("constant-up", node, str(value + 1))
        dropped = isinstance(parent, ast.BinOp) and value == 1  # as good as without the term
        if value != 0 and not dropped:
            yield code.replace("constant-down", node, str(value - 1))
    elif type(value) is float and not (isinstance(parent, ast.keyword) and parent.arg == "other"):
        if value == 0.0:
            yield code.replace("zero-to-one", node, "1.0")
            return
        yield code.replace("constant-to-zero", node, "0.0")
        yield code.replace("constant-doubled", node, repr(2 * value))
        if not isinstance(parent, ast.UnaryOp):
            # A power binds tighter than a minus, so a negative operand needs parentheses.
            text = f"(-{value!r})" if isinstance(parent, ast.BinOp) else f"-{value!r}"
            yield code.replace("constant-negated", node, text)


def _axes(code: _Code, node: ast.Subscript) -> Iterator[_Change]:
    """Make a row a column, or a column a row: ``[:, None]`` and ``[None, :]``."""
    text = code.slice(code.end(node.value), code.end(node))
    swapped = {"[:, None]": "[None, :]", "[None, :]": "[:, None]"}
    if text in swapped:
        yield _Change("axes-swapped", ((code.end(node.value), code.end(node), swapped[text]),))


def _loop(code: _Code, node: ast.For) -> Iterator[_Change]:
    """Move a bound of ``range`` by one."""
    call = node.iter
    if not (isinstance(call, ast.Call) and _name(call.func) in ("range", "static_range") and call.args):
        return
    stop = call.args[0] if len(call.args) == 1 else call.args[1]
    yield code.replace("stop-later", stop, _moved(code, stop, 1))
    yield code.replace("stop-earlier", stop, _moved(code, stop, -1))
    if len(call.args) == 1:
        yield _Change("start-later", ((code.start(stop), code.start(stop), "1, "),))
    else:
        yield code.replace("start-later", call.args[0], _moved(code, call.args[0], 1))


def _moved(code: _Code, node: ast.expr, step: int) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return str(node.value + step)
    text = code.bare(node) if isinstance(node, ast.BinOp) else code.text(node)
    return f"{text} + 1" if step > 0 else f"{text} - 1"


_IN_PLACE: dict[type[ast.operator], tuple[str, tuple[tuple[str, str], ...]]] = {
    ast.Add: ("+=", (("-=", "add-to-sub"), ("=", "accumulation-lost"))),
    ast.Sub: ("-=", (("+=", "sub-to-add"),)),
    ast.Mult: ("*=", (("=", "accumulation-lost"),)),
}


def _in_place(code: _Code, node: ast.AugAssign) -> Iterator[_Change]:
    """Turn ``+=`` and its like into a subtraction, or into a plain assignment."""
    symbol, others = _IN_PLACE.get(type(node.op), ("", ()))
    for new, operator in others:
        yield code.change_symbol(operator, symbol, new, after=node.target, before=node.value)


def _name(node: ast.expr) -> str:
    """Return the name ``f`` of ``f`` or ``tl.f``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


_OPERATORS: dict[type[ast.AST], tuple[Callable[..., Iterator[_Change]], ...]] = {
    ast.Compare: (_comparison,),
    ast.BinOp: (_arithmetic,),
    ast.BoolOp: (_conjunction,),
    ast.UnaryOp: (_unary,),
    ast.If: (_if,),
    ast.IfExp: (_conditional,),
    ast.Call: (_selection, _base, _cast, _keyword, _flag),
    ast.Constant: (_number,),
    ast.Subscript: (_axes,),
    ast.For: (_loop,),
    ast.AugAssign: (_in_place,),
}


_CHECKS = ("static_assert", "device_assert", "assume", "static_print", "device_print", "debug_barrier")
"""Calls that compute nothing."""


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in _CHECKS


def _is_effect(statement: ast.stmt) -> bool:
    """Whether a statement is a call made for its effect, such as a store."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and not _is_check(call)


def _deletable(function: ast.FunctionDef) -> list[ast.stmt]:
    """Return statements that can go while all names keep a value: calls, and assignments to names that have one."""
    found: list[ast.stmt] = []

    def visit(statements: list[ast.stmt], known: set[str]) -> set[str]:
        """Collect deletable statements; return the names that surely have a value afterwards."""
        for statement in statements:
            if isinstance(statement, ast.AugAssign) or _is_effect(statement):
                found.append(statement)
            elif isinstance(statement, ast.Assign):
                targets = {
                    node.id
                    for target in statement.targets
                    for node in ast.walk(target)
                    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                }
                if targets and targets <= known:
                    found.append(statement)
                known = known | targets
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                known = known | {statement.target.id}
            elif isinstance(statement, ast.If):
                known = visit(statement.body, known) & visit(statement.orelse, known)
            elif isinstance(statement, ast.For):
                names = {node.id for node in ast.walk(statement.target) if isinstance(node, ast.Name)}
                visit(statement.body, known | names)
            elif isinstance(statement, ast.While):
                visit(statement.body, known)
        return known

    arguments = function.args
    visit(function.body, {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)})
    return found
