"""Masks of grammars against brute force; looking ahead leaves no trace; what cannot be used is refused in one line."""

import contextlib
import json
import random
import threading

import pytest
import torch
from grammars import END, SMALL, constraint, fits, grammar, greedily, vocabulary

from outrider.core import grammar as module, sampling
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.grammar import Grammar, Grammars, Vocabulary, permitted
from outrider.core.grammar_spec import LONGEST, GrammarSpec
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token

# text of each grammar, and every text that it allows
LANGUAGES = {
    "choice": (json.dumps(["a", "ab", "abba", "123", '{"a":1}', "é"]), ["a", "ab", "abba", "123", '{"a":1}', "é"]),
    "regex": ("(ab|a)(bc)?[12]", [a + b + c for a in ("ab", "a") for b in ("", "bc") for c in "12"]),
    "grammar": ('start: "a" x x | "null"\nx: "b" | "12"', ["abb", "ab12", "a12b", "a1212", "null"]),
}
BYTES = (*(bytes([byte]) for byte in range(256)), b"<end>", b"ab", b"bb", b"12", b"", b"ab")


def shown(mask):
    return None if mask is None else set(mask.nonzero().squeeze(1).tolist())


@pytest.mark.parametrize("parameter", LANGUAGES)
@pytest.mark.parametrize(("words", "ends"), [(tuple(SMALL), (END,)), (BYTES, (256,))])
def test_every_mask_is_what_the_language_allows(parameter, words, ends):
    text, texts = LANGUAGES[parameter]
    language = {each.encode() for each in texts}
    matcher, waiting, seen = grammar(parameter, text, words, ends).matcher(ends), [()], 0
    while waiting:
        path = waiting.pop()
        expected = fits(language, words, ends, path)
        if expected:
            assert shown(matcher.mask(path)) == expected
        waiting += [(*path, token) for token in expected - set(ends)]
        seen += 1
    assert seen > 10


def test_a_token_that_ends_the_sequence_is_no_text_though_the_grammar_names_it():
    matcher = grammar("grammar", f'start: "a" <[{END}]> "b" | "a" "b"').matcher([END])
    assert shown(matcher.mask([SMALL.index(b"a")])) == {SMALL.index(b"b")}


def test_a_mask_is_as_long_as_the_model_has_logits():
    words = (*SMALL, *[b""] * 23)  # a padded vocabulary
    assert grammar("regex", "a*", words).matcher([END]).mask().shape == (len(words),)


def walk(seed, look):
    """Random committed tokens; `look` is called before each."""
    luck = random.Random(seed)
    matcher = grammar("json_schema", json.dumps({"type": "object"}), BYTES, (256,)).matcher([256])
    masks = []
    for _ in range(30):
        look(matcher, random.Random(len(masks)))
        masks.append(shown(matcher.mask()))
        choices = sorted(masks[-1] - {256})
        if not choices:
            break
        matcher.commit(luck.choice(choices))
    return masks


def look_around(matcher, luck):
    """Down paths that are allowed and others, and at what is forced."""
    for _ in range(4):
        path = []
        for _ in range(luck.randrange(6)):
            mask = matcher.mask(path)
            path.append(luck.choice(sorted(shown(mask))) if mask is not None and luck.random() < 0.8 else 3)
        matcher.allowed(path)
        matcher.mask(path)
        matcher.forced(path[:2])


@pytest.mark.parametrize("seed", range(6))
def test_looking_ahead_leaves_no_trace(seed):
    assert walk(seed, look_around) == walk(seed, lambda matcher, luck: None)


def test_a_dead_end_of_a_draft_leaves_no_trace():
    """llguidance never comes back from an error by itself."""
    words = (b"a", b"b", b"ab", b"<end>")  # after b"b" the language wants a byte that no token has
    matcher = grammar("regex", "a*(bx)?", words, (3,)).matcher((3,))
    matcher.commit(0)
    with pytest.raises(OutriderError, match="no text fits"):
        matcher.mask([0, 1])
    assert shown(matcher.mask([0])) == shown(matcher.mask()) == {0, 1, 2, 3}
    matcher.commit(0)
    assert shown(matcher.mask()) == {0, 1, 2, 3}


