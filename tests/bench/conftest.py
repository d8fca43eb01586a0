"""A table of engines with one more, whose worker is the script fake.py."""

from pathlib import Path

import pytest

from outrider.bench import peers, plan

FAKE = Path(__file__).with_name("fake.py")


class Fake(peers.Peer):
    @property
    def path(self):
        return FAKE


@pytest.fixture
def make_plan(tiny_folder, tmp_path, monkeypatch):
    """A plan over a fake engine with the modes that are named."""

    def make(*modes, one_process=False, engines=("fake",), **changes):
        fake = Fake("fake", "fake.py", "pip install fake", "plain", modes, "any", one_process)
        monkeypatch.setitem(peers.TABLE, "fake", fake)
        return plan.BenchRequest(**options(engines=engines, output=tmp_path / "out") | changes).plan()

    def options(**changes):
        said = dict(model=str(tiny_folder), drafts=[], prompts=None, kinds=["chat"], limit=2, rounds=1, max_tokens=16)
        return said | dict(threads=1, seed=0, timeout=20.0, python=[], draft_model=None) | changes

    return make
