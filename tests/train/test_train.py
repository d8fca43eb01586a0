"""`outrider train` from end to end on a CPU: it learns, it ends cleanly, and it goes on exactly where it was."""

import contextlib
import functools
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from small_adapters import write_adapter

from outrider import LLM, OutriderError, SamplingParams
from outrider.cli import main
from outrider.drafters.heads import files as heads
from outrider.models.adapters import files
from outrider.models.base import Feed
from outrider.models.load import LoadOptions, load
from outrider.train import checkpoint, eagle, grow, kinds, medusa, results, run
from outrider.train.adapted import fold, named
from outrider.train.data.batches import TextBatch
from outrider.train.data.corpus import FOLDER, CorpusFolder
from outrider.train.job import BEGUN_RATE, TrainingJob
from outrider.train.step import GradientStep
from outrider.train.teacher import Teacher
from outrider.train.tune_tree import rates

PLACE = LoadOptions(torch.device("cpu"), torch.float32, 1 << 26)
FEW = ("--batch-tokens", "512", "--unroll", "3", "--writers", "16")
QUICK = (*FEW, "--rate", "0.1", "--block", "3")


def train(kind, model, out, *more, how=QUICK):
    args = ["train", kind, "--model", str(model), "--out", str(out), *how, *map(str, more)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["outrider", *args])
        return main(args)


def log(out):
    return [json.loads(line) for line in (out / FOLDER / "log.jsonl").read_text().splitlines()]


def provenance(out):
    return json.loads((out / "provenance.json").read_text())


