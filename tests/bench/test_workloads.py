"""The prompts: ours, and those of a JSONL file."""

import json
from collections import Counter

import pytest

from outrider.bench import workloads
from outrider.bench.workloads import KINDS
from outrider.core.errors import OutriderError

DOCUMENTS = ("summarise", "docqa", "edit", "extraction")


def line(**changes):
    return json.dumps({"question_id": 7, "category": "qa", "turns": ["Who?", "Why?"]} | changes)


def test_eight_kinds_of_four_prompts():
    prompts = workloads.built_in()
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(KINDS, 4)
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 32


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_document_is_long_enough_to_copy_from(kind):
    sizes = [len(prompt.text.split()) for prompt in workloads.built_in() if prompt.kind == kind]
    assert all(150 <= size <= 400 for size in sizes)


def test_prompts_carry_no_marks_of_the_file():
    assert not any("=====" in prompt.text or prompt.text != prompt.text.strip() for prompt in workloads.built_in())


def test_select_by_kind_and_number():
    prompts = workloads.built_in()
    chosen = workloads.select(prompts, ["edit", "chat"], 2)
    assert [prompt.id for prompt in chosen] == ["chat-1", "chat-2", "edit-1", "edit-2"]
    assert workloads.select(prompts) == prompts


@pytest.mark.parametrize(
    ("kinds", "limit", "why"), [(["poems"], None, "unknown kind 'poems'; known: chat, code"), ([], 0, "at least 1")]
)
def test_select_refuses(kinds, limit, why):
    with pytest.raises(OutriderError, match=why):
        workloads.select(workloads.built_in(), kinds, limit)


def test_jsonl_uses_the_first_turn(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text(line() + "\n\n" + line(question_id="b", turns=["Où ?"]) + "\n", encoding="utf-8")
    assert workloads.read_jsonl(file) == [
        workloads.BenchPrompt("7", "qa", "Who?"),
        workloads.BenchPrompt("b", "qa", "Où ?"),
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"{", "line 1 is not JSON"),
        (b"[1]", "line 1 is not a JSON object"),
        (b'{"question_id": 1, "turns": ["a"]}', "line 1 has no 'category'"),
        (line(turns=[]).encode(), "turns must be a list"),
        (line(turns="Who?").encode(), "turns must be a list"),
        (line(turns=[" "]).encode(), "turns must be a list"),
        (line(turns=[{"content": "Who?"}]).encode(), "turns must be a list"),
        ((line() + "\n" + line()).encode(), "question_id 7 twice"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, content, why):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(OutriderError, match=why):
        workloads.read_jsonl(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(OutriderError, match="cannot be read: No such file"):
        workloads.read_jsonl(tmp_path / "none.jsonl")
    with pytest.raises(OutriderError, match="cannot be read: Is a directory"):
        workloads.read_jsonl(tmp_path)
