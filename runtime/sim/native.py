"""Rewrites this project's sources for mypyc: equal meaning, without look-ups by name at run time.

Code compiled by mypyc looks up the fields of a struct by name. The `__init__` of a dataclass is made at run time and
stays interpreted, constants and members of enums are looked up in dictionaries, and `match` looks up fields by name for
any class. The rewrite turns structs into plain classes, gives dataclasses an `__init__`, turns `match` over classes
into `if`, makes constants final, and makes members of enums constants.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Mapping, Sequence

STRUCTS = ("msgspec.Struct", "Message")  # bases of structs
_CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*$")

Fields = Mapping[str, Sequence[str]]  # class name → field names, in the order of positional `match` patterns


def fields(sources: Iterable[str]) -> dict[str, list[str]]:
    """Field names of every struct and dataclass in the sources, by class name."""
    classes = [node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {
        each.name: [_name(field) for field in _fields(each)] for each in classes if _is_struct(each) or _dataclass(each)
    }


def enums(sources: Iterable[str]) -> set[str]:
    classes = [node for source in sources for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {each.name for each in classes if any(ast.unparse(base) in ("Enum", "IntEnum") for base in each.bases)}


def native(source: str, of: Fields, members_of: set[str], structs: bool) -> str:
    """Source rewritten for mypyc.

    Args:
        of: fields of every class, from `fields`.
        members_of: names of enums, from `enums`.
        structs: whether structs of this file become classes; no code may encode or decode such structs."""
    tree = ast.parse(source)
    rewritten = _Rewritten(of, members_of, structs)
    tree = rewritten.visit(tree)
    body = tree.body
    first = next(n for n, each in enumerate(body) if not _opens(each))
    body.insert(first, ast.parse("from typing import ClassVar, Final").body[0])
    _put_constants(body, rewritten.members)
    for number, each in enumerate(body):
        if isinstance(each, ast.Assign) and _is_constant(each.targets):
            body[number] = ast.parse(f"{ast.unparse(each.targets[0])}: Final = {ast.unparse(each.value)}").body[0]
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _opens(node: ast.stmt) -> bool:
    """Whether a statement must stay at the top: the docstring, or an import from `__future__`."""
    return isinstance(node, ast.Expr) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _is_constant(targets: Sequence[ast.expr]) -> bool:
    return len(targets) == 1 and isinstance(targets[0], ast.Name) and bool(_CONSTANT.match(targets[0].id))


def _put_constants(body: list[ast.stmt], members: Mapping[str, ast.Attribute]) -> None:
    """Inserts each constant after the import or the class of its enum."""
    for name, member in members.items():
        enum = ast.unparse(member.value)
        at = next(n for n, each in enumerate(body) if enum in _brings(each))
        body.insert(at + 1, ast.parse(f"{name}: Final = {ast.unparse(member)}").body[0])


def _brings(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return [node.name] if isinstance(node, ast.ClassDef) else []


class _Rewritten(ast.NodeTransformer):
    def __init__(self, of: Fields, members_of: set[str], structs: bool) -> None:
        self.members: dict[str, ast.Attribute] = {}  # name of the constant → member of an enum
        self._of, self._members_of, self._structs = of, members_of, structs
        self._inside = 0  # functions

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._inside += 1
        self.generic_visit(node)
        self._inside -= 1
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not (self._inside and isinstance(node.value, ast.Name) and node.value.id in self._members_of):
            return node
        name = f"_{node.value.id}_{node.attr}".upper()
        self.members[name] = node
        return ast.Name(name, ast.Load())

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrites calls into forms that mypyc compiles well: `min` of two, `any` of a generator, `isinstance` of a
        tuple."""
        self.generic_visit(node)
        if not isinstance(node.func, ast.Name) or node.keywords:
            return node
        args = node.args
        match node.func.id:
            case "isinstance" if isinstance(args[1], ast.BinOp):
                args[1] = ast.Tuple(_alternatives(args[1]), ast.Load())
            case "any" | "all" if isinstance(args[0], ast.ListComp):
                args[0] = ast.GeneratorExp(args[0].elt, args[0].generators)
            case "min" | "max" if len(args) > 2 and not any(isinstance(each, ast.Starred) for each in args):
                return ast.Call(node.func, [self.visit(ast.Call(node.func, args[:-1], [])), args[-1]], [])
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.generic_visit(node)
        if _is_struct(node) and self._structs:
            return _plain(node)
        return _with_init(node) if _dataclass(node) else node

    def visit_Match(self, node: ast.Match) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.subject, ast.Name):
            return node
        branches: list[tuple[ast.expr | None, list[ast.stmt]]] = []
        for number, case in enumerate(copy.deepcopy(node.cases)):
            branch = None if case.guard else self._branch(node.subject.id, case, number)
            if branch is None:
                return node
            branches.append(branch)
        return _chain(branches)

    def _branch(self, subject: str, case: ast.match_case, number: int) -> tuple[ast.expr | None, list[ast.stmt]] | None:
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None and pattern.name is None:
            return None, case.body
        names = self._of.get(ast.unparse(pattern.cls)) if isinstance(pattern, ast.MatchClass) else None
        if not isinstance(pattern, ast.MatchClass) or pattern.kwd_attrs or names is None:
            return None
        test = ast.parse(f"isinstance({subject}, {ast.unparse(pattern.cls)})", mode="eval").body
        taken: dict[str, str] = {}
        for field, part in zip(names, pattern.patterns, strict=False):
            if not isinstance(part, ast.MatchAs) or part.pattern is not None:
                return None
            if part.name is not None:
                taken[part.name] = field
        # Two cases may bind values of different types to a single name.
        renamed = _Renamed({name: f"{name}_{number}" for name in taken})
        takes = [ast.parse(f"{name}_{number} = {subject}.{field}").body[0] for name, field in taken.items()]
        return test, takes + [renamed.visit(each) for each in case.body]


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)


