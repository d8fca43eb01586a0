"""The table of drafters, and how `NAME:key=value,...` is read."""

import pytest
from tiny import ALL_SPECS, Markov, random_heads

from outrider import drafters
from outrider.core.errors import OutriderError
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.ngram import Ngram


@pytest.mark.parametrize("name", drafters.TABLE)
def test_a_name_leads_to_its_class(name):
    kind = drafters.find(name)
    assert issubclass(kind, Drafter)
    assert kind.name == name
    assert name in drafters.names()


def test_options_are_read_by_their_types():
    assert drafters.parse("ngram") == ("ngram", Ngram.Options())
    expected = Ngram.Options(max_n=5, length=3, store="adaptive")
    assert drafters.parse(" ngram:max_n=5, length=3,store=adaptive") == ("ngram", expected)
    for text, value in [("true", True), ("Yes", True), ("1", True), ("false", False), ("no", False), ("0", False)]:
        assert drafters.parse(f"draft_model:model=a/b,greedy={text}")[1] == DraftModel.Options("a/b", greedy=value)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("psychic", "unknown drafter 'psychic'; known: none, auto, ngram"),
        ("eagle+psychic", "unknown drafter 'psychic'; known: none, auto, ngram"),
        ("ngram+", "unknown drafter 'ngram[+]'"),
        ("+ngram", "unknown drafter ''"),
        ("ngram+history+ngram:max_n=3", "the drafter ngram is named twice"),
        ("none+ngram", "the drafter none drafts nothing, so it goes with no other"),
        ("ngram+auto", "the drafter auto already asks every drafter that fits"),
        ("ngram+history:depth=3", "drafter history has no option 'depth'"),
        ("+".join(["ngram"] * 9), "at most 8 drafters guess together, not 9"),
        ("auto:length=-", "auto:length must be a whole number"),
        ("", "unknown drafter ''"),
        ("none:length=1", "drafter none has no option 'length'; it has: none"),
        ("ngram:size=3", "drafter ngram has no option 'size'; it has: max_n, min_n, length, store"),
        ("ngram:length", "needs a value: length=..."),
        ("ngram:length=", "ngram:length must be a whole number, not ''"),
        ("ngram:length=many", "ngram:length must be a whole number, not 'many'"),
        ("ngram:length=2.5", "a whole number"),
        ("ngram:store=big", "ngram:store must be one of recent, adaptive, not 'big'"),
        ("ngram:length=3,length=4", "option 'length' of drafter 'ngram' is given twice"),
        ("oracle:rate=nan", "oracle:rate must be a number, not nan"),
        ("draft_model", "drafter draft_model needs model: write draft_model:model="),
        ("draft_model:model=x,greedy=perhaps", "must be true or false"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(spec, reason):
    with pytest.raises(OutriderError, match=reason):
        drafters.parse(spec)


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_spec_written_out_and_read_again_is_equal(spec):
    read = drafters.parse(spec)
    assert drafters.parse(read.text()) == read
    assert drafters.varied(read, {}) == read


def test_several_drafters_have_their_own_options_each():
    read = drafters.parse(" ngram:length=3,max_n=5 + history:width=1+prediction")
    assert read.name == "ngram+history+prediction"
    assert [member.text() for member in read.members] == ["ngram:max_n=5,length=3", "history:width=1", "prediction"]
    longer = drafters.varied(read, {"length": 9})
    assert longer.text() == "ngram:max_n=5,length=9+history:length=9,width=1+prediction:length=9"
    with pytest.raises(OutriderError, match=r"no drafter of ngram\+history\+prediction has an option 'stop'"):
        drafters.varied(read, {"stop": 4})


@pytest.mark.parametrize("path", ["a+b/c", "c++", "/opt/c++/heads", "a+b.c"])
def test_a_plus_sign_in_a_path_begins_no_drafter(path):
    for spec in (f"draft_model:model={path}", f"draft_model:model={path}+ngram", f"ngram+draft_model:model={path}"):
        read = drafters.parse(spec)
        assert path in {getattr(member.options, "model", "") for member in read.members}
        assert drafters.parse(read.text()) == read


def test_what_several_drafters_read_is_what_any_does():
    assert drafters.reads_prediction("ngram+prediction")
    assert not drafters.needs_prediction("ngram+prediction")
    assert drafters.needs_prediction("prediction")
    assert drafters.reads_prediction("auto")
    assert not drafters.needs_prediction("auto")
    assert not drafters.needs_grammar("auto")
    assert drafters.needs_grammar("grammar")
    assert [kind.name for kind in drafters.kinds("ngram+eagle")] == ["ngram", "eagle"]


def test_only_what_is_not_at_its_default_is_written():
    assert drafters.parse(" ngram:store=recent, length=3").text() == "ngram:length=3"
    assert drafters.from_values("eagle", {"stop": 1, "greedy": True}).text() == "eagle:stop=1.0,greedy=true"
    assert drafters.parse("draft_model:model=a=b").text() == "draft_model:model=a=b"


@pytest.mark.parametrize("model", ["a,length=9", " a", "a\n", "a+b", "a+b:c"])
def test_a_value_that_would_be_read_otherwise_is_not_written(model):
    with pytest.raises(OutriderError, match=r"comma or spaces|plus sign"):
        drafters.from_values("draft_model", {"model": model}).text()


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"length": "3"}, "ngram:length must be a whole number, not '3'"),
        ({"length": 3.0}, "a whole number"),
        ({"length": True}, "a whole number"),
        ({"length": None}, "a whole number"),
        ({" length": 3}, "no option ' length'"),
        ({"length=9,max_n": 3}, "no option 'length=9,max_n'"),
        ({"store": "big"}, "one of recent, adaptive"),
    ],
)
def test_values_are_neither_stripped_nor_converted(values, reason):
    with pytest.raises(OutriderError, match=reason):
        drafters.from_values("ngram", values)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), 10**400, "0.5", False])
