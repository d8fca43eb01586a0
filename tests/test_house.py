"""Imports between the rooms of the house point one way, and `import outrider` stays cheap (docs/ARCHITECTURE.md)."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "outrider"

# From left to right; a room may import from itself and from rooms to its left. "" is outrider/__init__.py.
ORDER: list[set[str]] = [
    {"core"},
    {"models"},
    {"drafters"},
    {"engine"},
    {"backends"},
    {"settings", "prompts"},
    {"build"},
    {"llm", "server", "train", "compat"},
    {"audit", "bench", "config"},
    {""},
    {"cli"},
    {"__main__"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms}

# The engine knows these rooms by their protocols only.
ONLY_BASE = {("engine", "models"), ("engine", "drafters")}

HEAVY = {"transformers", "fastapi", "vllm", "ray", "gguf", "huggingface_hub"}
# The files that wrap a heavy package may import it at the top; nobody imports them before they are needed.
HEAVY_HOMES = {
    "models/transformers.py": {"transformers"},
    "compat/functions.py": {"transformers"},
    "server/app.py": {"fastapi"},
    "server/answers.py": {"fastapi"},
    "server/faces/openai.py": {"fastapi"},
    "server/faces/lorax.py": {"fastapi"},
    "server/faces/xinference.py": {"fastapi"},
    "server/faces/playground.py": {"fastapi"},
    "backends/vllm.py": {"vllm"},
    "server/ray/app.py": {"fastapi", "ray"},
    "server/ray/fleet.py": {"ray"},
}


def modules(src: Path) -> dict[str, Path]:
    """Dotted name below outrider -> file; a package goes by its __init__.py."""
    names = {}
    for path in sorted(src.rglob("*.py")):
        parts = path.relative_to(src).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imported(node: ast.AST, package: list[str]) -> Iterator[str]:
    """The absolute dotted names an import statement may bring in; `package` is where relative ones start."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else []
        stem = ".".join([*base, *([node.module] if node.module else [])])
        yield from (f"{stem}.{alias.name}" for alias in node.names)


def inner(name: str, known: set[str]) -> str | None:
    """The module of ours that a dotted name means, relative to outrider; None if it is someone else's."""
    first, *parts = name.split(".")
    if first != "outrider":
        return None
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)


def at_import_time(parent: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported: not those in functions or under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from at_import_time(ast.Module(node.orelse, []))
            continue
        yield node
        yield from at_import_time(node)


def wrong_arrows(src: Path) -> list[str]:
    files = modules(src)
    # A folder without __init__.py can be imported from as well.
    known = set(files) | {".".join(path.relative_to(src).parts) for path in src.rglob("*") if path.is_dir()}
    found = []
    for name, path in files.items():
        here = name.split(".")[0]
        if here not in RANK:
            found.append(f"{name}: no such room in the plan; give {here!r} its place in ORDER")
            continue
        package = ["outrider", *path.relative_to(src).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            for target in (inner(each, known) for each in imported(node, package)):
                if target is not None and not allowed(here, target):
                    found.append(f"{name}:{node.lineno} imports outrider.{target}")
    return found


def allowed(here: str, target: str) -> bool:
    there = target.split(".")[0]
    if here == there:
        return True
    if (here, there) in ONLY_BASE:
        return target == f"{there}.base"
    return there in RANK and RANK[there] < RANK[here]


def heavy_imports(src: Path) -> list[str]:
    found = []
    for name, path in modules(src).items():
        home = HEAVY_HOMES.get(path.relative_to(src).as_posix(), set())
        for node in at_import_time(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                continue
            heavy = {each.split(".")[0] for each in imported(node, [])} & HEAVY - home
            found += [f"{name}:{node.lineno} imports {each} at the top" for each in sorted(heavy)]
    return found


def test_imports_point_one_way():
    assert wrong_arrows(SRC) == []


def test_heavy_packages_are_imported_where_they_are_used():
    assert heavy_imports(SRC) == []


def test_import_outrider_is_cheap():
    unwanted = {"transformers", "fastapi", "gguf", "typer", "huggingface_hub"}
    code = f"import sys, outrider; print(*sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


# The checker itself, on a small house with one fault.


def house(tmp_path: Path, file: str, code: str) -> Path:
    for each in (
        "core/draft.py",
        "models/base.py",
        "models/llama.py",
        "drafters/base.py",
        "settings.py",
        "llm.py",
        file,
    ):
        path = tmp_path / each
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code if each == file else "")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("core/draft.py", "from outrider.models.base import Model"),
        ("core/draft.py", "import outrider.models.base"),
        ("core/draft.py", "from ..models import base"),
        ("core/draft.py", "def late():\n    from outrider import models"),
        ("core/draft.py", "from outrider import LLM"),
        ("models/llama.py", "from outrider.drafters.base import Drafter"),
        ("engine/engine.py", "from outrider.models.llama import Llama"),
        ("engine/engine.py", "from outrider.models import llama"),
        ("engine/engine.py", "from outrider.drafters import table"),
        ("engine/engine.py", "from outrider import settings"),
        ("server/app.py", "from outrider.llm import LLM"),
        ("attic/trunk.py", ""),
    ],
)
def test_a_wrong_arrow_is_seen(tmp_path, file, code):
    assert len(wrong_arrows(house(tmp_path, file, code))) == 1


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("models/llama.py", "from .base import Model\nfrom outrider.core.draft import Draft\nimport torch"),
        ("engine/engine.py", "from outrider.models.base import Model\nfrom outrider.drafters import base"),
        ("build.py", "from outrider import settings\nfrom outrider.models import llama"),
        ("__init__.py", "from outrider.llm import LLM"),
        ("cli.py", "from outrider import LLM, __version__"),
    ],
)
def test_a_right_arrow_is_not(tmp_path, file, code):
    assert wrong_arrows(house(tmp_path, file, code)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import transformers",
        "from transformers.cache_utils import Cache",
        "import torch, gguf as g",
        "try:\n    import vllm\nexcept ImportError:\n    pass",
        "try:\n    pass\nexcept ImportError:\n    import vllm",
        "if True:\n    pass\nelse:\n    import ray",
        "class A:\n    import fastapi",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import ray",
    ],
)
def test_a_heavy_import_is_seen(tmp_path, code):
    assert len(heavy_imports(house(tmp_path, "models/llama.py", code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    import gguf",
        "class A:\n    def f(self):\n        import gguf",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers",
        "from outrider.models.gguf import GGUFFile",
        "from . import gguf",
    ],
)
def test_a_late_one_is_not(tmp_path, code):
    assert heavy_imports(house(tmp_path, "models/llama.py", code)) == []
