"""A draft model of another vocabulary: its text is re-encoded, and the answer stays the target's own."""

import functools
import shutil

import pytest
import torch
from tiny import (
    Markov,
    assert_follows,
    continuations,
    greedy_by_transformers,
    new_engine,
    ours,
    outputs,
    plainly,
    reference,
    run,
)
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from outrider import LLM, OutriderError, drafters
from outrider.core.dice import Dice
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, RetokenizedModel
from outrider.drafters.retokenize import UNFINISHED, Translation, Words
from outrider.engine.scheduler import Limits
from outrider.models import sources
from outrider.models.tokenizer import GGUFTokenizer

TEXT = (
    "The ferryman counts his ropes: one for the wind, two for the current, three for the stones. "
    "At noon the ferry leaves; at dusk it returns, and the ropes are counted again.\n"
    "Der Fährmann zählt seine Seile. 🙂🚣 He writes 17 and 42 in the book, then    goes home.\n"
)
ODD = "naïve café 🙂👩‍👩‍👧 日本語のテキスト\n\n\t  x = {'a': [1, 2]}\r\n ﷽ ﹏ \u200b end   "
CHAT = ["<|begin|>", "<|end|>"]


def byte_level(size, special=(), digits=False):
    """A byte-level tokenizer of GPT-2's kind, or of SmolLM's, where every digit stands by itself."""
    bpe = Tokenizer(models.BPE())
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte]) if digits else byte
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        [TEXT] * 3,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return bpe


@functools.cache
def wide():
    """The target's: SmolLM's kind with a chat's marks."""
    return GGUFTokenizer(byte_level(420, CHAT, digits=True), {"eos_token": "<|end|>"})


@functools.cache
def narrow():
    """The draft model's: GPT-2's kind, fewer and other tokens, and another word for the end."""
    return GGUFTokenizer(byte_level(300, ["<|endoftext|>", "<|end|>"]), {"eos_token": "<|endoftext|>"})


@functools.cache
def spaced():
    """Llama's kind: a space before every text, characters that are not known as bytes, and a token that begins it."""
    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    bpe.decoder = decoders.Sequence(steps)
    bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    reserved = ["<unk>", "<s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    words = [TEXT.encode("ascii", "ignore").decode()]
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=400, special_tokens=reserved, show_progress=False))
    vocabulary = bpe.get_vocab()
    merges = sorted(
        ((a, b) for word in vocabulary if len(word) > 1 and word not in reserved for a, b in cuts(word, vocabulary)),
        key=lambda pair: vocabulary[pair[0] + pair[1]],
    )
    plain = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    plain.normalizer, plain.decoder = bpe.normalizer, bpe.decoder
    plain.add_special_tokens(["<s>"])
    return GGUFTokenizer(plain, {"bos_token": "<s>"}, add_bos_token=True)


def cuts(word, vocabulary):
    pairs = [(word[:i], word[i:]) for i in range(1, len(word))]
    return [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]


PAIRS = {
    "wide, narrow": (wide, narrow),
    "narrow, wide": (narrow, wide),
    "spaced": (spaced, wide),
    "to spaced": (wide, spaced),
}