def test_nothing_is_said_about_what_the_grammar_forbids():
    matcher = grammar("regex", "ab*").matcher([END])
    a, b, c = (SMALL.index(bytes([byte])) for byte in b"abc")
    assert matcher.mask([a, c]) is None  # forbidden
    assert matcher.mask([a, END]) is None  # past the end
    assert shown(matcher.mask([a, b])) == {b, END}
    with pytest.raises(OutriderError, match="forbids"):
        matcher.commit(c)


def test_how_many_tokens_may_follow():
    matcher = grammar("regex", "ab*").matcher([END])
    a, b, c = (SMALL.index(bytes([byte])) for byte in b"abc")
    assert [matcher.allowed(path) for path in ([], [c], [a, b, c, b], [a, b, END, b], [END], [a, END])] == [
        *(0, 0, 2, 3, 0, 2)
    ]


def test_only_special_tokens_end_a_grammar():
    """A stop token that is text stays text: the grammar says where it may stand."""
    a, b = (SMALL.index(bytes([byte])) for byte in b"ab")
    matcher = grammar("regex", "ab").matcher([END, b])
    assert shown(matcher.mask()) == {a, SMALL.index(b"ab")}
    assert shown(matcher.mask([a])) == {b}
    matcher = grammar("regex", "ab").matcher([b])  # no end of the model's is one of this sequence's
    assert matcher.ends == frozenset()


def test_after_an_error_it_stands_where_it_stood():
    """llguidance's state is of no use after one, which a draft alone may have brought about."""
    matcher = grammar("regex", "ab(1|2)").matcher([END])
    for byte in b"ab":
        matcher.commit(SMALL.index(bytes([byte])))
    expected = shown(matcher.mask())
    fresh = grammar("regex", "ab(1|2)").matcher([END])
    for byte in b"ab":
        fresh.commit(SMALL.index(bytes([byte])))
    fresh._state.consume_token(SMALL.index(b"c"))
    assert fresh._state.is_error()
    assert shown(fresh.mask()) == expected == {SMALL.index(b"1"), SMALL.index(b"2")}


class TestPermitted:
    a, b, c = (SMALL.index(bytes([byte])) for byte in b"abc")

    def cut(self, tokens, parents, probs=None):
        left = permitted(Draft(tuple(tokens), tuple(parents), probs), grammar("regex", "ab*").matcher([END]))
        return left.tokens, left.parents

    def test_a_chain_ends_where_the_grammar_forbids_it(self):
        assert self.cut([self.a, self.b, self.c, self.b], [-1, 0, 1, 2]) == ((self.a, self.b), (-1, 0))

    def test_nothing_follows_an_end(self):
        assert self.cut([self.a, END, self.b], [-1, 0, 1]) == ((self.a, END), (-1, 0))

    def test_a_tree_loses_branches(self):
        tokens, parents = [self.c, self.a, self.b, self.b, END, self.c, self.b], [-1, -1, 0, 1, 1, 3, 4]
        assert self.cut(tokens, parents) == ((self.a, self.b, END), (-1, 0, 0))

    def test_a_drawn_node_stays_and_what_hangs_below_it_goes(self):
        """That a forbidden token was drawn and refused is a part of the rule of rejection."""
        probs = torch.full((3, len(SMALL)), 1 / len(SMALL))
        assert self.cut([self.a, self.c, self.b], [-1, 0, 1], probs) == ((self.a, self.c), (-1, 0))

    def test_so_it_is_below_an_end_that_was_drawn(self):
        probs = torch.full((3, len(SMALL)), 1 / len(SMALL))
        assert self.cut([self.a, END, self.b], [-1, 0, 1], probs) == ((self.a, END), (-1, 0))


