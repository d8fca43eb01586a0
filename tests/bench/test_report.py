"""The report from fixed numbers."""

import builtins
import json

import pytest

from outrider.bench import report as reports


def row(engine="outrider", mode="ngram", kind="all", **changes):
    said = dict(engine=engine, mode=mode, kind=kind, plain=mode in ("none", "plain"), tokens_per_second=94.21)
    said |= dict(ratio=None if said["plain"] else dict(value=1.256, low=0.994, high=1.631, prompts=12))
    said |= dict(differ=0, compared=12, void=False, too_short=0, errors=0, acceptance_rate=0.49, tokens_per_step=1.71)
    return said | changes


def made(**changes):
    modes = [
        row(mode="none", acceptance_rate=None, tokens_per_step=1.0),
        row(),
        row(kind="edit", ratio=dict(value=2.0, low=None, high=None, prompts=1)),
        row(mode="layer_skip", void=True, differ=3),
        row("vllm", "plain", tokens_per_second=None, acceptance_rate=None, tokens_per_step=None),
        row("vllm", "ngram", too_short=2),
    ]
    ratio = dict(value=3.1, low=2.9, high=3.3, prompts=12)
    against = [dict(peer="vllm", kind="all", ratio=ratio, same_text=10, compared=12)]
    said = dict(created="2026-01-01T00:00:00+00:00", command="outrider bench --engine all", interrupted=False, runs=[])
    said |= dict(machine=dict(cpu="A CPU", cores=2, commit="abc123"))
    said |= dict(settings=dict(model="tiny", prompts=12, rounds=3, max_tokens=128, threads=2))
    said |= dict(summary=dict(modes=modes, against=against))
    said["engines"] = {
        "outrider": {"modes": {"none": "ok", "ngram": "ok", "layer_skip": "ok"}, "versions": {"torch": "2.0"}},
        "vllm": {"modes": {"plain": "ok", "ngram": "ok", "draft-model": "failed at edit-1: ended"}},
        "openvino": {"modes": {"plain": "missing: pip install openvino-genai"}},
        "llama.cpp": {"modes": {"plain": "ok", "ngram-mod": "ok"}},
    }
    return said | changes


def test_markdown():
    text = reports.markdown(made())
    for line in (
        "| outrider | none | 94.2 | 1 (plain) |  | 1.00 |",
        "| outrider | ngram | 94.2 | 1.26× [0.99–1.63] | 49% | 1.71 |",
        "| outrider | layer_skip | 94.2 | ~~1.26×~~ void (3 of 12 differ) | 49% | 1.71 |",
        "| ngram | edit | 94.2 | 2.00× | 49% | 1.71 |",
        "| vllm | plain | – | 1 (plain) |  |  |",
        "| vllm | all | 3.10× [2.90–3.30] | 10 of 12 |",
        "## vllm by kind",
        "- vllm draft-model: failed at edit-1: ended",
        "- openvino: missing: pip install openvino-genai",
        "- llama.cpp ngram-mod: its store outlives a request",
        "- 2 runs ended too early",
        "torch 2.0; commit abc123",
    ):
        assert line in text
    assert "partial" not in text


def test_prompts_beside_another_engine_of_ours():
    twice, thrice = (dict(value=value, low=None, high=None, prompts=1) for value in (2.0, 3.0))
    rows = [
        dict(engine="outrider", tokens_per_second=1000.0, ratio=None, also={"outrider-int8": None}),
        dict(engine="peer", tokens_per_second=500.0, ratio=twice, also={"outrider-int8": thrice}),
    ]
    said = made()
    said["summary"]["prompts"], said["settings"]["prompt_tokens"] = rows, 512
    text = reports.markdown(said)
    assert "| engine | tok/s | our speed | speed of outrider-int8 |" in text
    assert "| peer | 500.0 | 2.00× | 3.00× |" in text


def test_an_interrupted_report_says_so():
    assert "- Interrupted: this is a partial report." in reports.markdown(made(interrupted=True))


def test_the_terminal_shows_the_same(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    reports.show(made())
    shown = capsys.readouterr().out
    assert "1.26× void (3 of 12 differ)" in shown
    assert "~~" not in shown
    assert "Our plain decoding against the peers' plain decoding" in shown
    assert "missing: pip install openvino-genai" in shown


def test_files(tmp_path):
    pytest.importorskip("matplotlib")
    said = made()
    assert reports.write(said, tmp_path) == []
    assert json.loads((tmp_path / "report.json").read_text()) == said
    assert (tmp_path / "report.png").read_bytes()[:4] == b"\x89PNG"


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.startswith(("matplotlib", "outrider.bench.plot")):
            raise ModuleNotFoundError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    (told,) = reports.write(made(), tmp_path)
    assert "pip install '.[plot]'" in told
    assert (tmp_path / "report.json").is_file()
    assert not (tmp_path / "report.png").exists()


def test_nothing_measured_is_still_a_report(tmp_path):
    empty = made(summary=dict(modes=[], against=[]), interrupted=True)
    assert reports.write(empty, tmp_path) == []
    assert "partial report" in (tmp_path / "report.md").read_text()
