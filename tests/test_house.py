"""The rules of the house (docs/ARCHITECTURE.md), read from the source: imports point one way and not in circles, heavy
packages come late, names are unique, modules are described, drafters are known by the table alone, private attributes
stay at home, functions are short. `python tests/test_house.py` prints everything that breaks a rule.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "outrider"
PLAN = ROOT / "docs" / "ARCHITECTURE.md"

# From left to right; a room may import from itself and from rooms to its left. "" is outrider/__init__.py.
ORDER: list[set[str]] = [
    {"core", "interrupt"},
    {"models"},
    {"drafters"},
    {"engine"},
    {"backends"},
    {"settings", "prompts"},
    {"refusals"},
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
    "server/context.py": {"fastapi"},
    "server/responses.py": {"fastapi"},
    "server/faces/asking.py": {"fastapi"},
    "server/faces/openai.py": {"fastapi"},
    "server/faces/responses_api.py": {"fastapi"},
    "server/faces/anthropic.py": {"fastapi"},
    "server/faces/lora.py": {"fastapi"},
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


# Where a drafter's name may stand as a literal outside drafters/, and why. "none" is also a plain word; it counts only
# where it is compared with, or given as, a drafter.
DRAFTER_WORDS: dict[str, set[str]] = {
    "backends/speculation.py": {"ngram", "draft_model", "medusa", "eagle"},  # vLLM's own words for its methods
    "compat/autogluon.py": {"ngram", "draft_model", "layer_skip"},  # what AutoGluon's settings mean here
    "server/faces/openai_bodies.py": {"prediction"},  # the field of OpenAI's API
    "cli/config.py": {"draft_model"},  # vLLM's own word
    "core/": {"grammar"},  # the sampling parameter of that name
    "server/faces/structured.py": {"grammar"},  # the same, and vLLM's word
    "server/faces/tool_fields.py": {"grammar"},  # the same
    "server/tools/reasoning.py": {"grammar"},  # the same
    "server/fleet/worker.py": {"grammar"},  # the same
    "cli/options.py": {"grammar", "history"},  # its option, and the setting that names a history file
    "refusals.py": {"history"},  # the same setting
    "settings.py": {"ngram"},  # the default
    "llm.py": {"ngram", "prediction"},  # the same default, and the argument of that name
    "train/": {"eagle", "block", "medusa", "draft_model"},  # what is trained
    "bench/": {"none", "ngram", "draft_model", "oracle"},  # what is measured, here and at other engines
}
DRAFTER_PLACES = {"draft", "drafter", "method", "name", "spec"}  # names that hold a drafter's name or spec

# Private attributes for which other libraries have no public way; os._exit and those of named tuples are documented.
FOREIGN_PRIVATE = {
    *("_replace", "_asdict", "_fields", "_exit"),
    *("_attn_implementation", "_is_stateful", "_supports_attention_backend", "_supports_sdpa"),  # transformers
    *("_foreach_zero_", "_foreach_sub", "_foreach_mul_", "_foreach_add_", "_foreach_copy_"),  # torch
    *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"),
}

MEDIAN, NINETIETH, LONGEST = 6, 16, 60  # lines of a function, outside kernels


def arrows(src: Path) -> dict[str, set[str]]:
    """Module -> the modules of ours it imports, anywhere: also in functions and under TYPE_CHECKING."""
    files = modules(src)
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        package = ["outrider", *path.relative_to(src).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text())):
            targets = {inner(each, set(files)) for each in imported(node, package)}
            found[name] |= {each for each in targets if each in files and each != name}
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def cycles(src: Path) -> list[str]:
    """Groups of modules that import each other, directly or in a circle."""
    graph = arrows(src)
    beyond = {name: reachable(graph, name) for name in graph}
    groups = {frozenset(each for each in beyond[name] if name in beyond[each]) for name in graph}
    return sorted("import cycle: " + ", ".join(sorted(group)) for group in groups if group)


def top_classes(tree: ast.AST) -> Iterator[ast.ClassDef]:
    """Classes of a module, not those inside another class or a function (every drafter has its own `Options`)."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from top_classes(node)


def shared_class_names(src: Path) -> list[str]:
    places = defaultdict(list)
    for path in modules(src).values():
        for node in top_classes(ast.parse(path.read_text())):
            places[node.name.lstrip("_")].append(f"{path.relative_to(src).as_posix()}:{node.lineno}")
    return [
        f"class {name} is defined {len(at)} times: {', '.join(at)}" for name, at in sorted(places.items()) if at[1:]
    ]


