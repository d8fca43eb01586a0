import io
import json
import sys

import gguf
import numpy as np
import pytest

from outrider.cli import main
from outrider.cli.screen import json_text


def test_json(outrider, tiny_folder):
    done = outrider(
        "generate", "the fox", "-m", tiny_folder, "--max-tokens", 12, "--ignore-eos", "--json", "--logprobs", 2
    )
    assert done.code == 0
    said = json.loads(done.out)
    assert set(said) == {"model", "draft", "prompt", "text", "token_ids", "finish_reason", "logprobs", "stats"}
    assert (said["prompt"], said["draft"], said["finish_reason"]) == ("the fox", "auto", "length")
    assert len(said["token_ids"]) == len(said["logprobs"]) == said["stats"]["tokens"] == 12


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8", "utf-16"])
def test_json_is_valid_in_every_encoding(tiny_folder, monkeypatch, encoding):
    """As __main__ sets stdout up: what the encoding does not have is escaped, but not as JSON does it."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    prompt = "\N{GRINNING FACE} é \N{CJK UNIFIED IDEOGRAPH-4E2D}"
    assert main(["generate", prompt, "-m", str(tiny_folder), "--max-tokens", "4", "--json"]) == 0
    assert json.loads(out.buffer.getvalue().decode(encoding))["prompt"] == prompt


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_json_is_readable_where_the_encoding_allows_it(encoding):
    assert json_text({"text": "é"}, encoding) == '{"text": "é"}'
    assert json_text({"text": "é \ud800"}, encoding) == '{"text": "\\u00e9 \\ud800"}'


def test_text_on_stdout_and_stats_on_stderr(outrider, tiny_folder):
    args = ("generate", "the fox", "-m", tiny_folder, "--max-tokens", 12)
    done = outrider(*args)
    assert done.code == 0
    assert done.out == json.loads(outrider(*args, "--json").out)["text"] + "\n"
    assert "tokens in" in done.err
    assert "\x1b" not in done.out + done.err


@pytest.mark.parametrize("draft", ["none", "layer_skip:layers=1", "ngram:min_n=1"])
def test_a_seed_decides_whoever_drafts(outrider, tiny_folder, draft):
    args = (
        "generate",
        "fox",
        "-m",
        tiny_folder,
        "--temperature",
        1,
        "--seed",
        5,
        "--max-tokens",
        20,
        "--json",
        "--draft",
    )
    assert tokens(outrider(*args, draft)) == tokens(outrider(*args, "ngram"))


def test_the_prompt_can_come_from_stdin(outrider, tiny_folder):
    args = ("-m", tiny_folder, "--max-tokens", 4, "--json")
    assert tokens(outrider("generate", "-", *args, stdin="the sea")) == tokens(outrider("generate", "the sea", *args))


@pytest.mark.parametrize("stdin", ["", " \n"])
def test_nothing_on_stdin_is_no_prompt(outrider, tiny_folder, stdin):
    done = outrider("generate", "-", "-m", tiny_folder, stdin=stdin)
    assert (done.code, done.out) == (2, "")
    assert "nothing came on standard input" in done.err


def test_raw_continues_and_templates_answer(outrider, tiny_folder):
    args = ("generate", "the sea", "-m", tiny_folder, "--max-tokens", 8, "--json", "--ignore-eos")
    assert tokens(outrider(*args)) != tokens(outrider(*args, "--raw"))


def test_stop(outrider, tiny_folder):
    args = ("generate", "the sea", "-m", tiny_folder, "--max-tokens", 40, "--ignore-eos", "--json")
    whole = json.loads(outrider(*args).out)["text"]
    cut = json.loads(outrider(*args, "--stop", whole[5:8]).out)
    assert cut["finish_reason"] == "stop"
    assert whole.startswith(cut["text"])


def test_a_prediction_from_a_file_or_as_text_is_the_draft(outrider, tiny_folder, tmp_path):
    settings = tmp_path / "c.yaml"
    settings.write_text(f"model: {tiny_folder}\npace: false\n")  # what is drafted does not depend on the clock
    args = ("generate", "the sea", "--config", settings, "--max-tokens", 24, "--json", "--ignore-eos")
    plain = json.loads(outrider(*args, "--draft", "none").out)
    file = tmp_path / "expected.txt"
    file.write_text(plain["text"], encoding="utf-8")
    for expected in (file, plain["text"]):
        said = json.loads(outrider(*args, "--prediction", expected).out)
        assert said["draft"] == "auto"
        assert said["stats"]["by_drafter"]["prediction"]["accepted"] > 0
        assert said["token_ids"] == plain["token_ids"]
        assert said["stats"]["drafted"] > 0


def test_a_model_without_chat_template(outrider, tiny_mute):
    done = outrider("generate", "the sea", "-m", tiny_mute, "--max-tokens", 4)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--raw" in done.err
    assert outrider("generate", "the sea", "-m", tiny_mute, "--max-tokens", 4, "--raw").code == 0


def test_a_prompt_longer_than_the_context(outrider, tiny_folder):
    done = outrider("generate", "x" * 5000, "-m", tiny_folder)
    assert_refused(done, "shorten the prompt")


def test_an_answer_longer_than_the_context(outrider, tiny_folder):
    assert_refused(outrider("generate", "x", "-m", tiny_folder, "--max-tokens", 5000), "set max_tokens to at most")


def test_too_little_memory(outrider, tiny_folder):
    assert_refused(outrider("generate", "x", "-m", tiny_folder, "--cache-memory", 1e-6), "--cache-memory")


def test_a_draft_model_with_another_vocabulary(outrider, tiny_folder, tiny_stranger):
    asked = ("generate", "x", "-m", tiny_folder, "--max-tokens", 9)
    done = outrider(*asked, "--draft", f"draft_model:model={tiny_stranger}")
    assert (done.code, done.out) == (0, outrider(*asked, "--draft", "none").out)


def test_a_draft_model_that_is_not_there(outrider, tiny_folder):
    assert_refused(
        outrider("generate", "x", "-m", tiny_folder, "--draft", "draft_model:model=./none"), "check the path"
    )


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"not a model at all"])
def test_a_broken_gguf(outrider, tmp_path, content):
    file = tmp_path / "broken.gguf"
    file.write_bytes(content)
    assert_refused(outrider("generate", "x", "-m", file), "broken.gguf")


def test_a_truncated_gguf(outrider, tmp_path):
    file = tmp_path / "cut.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.write_bytes(file.read_bytes()[:-1000])
    assert_refused(outrider("generate", "x", "-m", file), "download it again")


def test_a_folder_that_is_no_model(outrider, tmp_path):
    assert_refused(outrider("generate", "x", "-m", tmp_path), "config.json")


def tokens(done):
    assert done.code == 0, done.err
    return json.loads(done.out)["token_ids"]


def assert_refused(done, says):
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert says in done.err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--device", "cpu:foo"], "unknown device"),
        (["--model", "x" * 300], "is no path"),
        (["--model", "~nobody-of-that-name/x"], "is no path"),
        (["--prediction", "abc", "--draft", "ngram"], "--prediction is for the drafter prediction"),
        (["--logprobs", "2"], "with --json only"),
        (["--threads", "100000"], "threads must be at most"),
        (["--quantize", "int4", "--dtype", "bfloat16"], "computed in float32"),
    ],
)
def test_more_mistakes_in_one_line(outrider, tiny_folder, args, said):
    model = [] if "--model" in args else ["--model", tiny_folder]
    done = outrider("generate", "hello", *model, *args)
    assert done.code == 2
    assert done.err.startswith("error:")
    assert done.err.count("\n") == 1
    assert said in done.err


class TestGrammars:
    """What the text may be, by an option or a file."""

    def text(self, outrider, tiny_folder, *options):
        done = outrider("generate", "the fox", "-m", tiny_folder, "--max-tokens", 40, "--json", *options)
        assert done.code == 0, done.err
        said = json.loads(done.out)
        assert said["finish_reason"] == "stop"
        return said["text"]

    def test_a_choice(self, outrider, tiny_folder):
        assert self.text(outrider, tiny_folder, "--choice", "the sea,the river") in ("the sea", "the river")

    def test_an_expression(self, outrider, tiny_folder):
        assert self.text(outrider, tiny_folder, "--regex", "[ab]{3}") in {
            a + b + c for a in "ab" for b in "ab" for c in "ab"
        }

    def test_a_schema_and_a_grammar_in_files(self, outrider, tiny_folder, tmp_path):
        schema, rules = tmp_path / "s.json", tmp_path / "g.lark"
        schema.write_text('{"enum": [{"a": 1}, {"a": 2}]}')
        rules.write_text('start: "x" | "yy"')
        assert json.loads(self.text(outrider, tiny_folder, "--json-schema", schema)) in ({"a": 1}, {"a": 2})
        assert self.text(outrider, tiny_folder, "--grammar", rules) in ("x", "yy")

    def test_any_object(self, outrider, tiny_folder):
        done = outrider("generate", "the", "-m", tiny_folder, "--max-tokens", 9, "--json", "--json-object")
        assert json.loads(done.out)["text"].startswith("{")

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            (["--choice", "a,,b"], "choice must be a list of texts"),
            (["--json-schema", "nowhere.json"], "cannot read the JSON schema in nowhere.json"),
            (["--regex", "a", "--json-object"], "regex and json_object cannot be given together"),
            (["--regex", "(a"], "unclosed group"),
            (["--regex", "a", "--ignore-eos"], "ignore_eos and regex"),
        ],
    )
    def test_mistakes_are_one_line(self, outrider, tiny_folder, options, reason):
        done = outrider("generate", "the", "-m", tiny_folder, *options)
        assert done.code == 2
        assert reason in done.err
        assert len(done.err.strip().splitlines()) <= 2
