"""What the grammar forces, or nearly forces, as a draft: keys, spacing, values as branches, and what is learned."""

import json

import pytest
import torch
from grammars import END, SMALL, constraint, grammar, vocabulary

from outrider.core.draft import ROOT, Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import Step
from outrider.drafters.grammar import FORCED, HALF, GrammarDrafter
from outrider.drafters.spacing import FIRST


def flat(*names, value=None):
    properties = {name: value or {"type": "integer"} for name in names}
    return {"type": "object", "properties": properties, "required": list(names), "additionalProperties": False}


def sequence(schema, written=b""):
    """A sequence that has written this much under a schema."""
    params, matcher = constraint("json_schema", schema)
    seq = Sequence(1, [0], SamplingParams(**params, max_tokens=64), matcher=matcher())
    for token in vocabulary().encode(written.decode()):
        seq.tokens.append(token)
        seq.matcher.commit(token)
    return seq


def drafter(length=16):
    return GrammarDrafter(GrammarDrafter.Options(length), None)


def paths(draft):
    """The texts from the root to each leaf."""
    leaves = [node for node in range(len(draft)) if node not in draft.parents]
    return [b"".join(SMALL[draft.tokens[node]] for node in draft.path(leaf)) for leaf in leaves]


def proposed(seq, made=None, budget=16):
    return (made or drafter()).propose([seq], [budget])[0]


class TestText:
    def test_the_first_line_is_guessed_in_both_ways(self):
        draft = proposed(sequence(flat("a", "b")))
        assert b'{"a": ' in paths(draft)

    def test_a_key_comes_whole_in_the_way_of_the_text(self):
        assert paths(proposed(sequence(flat("a", "b"), b'{"a": 1,'))) == [b' "b": ']
        assert paths(proposed(sequence(flat("a", "b", "c"), b'{"a":1,"b":2,'))) == [b'"c":']

    def test_spacing_is_not_taken_from_inside_a_string(self):
        text = {"type": "string"}
        assert paths(proposed(sequence(flat("a", "b", "c", value=text), b'{"a": "1:2", "b": "1:2",'))) == [b' "c": "']

    def test_a_bracket_closes_as_it_was_opened(self):
        """Where the object ended its line, the last bracket begins one; this vocabulary has no line breaks."""
        assert paths(proposed(sequence(flat("a", value={"enum": ["b"]}), b'{"a": "b"'))) == [b"}"]

    @pytest.mark.parametrize("values", [["ab", "ba"], ["ab", "ba", "cd"]])
    def test_a_few_values_are_branches(self, values):
        seq = sequence(flat("a", value={"enum": values}), b'{"a": "')
        assert sorted(paths(proposed(seq, drafter(4)))) == sorted(value.encode() + b'"}' for value in values)

    def test_of_more_values_none_is_guessed(self):
        seq = sequence(flat("a", value={"enum": ["ab", "ba", "cd", "de"]}), b'{"a": "')
        assert not proposed(seq)

    def test_branches_begin_with_the_space_before_them(self):
        seq = sequence(flat("a", "b", value={"enum": [True, None]}), b'{"a": true, "b":')
        assert sorted(paths(proposed(seq))) == [b" null}", b" true}"]

    def test_a_branch_of_branches_is_not_opened(self):
        seq = sequence(flat("a", "b", value={"enum": ["ab", "ba"]}), b'{"a": "')
        assert sorted(paths(proposed(seq, drafter(16)))) == [b'ab", "b": "', b'ba", "b": "']

    def test_free_text_is_not_drafted(self):
        assert not proposed(sequence(flat("a", value={"type": "string"}), b'{"a": "b'))

    def test_nothing_without_a_grammar_or_a_budget(self):
        assert not proposed(Sequence(1, [0], SamplingParams(max_tokens=4)))
        assert not proposed(sequence(flat("a")), budget=0)

    def test_no_path_is_longer_than_the_option(self):
        assert max(proposed(sequence(flat("a", "b"), b'{"a": 1,'), drafter(2)).depths()) == 2