def test_a_number_is_a_finite_number(rate):
    with pytest.raises(OutriderError, match="oracle:rate must be a number"):
        drafters.from_values("oracle", {"rate": rate})
    assert drafters.from_values("oracle", {"rate": 1}) == drafters.parse("oracle:rate=1")


def test_a_refusal_repeats_little_of_what_is_long():
    for ask in (
        lambda: drafters.parse("x" * 10**6),
        lambda: drafters.parse("+x" * 10**6),
        lambda: drafters.parse("ngram+" + "x" * 10**6),
        lambda: drafters.parse(f"ngram:{'x' * 10**6}=1"),
        lambda: drafters.parse(f"ngram:{'x' * 10**6}"),
        lambda: drafters.parse(f"ngram:length={'x' * 10**6}"),
        lambda: drafters.from_values("ngram", {"length": ["x" * 10**6]}),
    ):
        with pytest.raises(OutriderError) as caught:
            ask()
        assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("ngram:length=0", "ngram:length must be at least 1"),
        ("ngram:min_n=5", "1 <= min_n <= max_n"),
        ("ngram:min_n=0", "1 <= min_n <= max_n"),
        ("ngram:max_n=17", "ngram:max_n must be at most 16, not 17"),
        ("ngram:max_n=17,store=adaptive", "ngram:max_n must be at most 16, not 17"),
        ("draft_model:model=noisy,length=0", "draft_model:length must be at least 1"),
        ("prediction:length=0", "prediction:length must be at least 1"),
        ("prediction:least=9", "1 <= least <= overlap"),
        ("layer_skip:layers=4", "between 1 and 3"),
        ("layer_skip:layers=-1", "between 1 and 3"),
        ("layer_skip:length=0", "layer_skip:length must be at least 1"),
    ],
)
def test_values_that_cannot_work_are_refused(spec, reason):
    with pytest.raises(OutriderError, match=reason):
        drafters.build(spec, BuildContext(Markov(), lambda name, quantize: Markov()))


@pytest.mark.parametrize("spec", ALL_SPECS)
def test_a_draft_is_never_larger_than_its_room(spec):
    from outrider.core.sequence import Sequence

    target = Markov()
    drafter = drafters.build(
        spec, BuildContext(target, lambda name, quantize: Markov(seed=1), heads=random_heads(target))
    )
    seqs = [Sequence(i, [0, 1, 2, 0, 1, 2], prediction=(0, 1, 2, 3)) for i in range(4)]
    budgets = [0, 1, 2, 50]
    for draft, budget in zip(drafter.propose(seqs, budgets), budgets, strict=True):
        assert len(draft) <= budget
    assert all(seq.tokens == [0, 1, 2, 0, 1, 2] for seq in seqs)  # drafters never write into a sequence
