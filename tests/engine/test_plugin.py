"""A drafter of another package that fails: requests through LLM go on, and their text is the same."""

import importlib
import logging
import sys

import pytest

from outrider import LLM, SamplingParams

CODE = '''
from dataclasses import dataclass
from outrider.core.draft import Draft
from outrider.drafters.base import Drafter


class Broken(Drafter):
    """Repeats the last token, and raises at every call of one kind after the first few."""

    @dataclass(frozen=True)
    class Options:
        call: str = "propose"
        after: int = 0

    name = "broken"

    def __init__(self, options, parts):
        self._options, self._calls = options, 0

    def _may_fail(self, call):
        if call == self._options.call:
            self._calls += 1
            if self._calls > self._options.after:
                raise RuntimeError("a plug-in's own mistake")

    def propose(self, seqs, budgets):
        self._may_fail("propose")
        return [Draft.chain(seq.tokens[-1:]).cut(budget) for seq, budget in zip(seqs, budgets)]

    def observe(self, step):
        self._may_fail("observe")

    def forget(self, id):
        self._may_fail("forget")
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A package with the entry point `outrider.drafters`."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "broken_drafter.py").write_text(CODE)
    about = folder / "broken_drafter-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-drafter\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[outrider.drafters]\nbroken = broken_drafter:Broken\n")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def llm(plugin, tiny_folder):
    with LLM(str(tiny_folder), draft="ngram:min_n=1", threads=1, pace=False, cache_memory=0.05) as llm:
        yield llm


@pytest.mark.parametrize("call", ["propose", "observe", "forget"])
@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_plug_in_that_raises_ends_no_request(llm, call, after, caplog):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = ["the red fox and the blue fox", "one, two, three; one, two,", "a river ends in the sea"]
    expected = [llm.generate(prompt, params).text for prompt in prompts]
    draft = f"broken:call={call},after={after}"
    with caplog.at_level(logging.ERROR, "outrider"):
        streams = [llm.submit(p, params, draft=d) for p in prompts for d in (draft, "")]
        results = [stream.result() for stream in streams]
    assert [result.finish_reason for result in results] == ["length"] * 6
    assert [result.text for result in results] == [text for text in expected for _ in range(2)]
    assert "a plug-in's own mistake" in caplog.text or (call == "forget" and after)