class TestLaw:
    """A mask is one more option beside the others."""

    def seq(self, **more):
        params, matcher = constraint("regex", "(ab*|12)")
        return Sequence(0, [0], SamplingParams(**params, **more), frozenset([END]), matcher=matcher())

    def logits(self):
        return torch.randn(len(SMALL), generator=torch.Generator().manual_seed(0))

    def support(self, seq, guessed=()):
        return set(seq.law(self.logits(), guessed).nonzero().squeeze(1).tolist())

    def test_what_is_left_keeps_its_proportions(self):
        seq, logits = self.seq(temperature=0.5), self.logits()
        allowed = sorted(shown(seq.matcher.mask()))
        expected = torch.softmax(logits[allowed] / 0.5, -1)
        assert torch.allclose(seq.law(logits)[allowed], expected)
        assert seq.best(logits) == allowed[int(expected.argmax())]

    def test_top_k_counts_what_the_grammar_allows(self):
        assert len(self.support(self.seq(temperature=1.0, top_k=2))) == 2

    def test_greedy_with_another_option(self):
        seq, logits = self.seq(logit_bias={SMALL.index(b"1"): 50.0, SMALL.index(b"c"): 90.0}), self.logits()
        assert seq.best(logits) == SMALL.index(b"1")

    def test_min_tokens_bans_the_end_unless_nothing_else_is_left(self):
        a, b = (SMALL.index(bytes([byte])) for byte in b"ab")
        seq = self.seq(temperature=1.0, min_tokens=4)
        assert self.support(seq, [a]) == {b}
        assert self.support(seq, [SMALL.index(b"12")]) == {END}
        assert seq.best(self.logits(), [SMALL.index(b"12")]) == END

    def test_a_ban_and_a_grammar_that_leave_nothing_are_an_error(self):
        seq = self.seq(allowed_token_ids=[0])
        with pytest.raises(OutriderError, match="loosen"):
            seq.best(self.logits())

    def test_a_processor_cannot_write_what_the_grammar_forbids(self):
        seq = self.seq(processors=[lambda tokens, logits: torch.zeros_like(logits)], temperature=1.0)
        assert self.support(seq) == shown(seq.matcher.mask())

    def test_it_is_not_plain_so_that_no_short_cut_is_taken(self):
        assert not self.seq().plain
        assert self.seq().params.adjusts

    def test_committing_goes_on_in_the_grammar_and_an_end_does_not(self):
        seq = self.seq()
        assert seq.append(Token(SMALL.index(b"12")))
        assert self.support(seq) == {END}
        assert not seq.append(Token(END))
        assert seq.finish == "stop"

    def test_the_parameters_alone_are_not_enough(self):
        with pytest.raises(OutriderError, match="compiled"):
            Sequence(0, [0], SamplingParams(regex="a"))


def nested(levels):
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