@pytest.fixture(scope="module")
def learned(calm_folder, prompt_file, tmp_path_factory):
    """A head of each kind that has learned, made once: its folder, and what was shown."""

    @functools.cache
    def head(kind):
        out, shown = tmp_path_factory.mktemp("learned") / "head", io.StringIO()
        with contextlib.redirect_stdout(shown):
            assert train(kind, calm_folder, out, "--tokens", 2000, "--epochs", 10, "--prompts", prompt_file) == 0
        return out, shown.getvalue()

    return head


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_a_head_learns(kind, learned, calm_folder):
    out, shown = learned(kind)
    losses = [line["loss"] for line in log(out)]
    assert sum(losses[-5:]) / 5 < 0.9 * losses[0]
    said = provenance(out)
    untrained, trained = said["figures"]["live"][0][1], said["figures"]["tokens_per_pass"]
    first = next(iter(trained.values()))["all"]["tokens_per_pass"]
    assert first > untrained + 0.1
    held = [entry[3] for entry in said["figures"]["held_out"]]  # tokens per pass, from hits
    assert max(held[len(held) // 2 :]) > held[0] + 0.1
    assert log(out)[said["figures"]["best_step"] - 1]["held_hit1"] > log(out)[4]["held_hit1"]
    assert said["steps"] == said["planned_steps"] == len(losses)
    assert str(out.parent) not in json.dumps(said)  # no paths of this machine
    assert f"train {kind} --model calm --out head" in said["command"]
    assert f"{first:.2f}" in shown
    assert f"{first:.2f}" in (out / f"{results.TABLE}.md").read_text()
    with LLM(str(calm_folder), draft=f"{kind}:head={out}", pace=False) as llm:
        asked = [["the red fox", "the blue fox and the sea", "count the stars, one, two", "a river"]]
        speculative, plain = (
            llm.generate(*asked, SamplingParams(max_tokens=40), **more) for more in ({}, {"draft": "none"})
        )
    assert [result.token_ids for result in speculative] == [result.token_ids for result in plain]
    assert sum(result.stats.accepted for result in speculative) > 0


@pytest.fixture(scope="module")
def adapter(calm_folder, tmp_path_factory):
    """A LoRA adapter of the calm target that changes its texts."""
    folder = tmp_path_factory.mktemp("adapters") / "loud"
    return write_adapter(folder, load(str(calm_folder), PLACE).model, 3, scale=0.4)


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_head_for_an_adapter(kind, adapter, calm_folder, prompt_file, tmp_path, capsys):
    """It learns from what the adapted model writes, says so, and is found by requests with that adapter."""
    own = shutil.copytree(adapter, tmp_path / "loud")
    out = tmp_path / "loud.outrider-head" / kind
    before = digests(calm_folder)
    more = ("--adapter", own, "--tokens", 2000, "--epochs", 10, "--prompts", prompt_file)
    assert train(kind, calm_folder, out, *more) == 0
    assert digests(calm_folder) == before, "the model's own files stay as they are"
    said = provenance(out)
    assert said["job"]["adapter"] == named(own)
    assert said["figures"]["data"]["adapter"] == named(own)
    assert str(tmp_path) not in json.dumps(said)
    assert f"requests with the adapter loud and the drafter {kind} find this head" in capsys.readouterr().err
    trained = next(iter(said["figures"]["tokens_per_pass"].values()))["all"]["tokens_per_pass"]
    assert trained > said["figures"]["live"][0][1] + 0.1
    texts, asked = CorpusFolder(out).read(said["figures"]["data"]["waves"]), SamplingParams(max_tokens=40)
    with LLM(str(calm_folder), draft="auto", adapters={"loud": str(own)}, dtype="float32", pace=False) as llm:
        written = greedy_share(llm, texts, "loud")
        assert written > 0.4, "60 % of the answers are greedy"
        assert greedy_share(llm, texts, "") < written - 0.2, "the model alone would have written others"
        prompts = ["the red fox", "the blue fox and the sea", "count the stars, one, two", "a river"]
        plain, *others = (
            llm.generate(prompts, asked, adapter="loud", draft=draft) for draft in ("none", "", kind, f"{kind}:tree=8")
        )
    for results_ in others:
        assert [each.token_ids for each in results_] == [each.token_ids for each in plain]
    assert sum(each.stats.accepted for each in others[1]) > 0
    assert kind in {token.drafter for each in others[0] for token in each.tokens}, "auto has found it"


@pytest.mark.parametrize("kind", ["eagle", "block", "medusa"])
def test_a_trained_head_goes_on_learning(kind, learned, calm_folder, prompt_file, tmp_path, capsys):
    """It begins as good as it was, not as the target's own layers are, and stays the head that it is."""
    few, (before, _) = ("--tokens", 2000, "--prompts", prompt_file), learned(kind)
    more = (*few, "--epochs", 1, "--data", before, "--begin", before)
    assert train(kind, calm_folder, tmp_path / "second", *more, how=FEW) == 0
    first, second = log(before), log(tmp_path / "second")
    epoch = len(second)  # whole ones, of the same texts: single batches differ
    fresh, end, begin = (sum(line["hit1"] for line in lines) for lines in (first[:epoch], first[-epoch:], second))
    assert begin > (fresh + end) / 2
    said = provenance(tmp_path / "second")
    assert (said["job"]["rate"], said["job"]["begin"]) == (BEGUN_RATE, "head")
    assert not any(str(path) in json.dumps(said) for path in (tmp_path, before.parent))
    heads_ = [safetensors.torch.load_file(out / "model.safetensors") for out in (before, tmp_path / "second")]
    shapes = [{name: tensor.shape for name, tensor in head.items()} for head in heads_]
    assert shapes[0] == shapes[1]
    assert train(kind, calm_folder, tmp_path / "other", *more, "--draft-vocab", 64, how=FEW) == 2
    assert "--draft-vocab makes another head than the one that --begin names" in capsys.readouterr().err
    other = "medusa" if kind == "eagle" else "eagle"
    assert train(other, calm_folder, tmp_path / "other", *more, how=FEW) == 2
    assert f"holds no head of the kind {other}" in " ".join(capsys.readouterr().err.split())
    assert train(kind, calm_folder, tmp_path / "other", *few, "--begin", tmp_path / "nothing", how=FEW) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not (tmp_path / "other").exists(), "it says so before it writes any text"


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def greedy_share(llm, corpus, adapter):
    """Of the texts: those whose answers begin with what the model writes greedily."""
    ends = corpus.starts + corpus.lengths
    parts = [
        (corpus.tokens[begin : begin + answer].tolist(), corpus.tokens[begin + answer : end].tolist()[:6])
        for begin, answer, end in zip(corpus.starts, corpus.answers, ends, strict=True)
    ]
    parts = [(prompt, answer) for prompt, answer in parts if len(answer) == 6]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    found = llm.generate([prompt for prompt, _ in parts], params, adapter=adapter, draft="none")
    return sum(each.token_ids == answer for each, (_, answer) in zip(found, parts, strict=True)) / len(parts)


def test_a_target_with_an_adapter_in_its_weights(adapter, calm_folder):
    """Its passes are those of the model with the adapter as requests have it."""
    folded, served = (load(str(calm_folder), PLACE).model for _ in range(2))
    ready = served.adapt(files.read(adapter, served.adapter_base), "a")
    tokens = list(range(5, 45))
    [before] = folded.forward([Feed(1, tokens)])
    fold(folded, adapter)
    [found], [expected] = folded.forward([Feed(2, tokens)]), served.forward([Feed(1, tokens, adapter=ready)])
    assert torch.allclose(found.logits, expected.logits, atol=1e-4)
    assert not torch.allclose(before.logits, expected.logits, atol=1e-2)


def test_texts_of_another_adapter_are_refused(adapter, calm_folder, prompt_file, tmp_path, capsys):
    plain, out = tmp_path / "plain", tmp_path / "head"
    more = ("--tokens", 600, "--prompts", prompt_file)
    assert train("eagle", calm_folder, plain, *more) == 0
    capsys.readouterr()
    assert train("eagle", calm_folder, out, "--data", plain, "--adapter", adapter) == 2
    assert "were written with no adapter, not with the adapter loud (sha256" in capsys.readouterr().err
    own = shutil.copytree(adapter, tmp_path / "own")
    first = tmp_path / "first"
    assert train("eagle", calm_folder, first, *more, "--adapter", own) == 0
    assert f"move the head to {tmp_path / 'own.outrider-head' / 'eagle'}" in capsys.readouterr().err.replace("\n", " ")
    config = own / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 2', '"lora_alpha": 1'))
    assert train("eagle", calm_folder, first, "--resume") == 2  # another adapter now
    assert "begin a new run" in capsys.readouterr().err


def test_adapters_that_no_head_is_trained_for(calm_folder, tmp_path, capsys):
    head = tmp_path / "heads" / "head"
    assert train("eagle", calm_folder, head, "--adapter", tmp_path / "gone", "--tokens", 600) == 2
    assert "is no adapter" in capsys.readouterr().err
    assert not head.parent.exists()
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    hidden, vocab = load(str(calm_folder), PLACE).model.adapter_base.shapes["model.embed_tokens"]
    tensors = {"lora_embedding_A": torch.zeros(2, vocab), "lora_embedding_B": torch.zeros(hidden, 2)}
    names = {f"base_model.model.model.embed_tokens.{name}": tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(names, wrong / "adapter_model.safetensors")
    (wrong / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    kept = tmp_path / "other"
    kept.mkdir()
    assert train("eagle", calm_folder, kept, "--adapter", wrong, "--tokens", 600) == 2
    assert "heads share with the base" in " ".join(capsys.readouterr().err.split())
    assert list(kept.iterdir()) == []


def test_a_draft_model_learns(calm_folder, prompt_file, tmp_path, monkeypatch):
    """And is measured again though the first measurement, which compiles on a GPU, takes longer than all others may."""
    out, measure, late = tmp_path / "draft", results.Evaluator.measure, iter([2.0])

    def slow_at_first(*given, **more):
        time.sleep(next(late, 0.0))
        return measure(*given, **more)

    monkeypatch.setattr(results.Evaluator, "measure", slow_at_first)
    more = ("--tokens", 3000, "--epochs", 8, "--layers", 1, "--rate", 0.03, "--prompts", prompt_file)
    assert train("draft", calm_folder, out, *more) == 0
    hits, live = [line["hit1"] for line in log(out)], provenance(out)["figures"]["live"]
    assert sum(hits[-5:]) > sum(hits[:5]) + 0.2
    assert len(live) > 1
    assert provenance(out)["figures"]["tokens_per_pass"]["chain 5"]["all"]["tokens_per_pass"] > live[0][1]
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 1
    with LLM(str(out), draft="none") as llm:  # a model like any other
        assert llm.generate("the red fox", SamplingParams(max_tokens=4)).token_ids


STEPS = ("--tokens", "1000", "--epochs", "6", "--save-every", "3")


@pytest.fixture(scope="module")
def uninterrupted(calm_folder, prompt_file, tmp_path_factory):
    """The log of a run that nobody disturbed, and its weights."""
    out = tmp_path_factory.mktemp("whole")
    assert train("eagle", calm_folder, out, *STEPS, "--prompts", prompt_file) == 0
    return log(out), (out / "model.safetensors").read_bytes()


def resume(out):
    """Everything else it knows."""
    return main(["train", "eagle", "--out", str(out), "--resume", "--save-every", "3"])


def test_killed_and_resumed_it_goes_on_exactly(calm_folder, prompt_file, tmp_path, uninterrupted):
    out, (whole, weights) = tmp_path / "head", uninterrupted
    command = [sys.executable, "-m", "outrider", "train", "eagle", "--model", calm_folder, "--out", out, *QUICK, *STEPS]
    process = subprocess.Popen([*map(str, command), "--prompts", str(prompt_file)], stderr=subprocess.PIPE)
    wait_for(lambda: (out / FOLDER / "checkpoint.safetensors").exists(), process)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = len(log(out))
    assert 0 < before < len(whole)
    model = load(str(calm_folder), LoadOptions(torch.device("cpu"), torch.float32, 1 << 28)).model
    heads.read(out, model)  # what is there can be used
    assert resume(out) == 0
    assert log(out) == whole
    assert (out / "model.safetensors").read_bytes() == weights
    assert provenance(out)["interrupted"] is False


def wait_for(ready, process, seconds=100):
    end = time.monotonic() + seconds
    while not ready():
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_interrupted_it_saves_and_goes_on(calm_folder, prompt_file, tmp_path, uninterrupted):
    out, (whole, weights) = tmp_path / "head", uninterrupted

    def interrupt():
        while not (out / FOLDER / "checkpoint.safetensors").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert train("eagle", calm_folder, out, *STEPS, "--prompts", prompt_file) == 130
    thread.join()
    assert 0 < len(log(out)) < len(whole)
    assert provenance(out)["interrupted"] is True
    assert resume(out) == 0
    assert log(out) == whole
    assert (out / "model.safetensors").read_bytes() == weights


def test_a_full_disk_leaves_the_old_checkpoint(calm_folder, prompt_file, tmp_path, capsys, uninterrupted):
    """No file may grow beyond a limit, as on a full disk: the run ends with one line and goes on later."""
    out = tmp_path / "head"
    path, limits = out / FOLDER / "checkpoint.safetensors", resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        while not path.exists():
            time.sleep(0.02)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        code = train("eagle", calm_folder, out, *STEPS, "--prompts", prompt_file)
        thread.join()
        error = capsys.readouterr().err
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert "File too large" in error
    assert "Traceback" not in error
    assert sorted(each.name for each in path.parent.iterdir() if each.name.startswith(".")) == []
    assert 0 < checkpoint.begin(out, resume=True).step < len(uninterrupted[0])
    assert resume(out) == 0
    assert log(out) == uninterrupted[0]


def test_stopped_while_it_measures_the_table_so_far_is_there(calm_folder, prompt_file, tmp_path, monkeypatch):
    """A rented machine may have to go: SIGTERM ends the table after the way that it is at."""
    out, measure = tmp_path / "head", results.Evaluator.measure

    def stopped(self, spec, prompts, max_tokens, *more):
        if max_tokens == run.TABLE_TOKENS:
            assert provenance(out)["figures"]["tokens_per_pass"] == {}
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(self, spec, prompts, max_tokens, *more)

    monkeypatch.setattr(results.Evaluator, "measure", stopped)
    assert train("block", calm_folder, out, "--tokens", 600, "--epochs", 2, "--prompts", prompt_file) == 130
    assert list(provenance(out)["figures"]["tokens_per_pass"]) == ["chain 5"]
    assert "chain 5 |" in (out / f"{results.TABLE}.md").read_text().splitlines()[0]
    assert provenance(out)["interrupted"] is True


def test_too_little_memory_ends_with_one_line(calm_folder, prompt_file, tmp_path, capsys, monkeypatch):
    def full(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(GradientStep, "__call__", full)
    assert train("block", calm_folder, tmp_path / "head", *STEPS, "--prompts", prompt_file) == 2
    error = capsys.readouterr().err
    assert "smaller --batch-tokens" in error
    assert "Traceback" not in error


def test_a_time_limit_is_kept(calm_folder, prompt_file, tmp_path):
    out = tmp_path / "head"
    begin = time.monotonic()
    assert train("medusa", calm_folder, out, "--minutes", 0.2, "--prompts", prompt_file) == 0
    assert time.monotonic() - begin < 60
    said = provenance(out)
    assert said["steps"] > 0
    assert said["figures"]["data"]["seconds"] < 11


def test_texts_of_another_run_are_learned_from(calm_folder, prompt_file, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert train("medusa", calm_folder, first, "--tokens", 600, "--prompts", prompt_file) == 0
    assert train("medusa", calm_folder, second, "--data", first, "--tokens", 600, "--draft-vocab", 64) == 0
    assert not list((second / FOLDER).glob("data*"))
    assert len(log(second)) == len(log(first))
    assert json.loads((second / "config.json").read_text())["truncated_vocab_size"] == 64


def test_a_tree_is_grown_from_what_the_heads_get_right(calm_folder, prompt_file, tmp_path, capsys):
    out = tmp_path / "head"
    assert train("medusa", calm_folder, out, "--tokens", 1000, "--epochs", 6, "--prompts", prompt_file) == 0
    more = ("--model", calm_folder, "--prompts", prompt_file, "--tokens", "800", "--nodes", "12")
    assert main(["tune-tree", "--head", str(out), *map(str, more)]) == 0
    shown = capsys.readouterr()
    assert "12 nodes" in shown.err
    paths = json.loads((out / "config.json").read_text())["medusa_choices"]
    assert len(paths) == 12
    assert all(path[:-1] in paths[:place] for place, path in enumerate(paths) if len(path) > 1)  # parents first
    model = load(str(calm_folder), LoadOptions(torch.device("cpu"), torch.float32, 1 << 28)).model
    head = heads.read(out, model)
    assert [list(path) for path in head.tree] == paths
    again = rates(head, [lesson(model, head)])
    assert all(sum(row) <= 1.0 + 1e-6 for row in again)


def lesson(model, head):
    tokens = torch.randint(2, 300, (2, 40), generator=torch.Generator().manual_seed(0))
    return Teacher(model, head.reads, 64).read(TextBatch(tokens, torch.ones(2, 40, dtype=torch.bool)))


def test_ranks_are_counted_against_the_target(calm_folder):
    """A head that passes the state on says what the target says one place earlier; counted by hand."""
    model = load(str(calm_folder), LoadOptions(torch.device("cpu"), torch.float32, 1 << 28)).model
    head = medusa.fresh(model, None, 2)
    given = lesson(model, head)
    best = (given.last @ given.output.T).topk(10).indices
    for index, row in enumerate(rates(head, [given])):
        said, truth = best[:, : 38 - index], best[:, 1 + index : 39, 0]
        for rank, share in enumerate(row):
            assert share == pytest.approx(float((said[:, :, rank] == truth).float().mean()), abs=1e-4)


def refused(capsys, *args):
    capsys.readouterr()
    assert main(["train", *map(str, args)]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("loading ")]
    assert len(error) == 1, error
    return error[0]


def test_what_cannot_be_trained_is_refused(calm_folder, tiny_stranger, prompt_file, tmp_path, capsys):
    out = tmp_path / "out"
    model = ("--model", calm_folder, "--out", out)
    assert "known: eagle, block, medusa, draft" in refused(capsys, "lookahead", *model)
    assert "no run to go on with" in refused(capsys, "eagle", "--out", out, "--resume")
    assert "--reads takes" in refused(capsys, "eagle", *model, "--reads", "a")
    assert "--draft-vocab takes" in refused(capsys, "eagle", *model, "--draft-vocab", "some")
    assert "--sequential takes" in refused(capsys, "block", *model, "--sequential", "some")
    assert "--block must be" in refused(capsys, "block", *model, "--block", "1")
    for name in ("minutes", "tokens", "writers", "epochs", "layers", "inner", "rate"):
        zero = refused(capsys, "eagle", *model, f"--{name}", "0")
        assert f"--{name} must be more than 0; leave it out for the default" in zero
    assert "give one of them" in refused(capsys, "block", *model, "--about", prompt_file, "--prompts", prompt_file)
    few = tmp_path / "few.txt"
    few.write_text("a\nb\n")
    assert "too few" in refused(capsys, "eagle", *model, "--prompts", few)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"question": "?"}\n')
    assert "line 1" in refused(capsys, "eagle", *model, "--prompts", broken)
    assert "cannot be read" in refused(capsys, "eagle", *model, "--prompts", tmp_path / "none.txt")
    assert "has no texts" in refused(capsys, "eagle", *model, "--data", tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert "cannot write" in refused(capsys, "eagle", "--model", calm_folder, "--out", file / "out")


def test_a_run_is_not_written_over(calm_folder, tiny_stranger, prompt_file, tmp_path, capsys):
    out = tmp_path / "out"
    assert train("medusa", calm_folder, out, "--tokens", 600, "--prompts", prompt_file) == 0
    assert "already holds" in refused(capsys, "medusa", "--model", calm_folder, "--out", out)
    assert "leave out --prompts" in refused(capsys, "medusa", "--out", out, "--resume", "--prompts", prompt_file)
    assert "begun with seed 0, not 1" in refused(capsys, "medusa", "--out", out, "--resume", "--seed", "1")
    other = ("--out", tmp_path / "other", "--data", out, "--tokens", "600")
    assert "were written by calm" in refused(capsys, "medusa", "--model", tiny_stranger, *other)


def test_only_llamas_are_trained_for(tmp_path, capsys):
    from tiny import reference

    reference("opt").save_pretrained(tmp_path / "opt")
    error = refused(capsys, "eagle", "--model", tmp_path / "opt", "--out", tmp_path / "out")
    assert "llama-like" in error


def test_a_trained_head_grows(learned, calm_folder, prompt_file, tmp_path, capsys):
    """It drafts at first what it drafted before it grew, has what was asked for, and learns with it."""
    few, (before, _) = ("--tokens", 2000, "--prompts", prompt_file), learned("eagle")
    target = load(str(calm_folder), PLACE).model
    head = kinds.begun(TrainingJob("eagle", str(calm_folder), begin=str(before)), target)
    reads = tuple(range(target.num_layers))
    job = TrainingJob("eagle", str(calm_folder), begin=str(before), inner=2 * head.config.inner_size, reads=reads)
    larger = kinds.begun(job, target)
    assert (larger.config.inner_size, larger.config.layers) == (2 * head.config.inner_size, reads)
    hidden = torch.randn(1, 7, target.num_layers, head.config.hidden_size)
    embedded = torch.randn(1, 7, head.config.hidden_size)
    outputs = []
    for each, states in ((head, hidden[:, :, list(head.config.layers)]), (larger, hidden)):
        turns = eagle.rotations(each, 7, torch.device("cpu"))
        outputs.append(eagle.draft_step(each, embedded, each.combine(states), [[] for _ in each.layers], turns)[1])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    more = (*few, "--epochs", 2, "--data", before, "--begin", before)
    every = ",".join(map(str, reads))
    wide = ("--inner", 2 * head.config.inner_size, "--reads", every, "--temperature", 0.5, "--focus")
    assert train("eagle", calm_folder, tmp_path / "wide", *more, *wide, how=FEW) == 0
    weights = safetensors.torch.load_file(tmp_path / "wide" / "model.safetensors")
    down = next(weight for name, weight in weights.items() if name.endswith("mlp.down_proj.weight"))
    assert down.shape[1] == 2 * head.config.inner_size
    assert down[:, head.config.inner_size :].any()
    for bad, said in (
        (("--inner", 8), "--inner 8 is less than"),
        (("--reads", "0"), "must name all blocks that the head of --begin reads"),
        (("--reads", every + ",99"), "cannot read blocks"),
        (("--layers", 2), "--layers makes another head"),
        (("--temperature", 0), "--temperature must be at least"),
    ):
        assert train("eagle", calm_folder, tmp_path / "bad", *more, *bad, how=FEW) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    normed = eagle.EagleHead(replace(head.config, norm_joined=True, layers=reads[:1]))
    with pytest.raises(OutriderError, match="--reads cannot add"):
        grow.grown(normed, 0, reads, target.num_layers)
    assert train("medusa", calm_folder, tmp_path / "bad", *few, "--temperature", 0.5, how=FEW) == 2
    assert "--temperature is for EAGLE heads" in " ".join(capsys.readouterr().err.split())