class TestProbabilities:
    def test_forced_tokens_are_nearly_sure_and_branches_share(self):
        draft = proposed(sequence(flat("a", value={"enum": ["ab", "ba"]}), b'{"a": "'))
        first = [p for p, parent in zip(draft.acceptance, draft.parents, strict=True) if parent == ROOT]
        rest = [p for p, parent in zip(draft.acceptance, draft.parents, strict=True) if parent != ROOT]
        assert first == [0.5, 0.5]
        assert set(rest) == {0.95, 0.9}  # `"`, then `}`, before which spaces may stand

    def test_a_choice_is_where_the_tokens_part(self):
        """`{` and `{"` begin two ways to go on: neither is forced."""
        draft = proposed(sequence(flat("a")))
        roots = [p for p, parent in zip(draft.acceptance, draft.parents, strict=True) if parent == ROOT]
        assert len(roots) == 1 or sum(roots) == pytest.approx(1.0)

    def test_what_is_kept_is_learned_by_kind(self):
        made, schema = drafter(), flat("a", value={"enum": ["ab", "ba"]})
        for _ in range(40):
            seq = sequence(schema, b'{"a": "')
            draft = proposed(seq, made)
            seq.tokens += [SMALL.index(b"b"), SMALL.index(b"c")]  # the second, and then another token than was forced
            made.observe(Step(seq, (), draft, Verdict((), 0), None))
        after = proposed(sequence(schema, b'{"a": "'), made)
        assert after.acceptance[0] == pytest.approx(0.5, abs=0.02)  # one of two holds, each time
        assert made._calibration.frequency(HALF, 0.5) == after.acceptance[0]
        assert made._calibration.frequency(FORCED, 0.95) < 0.3

    def test_a_chunk_of_a_prompt_teaches_nothing(self):
        made, seq = drafter(), sequence(flat("a"))
        proposed(seq, made)
        made.observe(Step(seq, (), Draft(), None, None))
        assert made._calibration.frequency(FORCED, 0.95) == 0.95

    def test_a_sequence_that_ended_is_forgotten(self):
        made, seq = drafter(), sequence(flat("a"))
        proposed(seq, made)
        made.forget(seq.id)
        assert not made._guesses
        assert not made._spacings


class TestContinued:
    """What others guessed goes on with what the grammar forces after it."""

    SCHEMA = flat("a", "b", value={"type": "string"})

    def other(self, text, acceptance=0.9, name="ngram"):
        tokens = vocabulary().encode(text.decode())
        return Draft.chain(tokens, None, [name] * len(tokens), [acceptance] * len(tokens))

    def test_a_copied_value_with_the_next_key(self):
        draft = drafter().extended(sequence(self.SCHEMA, b'{"a": "'), self.other(b'12",'))
        assert paths(draft) == [b'12", "b": "']
        assert draft.is_chain
        assert draft.sources[:2] == ("ngram", "ngram")
        assert set(draft.sources[2:]) == {"grammar"}
        assert draft.acceptance[:2] == (0.9, 0.9)
        assert len(draft.acceptance) == len(draft.tokens)

    def test_each_likely_end_of_a_tree(self):
        twelve, quote, comma = (SMALL.index(text) for text in (b"12", b'"', b'",'))
        tree = Draft((twelve, quote, comma), (ROOT, 0, 0), None, ("ngram",) * 3, (0.9, 0.4, 0.5))
        draft = drafter().extended(sequence(self.SCHEMA, b'{"a": "'), tree)
        assert sorted(paths(draft)) == [b'12", "b": "', b'12", "b": "']
        assert draft.tokens[:3] == tree.tokens
        assert draft.parents[3] == 2  # the likelier end comes first

    def test_not_where_it_is_hardly_reached_nor_after_its_own(self):
        seq = sequence(self.SCHEMA, b'{"a": "')
        for draft in (self.other(b'12",', 0.3), self.other(b'12",', name="grammar"), self.other(b"12"), Draft()):
            assert drafter().extended(seq, draft).tokens == draft.tokens

    def test_not_without_a_grammar_nor_after_draws(self):
        draft = self.other(b'12",')
        assert drafter().extended(Sequence(1, [0], SamplingParams(max_tokens=4)), draft) is draft
        drawn = Draft(draft.tokens, draft.parents, torch.ones(len(draft), len(SMALL)), draft.sources, draft.acceptance)
        assert drafter().extended(sequence(self.SCHEMA, b'{"a": "'), drawn) is drawn

    @pytest.mark.parametrize(("written", "learned"), [(b'12", "', True), (b'ab1 "', False)])
    def test_it_is_learned_where_the_guess_before_it_held(self, written, learned):
        made, seq = drafter(), sequence(self.SCHEMA, b'{"a": "')
        made.extended(seq, self.other(b'12",'))
        seq.tokens += vocabulary().encode(written.decode())
        made.observe(Step(seq, (), Draft(), Verdict((), 0), None))
        assert (made._calibration.frequency(FIRST, 0.6) > 0.6) is learned


class TestOneToken:
    """Asking for one token gives what the mask says, without a mask."""

    @pytest.mark.parametrize("schema", [flat("a", "b"), flat("a", value={"type": "string"}), {"enum": ["ab", "abc"]}])
    def test_as_the_mask_says(self, schema):
        source = grammar("json_schema", json.dumps(schema))
        written: list[int] = []
        while True:
            matcher, masked = source.matcher([END]), source.matcher([END])
            for token in written:
                matcher.commit(token)
                masked.commit(token)
            mask = masked.mask().tolist()
            assert [matcher.allows((), token) for token in range(len(SMALL))] == mask
            ahead = next(token for token, fits in enumerate(mask) if fits)
            if ahead == END or len(written) > 12:
                break
            below = masked.mask((ahead,)).tolist()
            assert [matcher.allows((ahead,), token) for token in range(len(SMALL))] == below
            written.append(ahead)

    def test_nothing_after_what_is_forbidden(self):
        matcher = grammar("json_schema", json.dumps(flat("a"))).matcher([END])
        assert not matcher.allows((END,), 0)
        assert not matcher.allows((SMALL.index(b"}"),), 0)
