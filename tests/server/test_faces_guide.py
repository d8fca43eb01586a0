"""What docs/guides/apis.md shows is run."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import foreign
import pytest
from serving import outrider_serve

from outrider import OutriderError
from outrider.models import sources
from outrider.server.registry import load

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "apis.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.S)


def test_the_registry_of_the_guide_is_one(tmp_path):
    path = tmp_path / "registry.yaml"
    path.write_text(blocks("yaml")[0])
    registry = load(path)
    assert registry.choose("llama-3.1-instruct", 8, "q4_k_m").source == "/data/llama-3.1-8b.Q4_K_M.gguf"
    assert registry.choose("llama-3.2-instruct", 1).source == str(tmp_path / "llama-3.2-1b")
    assert "llama-eagle" in registry.sources()


@pytest.mark.real
def test_the_commands_and_the_python_of_the_guide_run(tmp_path, capsys):
    try:
        sources.pull("smollm2-135m")
    except OutriderError as error:
        pytest.skip(f"the weights cannot be had here: {error}")
    serve, curl = blocks("sh")[0].replace("\\\n", " ").replace("/data/heads", str(tmp_path)).splitlines()
    with outrider_serve(*shlex.split(serve)[2:], "--log-level", "error", "--cache-memory", "0.2") as client:
        address = client.base_url.removeprefix("http://")
        done = subprocess.run(
            shlex.split(curl.replace("127.0.0.1:8000", address)), capture_output=True, text=True, check=True
        )
        answer = json.loads(done.stdout)
        assert "Danube" in answer["generated_text"]
        assert answer["details"]["skipped_tokens"] > 0
        foreign.anthropic()  # the client can then be imported
        for block in blocks("python"):
            here = block.replace("127.0.0.1:8000", address).replace("localhost:8000", address)
            exec(compile(here, "apis.md", "exec"), {})
        assert list(client.list_models()) == ["smollm2-135m"]
    assert len(capsys.readouterr().out.split()) > 20
