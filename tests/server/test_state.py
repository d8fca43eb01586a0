"""The launched set survives a restart of the server, and what cannot be had again is reported."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from serving import outrider_serve

from outrider import OutriderError, Settings
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.state import read, write

SPECS = [LaunchSpec(Settings("a", max_batch=3), "one", ("x",), {"size": 7}), LaunchSpec(Settings("b"), "two")]


def test_the_launched_set_survives_a_restart(tmp_path, tiny_folder, tiny_draft):
    state = tmp_path / "deep" / "state.json"
    target, draft, gone = (tmp_path / name for name in ("target", "draft", "gone"))
    for source, folder in ((tiny_folder, target), (tiny_draft, draft), (tiny_draft, gone)):
        shutil.copytree(source, folder)
    settings = tmp_path / "c.yaml"
    settings.write_text("pace: false\nthreads: 1\ncache_memory: 0.05\n")  # what is drafted does not depend on the clock
    common = ("--config", settings, "--state", state, "--allow-folder", tmp_path)
    with outrider_serve("--no-model", *common) as client:
        pair = client.launch_speculative_llm(str(target), None, None, str(draft), None, None, n_gpu=None)
        client.launch_model(str(gone), model_uid="gone", max_batch=3)
        before = client.get_model(pair).generate("the red fox", {"max_tokens": 8, "temperature": 0})
    assert [spec.uid for spec in read(state)] == [pair, "gone"]
    assert not any(spec.settings.pace for spec in read(state))  # as the server's own file says
    shutil.rmtree(gone)
    with outrider_serve(draft, "--uid", "given", *common) as client:
        models = client.list_models()
        assert {uid: model["status"] for uid, model in models.items()} == {
            "given": "ready",
            pair: "ready",
            "gone": "failed",
        }
        assert "no such file or folder" in models["gone"]["reason"]
        after = client.get_model(pair).generate("the red fox", {"max_tokens": 8, "temperature": 0})
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
        assert after["metrics"]["by_drafter"].keys() == {"draft_model"}
        assert [spec.uid for spec in read(state)] == [pair, "gone"]  # what the command gave is not in it
        client.terminate_model("gone")
        assert [spec.uid for spec in read(state)] == [pair]


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "state.json"
    assert read(path) == []
    for specs in (SPECS, SPECS[:1]):
        write(path, specs)
        assert read(path) == specs
    assert os.listdir(tmp_path) == ["state.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state.json"
    write(path, SPECS)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(path, [])
    assert read(path) == SPECS
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not JSON"),
        ("\x00\xff", "is not JSON"),
        ("[]", "not written by this version"),
        ('{"version": 99, "models": []}', "not written by this version"),
        ('{"version": 1, "models": [{}]}', "not a launched model"),
        ('{"version": 1, "models": [7]}', "not a launched model"),
        (
            json.dumps({"version": 1, "models": [SPECS[0].as_dict() | {"settings": {"speed": 9}}]}),
            "unknown setting 'speed'",
        ),
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_left(tmp_path, text, reason):
    path = tmp_path / "state.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(OutriderError, match=reason):
        read(path)
    assert path.read_text(encoding="latin-1") == text