@pytest.mark.parametrize("pair", PAIRS)
class TestReading:
    """The draft model sees what was committed, however that was cut."""

    def read(self, pair, tokens, steps):
        target, draft = (make() for make in PAIRS[pair])
        words, seq = Translation(target, draft), Sequence(0, [])
        for begin in range(0, len(tokens), steps):
            seq.tokens += tokens[begin : begin + steps]
            reading = words.read(seq)
        return draft, reading

    @pytest.mark.parametrize("steps", [1, 3, 1000])
    @pytest.mark.parametrize("text", [TEXT * 3, ODD, "a", "🙂"], ids=["text", "odd", "a", "smile"])
    def test_the_tokens_are_those_of_the_whole_text(self, pair, text, steps):
        target = PAIRS[pair][0]()
        draft, reading = self.read(pair, target.encode(text), steps)
        assert reading.seq.tokens == draft.encode(target.decode(target.encode(text, add_special_tokens=False)))

    @pytest.mark.parametrize("seed", range(8))
    def test_any_tokens_at_all(self, pair, seed):
        """Random tokens are broken characters and words cut anywhere: the text is what counts."""
        target = PAIRS[pair][0]()
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(2, len(target), (60,), generator=random).tolist()
        draft, reading = self.read(pair, tokens, 1 + seed % 4)
        assert 60 - reading.read < 4
        if pair == "wide, narrow":  # others lose spaces at the edges
            assert draft.decode(reading.seq.tokens).rstrip(UNFINISHED) == target.decode(tokens).rstrip(UNFINISHED)

    def test_a_long_text_is_not_encoded_again(self, pair):
        target, draft = (make() for make in PAIRS[pair])
        words = Translation(target, draft)
        seq, most = Sequence(0, target.encode(TEXT * 20)), 0
        words.read(seq)

        class Counting(Words):
            def encode(self, text):
                nonlocal most
                most = max(most, len(text))
                return super().encode(text)

        words._draft, words._target = Counting(draft), Counting(target)
        for token in target.encode(TEXT, add_special_tokens=False):
            seq.tokens.append(token)
            words.read(seq)
            words.write(seq, draft.encode(" and", add_special_tokens=False))
        assert 0 < most < 300 < len(TEXT * 20)


@pytest.mark.parametrize("pair", PAIRS)
class TestWriting:
    """What the draft model adds arrives in the tokens that the target would write."""

    def test_the_rest_of_a_text(self, pair):
        target, draft = (make() for make in PAIRS[pair])
        tokens, right = target.encode(TEXT), 0
        for known in range(1, len(tokens) - 12):
            words, seq = Translation(target, draft), Sequence(0, tokens[:known])
            reading = words.read(seq)
            rest = target.decode(tokens).removeprefix(target.decode(tokens[: reading.read]))
            place = rest.find(" ", 10)  # whole words
            guessed = words.write(seq, Words(draft).apart(rest[:place]))
            right += len(guessed) > 1 and guessed == tokens[known : known + len(guessed)]
        assert right > 0.9 * (len(tokens) - 13)

    def test_a_character_that_was_begun(self, pair):
        target, draft = (make() for make in PAIRS[pair])
        tokens = target.encode("now 🙂 or")
        split = [i for i in range(len(tokens)) if target.decode(tokens[:i]).endswith(UNFINISHED)]
        for known in split:
            words, seq = Translation(target, draft), Sequence(0, tokens[:known])
            reading = words.read(seq)
            assert known - 4 < reading.read < known
            space = "" if target.decode(tokens[: reading.read]).endswith(" ") else " "
            assert words.write(seq, Words(draft).apart(f"{space}🙂 or")) == tokens[known:]
            assert words.write(seq, Words(draft).apart(f"{space}or")) == []  # the committed bytes rule it out
        assert split or target is not spaced()

    def test_a_character_that_is_not_finished_is_not_guessed(self, pair):
        target, draft = (make() for make in PAIRS[pair])
        words, seq = Translation(target, draft), Sequence(0, target.encode("now"))
        words.read(seq)
        ahead = draft.encode("now 🙂")[len(draft.encode("now")) :]
        if draft.decode(ahead[:-1]).endswith(UNFINISHED):
            assert target.decode(words.write(seq, ahead[:-1])).strip() == ""
        assert target.decode(words.write(seq, ahead)).strip() == "🙂"


