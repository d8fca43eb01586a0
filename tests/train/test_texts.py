"""What the target is asked to write: requests that differ, whole questions, sources that translations are of; and that
conversations wait in the cache while a head is measured."""

import itertools
from collections import Counter
from random import Random

import pytest
import torch

from outrider.models.load import LoadOptions, load
from outrider.train.data import wording, writer
from outrider.train.data.conversations import CODERS, SOURCED, USUAL, ChatFormat, conversation, mix_for
from outrider.train.data.corpus import CorpusFolder, CorpusInfo
from outrider.train.data.openers import DOCUMENT, is_whole, openers, pick
from outrider.train.job import TrainingJob
from outrider.train.results import Evaluator

WHERE = LoadOptions(torch.device("cpu"), torch.float32, 1 << 30)
END = 0


class Letters:
    """A tokenizer of characters, with a template of one letter around a turn."""

    chat_template = "it has one"

    def encode(self, text, add_special_tokens=False):
        return [ord(letter) for letter in text]

    def decode(self, tokens, skip_special_tokens=False):
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True):
        return "".join(f"<{message['content']}>" for message in messages)


CHAT = ChatFormat.of(Letters())


def played(section, say, seed=0):
    """The requests of a conversation that begins with that section, each as text, whether it is for an answer, and its
    temperature; `say`: what the target writes for it, without the token that ends it where that ends with "..."."""
    asked = []
    talk = conversation(CHAT, frozenset({END}), Random(seed), (), {section: 1.0})
    try:
        request = next(talk)
        while True:
            text = CHAT.text(request.tokens)
            asked.append((text, request.answer, request.temperature))
            words = say(text, request.answer)
            cut = words.endswith("...")
            request = talk.send([*map(ord, words.removesuffix("..."))] + ([] if cut else [END]))
    except StopIteration as end:
        return asked, end.value


class TestOpeners:
    def test_gaps_are_filled_in(self):
        found, random = openers(), Random(0)
        assert all(
            len(set(lines)) == len(lines) for name, lines in found.items() if name not in ("code", "translation")
        )
        assert all(DOCUMENT in line for name in SOURCED for line in found[name])
        for section in {*USUAL, *CODERS, *(form.section for form in SOURCED.values()), "followups", "manners"}:
            for _ in range(200):
                assert "{" not in pick(section, random).replace(DOCUMENT, "").replace("{{", ""), section

    def test_two_languages_differ(self):
        line = "Translate from {language} into {other}: {document}"
        assert line in openers()["translating"]
        for seed in range(300):
            words = pick("translating", Random(seed)).split()
            if words[:2] == ["Translate", "from"]:
                assert words[2] != words[4].rstrip(":")

    def test_a_mix_is_a_share_of_each(self):
        assert sum(USUAL.values()) == pytest.approx(1.0)
        assert sum(CODERS.values()) == pytest.approx(1.0)
        assert mix_for("Qwen2.5-Coder-1.5B") is CODERS

    def test_whole_requests(self):
        assert is_whole("Write a poem about water.")
        assert is_whole("Summarize: {document}")
        assert not is_whole("Tom buys")
        assert not is_whole("")


class TestWording:
    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("One. Two? Thr", "One. Two?"),
            ('He said "No." And', 'He said "No."'),
            ("It costs 1.5 eu", "It costs 1.5 eu"),
            ("a line\nand ano", "a line"),
            ("今天下雨。明天", "今天下雨。"),
            ("nothing ends", "nothing ends"),
        ],
    )
    def test_a_sentence_that_was_cut_is_left_out(self, text, left):
        assert wording.whole_sentences(text) == left

    def test_what_is_said_before_a_text_is_left_out(self):
        assert wording.passage("Sure, here it is:\n\nThe sea.\n") == "The sea."
        assert wording.passage("The sea: it is blue.") == "The sea: it is blue."
        assert wording.passage("Only this:") == "Only this:"

    def test_a_question_stands_alone(self):
        assert wording.question('Sure:\n\n**Question:** "Why is it so?"\n\nAnswer: because') == "Why is it so?"


