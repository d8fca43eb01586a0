"""Jinja with bounds: a template comes with a model, and may not take the machine's time or memory.

Jinja's own sandbox keeps a template away from Python; it does not keep it from writing 'a' * 10**9. Here every turn of
a loop, call, operator and printed value is counted, and whatever could grow is measured before it is made.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

# Steps of a rendering (iterations of loops, calls, operators), and one more for each character of the input. Known
# templates take 20 to 50 for a message, and a message brings at least 30 characters.
STEPS = 200_000
SECONDS = 10.0  # of a rendering, which takes milliseconds: catches slow work that is not counted as steps
CHARACTERS = 1 << 22  # of output beyond the input; the longest known template writes 20,000
GROWTH = 8  # times the input that the output may have on top: known templates write a message at most twice
WIDTH = 10_000  # columns of padding, items of a batch, digits of a number
BITS = 4096  # bits of a whole number: larger ones take long to multiply and to print
INDENT = 16  # columns that JSON is indented by, at each level
HELD = 1_000_000  # items of measured lists that are kept alive while they are known: 8 MB of references

_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*))?")
_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]*\{[^{]")


class Budget:
    """What is left to one rendering."""

    def __init__(self, given: int) -> None:
        """`given`: characters of the messages and variables."""
        self.steps = self._steps_left = STEPS + given
        self._end = time.monotonic() + SECONDS
        self.characters = self._left = CHARACTERS + GROWTH * given
        self._weights: dict[int, tuple[Any, int]] = {}  # by id: a list or dict (so that its id stays its own), weight
        self._held = 0  # items of the lists in `_weights`

    def step(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise SecurityError(f"it takes more than {self.steps} steps")
        if time.monotonic() > self._end:
            raise SecurityError(f"it takes more than {SECONDS:g} seconds")

    def write(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise SecurityError(f"it writes more than {self.characters} characters")

    def check(self, size: int) -> None:
        """A text or list of this size is about to be made."""
        if size > self.characters:
            raise SecurityError(f"it makes a value of {size} characters or items; {self.characters} are allowed")

    def weigh(self, value: Any) -> int:
        """Characters and items of a value: a list that holds another twice, which holds another twice, and so on, is
        small in memory and has no end when it is printed."""
        if not isinstance(value, list | tuple | dict):
            return 1 + (len(value) if isinstance(value, str) else _digits(value))
        if known := self._weights.get(id(value)):
            return known[1]
        weight = 1
        for part in value.values() if isinstance(value, dict) else value:
            weight += self.weigh(part)
            self.check(weight)
        self._remember(value, weight)
        return weight

    def join(self, left: list[Any], right: list[Any], both: list[Any]) -> None:
        """As `weigh`, without a look at every item: templates collect messages one by one."""
        weight = self.weigh(left) + self.weigh(right)
        self.check(weight)
        self._remember(both, weight)

    def _remember(self, value: list[Any] | tuple[Any, ...] | dict[Any, Any], weight: int) -> None:
        self._held += len(value)
        if self._held > HELD:
            self._weights, self._held = {}, len(value)
        self._weights[id(value)] = value, weight


_BUDGET: ContextVar[Budget | None] = ContextVar("budget", default=None)


def render(template: Any, variables: Mapping[str, Any], given: int) -> str:
    """The text of a compiled template within a budget of its own."""
    token = _BUDGET.set(Budget(given))
    try:
        return str(template.render(variables))
    finally:
        _BUDGET.reset(token)


def _budget() -> Budget:
    return _BUDGET.get() or Budget(0)  # none while a template is compiled, which computes what is constant


def _finalize(value: Any) -> str:
    text = str(value)
    _budget().write(len(text))
    return text


def _refuse(*args: Any, **named: Any) -> None:
    """lipsum(n) of Jinja writes as much as it is asked for."""
    raise SecurityError("it asks for text to fill a page with, which no conversation needs")


class _Counted(NodeTransformer):
    """Puts the counting into a template's syntax tree."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        if node.test is not None:  # a turn that the test leaves out is a turn
            node.test = nodes.And(_call("count", [nodes.Const(0)], node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, _tick(node))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenate", node.nodes, node)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return node if _constant(node.items) else _call("measured", [node], node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("measured", [node], node) if node.items else node

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" or _constant(node.items) else _call("measured", [node], node)


def _constant(items: Iterable[nodes.Node]) -> bool:
    return all(isinstance(item, nodes.Const) for item in items)


def _tick(node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
    """Counts a turn, and the text that the template itself writes in it."""
    text = sum(len(data.data) for part in node.body for data in part.find_all(nodes.TemplateData))
    return nodes.ExprStmt(_call("count", [nodes.Const(text)], node), lineno=node.lineno)


def _call(name: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(name, lineno=node.lineno)
    return nodes.Call(function, arguments, [], None, None, lineno=node.lineno)


class _CountingGenerator(CodeGenerator):
    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:
        counted: nodes.Template = _Counted().visit(node)
        counted.set_environment(self.environment)
        super().visit_Template(counted, frame)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which a template ends soon and stays small."""

    code_generator_class = _CountingGenerator
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, **options)
        self.globals["lipsum"] = _refuse
        for name, check in _FILTERS.items():
            self.filters[name] = _guarded(self.filters[name], check)
        for name in _LAZY:
            self.filters[name] = _weighed(self.filters[name])

    @staticmethod
    def count(text: int) -> bool:
        _budget().step()
        _budget().write(text)
        return True

    @staticmethod
    def concatenate(*values: Any) -> str:
        texts = [str(value) for value in values]
        _budget().check(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def measured(container: Any) -> Any:
        _budget().weigh(container)
        return container

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in _DENIED)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget().step()
        _OPERATORS[operator](left, right)
        made = super().call_binop(context, operator, left, right)
        if operator == "+" and isinstance(made, list):
            _budget().join(left, right, made)
        return self.measured(made)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget().step()
        text, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(text, str) and name in _METHODS:
            args = tuple(map(_listed, args))
            _METHODS[name](text, *args, **kwargs)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        return (
            None
            if made is None
            else _guarded(functools.partial(made), functools.partial(_check_format, value.__self__))
        )


# What each operator, method and filter would make, measured before it is made


def _check_sum(left: Any, right: Any) -> None:
    if isinstance(left, Sequence) and isinstance(right, Sequence):
        _budget().check(len(left) + len(right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
    for values, times in ((left, right), (right, left)):
        if isinstance(values, Sequence) and isinstance(times, int):
            _budget().check(len(values) * times)


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))


def _check_bits(bits: int) -> None:
    if bits > BITS:
        raise SecurityError(f"it makes a number of {bits} bits; {BITS} are allowed")


def _check_percent(left: Any, right: Any = (), *more: Any, **named: Any) -> None:
    """A number by a number, or a format and its values."""
    if isinstance(left, str):
        widths = [group for match in _PERCENT.finditer(left) for group in match.groups() if group]
        _check_width(*(-1 if width == "*" else width for width in widths))
        values = [*(right if isinstance(right, tuple) else (right,)), *more, *named.values()]
        _check_repeats(left.count("%"), sum(map(int, widths)), left, values)


def _check_format(text: str, *args: Any, **named: Any) -> None:
    if _NESTED.search(text.replace("{{", "")):
        raise SecurityError("a format within a format is not allowed")
    widths = _NUMBER.findall(text)
    _check_width(*widths)
    _check_repeats(text.count("{"), sum(map(int, widths)), text, [*args, *named.values()])


def _check_repeats(fields: int, padding: int, text: str, values: Sequence[Any]) -> None:
    """A format may name the same value many times."""
    _budget().check(len(text) + padding + fields * max((len(str(value)) for value in values), default=0))


def _check_width(*widths: Any, **named: Any) -> None:
    """Numbers among what is given to a filter or method that pads, cuts or repeats."""
    for width in (*widths, *named.values()):
        digits = isinstance(width, str) and width.isdecimal()
        if (digits and (len(width) > len(str(WIDTH)) or int(width) > WIDTH)) or (
            isinstance(width, int) and not -1 < width <= WIDTH
        ):
            raise SecurityError(f"it asks for a width of {str(width)[:20]}; {WIDTH} are allowed")


def _check_replace(text: Any, old: Any = "", new: Any = "", *rest: Any, **named: Any) -> None:
    text, old, new = str(text), str(named.get("old", old)), str(named.get("new", new))
    times = text.count(old) if old else len(text) + 1
    _budget().check(len(text) + times * len(new))


def _check_join(between: Any, values: Any, *rest: Any, **named: Any) -> None:
    if isinstance(values, Sequence):
        _budget().check(sum(len(str(value)) for value in values) + len(values) * len(str(between)))


def _check_join_filter(values: Any, between: Any = "", *rest: Any, **named: Any) -> None:
    _check_join(named.get("d", between), values)


def _check_list(values: Any, *rest: Any, **named: Any) -> None:
    if isinstance(values, str):  # each character becomes a text of its own
        _budget().check(2 * len(values))


def _check_slice(values: Any, *rest: Any, **named: Any) -> None:
    _check_width(*rest, **named)
    _check_list(values)


def _check_indent(text: Any, width: Any = 4, *rest: Any, **named: Any) -> None:
    width = named.get("width", width)
    _check_width(width)
    size = len(width) if isinstance(width, str) else width
    _budget().check(len(str(text)) + str(text).count("\n") * size + size)


def _check_total(values: Any, attribute: Any = None, start: Any = 0, **named: Any) -> None:
    if not isinstance(named.get("start", start), int | float):
        raise SecurityError("only numbers can be summed")


def check_indent(indent: int | None) -> None:
    """Of JSON, whose every line is indented by its level times this."""
    if indent is not None and not 0 <= indent <= INDENT:
        raise SecurityError(f"it indents JSON by {indent} columns; {INDENT} are allowed")


def _check_arguments(value: Any, *args: Any, **named: Any) -> None:
    _check_width(*args, **named)


_OPERATORS: dict[str, Callable[[Any, Any], None]] = {
    "+": _check_sum,
    "*": _check_product,
    "%": _check_percent,
    "**": _check_power,
}
_DENIED = ("expandtabs", "translate", "maketrans")  # no known template uses them, and all can grow
_METHODS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_arguments),
    "replace": _check_replace,
    "join": _check_join,
}
_FILTERS: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("center", "batch", "wordwrap", "round"), _check_arguments),
    **dict.fromkeys(("list", "sort", "groupby"), _check_list),
    "format": _check_percent,
    "indent": _check_indent,
    "join": _check_join_filter,
    "replace": _check_replace,
    "slice": _check_slice,
    "sum": _check_total,
}
# Filters that give their values one by one, as they are asked for: what they come to is seen by nobody else.
_LAZY = ("batch", "items", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "unique")


def _guarded(function: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """A filter that is checked first; Jinja may hand it the environment before the value."""
    handed = 1 if getattr(function, "jinja_pass_arg", None) else 0

    @functools.wraps(function)
    def guarded(*args: Any, **named: Any) -> Any:
        _budget().step()
        args = tuple(map(_listed, args))
        check(*args[handed:], **named)
        return function(*args, **named)

    return guarded


def _weighed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose values are weighed together as they come, whatever collects them."""

    @functools.wraps(function)
    def weighed(*args: Any, **named: Any) -> Any:
        made = function(*args, **named)
        return _weighed_items(made) if isinstance(made, Iterator) else made

    return weighed


def _weighed_items(values: Iterator[Any]) -> Iterator[Any]:
    budget, weight = _budget(), 0
    for value in values:
        weight += budget.weigh(value)
        budget.check(weight)
        yield value


def _listed(value: Any) -> Any:
    """A check looks at every value of an iterator, and leaves none for the function that is checked."""
    return list(_weighed_items(value)) if isinstance(value, Iterator) else value


def _digits(value: Any) -> int:
    """At most this many, for a whole number: each takes more than three bits."""
    return value.bit_length() // 3 if isinstance(value, int) else 0
