"""llama.cpp built from source for this machine, once, kept in the cache: a wheel must run on any processor, and a
comparison with it flatters us.

The source is the one that comes with the sdist of llama-cpp-python, or a tree that the user names (ik_llama.cpp has the
same build and the same server). Nothing of it becomes a part of outrider.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.errors import OutriderError
from outrider.models.native import levels
from outrider.models.sources import cache_dir

SDIST = "llama-cpp-python"
NATIVE_PEER, IK_PEER = "llama.cpp-native", "ik_llama.cpp"
TARGETS = ("llama-server", "llama-quantize")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # the folder of programs and libraries can be moved
    *(f"-DLLAMA_{name}=OFF" for name in ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "OPENSSL", "CURL")),
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded
    "-DLLAMA_BUILD_SERVER=ON",
)
# What --instructions names: the flags of the build, and the level of our own kernels that is limited in the same way.
INSTRUCTIONS = {
    "native": (("-DGGML_NATIVE=ON",), None),
    "avx2": (("-DGGML_NATIVE=OFF", "-DGGML_AVX2=ON", "-DGGML_FMA=ON", "-DGGML_F16C=ON", "-DGGML_BMI2=ON"), "x86-64-v3"),
}
_STEP = re.compile(r"^\[\s*(\d+)(?:/(\d+)|%)\]")  # of ninja, or of make
Show = Callable[[str, int, int], None]  # (what, done, of how many)


@dataclass(frozen=True)
class BuiltPeer:
    """Programs of llama.cpp, and how they were made."""

    peer: str  # its name in the table of engines
    folder: str
    source: str  # its name and version
    flags: tuple[str, ...]
    compiler: str

    @property
    def server(self) -> str:
        return str(Path(self.folder) / "llama-server")

    @property
    def quantizer(self) -> str:
        return str(Path(self.folder) / "llama-quantize")


def build(source: Path | None, instructions: str, show: Show) -> BuiltPeer:
    """The programs, built now if they are not kept from an earlier time. A mistake is one line."""
    options = (*OPTIONS, *INSTRUCTIONS[instructions][0])
    if source is not None:
        check_source(source)
        name = _tree_name(source)
        return _kept(_place(name, options)) or _built(source, name, options, show)
    for place in sorted(_folder().glob(f"{SDIST}-*-{_digest(options)}"), reverse=True):
        if kept := _kept(place):
            return kept
    check_tools()
    with tempfile.TemporaryDirectory(prefix="outrider-peers-") as scratch:
        show(f"downloading the sdist of {SDIST}", 0, 0)
        tree, name = _sdist(Path(scratch))
        return _built(tree, name, options, show)


def kept_builds(instructions: str) -> dict[str, BuiltPeer]:
    """What was built earlier, by the name of the engine; of several the newest."""
    ending = _digest((*OPTIONS, *INSTRUCTIONS[instructions][0]))
    places = sorted(_folder().glob(f"*-{ending}"), key=lambda place: place.stat().st_mtime)
    return {built.peer: built for built in map(_kept, places) if built is not None}


def check_tools() -> None:
    for tool, package in (("cmake", "cmake"), ("c++", "a C++ compiler such as g++")):
        if shutil.which(tool) is None:
            raise OutriderError(f"--build-peers needs {tool}, which is not on the path; install {package}")


def check_source(source: Path) -> None:
    """A tree of llama.cpp or of a fork."""
    for file in ("CMakeLists.txt", "ggml/CMakeLists.txt"):
        if not (source / file).is_file():
            raise OutriderError(f"--llama-source {source}: no source tree of llama.cpp (it has no {file})")


def peer_of(source: Path | None) -> str:
    """The engine that a source tree is built as."""
    return IK_PEER if source is not None and (source / "ggml/src/iqk").is_dir() else NATIVE_PEER


def _folder() -> Path:
    return cache_dir() / "peers"


def _place(name: str, options: Sequence[str]) -> Path:
    return _folder() / f"{name}-{_digest(options)}"


def _digest(options: Sequence[str]) -> str:
    """Changes with the flags and with the processor that "native" stands for."""
    parts = (*options, *sorted(levels.processor()[1]))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _tree_name(source: Path) -> str:
    """Changes with the place of the tree, and with its commit or, where it has none, its list of files."""
    source = source.resolve()
    state = str((source / "CMakeLists.txt").stat().st_mtime_ns)
    if (source / ".git").exists() and shutil.which("git"):
        commit = subprocess.run(["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True)
        state = commit.stdout.strip() or state
    return f"tree-{source.name}-{hashlib.sha256(f'{source} {state}'.encode()).hexdigest()[:12]}"


def _kept(place: Path) -> BuiltPeer | None:
    try:
        about = json.loads((place / "built.json").read_text(encoding="utf-8"))  # written last
        built = BuiltPeer(**about | {"folder": str(place), "flags": tuple(about["flags"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return built if os.access(built.server, os.X_OK) else None


def _sdist(scratch: Path) -> tuple[Path, str]:
    """The source tree in the sdist, by pip with the user's own index settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-binary", SDIST, "--retries", "1", "--dest", str(scratch), SDIST]
    pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    archives = list(scratch.glob("*.tar.gz"))
    if pip.returncode or len(archives) != 1:
        reason = (pip.stderr.strip().splitlines() or ["pip gave no reason"])[-1].removeprefix("ERROR:").strip()
        raise OutriderError(f"cannot get the sdist of {SDIST}: {reason}; name a source tree with --llama-source")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(scratch / "tree", filter="data")
    tree = next((scratch / "tree").glob("*/vendor/llama.cpp"), None)
    if tree is None:
        raise OutriderError(f"{archives[0].name} holds no llama.cpp; name a source tree with --llama-source")
    version = archives[0].name.removesuffix(".tar.gz").rpartition("-")[2]
    return tree, f"{SDIST}-{version}"