class TestMarks:
    def test_one_that_both_have(self):
        words, seq = Translation(wide(), narrow()), Sequence(0, wide().encode("<|begin|>noon<|end|>"))
        reading = words.read(seq)
        assert narrow().decode(reading.seq.tokens) == "<|begin|>noon<|end|>"
        assert reading.seq.tokens[-1] == narrow().backend_tokenizer.token_to_id("<|end|>")
        assert words.write(seq, reading.seq.tokens[-1:]) == [wide().eos_token_id]

    def test_one_that_the_target_lacks_ends_the_draft(self):
        words, seq = Translation(wide(), narrow()), Sequence(0, wide().encode("at noon"))
        words.read(seq)
        ahead = narrow().encode(" the<|endoftext|> ferry")
        assert wide().decode(words.write(seq, ahead)) == " the"

    def test_each_model_begins_a_text_in_its_own_way(self):
        words = Translation(wide(), spaced())
        assert words.read(Sequence(0, wide().encode("noon"))).seq.tokens == spaced().encode("noon")
        words = Translation(spaced(), wide())
        assert words.read(Sequence(0, spaced().encode("noon"))).seq.tokens == wide().encode("noon")
        assert words.read(Sequence(1, spaced().encode(""))).seq.tokens == []

    def test_nothing_but_a_beginning(self):
        words, seq = Translation(spaced(), spaced()), Sequence(0, spaced().encode(""))
        assert words.read(seq).seq.tokens == seq.tokens
        assert words.write(seq, spaced().encode("The ferry")[1:]) == spaced().encode("The ferry")[1:]

    def test_a_token_that_was_cut_too_early_is_continued(self):
        """The target wrote a part of a word that it usually writes whole: the rest is still worth a guess."""
        word = wide().encode(" ropes")
        assert len(word) == 1
        seq = Sequence(0, wide().encode("the") + wide().encode(" ro"))
        words = Translation(wide(), narrow())
        words.read(seq)
        assert wide().decode(words.write(seq, narrow().encode("pes are"))) == "pes are"
        seq = Sequence(1, spaced().encode("the ro"))
        words = Translation(spaced(), narrow())
        words.read(seq)
        assert spaced().decode([*seq.tokens, *words.write(seq, narrow().encode("pes are"))]).endswith("the ropes are")


# Whole models, taught to write the text: the two agree on it and on little else.


@functools.cache
def taught(make, seed, steps=70):
    tokenizer = make()
    model = reference("llama", seed=seed, vocab_size=len(tokenizer), initializer_range=0.08, num_hidden_layers=2)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    return model.requires_grad_(False), ours(model)


def target():
    return taught(wide, 3)


def drafter(length=4, draft=narrow, model=None):
    found = RetokenizedModel(model or taught(draft, 4)[1], draft(), wide())
    return drafters.build(
        f"draft_model:model=other,length={length}", BuildContext(target()[1], lambda name, quantize: found)
    )


def prompts():
    """Eight ragged ones: parts of the text, odd ones, tokens that are no text, one that ends inside a character."""
    smile = wide().encode("He writes 🙂")
    asked = [wide().encode(TEXT)[:n] for n in (1, 5, 17, 60)]
    return [*asked, wide().encode(ODD), smile[:-2], [7, 200, 250, 255, 199], wide().encode("<|begin|>noon<|end|>")]


COUNT = 24
SAMPLED = [
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=8, repetition_penalty=1.2),
    dict(temperature=0.9, min_p=0.05, logit_bias={3: 2.0}),
    dict(temperature=0.0, repetition_penalty=1.3),
]


@functools.cache
def greedy_answers():
    return [greedy_by_transformers(target()[0], tokens, COUNT) for tokens in prompts()]


@pytest.mark.parametrize("limits", [Limits(), Limits(batch=1), Limits(batch=3, chunk=4)], ids=str)
@pytest.mark.parametrize("draft", [narrow, spaced])
def test_greedy_output_is_that_of_transformers(limits, draft):
    seqs = [Sequence(i, list(tokens), SamplingParams(max_tokens=COUNT)) for i, tokens in enumerate(prompts())]
    engine = run(target()[1], drafter(draft=draft), seqs, limits)
    assert outputs(seqs) == greedy_answers()
    assert engine.stats.accepted > COUNT  # the text is known to both
    assert engine.stats.accepted < engine.stats.drafted