CHAIN = 1200  # definitions that refer to the next one
BAD = [
    (dict(json_schema={"if": {"type": "string"}}), r"json_schema .*\"if\""),
    (dict(json_schema={"properties": {"a": {"not": {}}}}), r"json_schema .*\"not\""),
    (dict(json_schema={"not": {}, "x-guidance": {"lenient": True}}), r"\"not\""),
    (dict(json_schema={"type": "array", "uniqueItems": True}), "uniqueItems"),
    (dict(json_schema={"type": "strin"}), "Invalid type: strin"),
    (dict(json_schema={"type": "string", "format": "zip"}), "format: zip"),
    (dict(json_schema={"type": "string", "pattern": "(?=a)"}), "look-around"),
    (dict(json_schema={"$ref": "https://example.com/x.json"}), "https://example.com/x.json"),
    (dict(json_schema={"$ref": "#/$defs/nowhere"}), "nowhere"),
    (dict(json_schema={"$ref": "#"}), "no text fits"),
    (dict(json_schema={"type": "integer", "minimum": 3, "maximum": 2}), "minimum"),
    (dict(json_schema={"enum": []}), "json_schema"),
    (dict(json_schema={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "oneOf"),
    (dict(json_schema={"default": float("nan")}), "json_schema is no JSON"),
    (dict(json_schema="{"), "json_schema is no JSON"),
    (dict(json_schema="[]"), "json_schema must be a JSON object"),
    (dict(json_schema=True), "json_schema must be a JSON object"),
    (dict(json_schema={"description": "\ud800"}), "json_schema is no JSON"),
    (dict(json_schema=nested(200)), "recursion limit"),
    (dict(json_schema=nested(10_000)), "nested too deeply|recursion"),
    (dict(json_schema="[" * 10_000), "json_schema"),
    (dict(json_schema={"description": "x" * 10_000_000}), "json_schema has .* characters"),
    (dict(json_schema='{"description": "' + "x" * 10_000_000), "json_schema has .* characters"),
    (dict(regex="(a"), "regex .*unclosed group"),
    (dict(regex="("), "regex"),
    (dict(regex=""), "regex must be text"),
    (dict(regex=3), "regex must be text"),
    (dict(regex="(" * 5000 + "a" + ")" * 5000), "regex"),
    (dict(grammar='start: "a" | foo'), r"grammar .*1\(8\).*foo"),
    (dict(grammar='begin: "a"'), "grammar .*start"),
    (dict(grammar="start: " + "(" * 5000 + '"a"' + ")" * 5000), "too deeply nested"),
    (dict(choice=[]), "choice must be a list"),
    (dict(choice="yes"), "choice must be a list"),
    (dict(choice=["yes", ""]), "choice must be a list"),
    (dict(choice=["yes", 3]), "choice must be a list"),
    (dict(choice=["\ud800"]), "half a character"),
    (dict(json_object="yes"), "json_object must be true or false"),
    (dict(json_object=True, regex="a"), "regex and json_object cannot be given together"),
    (dict(regex="a", ignore_eos=True), "ignore_eos and regex"),
]


@pytest.mark.parametrize(("given", "reason"), BAD, ids=[f"{i}-{next(iter(given))}" for i, (given, _) in enumerate(BAD)])
def test_what_cannot_be_used_is_refused_in_one_line(given, reason):
    with pytest.raises(OutriderError, match=reason) as refused:
        Grammar(SamplingParams(**given).constraint, vocabulary())
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "given",
    [
        dict(regex="a{1000000}"),
        dict(regex="(a?){2000}a{2000}"),
        dict(regex="((a?){300}){300}"),
        dict(regex="(a|b)*a(a|b){200}"),
        dict(json_schema={"type": "string", "minLength": 10_000_000}),
    ],
    ids=str,
)
def test_an_expression_that_explodes_ends_its_own_sequence_at_most(given):
    """Refused when it is compiled, or by an error at some token, or not at all; and each in time."""
    with contextlib.suppress(OutriderError):
        matcher = Grammar(SamplingParams(**given).constraint, vocabulary()).matcher([END])
        for _ in range(40):
            choices = sorted(shown(matcher.mask()) - {END})
            matcher.commit(choices[-1])


def test_one_that_explodes_as_it_is_written_says_so():
    """Also where no mask was asked for."""
    matcher = grammar("regex", "((a?){300}){300}").matcher([END])
    letter = SMALL.index(b"a")

    def write():
        for _ in range(400):
            assert matcher.allows((), letter)
            matcher.commit(letter)

    with pytest.raises(OutriderError, match=r"the grammar cannot go on: .*too many expressions"):
        write()


def test_a_chain_of_references_does_not_overflow_the_stack():
    """On a usual stack it ends the process."""
    parts = {f"a{i}": {"properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(CHAIN)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**parts, f"a{CHAIN}": {"type": "integer"}}}
    assert len(json.dumps(schema)) < LONGEST
    matcher = Grammar(SamplingParams(json_schema=schema).constraint, vocabulary()).matcher([END])
    assert matcher.allowed(greedily(SMALL)("{")) == 1
    rules = "\n".join(f"a{i}: a{i + 1}" for i in range(8000))
    assert (
        Grammar(GrammarSpec("grammar", f'start: a0\n{rules}\na8000: "a"'), vocabulary()).matcher([END]).mask()
        is not None
    )


def test_recursion_and_unknown_keywords_are_no_mistakes():
    schema = {
        "title": "A",
        "x-mine": 1,
        "$ref": "#/$defs/a",
        "$defs": {"a": {"properties": {"a": {"$ref": "#/$defs/a"}}}},
    }
    matcher = Grammar(SamplingParams(json_schema=schema).constraint, vocabulary()).matcher([END])
    tokens = greedily(SMALL)('{"a":{"a":{}}}')
    assert matcher.allowed([*tokens, END]) == len(tokens) + 1


def test_the_order_of_properties_is_that_of_the_schema():
    schema = {"properties": {"b": {}, "a": {}}, "required": ["b", "a"]}
    matcher = Grammar(SamplingParams(json_schema=schema).constraint, vocabulary()).matcher([END])
    assert matcher.allowed(greedily(SMALL)('{"a"')) < matcher.allowed(greedily(SMALL)('{"b"'))


class TestKept:
    def test_compiled_once_and_the_longest_unused_is_dropped(self, monkeypatch):
        monkeypatch.setattr(module, "KEPT", 3)
        made = []

        def make():
            made.append(0)
            return vocabulary()

        grammars = Grammars(make)
        assert not made  # a model that never meets a grammar pays nothing
        first = grammars.get(GrammarSpec("regex", "a"))
        assert grammars.get(GrammarSpec("regex", "a")) is first
        for text in "bcd":
            grammars.get(GrammarSpec("regex", text))
        assert grammars.get(GrammarSpec("regex", "a")) is not first
        assert grammars.get(GrammarSpec("regex", "d")) is grammars.get(GrammarSpec("regex", "d"))
        assert len(made) == 1

    def test_one_that_is_used_again_stays(self, monkeypatch):
        monkeypatch.setattr(module, "KEPT", 2)
        grammars = Grammars(vocabulary)
        first, *_ = [grammars.get(GrammarSpec("regex", text)) for text in "abac"]
        assert grammars.get(GrammarSpec("regex", "a")) is first

    def test_other_threads_do_not_wait_for_a_grammar_that_takes_long(self, monkeypatch):
        begun, over = threading.Event(), threading.Event()

        def compiled(spec, words):
            if spec.text == "bab":
                begun.set()
                assert over.wait(60)
            return Grammar(spec, words)

        monkeypatch.setattr(module, "Grammar", compiled)
        grammars = Grammars(vocabulary)
        thread = threading.Thread(target=grammars.get, args=[GrammarSpec("regex", "bab")])
        thread.start()
        assert begun.wait(60)
        assert grammars.get(GrammarSpec("regex", "a")) is grammars.get(GrammarSpec("regex", "a"))
        over.set()
        thread.join()

    def test_samples_are_independent(self):
        one, other = (grammar("regex", "ab").matcher([END]) for _ in range(2))
        one.commit(SMALL.index(b"a"))
        assert shown(one.mask()) != shown(other.mask())


def test_the_library_is_imported_when_a_grammar_is_asked_for():
    import subprocess
    import sys

    code = "import sys, outrider; outrider.SamplingParams(regex='a'); sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_special_tokens_are_never_text():
    words = (b"<", b"end", b">", b"<end>", b"<end>")
    matcher = Grammar(GrammarSpec("regex", ".*"), Vocabulary(words, [3], [3], greedily(words))).matcher([3])
    assert shown(matcher.mask()) == {0, 1, 2, 3, 4}  # 3 because it may end here, 4 as text
    matcher = Grammar(GrammarSpec("regex", "<end>"), Vocabulary(words, [3], [3], greedily(words))).matcher([3])
    assert shown(matcher.mask()) == {0, 4}


def test_asking_what_is_forced_before_a_special_token_leaves_no_trace():
    """llguidance names the token among the bytes, and was then stuck in its name."""
    words = (*SMALL, b"<call>")
    call = len(words) - 1
    vocabulary = Vocabulary(words, [END, call], [END], lambda text: [])
    made = Grammar(GrammarSpec("grammar", f'start: "ab" <[{call}]> "c"'), vocabulary)
    matcher, a, b, c = made.matcher([END]), *(words.index(letter) for letter in (b"a", b"b", b"c"))
    for token, text in ((a, b"ab"), (b, b"b"), (call, b""), (c, b"c")):
        assert matcher.forced() == text
        assert [other for other in range(len(words)) if matcher.allows((), other)] == sorted(shown(matcher.mask()))
        assert matcher.mask()[token]
        assert matcher.forced([token]) == (text[1:] if token != call else b"c")
        matcher.commit(token)
    assert matcher.mask().nonzero().flatten().tolist() == [END]


@pytest.mark.parametrize("count", [1, 5, 400, 1000])
def test_the_host_masks_logits_as_a_device_would(count):
    """Bit by bit, and with the first of equals."""
    luck = torch.Generator().manual_seed(count)
    held = SamplingParams(json_object=True, temperature=1.0)
    for _ in range(20):
        logits = torch.randint(-6, 6, (1000,), generator=luck).float() / 3  # many equals
        mask = torch.zeros(1000, dtype=torch.bool)
        mask[torch.randperm(1000, generator=luck)[:count]] = True
        expected = logits.where(mask, float("-inf"))
        assert torch.equal(sampling.adjust(logits, [1], 1, held, frozenset(), mask), expected)
        assert sampling.likeliest_allowed(logits, mask) == int((expected == expected.max()).nonzero()[0])
    nothing = torch.zeros(1000, dtype=torch.bool)
    for choose in (sampling.likeliest_allowed, lambda row, mask: sampling.adjust(row, [1], 1, held, frozenset(), mask)):
        with pytest.raises(OutriderError, match="leaves no token"):
            choose(logits, nothing)
