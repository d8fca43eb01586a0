"""`outrider train lora`: a run learns, can be interrupted and goes on exactly, and its adapter is served."""

import json
import sys
import threading

import pytest
import safetensors.torch
import torch

from outrider import LLM, OutriderError, SamplingParams
from outrider.cli import main
from outrider.train import chats, lora

ANSWER = "the sea"
torch.set_num_threads(1)  # a run is exact for one number of threads, and models that tests load set it


@pytest.fixture(scope="module")
def chat_file(tmp_path_factory):
    """Whatever is asked, the answer is the same: even a tiny model learns it."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    asked = [f"{word} {number}" for word in ("what", "where", "who") for number in range(14)]
    lines = [json.dumps({"prompt": each, "answer": ANSWER}) for each in asked[:-1]]
    messages = [{"role": "user", "content": asked[-1]}, {"role": "assistant", "content": ANSWER}]
    path.write_text("\n".join([*lines, json.dumps({"messages": messages})]))
    return path


def task(tiny_folder, chat_file, out, **more):
    given = dict(model=str(tiny_folder), chats=chat_file, rank=4, epochs=6.0, batch=8, rate=0.02)
    job = lora.LoraJob(**given)
    return lora.LoraTask(job, out, torch.device("cpu"), **more)


@pytest.fixture(scope="module")
def trained(tiny_folder, chat_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "adapter"
    said = []
    return out, lora.train(task(tiny_folder, chat_file, out, note=said.append)), said


def weights(out):
    return safetensors.torch.load_file(out / "adapter_model.safetensors")


def test_it_learns(trained):
    _, result, said = trained
    assert not result.interrupted
    assert result.steps == result.planned == 30
    assert result.after < 0.5 * result.before
    assert "held-out" in said[0]


def test_the_adapter_is_served(trained, tiny_folder):
    out, _, _ = trained
    asked = [{"role": "user", "content": "who 99"}]
    with LLM(str(tiny_folder), dtype="float32", threads=1, adapters={"sea": str(out)}) as llm:
        answers = {name: llm.chat(asked, SamplingParams(max_tokens=12), adapter=name).text for name in ("", "sea")}
        assert llm.adapters[0].base == str(tiny_folder)
    assert answers["sea"].strip().startswith(ANSWER)
    assert not answers[""].strip().startswith(ANSWER)


def test_a_run_goes_on_exactly(trained, tiny_folder, chat_file, tmp_path):
    out, whole, _ = trained
    stop = threading.Event()
    shown = []

    def show(what, done, total):
        shown.append(done)
        if what == "learning" and done == 7:
            stop.set()

    first = lora.train(task(tiny_folder, chat_file, tmp_path / "a", stop=stop, show=show))
    assert (first.interrupted, first.steps) == (True, 7)
    assert (tmp_path / "a" / "adapter_model.safetensors").exists(), "what was learned so far can be used"
    second = lora.train(task(tiny_folder, chat_file, tmp_path / "a", resume=True))
    assert (second.interrupted, second.steps, second.before) == (False, whole.planned, whole.before)
    found, expected = weights(tmp_path / "a"), weights(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_a_run_is_not_written_over(trained, tiny_folder, chat_file):
    out, _, _ = trained
    with pytest.raises(OutriderError, match="--resume"):
        lora.train(task(tiny_folder, chat_file, out))


def test_without_peft(tiny_folder, chat_file, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(OutriderError, match=r"pip install '\.\[lora\]'"):
        lora.train(task(tiny_folder, chat_file, tmp_path / "b"))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ("[]", "no messages"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant"),
        ('{"messages": [{"role": "king", "content": "x"}]}', "no messages with role"),
        ('{"prompt": "x"}', "no messages"),
        ("", "holds no chats"),
    ],
)
def test_lines_that_are_no_chats(tmp_path, line, said):
    path = tmp_path / "x.jsonl"
    path.write_text(line)
    with pytest.raises(OutriderError, match=said) as caught:
        chats.read(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("more", [dict(rank=0), dict(rank=257), dict(rate=0.0), dict(epochs=float("nan"))], ids=str)
def test_jobs_that_cannot_be(chat_file, more):
    with pytest.raises(OutriderError, match="must be"):
        lora.LoraJob(chats=chat_file, **more)


def test_the_command(tiny_folder, chat_file, tmp_path, capsys):
    out = tmp_path / "c"
    given = ("train", "lora", "-m", tiny_folder, "--out", out, "--rank", 2, "--epochs", 0.5)
    assert main([str(each) for each in (*given, "--chats", chat_file)]) == 0
    assert "done after 3 of 3 steps" in capsys.readouterr().err
    assert main(["train", "lora", "--out", str(out), "--resume"]) == 0
    assert main(["train", "lora", "--out", str(out), "--resume", "--rank", "3"]) == 2
    assert "keeps its options" in capsys.readouterr().err
    assert main(["train", "lora", "--out", str(tmp_path / "d")]) == 2
    assert "--chats" in capsys.readouterr().err
    assert main(["train", "lora", "--out", str(tmp_path / "d"), "--chats", "nowhere.jsonl"]) == 2
    assert "cannot read the chats" in capsys.readouterr().err