def lines_of_plan(text: str) -> dict[str, int]:
    """The files that have a line of their own (it begins with the name in backquotes), and how many lines."""
    found: dict[str, int] = defaultdict(int)
    for name in re.findall(r"^(?:\| |- )?`([\w/.]+\.\w+)`", text, re.M):
        found[name] += 1
    return found


def undescribed(src: Path, plan: Path) -> list[str]:
    """Modules without exactly one line in the plan, and lines without a file; an empty package needs none."""
    lines = lines_of_plan(plan.read_text())
    files = {path.relative_to(src).as_posix(): path for path in src.rglob("*.py")}
    wanted = {name for name, path in files.items() if not empty_package(path)}
    return [
        *(f"{plan.name}: no line for {name}" for name in sorted(wanted - set(lines))),
        *(f"{plan.name}: {name} is not there" for name in sorted(lines) if not (src / name).exists()),
        *(f"{plan.name}: {count} lines for {name}" for name, count in sorted(lines.items()) if count > 1),
    ]


def empty_package(path: Path) -> bool:
    return path.name == "__init__.py" and all(isinstance(node, ast.Expr) for node in ast.parse(path.read_text()).body)


def drafter_names(src: Path) -> set[str]:
    """The keys of the table in drafters/__init__.py: literals, or constants of that file."""
    named = {}
    for node in ast.walk(ast.parse((src / "drafters" / "__init__.py").read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            named[node.targets[0].id] = node.value
    keys = [named[key.id] if isinstance(key, ast.Name) else key for key in named["TABLE"].keys]
    return {ast.literal_eval(key) for key in keys}


def named_drafters(src: Path) -> list[str]:
    """A drafter's name, or the beginning of a spec "NAME:key=value", as a literal outside drafters/. Devices and types
    of numbers are chosen by `auto` as well."""
    pattern = re.compile(rf"({'|'.join(sorted(drafter_names(src) - {'none', 'auto'}))})(:\w+=.*)?")
    found = []
    for path in modules(src).values():
        file = path.relative_to(src).as_posix()
        spared = {word for place, words in DRAFTER_WORDS.items() if file.startswith(place) for word in words}
        tree = ast.parse(path.read_text())
        if not file.startswith("drafters/"):
            hits = [(node, hit[1]) for node, text in literals(tree) if (hit := pattern.fullmatch(text))]
            hits += [(node, "none") for node in plain_by_name(tree)]
            found += [f"{file}:{node.lineno} names the drafter {name!r}" for node, name in hits if name not in spared]
    return found


def literals(tree: ast.AST) -> Iterator[tuple[ast.Constant, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node, node.value


def plain_by_name(tree: ast.AST) -> Iterator[ast.expr]:
    """Where "none" is compared with a drafter's name, or given as one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and last_names(node) & DRAFTER_PLACES:
            yield from (each for each in ast.walk(node) if is_none_word(each))
        elif isinstance(node, ast.keyword) and node.arg in DRAFTER_PLACES and is_none_word(node.value):
            yield node.value
        elif isinstance(node, ast.Dict):
            yield from (v for k, v in zip(node.keys, node.values, strict=True) if given_as_draft(k) and is_none_word(v))


def given_as_draft(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value in DRAFTER_PLACES


def is_none_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == "none"


def last_names(node: ast.Compare) -> set[str]:
    sides = [node.left, *node.comparators]
    attributes = {each.attr for each in sides if isinstance(each, ast.Attribute)}
    return attributes | {each.id for each in sides if isinstance(each, ast.Name)}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(tree: ast.AST) -> set[str]:
    """Names that a file defines itself: functions, classes, fields, variables, attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node.value):
            found.add(node.attr)
    return found


def own(value: ast.AST) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def private_elsewhere(src: Path) -> list[str]:
    """Private names of other files: of another object, imported, or (from another folder) inherited."""
    trees = {path: ast.parse(path.read_text()) for path in modules(src).values()}
    names = {path: own_names(tree) | FOREIGN_PRIVATE for path, tree in trees.items()}
    found = []
    for path, tree in trees.items():
        beside = set().union(*(names[each] for each in names if each.parent == path.parent))
        for node in ast.walk(tree):
            known = beside if isinstance(node, ast.Attribute) and own(node.value) else names[path]
            if any(private(name) and name not in known for name in used_names(node)):
                found.append(
                    f"{path.relative_to(src).as_posix()}:{node.lineno} uses a private name: {ast.unparse(node)}"
                )
    return found


def used_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Attribute):
        return [node.attr]
    return [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"\bjit\b", ast.unparse(each)) for each in function.decorator_list)


def function_lengths(src: Path) -> dict[str, int]:
    """Place of a function -> its lines, without decorators; Triton kernels are left out."""
    found = {}
    for path in modules(src).values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not kernel(node):
                place = f"{path.relative_to(src).as_posix()}:{node.lineno} {node.name}"
                found[place] = (node.end_lineno or node.lineno) - node.lineno + 1
    return found


def long_functions(src: Path) -> list[str]:
    lengths = function_lengths(src)
    if len(lengths) < 2:
        middle = ninetieth = float(max(lengths.values(), default=0))
    else:
        middle = statistics.median(lengths.values())
        ninetieth = statistics.quantiles(lengths.values(), n=10, method="inclusive")[-1]
    found = [f"{place} has {lines} lines, more than {LONGEST}" for place, lines in lengths.items() if lines > LONGEST]
    found += [f"the median function has {middle:g} lines, more than {MEDIAN}"] * (middle > MEDIAN)
    found += [f"one function in ten has more than {NINETIETH} lines: {ninetieth:g}"] * (ninetieth > NINETIETH)
    return found


RULES: dict[str, Callable[[], list[str]]] = {
    "imports point one way": lambda: wrong_arrows(SRC),
    "heavy packages are imported where they are used": lambda: heavy_imports(SRC),
    "no import cycles": lambda: cycles(SRC),
    "class names are unique": lambda: shared_class_names(SRC),
    "every module has a line in docs/ARCHITECTURE.md": lambda: undescribed(SRC, PLAN),
    "drafters are known by the table alone": lambda: named_drafters(SRC),
    "private attributes stay at home": lambda: private_elsewhere(SRC),
    "functions are short": lambda: long_functions(SRC),
}


def report() -> int:
    """Print what breaks a rule; the number of places."""
    total = 0
    for rule, check in RULES.items():
        found = check()
        total += len(found)
        print(f"{rule}: {len(found) or 'yes'}", *(f"  {each}" for each in found), sep="\n")
    return total


def test_imports_point_one_way():
    assert wrong_arrows(SRC) == []


def test_heavy_packages_are_imported_where_they_are_used():
    assert heavy_imports(SRC) == []


def test_no_import_cycles():
    assert cycles(SRC) == []


def test_class_names_are_unique():
    assert shared_class_names(SRC) == []


def test_every_module_has_a_line_in_the_plan():
    assert undescribed(SRC, PLAN) == []


def test_private_attributes_stay_at_home():
    assert private_elsewhere(SRC) == []


def test_drafters_are_known_by_the_table_alone():
    assert named_drafters(SRC) == []


def test_functions_are_short():
    assert long_functions(SRC) == []


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


@pytest.mark.parametrize(
    ("base", "llama"),
    [
        ("from outrider.models.llama import Llama", "from outrider.models.base import Model"),
        ("def late():\n    from outrider.models import llama", "from .base import Model"),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .llama import Llama", "from . import base"),
        ("import outrider.models.cache", "import outrider.models.base"),
    ],
)
def test_a_cycle_is_seen(tmp_path, base, llama):
    src = house(tmp_path, "models/cache.py", "import outrider.models.llama")
    (src / "models/base.py").write_text(base)
    (src / "models/llama.py").write_text(llama)
    assert len(cycles(src)) == 1


def test_a_chain_is_no_cycle(tmp_path):
    src = house(tmp_path, "models/llama.py", "from . import base\nfrom outrider.core.draft import Draft")
    (src / "models/base.py").write_text("from outrider.core import draft")
    assert cycles(src) == []


@pytest.mark.parametrize("code", ["class Plan: ...", "class _Plan: ...", "if True:\n    class Plan: ..."])
def test_a_class_name_used_twice_is_seen(tmp_path, code):
    src = house(tmp_path, "core/draft.py", "class Plan: ...")
    (src / "models/base.py").write_text(code)
    assert len(shared_class_names(src)) == 1


def test_classes_inside_classes_may_share_a_name(tmp_path):
    src = house(tmp_path, "core/draft.py", "class A:\n    class Options: ...")
    (src / "models/base.py").write_text("class B:\n    class Options: ...\ndef f():\n    class Options: ...")
    assert shared_class_names(src) == []


def test_the_plan_has_one_line_for_each_file(tmp_path):
    src = house(tmp_path, "core/draft.py", "")
    (src / "core" / "__init__.py").write_text('"""Values."""')
    plan = tmp_path / "PLAN.md"
    lines = [
        f"| `{path.relative_to(src).as_posix()}` | its job |" for path in src.rglob("*.py") if path.stem != "__init__"
    ]
    plan.write_text("\n".join(lines))
    assert undescribed(src, plan) == []
    plan.write_text("\n".join(lines[1:]))
    assert len(undescribed(src, plan)) == 1
    plan.write_text("\n".join([*lines, "| `core/gone.py` | its job |"]))
    assert len(undescribed(src, plan)) == 1
    plan.write_text("\n".join([*lines, lines[0]]))
    assert len(undescribed(src, plan)) == 1
    plan.write_text("\n".join([*lines[1:], f"Beside it {lines[0]}"]))
    assert len(undescribed(src, plan)) == 1


def test_a_package_with_code_needs_a_line(tmp_path):
    src = house(tmp_path, "core/__init__.py", "from . import draft")
    plan = tmp_path / "PLAN.md"
    plan.write_text("")
    assert "PLAN.md: no line for core/__init__.py" in undescribed(src, plan)


TABLE = 'PLAIN = "none"\nTABLE = {PLAIN: "a:A", "ngram": "b:B", "eagle": "c:C"}'


@pytest.mark.parametrize(
    "code",
    [
        'x = name == "ngram"',
        'x = "ngram:length=4"',
        'x = f"eagle:head={folder}"',
        'x = {"eagle": 1}',
        'x = drafter.name != "none"',
        'x = spec in (None, "none")',
        'f(draft="none")',
        'x = {"draft": "none"}',
    ],
)
def test_a_drafter_named_outside_the_table_is_seen(tmp_path, code):
    src = house(tmp_path, "drafters/__init__.py", TABLE)
    (src / "models/llama.py").write_text(code)
    assert len(named_drafters(src)) == 1


@pytest.mark.parametrize(
    "code",
    [
        'x = "an ngram"',
        'x = "none"',
        'x = quantize == "none"',
        '"""ngram"" """',
        "ngram = 1",
        'x = drafter.name == "no"',
    ],
)
def test_other_words_are_not_drafters(tmp_path, code):
    src = house(tmp_path, "drafters/__init__.py", TABLE)
    (src / "models/llama.py").write_text(code)
    assert named_drafters(src) == []


def test_a_drafter_may_name_itself(tmp_path):
    src = house(tmp_path, "drafters/__init__.py", TABLE)
    (src / "drafters" / "ngram.py").write_text('name = "ngram"')
    assert named_drafters(src) == []


@pytest.mark.parametrize(
    "code",
    [
        "x = model._cache",
        "self.model._cache = 1",
        "from outrider.core.draft import _walk",
        "model._cache[0]",
        "class A(B):\n    def f(self):\n        return self._cache",
    ],
)
def test_a_private_name_of_another_file_is_seen(tmp_path, code):
    src = house(tmp_path, "core/draft.py", "class B:\n    def __init__(self):\n        self._cache = 1")
    (src / "models/base.py").write_text(code)
    assert len(private_elsewhere(src)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    def f(self):\n        self._cache = 1\n    def same(self, other):\n        return other._cache",
        "class A:\n    _cache: int = 0\ndef f(a):\n    return a._cache",
        "class A(B):\n    def f(self):\n        return self._slots",
        "import os\nos._exit(1)",
        "x.__dict__",
    ],
)
def test_a_private_name_at_home_is_not(tmp_path, code):
    src = house(tmp_path, "models/llama.py", "class B:\n    def __init__(self):\n        self._slots = 1")
    (src / "models/base.py").write_text(code)
    assert private_elsewhere(src) == []


def function(lines: int, head: str = "def f():") -> str:
    return head + "\n    pass" * (lines - 1) + "\n"


@pytest.mark.parametrize(
    ("sizes", "faults"),
    [
        ([6, 6, 6], 0),
        ([6, 7, 7], 1),
        ([2] * 8 + [16] * 2, 0),
        ([2] * 8 + [17] * 2, 1),
        ([2] * 40 + [60], 0),
        ([2] * 40 + [61], 1),
    ],
)
def test_a_long_function_is_seen(tmp_path, sizes, faults):
    src = house(tmp_path, "core/draft.py", "".join(function(size) for size in sizes))
    assert len(long_functions(src)) == faults


def test_kernels_may_be_long(tmp_path):
    code = function(4) + function(99, "@triton.jit\ndef g():") + function(80, "@triton.jit(debug=True)\ndef h():")
    assert long_functions(house(tmp_path, "core/draft.py", code)) == []


if __name__ == "__main__":
    sys.exit(report() > 0)
