"""What a request may open, and what it may say about drafting; also where vLLM runs the model."""

import typing

import pytest

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.models import sources
from outrider.server.access import Access
from outrider.server.errors import Bad, Forbidden

ON_VLLM = Access().on("vllm")


def test_our_own_engine_has_its_own_words():
    access = Access()
    assert access.on("local") is access


def test_a_drafter_is_written_in_vllms_words(tmp_path):
    assert ON_VLLM.draft("ngram", {"length": 3}) == "ngram:length=3"
    assert ON_VLLM.vary("ngram:length=3,max_n=6", {"length": 7}) == "ngram:length=7,max_n=6"
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


class TestSeveralDrafters:
    """Every member is held to what it would be held to alone."""

    def test_they_stand_in_the_method_with_their_options(self):
        assert Access().draft("ngram:length=3+history", {}) == "ngram:length=3+history"
        assert Access().draft("ngram:max_n=4+history", {}, own="ngram+history") == "ngram+history"
        with pytest.raises(Bad, match="options of several drafters stand in the method"):
            Access().draft("ngram+history", {"length": 3})

    @pytest.mark.parametrize(
        ("method", "reason"),
        [
            ("ngram+psychic", "unknown drafter 'psychic'"),
            ("ngram+ngram", "named twice"),
            ("none+ngram", "drafts nothing"),
            ("auto+ngram", "already asks every drafter that fits; name it alone"),
            ("ngram+history:length=257", "must be at most 256"),
            ("ngram+history:size=2", "has no option 'size'"),
            ("+".join(["ngram"] * 1000), "at most 8 drafters"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, method, reason):
        with pytest.raises(Bad, match=reason):
            Access().draft(method, {})

    @pytest.mark.parametrize("method", ["ngram+eagle:head=/etc", "draft_model:model=/etc+ngram", "ngram+medusa:head=."])
    def test_no_member_opens_what_lies_elsewhere(self, method):
        with pytest.raises(Forbidden, match="--allow-folder"):
            Access().draft(method, {})

    def test_no_member_is_unpickled(self, tmp_path):
        with pytest.raises(Forbidden, match="pickle"):
            Access((tmp_path,)).draft(f"ngram+eagle:head={tmp_path},allow_pickle=true", {})

    def test_auto_opens_no_more_than_its_members_would(self):
        for options in ({"head": "/etc"}, {"model": "/etc"}):
            with pytest.raises(Forbidden, match="--allow-folder"):
                Access().draft("auto", options)
        with pytest.raises(Bad, match="must be at most 256"):
            Access().draft("auto", {"length": 1000})

    def test_what_the_model_itself_has_is_allowed(self):
        own = "eagle:head=/srv/head,length=4+ngram"
        assert Access().draft(own, {}, own=own) == own
        assert Access().vary(own, {"length": 2}) == "eagle:head=/srv/head,length=2+ngram:length=2"
        with pytest.raises(Forbidden, match="--allow-folder"):
            Access().draft("eagle:head=/srv/other+ngram", {}, own=own)

    def test_a_length_for_all_of_auto(self):
        assert Access().vary("auto", {"length": 4}) == "auto:length=4"
        assert ON_VLLM.vary("auto", {"length": 4}) == "ngram:length=4"

    def test_who_reads_what_the_caller_expects_and_who_needs_it(self):
        access = Access()
        assert [access.expects(method) for method in ("auto", "ngram+prediction", "prediction", "ngram")] == [
            *[True] * 3,
            False,
        ]
        assert [access.needs(method) for method in ("auto", "ngram+prediction", "prediction")] == [False, False, True]
        assert not ON_VLLM.expects("auto")
        assert not ON_VLLM.needs("auto")


# Names that a parser which strips or splits would take for `head`.
TRICKS = [
    " head",
    "head ",
    "\thead",
    "head\n",
    "Head",
    "head=/etc,length",
    "length=3,head",
    "head\0",
    "",
    ",",
    "__dict__",
]


@pytest.mark.parametrize("key", TRICKS)
@pytest.mark.parametrize("access", [Access(), ON_VLLM], ids=["local", "vllm"])
def test_only_the_exact_name_of_an_option_is_one(access, key):
    with pytest.raises(Bad, match="has no option") as caught:
        access.draft("eagle", {"head": "", key: "/etc"})
    assert caught.value.param == "speculative"
    with pytest.raises(Bad, match="has no option"):
        access.vary("eagle:head=/models/own", {key: "/etc"})


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("eagle", {"head": "/etc"}),
        ("medusa", {"head": "/etc"}),
        ("draft_model", {"model": "/etc"}),
        ("draft_model", {"model": "smollm2-135m", "tokenizer": "/etc"}),
        ("draft_model", {"model": "evil/repo"}),
        ("draft_model", {"model": "a,model=/etc"}),
        ("draft_model", {"model": "~root"}),
        ("eagle", {"allow_pickle": True}),
        ("medusa", {"allow_pickle": True}),
    ],
)
def test_what_opens_something_is_forbidden_as_values_and_as_text(method, options):
    access = Access()
    with pytest.raises(Forbidden):
        access.draft(method, options)
    if "," not in "".join(map(str, options.values())):
        text = ",".join(f" {key} = {str(value).lower()}" for key, value in options.items())
        with pytest.raises(Forbidden):
            access.draft_of_text(f"{method}:{text}")