def _chain(branches: Sequence[tuple[ast.expr | None, list[ast.stmt]]]) -> ast.stmt:
    test, body = branches[0]
    rest: list[ast.stmt] = []
    if len(branches) > 1:
        after_test, after_body = branches[1]
        rest = after_body if after_test is None else [_chain(branches[1:])]
    return ast.If(test or ast.Constant(True), body, rest)


def _alternatives(union: ast.expr) -> list[ast.expr]:
    if isinstance(union, ast.BinOp):
        return [*_alternatives(union.left), *_alternatives(union.right)]
    return [union]


# ── classes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _is_struct(node: ast.ClassDef) -> bool:
    return [ast.unparse(base) for base in node.bases] in [[base] for base in STRUCTS]


def _dataclass(node: ast.ClassDef) -> ast.Call | None:
    """Call of the `dataclass` decorator of a class; None without the decorator."""
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "dataclass":
            return each
    return None


def _fields(node: ast.ClassDef) -> list[ast.AnnAssign]:
    return [each for each in node.body if isinstance(each, ast.AnnAssign)]


def _name(field: ast.AnnAssign) -> str:
    return ast.unparse(field.target)


def _plain(node: ast.ClassDef) -> ast.ClassDef:
    """Turns a struct into a class that is made, compared, printed and pickled like the struct."""
    own = _fields(node)
    names = [_name(field) for field in own]
    takes = [f"{_name(each)}: {ast.unparse(each.annotation)}{_default(each)}" for each in own]
    sets = [f"self.{name} = {name}" for name in names] or ["pass"]
    equal = " and ".join(["isinstance(other, " + node.name + ")", *(f"self.{n} == other.{n}" for n in names)])
    shown = ", ".join(f"{name}={{self.{name}!r}}" for name in names)
    methods = [
        _def(f"__init__(self, {', '.join(takes)}) -> None", sets),
        _def("__eq__(self, other: object) -> bool", [f"return {equal}"]),
        _def("__hash__(self) -> int", [f"return hash(({''.join(f'self.{name}, ' for name in names)}))"]),
        _def("__repr__(self) -> str", [f'return f"{node.name}({shown})"']),
        _def(
            "__reduce__(self) -> tuple[object, ...]",
            [f"return {node.name}, ({''.join(f'self.{name}, ' for name in names)})"],
        ),
    ]
    for field in own:
        field.value = None
    node.bases, node.keywords = [], []
    order = ast.parse(f"__match_args__: ClassVar = ({''.join(f'{name!r}, ' for name in names)})").body
    node.body = [*(each for each in node.body if not isinstance(each, ast.Pass)), *order, *methods]
    return node


def _default(field: ast.AnnAssign) -> str:
    return "" if field.value is None else f" = {ast.unparse(field.value)}"


def _with_init(node: ast.ClassDef) -> ast.ClassDef:
    """Gives a dataclass a written `__init__` and removes `slots=True`: native classes have slots anyway, and can't be
    created a second time to get slots."""
    decorator = _dataclass(node)
    assert decorator is not None
    given = {each.arg for each in decorator.keywords}
    decorator.keywords = [each for each in decorator.keywords if each.arg != "slots"]
    methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
    if "frozen" in given or "init" in given or "__init__" in methods:
        return node
    decorator.keywords.append(ast.keyword("init", ast.Constant(False)))
    takes, sets = [], []
    for each in _fields(node):
        name, kind, options = _name(each), ast.unparse(each.annotation), _options(each.value)
        if options is None:
            takes.append(f"{name}: {kind}{_default(each)}")
            sets.append(f"self.{name} = {name}")
        elif "default_factory" in options:
            takes.append(f"{name}: {kind} | None = None")
            sets.append(f"self.{name} = {name} if {name} is not None else {options['default_factory']}()")
        else:
            assert options == {"init": "False"}, f"a field of {node.name} can't be made: {ast.unparse(each)}"
    if "__post_init__" in methods:
        sets.append("self.__post_init__()")
    node.body.append(_def(f"__init__(self, {', '.join(takes)}) -> None", sets))
    return node


def _options(value: ast.expr | None) -> dict[str, str] | None:
    """Options of a `field(...)` call; None for a different value."""
    if not (isinstance(value, ast.Call) and ast.unparse(value.func) == "field"):
        return None
    return {each.arg or "": ast.unparse(each.value) for each in value.keywords}


def _def(head: str, body: Sequence[str]) -> ast.stmt:
    return ast.parse(f"def {head}:\n" + "\n".join(f"    {line}" for line in body)).body[0]