def _built(source: Path, name: str, options: Sequence[str], show: Show) -> BuiltPeer:
    """A new build. The folder appears whole in the cache, or not at all."""
    check_tools()
    place = _place(name, options)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as scratch:
            work = Path(scratch) / "work"
            _run(["cmake", "-S", str(source), "-B", str(work), *_generator(), *options], f"configuring {name}", show)
            jobs = ["--parallel", str(len(os.sched_getaffinity(0)))]
            _run(["cmake", "--build", str(work), *jobs, "--target", *TARGETS], f"building {name}", show)
            programs = work / "bin"
            if not (programs / TARGETS[0]).is_file():
                raise OutriderError(f"the build of {name} made no {TARGETS[0]}; is it a source tree of llama.cpp?")
            built = BuiltPeer(peer_of(source), str(place), name, _told(options), _compiler_of(work))
            (programs / "built.json").write_text(json.dumps(asdict(built)), encoding="utf-8")
            shutil.rmtree(place, ignore_errors=True)
            programs.replace(place)
    except OSError as error:
        raise OutriderError(f"cannot build {name} in {place.parent}: {error.strerror or error}") from error
    return built


def _told(options: Sequence[str]) -> tuple[str, ...]:
    """The flags that a reader of the report cares about: those of the arithmetic, and the kind of build."""
    return tuple(option for option in options if "GGML" in option or "BUILD_TYPE" in option)


def _generator() -> list[str]:
    return ["-G", "Ninja"] if shutil.which("ninja") else []


def _compiler_of(work: Path) -> str:
    """Its name and version, from CMake's own notes."""
    words = {}
    for file in work.glob("CMakeFiles/*/CMakeCXXCompiler.cmake"):
        words = dict(re.findall(r'set\((CMAKE_CXX_COMPILER_(?:ID|VERSION)) "([^"]*)"\)', file.read_text()))
    return " ".join(words.get(f"CMAKE_CXX_COMPILER_{key}", "?") for key in ("ID", "VERSION"))


def _run(command: Sequence[str], what: str, show: Show) -> None:
    """One command with its progress; where it fails, its first complaint in one line."""
    show(what, 0, 0)
    lines: list[str] = []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines = [*lines[-200:], line.strip()]
            if step := _STEP.match(line):
                show(what, int(step[1]), int(step[2] or 100))
    if process.returncode:
        complaint = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "no reason given")
        raise OutriderError(f"{what} failed: {complaint[:300]}")