class TestConversations:
    def test_whole_requests_are_asked_as_they_are(self):
        for seed in range(40):
            asked, texts = played("asking", lambda text, answer: "Why is the sea blue?", seed)
            assert [answer for _, answer, _ in asked] == [True, True]
            assert asked[1][0] == "<Why is the sea blue?>"
            assert len(texts) == 2

    @pytest.mark.parametrize("said", [" it adds.\nThe answer is 4.", " it adds. The answ..."])
    def test_a_turn_ends_with_its_line_and_has_no_sentence_that_was_cut(self, said):
        turns = set()
        for seed in range(60):
            asked, _ = played("coding", lambda text, answer: "yes" if answer else said, seed)
            turns |= {text for text, answer, _ in asked if answer and text.count("<") == 1 and "adds" in text}
        alone = [turn for turn in turns if "\n" not in turn]
        assert len(alone) > 10
        assert all(turn.endswith(" it adds.>") for turn in alone)

    def test_translations_are_of_texts_in_that_language(self):
        for seed in range(30):
            asked, _ = played("translating", lambda text, answer: "Ein Satz.", seed)
            (source, _, _), (wanted, _, _) = asked
            assert "Ein Satz." in wanted
            languages = [name for name in openers()["languages"] if name in wanted]
            assert any(name in source for name in openers()["languages"])
            assert any(name not in source for name in languages)

    def test_few_greedy_sources_are_the_same(self):
        """Of 20,000 conversations; before wishes were added, three in five were (docs/LOG.md)."""
        found, total = Counter(), 0
        for seed in range(20_000):
            talk = conversation(CHAT, frozenset({END}), Random(seed), (), {"documents": 1.0})
            request = next(talk)
            if not request.temperature:
                found[CHAT.text(request.tokens)] += 1
                total += 1
        assert total > 5_000
        assert len(found) > 0.7 * total


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load(str(tiny_folder), WHERE)


class Clock:
    """A budget of which a second is spent whenever somebody looks."""

    def __init__(self):
        self._seconds = itertools.count()

    @property
    def spent(self):
        return float(next(self._seconds))


class TestWriting:
    def writer(self, loaded):
        return writer.CorpusWriter(loaded, TrainingJob("eagle", writers=3), "cpu", ())

    def test_conversations_wait_while_others_are_measured(self, loaded, tmp_path):
        """What is written is the same as without a pause; a head is measured with the same model meanwhile."""

        def some(own, until):
            steps = iter(range(until))
            return own.some(0, lambda tokens: None, lambda: next(steps, None) is not None)

        pausing = self.writer(loaded)
        first = some(pausing, 40)
        before = dict(pausing._runner._running)
        Evaluator(loaded, ChatFormat.of(loaded.tokenizer), WHERE, 512).measure("none", [("a", "the sea")], 8)
        assert pausing._runner._running == before
        second = some(pausing, 300)
        pausing.rest()
        going = self.writer(loaded)
        whole = some(going, 340)
        going.rest()
        talks = {*first.talks.tolist(), *second.talks.tolist()}
        assert len(talks) > 1
        for talk in talks:
            texts = [part.pick((part.talks == talk).nonzero().squeeze(1)) for part in (first, second, whole)]
            assert texts[0].tokens.tolist() + texts[1].tokens.tolist() == texts[2].tokens.tolist()

    @pytest.mark.parametrize(("cut", "end", "busy"), [(False, 6e3, True), (True, 6e3, False), (False, 3e2, False)])
    def test_what_runs_at_the_end_waits_or_is_cut(self, loaded, tmp_path, cut, end, busy):
        """In little time fewer have ended than run: those are cut, too."""
        own, info = self.writer(loaded), CorpusInfo("tiny", loaded.model.vocab_size, 0)
        info = writer.write_until(own, CorpusFolder(tmp_path), info, end, Clock(), lambda *said: None, cut)
        assert own._runner._engine.busy == busy
        assert info.tokens
        own.rest()
