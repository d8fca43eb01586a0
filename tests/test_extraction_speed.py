"""scripts/extraction_speed.py on a tiny model: its texts are our own and differ, and what it compares is compared."""

import importlib.util
import json
import sys
from pathlib import Path

import jsonschema
import pytest
from extractions import extractions

from outrider import LLM

SCRIPT = Path(__file__).parents[1] / "scripts" / "extraction_speed.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("extraction_speed", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["extraction_speed"] = module
    spec.loader.exec_module(module)
    return module


def test_no_two_texts_and_no_two_schemas_are_the_same():
    found = list(extractions())
    assert len(found) == 100
    assert len({each.text for each in found}) == len({json.dumps(each.schema) for each in found}) == 100
    for each in found:
        jsonschema.Draft202012Validator.check_schema(each.schema)
        assert all(part in each.question for part in (each.text, *each.schema["properties"]))


def test_texts_are_compared_and_times_counted(script, tiny_folder, monkeypatch):
    monkeypatch.setattr(script, "TOKENS", 12)
    with LLM(str(tiny_folder), threads=1, cache_memory=0.1) as llm:
        measurement = script.Measurement(llm, script.WAYS)
        measurement.round(0, list(extractions())[:2])
        found = measurement.report()
        assert (found["texts that differ"], found["invalid"]) == ([], [])
        ratio, low, high = found["ways"]["auto"]["speed over plain"]
        assert 0 < low <= ratio <= high
        assert found["ways"]["plain"]["speed over plain"] == [1.0, 1.0, 1.0]
        assert found["ways"]["plain"]["drafted"] == 0 < found["ways"]["auto"]["drafted"]
        real = measurement._answer

        def other(each, way):
            result = real(each, way)
            if way == "auto":
                result.token_ids[-1] += 1
            return result

        monkeypatch.setattr(measurement, "_answer", other)
        measurement.round(1, list(extractions())[:1])
    assert measurement.report()["texts that differ"] == [0]
