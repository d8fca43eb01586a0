"""What a request may say about drafting where vLLM runs the model."""

import pytest

from outrider.core.errors import OutriderError
from outrider.server.access import Access
from outrider.server.errors import Forbidden

ON_VLLM = Access().on("vllm")


def test_our_own_engine_has_its_own_words():
    access = Access()
    assert access.on("local") is access


def test_a_drafter_is_written_in_vllms_words(tmp_path):
    assert ON_VLLM.draft("ngram", {"length": 3}) == "ngram:length=3"
    assert ON_VLLM.vary("ngram:length=3,max_n=4", {"length": 5}) == "ngram:length=5,max_n=4"
    assert Access((tmp_path,)).on("vllm").draft("eagle3", {"head": str(tmp_path)}) == f"eagle3:head={tmp_path}"


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("layer_skip", {}, "vLLM has no drafter 'layer_skip'"),
        ("ngram", {"store": "adaptive"}, "has no option 'store'"),
        ("none", {"length": 3}, "the drafter none has no options"),
    ],
)
def test_what_vllm_lacks_is_refused(method, options, reason):
    with pytest.raises(OutriderError, match=reason):
        ON_VLLM.draft(method, options)


@pytest.mark.parametrize(("method", "key"), [("draft_model", "model"), ("eagle", "head"), ("medusa", "head")])
def test_what_lies_elsewhere_is_not_named(method, key):
    with pytest.raises(Forbidden, match="--allow-folder"):
        ON_VLLM.draft(method, {key: "/etc"})


def test_vllms_own_words_are_not_varied():
    with pytest.raises(OutriderError, match="as it was loaded"):
        ON_VLLM.vary('{"method": "mtp"}', {"length": 3})
