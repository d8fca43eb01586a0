"""Names become sources, users add their own, and paths from outside stay in the allowed folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.cli import main
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.server.access import Access
from outrider.server.errors import Forbidden
from outrider.server.registry import BUILT_IN, Choice, Registry, load, parse_size

ONE_LINE = r"^[^\n]*$"
FILE = """
models:
  - {name: llama, size: 8, source: org/llama-8b}
  - {name: llama, size: 8, quantization: Q4_K_M, source: /data/llama.gguf}
  - {name: llama, size: "1_8", source: ./near}
  - {name: open, source: org/open}
heads:
  - {name: llama-eagle, source: ./heads/eagle}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    path = tmp_path / "registry.yaml"
    path.write_text(FILE)
    return load(path)


def test_every_built_in_entry_has_a_known_source():
    assert {entry.source for entry in BUILT_IN.entries} == set(sources.KNOWN)


@pytest.mark.parametrize(
    ("words", "choice"),
    [
        (("llama",), Choice("llama", "org/llama-8b", 8)),
        (("llama", 8), Choice("llama", "org/llama-8b", 8)),
        (("llama", "8", "none"), Choice("llama", "org/llama-8b", 8)),
        (("llama", 8, "q4_k_m"), Choice("llama", "/data/llama.gguf", 8, "q4_k_m")),
        (("llama", None, "Q4_K_M"), Choice("llama", "/data/llama.gguf", 8, "q4_k_m")),
        (("llama", 8, "8-bit"), Choice("llama", "org/llama-8b", 8, "8-bit", "int8")),
        (("open", 3), Choice("open", "org/open")),
        (("smollm2", "0_135", "q4_1"), Choice("smollm2", "smollm2-135m", 0.135, "q4_1")),
        (("org/other", 7, "4-bit"), Choice("org/other", "org/other", 7, "4-bit", "int4")),
        (
            ("org/other:x.Q8_0.gguf", None, "q8_0"),
            Choice("org/other:x.Q8_0.gguf", "org/other:x.Q8_0.gguf", None, "q8_0"),
        ),
    ],
)
def test_words_choose_a_source(registry, words, choice):
    assert registry.choose(*words) == choice


def test_a_path_in_the_file_is_meant_from_where_the_file_lies(registry, tmp_path):
    assert registry.choose("llama", 1.8).source == str(tmp_path / "near")
    assert registry.sources()["llama-eagle"] == str(tmp_path / "heads/eagle")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("llama", 70), "llama does not come in size 70; there is: size 8 none, size 8 q4_k_m, size 1.8 none"),
        (("llama", 8, "q2_k"), "does not come in size 8 and quantization q2_k"),
        (("org/other", None, "q4_0"), "name the file itself"),
        (("llama", "big"), "billions of parameters"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(registry, words, reason):
    with pytest.raises(OutriderError, match=ONE_LINE) as caught:
        registry.choose(*words)
    assert reason in str(caught.value)


@pytest.mark.parametrize("value", [True, 0, -1, "nan", "inf", "", [7], {}])
def test_a_size_is_a_positive_number(value):
    with pytest.raises(OutriderError, match="billions"):
        parse_size(value)


def test_a_name_without_an_entry_goes_through_access(registry, tmp_path, monkeypatch):
    inside, outside = tmp_path / "allowed" / "model", tmp_path / "secret"
    inside.mkdir(parents=True)
    outside.mkdir()
    (tmp_path / "allowed" / "link").symlink_to(outside)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "org").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "here")  # org/secret now is a folder as well as a hub id
    access = Access((tmp_path / "allowed",), registry.sources(), hub=True)

    def chosen(name: object) -> str:
        return registry.choose(str(name), direct=access.source).source

    assert chosen("llama") == access.source("llama") == "org/llama-8b"
    assert chosen("org/elsewhere") == "hub:org/elsewhere"
    assert chosen("org/secret") == "hub:org/secret"  # and never the folder
    assert chosen(inside) == chosen(f"{inside}/../model") == str(inside)
    for name in (outside, inside / "../../secret", tmp_path / "allowed/link", "../secret", "~", "/nowhere"):
        with pytest.raises(Forbidden):
            chosen(name)
    for name in ("lama", "a\0b", "~nobody-at-all/x", "x" * 5000, ""):
        with pytest.raises(Forbidden):
            chosen(name)
    with pytest.raises(Forbidden, match="hub"):
        Access().source("org/elsewhere")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("models: [", "is not YAML"),
        ("- a", "must have the keys models and heads"),
        ("modles: []", "must have the keys models and heads"),
        ("models: {a: b}", "models in the registry"),
        ("models: [7]", "models[0]"),
        ("models: [{name: a, source: b, sise: 7}]", "unknown key 'sise'; known: name, source, size, quantization"),
        ("models: [{name: a}]", "has no source"),
        ("models: [{name: a, source: ''}]", "has no source"),
        ("models: [{name: 7, source: b}]", "name of models[0]"),
        ("models: [{name: a, source: b, size: big}]", "billions"),
        ("models: [{name: a, source: b, quantization: 4}]", "quantization of models[0]"),
        ("models: [{name: a, source: b}, {name: a, source: c}]", "has a twice"),
        ("heads: [{name: a, source: b, size: 7}]", "unknown key 'size'; known: name, source"),
        ("models: [{name: a, source: '\xff'}]".encode("latin-1"), "is not YAML"),
        ("models: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "registry.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OutriderError, match=ONE_LINE) as caught:
        load(path)
    assert reason in str(caught.value)


def test_the_file_is_optional_unless_named(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CONFIG", str(tmp_path))
    assert load() == BUILT_IN
    with pytest.raises(OutriderError, match="No such file"):
        load(tmp_path / "absent.yaml")
    (tmp_path / "registry.yaml").write_text(FILE)
    assert load().names() == ["llama", "open", "smollm2-135m", "smollm2"]
    (tmp_path / "registry.yaml").write_text("")
    assert load() == BUILT_IN


def test_the_command_line_lists_them(tmp_path, capsys):
    path = tmp_path / "registry.yaml"
    path.write_text(FILE)
    assert main(["models", "--registry", str(path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["registry"][0] == {"name": "llama", "source": "org/llama-8b", "size": 8.0, "quantization": "none"}
    assert [head["name"] for head in listed["heads"]] == ["llama-eagle"]
    assert main(["models", "--registry", str(path)]) == 0
    assert "org/llama-8b" in capsys.readouterr().out
    path.write_text("models: 7")
    assert main(["models", "--registry", str(path)]) == 2
    assert "must be a list" in capsys.readouterr().err
