"""scripts/schema_proof.py on a tiny model: every text of the first schemas is valid, and the same with drafters."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from schemas import collection

SCRIPT = Path(__file__).parents[1] / "scripts" / "schema_proof.py"
COUNT = 96


@pytest.fixture(scope="module")
def proof():
    spec = importlib.util.spec_from_file_location("schema_proof", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["schema_proof"] = module
    spec.loader.exec_module(module)
    return module


def test_the_collection_has_2000_different_schemas_of_every_kind():
    found = [schema for _, schema in collection()]
    assert len({json.dumps(schema, sort_keys=True) for schema in found}) == 2000
    text = json.dumps(found)
    kinds = ("enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "format", "pattern", "minimum", "maxLength")
    more = ("exclusiveMaximum", "multipleOf", "minItems", "prefixItems", "patternProperties", "additionalProperties")
    for keyword in (*kinds, *more, "minProperties", "maxProperties"):
        assert text.count(f'"{keyword}"') > 40, keyword


def test_texts_are_judged(proof):
    """Numbers as they are written, and times with offsets."""
    above = {"type": "number", "exclusiveMinimum": 1000}
    assert proof.invalid("1000.0000000000000001", above) == ""
    assert "less than or equal" in proof.invalid("1000.0", above)
    assert proof.invalid('"12:15:00.798-06:01"', {"format": "time"}) == ""
    assert "not a 'time'" in proof.invalid('"12:15:00"', {"format": "time"})
    assert proof.invalid('"0000-02-29"', {"format": "date"}) == ""
    assert "not a 'date'" in proof.invalid('"0000-02-30"', {"format": "date"})
    assert proof.invalid('{"a": ', {}) != ""


def test_a_part_of_the_collection(tiny_folder, tmp_path):
    output = tmp_path / "part.json"
    command = [sys.executable, str(SCRIPT), "--model", str(tiny_folder), "--end", str(COUNT), "--tokens", "60"]
    command += ["--drafters", "ngram,history,layer_skip,prediction", "--always", "grammar", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(output.read_text())
    assert report["failures"] == []
    assert report["counts"]["schemas"] == COUNT
    assert report["counts"]["ended with stop"] > COUNT // 6
    assert report["counts"].get("refused", 0) < COUNT // 20
    assert report["drafters"]["grammar"]["accepted"] > 0


def test_what_differs_or_is_invalid_fails(proof, tiny_folder, monkeypatch):
    """A proof that cannot fail proves nothing."""
    from outrider import LLM

    asked = proof.cases(0, 8, 60, [])
    with LLM(str(tiny_folder), draft="none", pace=False, threads=1, cache_memory=0.1) as llm:
        other = proof.Proof(llm, ("ngram",), ("grammar",))
        real = proof.Proof._run

        def broken(self, asked, drafter, expected=None):
            found = real(self, asked, drafter, expected)
            return found if drafter == "none" else [found[-1], *found[:-1]]

        monkeypatch.setattr(proof.Proof, "_run", broken)
        monkeypatch.setattr(proof, "invalid", lambda text, schema: "no")
        other.check(asked)
    assert any(what.startswith("differs: grammar") for what in other.counts)
    assert other.counts["invalid"] == other.counts["ended with stop"] > 0
