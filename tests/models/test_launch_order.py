"""Kernels that are set up while the one before ends wait for it wherever they end: read from their source, since no
kernel runs in this order without a GPU."""

import ast
from pathlib import Path

import pytest

import outrider

ROOT = Path(outrider.__file__).parent
WAITS = {"begin_after", "nothing_to_do"}


def is_kernel(node):
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


def functions():
    """Every function in Triton, by its name: the file and what stands there."""
    trees = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(ROOT.rglob("*.py")))
    return {node.name: (path.name, node) for path, tree in trees for node in ast.walk(tree) if is_kernel(node)}


def called(nodes):
    calls = (each.func for node in nodes for each in ast.walk(node) if isinstance(each, ast.Call))
    return {func.id for func in calls if isinstance(func, ast.Name)}


FUNCTIONS = functions()
WAITING = {name for name, (_, node) in FUNCTIONS.items() if name in WAITS or called([node]) & WAITS}
LAUNCHED = sorted(
    name for name, (_, node) in FUNCTIONS.items() if name in WAITING - WAITS and "program_id" in ast.unparse(node)
)


def early_ends(body, waited=False):
    """The lines of `return` that a program may reach without having waited."""
    for node in body:
        if isinstance(node, ast.Return) and not waited:
            yield node.lineno
        for inner in ("body", "orelse"):
            yield from early_ends(getattr(node, inner, []), waited)
        waited = waited or (isinstance(node, ast.Expr) and bool(called([node]) & WAITING))
        waited = waited or (
            isinstance(node, ast.If) and "begin_after" in called([node])
        )  # a way of its own waits later


def test_there_are_kernels_to_look_at():
    assert {"_attend", "_few", "_many", "_grow", "_collect", "_judge"} <= set(LAUNCHED)


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_program_that_ends_early_has_waited(name):
    file, node = FUNCTIONS[name]
    assert not list(early_ends(node.body)), f"{name} of {file} ends without begin_after or nothing_to_do"