@pytest.mark.parametrize("length", [1, 4, 7])
@pytest.mark.parametrize("limits", [Limits(), Limits(batch=1)], ids=str)
def test_the_same_seed_gives_the_same_tokens(length, limits):
    params = [SamplingParams(seed=i, max_tokens=COUNT, **SAMPLED[i % 4]) for i in range(8)]
    alone = [plainly(target()[1], tokens, params[i], dice=Dice(i)) for i, tokens in enumerate(prompts())]
    seqs = [Sequence(i, list(tokens), params[i], dice=Dice(i)) for i, tokens in enumerate(prompts())]
    engine = run(target()[1], drafter(length), seqs, limits)
    assert outputs(seqs) == outputs(alone)
    assert engine.stats.accepted > 0


def test_a_draft_is_never_larger_than_its_room():
    """Even where few tokens of the draft model are many of the target's."""
    found = RetokenizedModel(target()[1], wide(), narrow())
    model = drafters.build(
        "draft_model:model=x,length=8", BuildContext(Markov(len(narrow())), lambda name, quantize: found)
    )
    seqs = [Sequence(i, narrow().encode(TEXT)[:40]) for i in range(4)]
    sizes = [len(draft) for draft in model.propose(seqs, [0, 1, 2, 50])]
    assert sizes[:3] == [0, 1, 2]
    assert sizes[3] > 8
    assert all(seq.tokens == narrow().encode(TEXT)[:40] for seq in seqs)  # drafters never write into a sequence
    for seq in seqs:
        model.forget(seq.id)


# Three letters: the target writes pairs of them too, the draft model writes them one by one.


@functools.cache
def letters(*pairs):
    vocabulary = {word: id for id, word in enumerate([*"abc", *pairs])}
    bpe = Tokenizer(models.BPE(vocabulary, [tuple(pair) for pair in pairs]))
    bpe.decoder = decoders.Fuse()
    return GGUFTokenizer(bpe, {})