@pytest.mark.parametrize("method", ["ngram:length=5000", " ngram", "ngram,length=5", "draft_model:model=/etc", ""])
def test_a_method_is_a_name_and_nothing_else(method):
    with pytest.raises(OutriderError, match="unknown drafter"):
        Access().draft(method, {})


def test_a_value_is_no_place_for_more_options(tmp_path):
    """A folder may have such a name, and be allowed: then it cannot be written down."""
    folder = tmp_path / "a,allow_pickle=true"
    folder.mkdir()
    with pytest.raises(Bad, match="comma"):
        Access((tmp_path,)).draft("eagle", {"head": str(folder)})


def numbers(kind):
    return [name for name, hint in typing.get_type_hints(kind.Options).items() if hint in (int, float)]


@pytest.mark.parametrize(
    ("name", "key"), [(name, key) for name in drafters.TABLE for key in numbers(drafters.find(name))]
)
def test_every_number_is_bounded_however_it_is_given(name, key):
    access, needed = Access(names={"small": "small"}), {"model": "small"} if name == "draft_model" else {}
    for value in (10**9, -(10**9)):
        with pytest.raises(Bad, match="must be at"):
            access.draft(name, {**needed, key: value})
        with pytest.raises(Bad, match="must be at"):
            access.draft_of_text(f"{name}:{key}={value}" + "".join(f",{each}={needed[each]}" for each in needed))
    for value in ("1000000000", "3", float("inf"), 10**300):
        with pytest.raises(Bad, match="must be"):
            access.draft(name, {**needed, key: value})


def test_the_models_own_drafter_keeps_what_it_has(tmp_path):
    """Its head lies where requests may not look, and its drafts are longer than theirs may be."""
    own = "eagle:head=/models/own,length=300,allow_pickle=true"
    access = Access((tmp_path,))
    assert access.draft("eagle", {"head": "/models/own", "length": 300, "allow_pickle": True}, own) == own
    assert access.vary(own, {"greedy": True}) == "eagle:head=/models/own,length=300,greedy=true,allow_pickle=true"
    with pytest.raises(Forbidden, match="pickles"):
        access.vary(own, {"head": str(tmp_path)})
    with pytest.raises(Forbidden, match="--allow-folder"):
        access.vary(own, {"head": "/models/other", "allow_pickle": False})
    with pytest.raises(Bad, match="at most 256"):
        access.vary(own, {"length": 301})
    with pytest.raises(Forbidden, match="pickles"):
        access.draft("medusa", {"head": "/models/own", "allow_pickle": True}, own)


def test_a_folder_whose_name_begins_alike_is_another(tmp_path):
    for name in ("models", "models-private"):
        (tmp_path / name).mkdir()
    access = Access((tmp_path / "models",))
    assert access.path(str(tmp_path / "models" / "x")) == tmp_path / "models" / "x"
    for name in ("models-private", "models-private/x", "models/../models-private"):
        with pytest.raises(Forbidden, match="--allow-folder"):
            access.path(str(tmp_path / name))


def test_a_refusal_does_not_tell_whether_a_path_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)

    def reason(name):
        with pytest.raises(Forbidden) as caught:
            Access().source(name)
        return str(caught.value).replace(name, "NAME")

    assert reason("a/b") == reason("a/c")
    assert reason(f"{tmp_path}/a/b") == reason(f"{tmp_path}/a/c")
    assert Access((tmp_path,)).source("a/b") == str(tmp_path / "a" / "b")
    assert Access((tmp_path,), hub=True).source("a/c") == "hub:a/c"


def test_a_hub_id_is_never_the_folder_of_that_name(tmp_path, monkeypatch):
    """What happens to it is the same whether there is such a folder or not: the hub is asked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    access = Access(hub=True)
    assert [access.source(name) for name in ("a/b", "a/c")] == ["hub:a/b", "hub:a/c"]
    assert access.draft("draft_model", {"model": "a/b"}) == "draft_model:model=hub:a/b"


@pytest.mark.parametrize("name", ["x" * 300, f"a/{'x' * 300}"])
def test_a_name_that_is_too_long_for_a_path_is_no_error_of_ours(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    assert Access((tmp_path,)).source(f"{tmp_path}/{name}") == f"{tmp_path}/{name}"
    with pytest.raises(Forbidden, match="--allow-"):
        Access((tmp_path / "a",)).source(name)
    with pytest.raises(OutriderError, match="is no path"):
        sources.resolve(f"{tmp_path}/{name}")
