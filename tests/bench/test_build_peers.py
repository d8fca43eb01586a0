"""Peers that are built from source: a tree that builds in a second, with a server that answers as theirs does."""

import json
import shutil
import sys
from pathlib import Path

import ggufs
import pytest

from outrider.bench import build_peers
from outrider.cli import main
from outrider.core.errors import OutriderError

pytestmark = pytest.mark.skipif(
    shutil.which("cmake") is None or shutil.which("c++") is None,
    reason="cmake or a C++ compiler is not installed (apt-get install cmake g++)",
)

CMAKE = """
cmake_minimum_required(VERSION 3.16)
project(fake LANGUAGES CXX)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
foreach(name llama-server llama-quantize)
  add_custom_target(${name}
    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/${name} ${CMAKE_BINARY_DIR}/bin/${name})
endforeach()
"""

SERVER = """#!PYTHON
import http.server, json, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def say(self, **body):
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    def do_GET(self):
        self.say(status="ok")
    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert job["temperature"] == 0 and not job["cache_prompt"]
        tokens = job["n_predict"]
        times = {"predicted_n": tokens, "predicted_ms": 100.0 * tokens, "prompt_ms": 50.0}
        self.say(content="x" * tokens, timings=times)
args = dict(zip(sys.argv[1::2], sys.argv[2::2]))
assert open(args["--model"], "rb").read(4) == b"GGUF"
http.server.HTTPServer(("127.0.0.1", int(args["--port"])), Answers).serve_forever()
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "llama.cpp"
    (folder / "ggml").mkdir(parents=True)
    (folder / "CMakeLists.txt").write_text(CMAKE)
    (folder / "ggml" / "CMakeLists.txt").write_text("")
    for name, text in (("llama-server", SERVER.replace("PYTHON", sys.executable)), ("llama-quantize", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def model(tmp_path):
    metadata = ggufs.byte_metadata()
    return ggufs.write_llama(
        tmp_path / "tiny.gguf", len(metadata["tokenizer.ggml.tokens"]), metadata | {"general.file_type": 0}, 4096
    )


class Shown:
    def __init__(self):
        self.lines = []

    def __call__(self, what, done, total):
        self.lines.append(what)


def build(tree, instructions="native"):
    shown = Shown()
    return build_peers.build(tree, instructions, shown), shown.lines


def bench(tree, model, out, *more):
    args = ["bench", "-m", model, "--build-peers", "--llama-source", tree, "--kind", "edit", "--limit", 2]
    return main(
        [*map(str, [*args, "--rounds", 2, "--max-tokens", 12, "--threads", 1, "--draft", "ngram", "-o", out, *more])]
    )


def test_it_is_built_once(tree):
    built, shown = build(tree)
    assert any("building" in line for line in shown)
    assert Path(built.server).is_file()
    assert "-DGGML_NATIVE=ON" in built.flags
    assert "GNU" in built.compiler or "Clang" in built.compiler
    assert build(tree) == (built, [])
    assert build_peers.kept_builds("native") == {"llama.cpp-native": built}
    assert build_peers.kept_builds("avx2") == {}


def test_a_changed_tree_or_other_flags_are_another_build(tree):
    first, _ = build(tree)
    other, _ = build(tree, "avx2")
    assert other.folder != first.folder
    assert "-DGGML_NATIVE=OFF" in other.flags
    (tree / "CMakeLists.txt").write_text(CMAKE + "\n")
    assert build(tree)[0].folder != first.folder


def test_what_is_kept_needs_no_cmake_and_what_is_new_says_so(tree, monkeypatch, tmp_path):
    built, _ = build(tree)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(tree)[0] == built
    (tree / "CMakeLists.txt").write_text(CMAKE + "\n")
    with pytest.raises(OutriderError, match="--build-peers needs cmake, which is not on the path; install cmake"):
        build(tree)


def test_a_fork_is_known_by_its_kernels(tree):
    (tree / "ggml/src/iqk").mkdir(parents=True)
    assert build(tree)[0].peer == "ik_llama.cpp"


@pytest.mark.parametrize(
    ("cmake", "said"),
    [
        ("message(FATAL_ERROR nothing-works)", "configuring .* failed: .*[Ee]rror"),
        (CMAKE.replace("/${name} ${CMAKE_BINARY", "/nothing ${CMAKE_BINARY"), "building .* failed: .*[Ee]rror"),
        (CMAKE.replace("/bin/${name}", "/bin/other"), "made no llama-server"),
    ],
)
def test_a_build_that_fails_is_one_line_and_leaves_nothing(tree, cmake, said):
    (tree / "CMakeLists.txt").write_text(cmake)
    with pytest.raises(OutriderError, match=said) as caught:
        build(tree)
    assert "\n" not in str(caught.value)
    assert build_peers.kept_builds("native") == {}
    assert not list(build_peers._folder().glob("build-*"))


def test_no_tree_is_refused(tmp_path):
    with pytest.raises(OutriderError, match=r"no source tree of llama\.cpp"):
        build_peers.build(tmp_path, "native", Shown())


def test_it_is_measured_beside_ours(tree, model, tmp_path, capsys):
    assert bench(tree, model, tmp_path / "out", "--prompt-tokens", 40) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    engines = report["engines"]
    assert engines["llama.cpp-native"]["modes"] == {"plain": "ok"}
    assert engines["llama.cpp-native"]["about"]["flags"].endswith("-DGGML_NATIVE=ON")
    assert engines["outrider"]["about"]["instructions"]
    plain = [row for row in report["summary"]["modes"] if row["engine"] == "llama.cpp-native" and row["kind"] == "all"]
    assert plain[0]["tokens_per_second"] == pytest.approx(11 / 1.2)
    speeds = {row["engine"]: row for row in report["summary"]["prompts"]}
    assert speeds["llama.cpp-native"]["tokens_per_second"] == pytest.approx(40 / 0.05)
    ours, ratio = speeds["outrider"]["tokens_per_second"], speeds["llama.cpp-native"]["ratio"]
    assert ratio["value"] == pytest.approx(ours / 800, rel=0.01)
    assert {run["prompt_tokens"] for run in report["prompt_runs"]} == {40}
    assert not any(run["stats"].get("cached") for run in report["prompt_runs"])
    (best,) = report["summary"]["best"]
    assert (best["peer"], best["its_mode"]) == ("llama.cpp-native", "plain")
    told = (tmp_path / "out" / "report.md").read_text()
    for part in ("Reading prompts of 40 tokens", "How the engines were built", "-DGGML_NATIVE=ON", "tree-llama.cpp"):
        assert part in told


def test_formats_are_measured_one_after_the_other(tree, model, tmp_path, capsys):
    assert bench(tree, model, tmp_path / "out", "--formats", "q4_0,q8_0") == 0
    for name in ("q4_0", "q8_0"):
        report = json.loads((tmp_path / "out" / name / "report.json").read_text())
        assert report["settings"]["model"].endswith(f".{name}.gguf")
        assert report["engines"]["llama.cpp-native"]["modes"] == {"plain": "ok"}


def test_the_kernels_are_limited_as_the_peer_is(tree, tmp_path, model, capsys):
    assert bench(tree, model, tmp_path / "out", "--instructions", "avx2", "--formats", "q8_0") == 0
    engines = json.loads((tmp_path / "out" / "q8_0" / "report.json").read_text())["engines"]
    assert "-DGGML_NATIVE=OFF" in engines["llama.cpp-native"]["about"]["flags"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--llama-source", "/nowhere", "--build-peers"], "no source tree of llama.cpp"),
        (["--llama-source", "."], "add --build-peers or leave it out"),
        (["--instructions", "mmx"], "unknown instructions 'mmx'; known: native, avx2"),
        (["--formats", "q3_x"], "unknown format 'q3_x'; known: q4_0"),
        (["--formats", "q4_k_m"], "only llama-quantize writes it; add --build-peers"),
        (["--prompt-tokens", "99999"], "prompt_tokens must be at most 8192"),
    ],
)
def test_mistakes_are_refused_in_one_line(tree, tmp_path, model, capsys, given, said):
    assert main(["bench", "-m", str(model), "-o", str(tmp_path / "out"), *given]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_a_peer_that_is_not_built_says_how(tmp_path, model, capsys, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "empty"))
    args = [
        "bench",
        "-m",
        model,
        "-e",
        "llama.cpp-native:plain",
        "--kind",
        "edit",
        "--limit",
        1,
        "-o",
        tmp_path / "out",
    ]
    assert main([*map(str, args)]) == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["engines"]["llama.cpp-native"]["modes"] == {"plain": "missing: outrider bench --build-peers"}