LAWS = {
    "temperature": dict(temperature=0.7),
    "all": dict(temperature=1.1, top_k=5, top_p=0.95, min_p=0.02, repetition_penalty=1.2, bad_words=[[2, 3]]),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_every_short_continuation_has_its_exact_probability(rule, law):
    model, params, prompt = Markov(6, seed=1), SamplingParams(**LAWS[law], max_tokens=3), [0, 3, 2, 0, 1]
    found = RetokenizedModel(Markov(3, seed=2), letters(), letters("ab", "bc", "ca"))
    spelled = drafters.build("draft_model:model=x,length=4", BuildContext(model, lambda name, quantize: found))
    seqs = [Sequence(i, list(prompt), params, dice=Dice(1000 + i), rule=rule) for i in range(800)]
    engine = run(model, spelled, seqs, Limits(batch=1000, chunk=100_000))
    assert_follows(list(map(tuple, outputs(seqs))), continuations(model.logits, prompt, params, 3))
    assert 0 < engine.stats.accepted < engine.stats.drafted


class Watched:
    """A model, what its cache has seen, and how many rows it was fed."""

    def __init__(self, model):
        self.model, self.rows, self.seen = model, 0, {}

    def forward(self, feeds, layers=()):
        for feed in feeds:
            self.rows += len(feed.tokens)
            self.seen.setdefault(feed.id, []).extend(feed.tokens)
        return self.model.forward(feeds, layers)

    def crop(self, id, length, path=()):
        self.model.crop(id, length, path)
        self.seen[id] = self.seen.get(id, [])[:length]

    def __getattr__(self, name):
        return getattr(self.model, name)


class TestCache:
    @pytest.mark.parametrize("draft", [narrow, spaced])
    def test_it_holds_the_text_and_what_was_guessed_after_it(self, draft):
        model = Watched(taught(draft, 4)[1])
        words = drafter(draft=draft, model=model)
        seqs = [Sequence(i, list(tokens), SamplingParams(max_tokens=COUNT)) for i, tokens in enumerate(prompts())]
        engine = new_engine(target()[1], words)
        for seq in seqs:
            engine.add(seq)
        while engine.busy:
            engine.step()
            for id, reading in words._translation._readings.items():
                own, text = reading.seq.tokens, wide().decode(seqs[id].tokens[: reading.read])
                assert model.seen[id] == [*own, *reading.ahead][: model.length(id)]
                assert model.length(id) >= len(own)
                assert own == draft().encode(text) or UNFINISHED in text

    def test_what_was_kept_is_not_run_again(self):
        model = Watched(taught(narrow, 4)[1])
        seq = Sequence(0, wide().encode(TEXT)[:40], SamplingParams(max_tokens=60))
        run(target()[1], drafter(model=model), [seq])
        assert seq.stats.accepted > 20
        text = len(narrow().encode(wide().decode(seq.tokens)))
        assert model.rows < text + 5 * seq.stats.drafts  # the last token again, and four guesses

    def test_nothing_stays_when_sequences_end_or_are_cancelled(self):
        model = taught(narrow, 4)[1]
        words = drafter(model=model)
        engine = new_engine(target()[1], words)
        for i, tokens in enumerate(prompts()):
            engine.add(Sequence(i, list(tokens), SamplingParams(max_tokens=3 + i)))
        for _ in range(3):
            engine.step()
        for i in range(8):
            engine.cancel(i)
        assert not engine.busy
        assert not words._translation._readings
        assert not words._written
        assert all(model.length(i) == 0 for i in range(8))

    def test_too_little_memory_or_context_means_no_drafts(self):
        small = ours(reference("llama", vocab_size=len(narrow())), memory=400_000)
        short = ours(reference("llama", vocab_size=len(narrow()), max_position_embeddings=32))
        long = wide().encode(TEXT)[:90]
        assert small.capacity < 8 * len(narrow().encode(TEXT))
        for model in (small, short):
            seqs = [Sequence(i, list(long), SamplingParams(max_tokens=8)) for i in range(8)]
            engine = run(target()[1], drafter(model=model), seqs)
            assert engine.stats.drafted == 0
            assert outputs(seqs) == [greedy_by_transformers(target()[0], long, 8)] * 8


def test_of_folders(tiny_folder, tiny_stranger, tmp_path):
    """By name, and with the tokenizer named beside it."""
    bare = tmp_path / "bare"
    shutil.copytree(tiny_stranger, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
    with LLM(str(tiny_folder), draft="none", pace=False, threads=1, cache_memory=0.05) as llm:
        plain = llm.generate("the red fox 🙂", params)
        for spec in (f"model={tiny_stranger}", f"model={bare},tokenizer={tiny_stranger}"):
            result = llm.generate("the red fox 🙂", params, draft=f"draft_model:{spec}")
            assert (result.token_ids, result.stats.drafted > 0) == (plain.token_ids, True)
        with pytest.raises(OutriderError, match="has no tokenizer"):
            llm.generate("the", params, draft=f"draft_model:model={bare},tokenizer={bare}")


@pytest.mark.real
def test_a_small_stranger_drafts_for_smollm2(tiny_stranger):
    try:
        sources.pull("smollm2-135m")
    except OutriderError as error:
        pytest.skip(f"the weights cannot be had here: {error}")
    asked = [[{"role": "user", "content": text}] for text in ("Count to ten.", "Schreibe ein Gedicht über 🙂.")]
    with LLM("smollm2-135m", draft="none", pace=False) as llm:
        for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=5)):
            plain = llm.chat(asked, params)
            drafted = llm.chat(asked, params, draft=f"draft_model:model={tiny_stranger},length=3")
            assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
            assert all(result.stats.drafted for result in drafted)
