"""Tokenizers trained here, written into a GGUF file, and demanded back token for token."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import byte_metadata, write_llama
from hypothesis import given, settings, strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from outrider.core.errors import OutriderError
from outrider.models.export import to_transformers
from outrider.models.gguf import GGUFFile
from outrider.models.tokenizer import LONG, GGUFTokenizer, decoder_of, encode_all, end_ids, from_folder, from_gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog doesn't mind: it's 1234567 to 89.",
    "for i in range(100):\n    print(i ** 2)\n\n    if i == 42:\n\t\treturn None  # don't\r\n",
    "Größe, café, naïve, Straße; привет мир, привет дом; 日本語 日本 中文",
    "WE'LL THEY'RE we'll they're ... --- !!! ((( ))) <html></html> $5 + $6 <= $11",
] * 4
NASTY = [
    "",
    " ",
    "\n",
    "   leading and trailing   ",
    "a\t\tb  c   d\n\n\n e \r\n\r\n f\u00a0g\u3000h",
    "1234567890 12 3 a1b22c333 ٣٤٥ Ⅷ ½",
    "don't DON'T I'Ll we'VE they'Re",
    "日本語のテキスト。中文，測試 한국어",
    "👍🏽 👩‍👩‍👧‍👦 e\u0301 a\u0300 ﬁ",
    "العربية עברית हिन्दी ไทย",
    "x={'a':[1,2]}; if(x!=y){z**=2}//..\n`~|^$+<=>",
    "\x00\x01\x7f\ufeff\u200b",
    "<|im_start|>user\nhi <|im_end|>\n<|im_start|><|im_end|> <tool> x<tool>y",
    "<s> </s> <unk> <0x0A> ▁",
    "word" * 100,
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER = ["<tool>"]
ALPHABET = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
PUNCTUATION = "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"


def regex(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level()]),
    "llama-bpe": lambda: regex(ALPHABET + "\\p{N}{1,3}" + PUNCTUATION),
    "qwen2": lambda: regex(ALPHABET + "\\p{N}" + PUNCTUATION),
}


def train_byte_level(pre: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = byte_level()  # the loosest rule, so that the vocabulary shows every other one
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500, special_tokens=SPECIAL + USER, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_sentencepiece(prefix: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *spaces] if prefix else spaces)
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    reserved = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    # Words apart while training only: Llama's own vocabulary was learned so.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁*[^▁]+"), "isolated")
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=600, special_tokens=reserved, show_progress=False)
    )
    state = json.loads(tokenizer.to_str())
    state["pre_tokenizer"] = None
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    return Tokenizer.from_str(json.dumps(state))


def tokens_of(tokenizer: Tokenizer) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def merges_of(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]


def byte_level_metadata(pre: str, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = tokens_of(tokenizer)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t in USER else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges_of(tokenizer)],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_metadata(tokenizer: Tokenizer, prefix: bool) -> dict[str, Any]:
    tokens = tokens_of(tokenizer)
    order = {"".join(pair): -float(rank) for rank, pair in reversed(list(enumerate(merges_of(tokenizer))))}
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [order.get(token, -10000.0) for token in tokens],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": prefix,
    }


def through_file(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """The same metadata after a trip through a GGUF file of a model with no layers."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    for name in ("block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", 0)
    for name in ("embedding_length", "context_length", "attention.head_count"):
        writer.add_uint32(f"llama.{name}", 2 if name != "attention.head_count" else 1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        writer.add_key_value(key, value, kind)
    writer.add_tensor("token_embd.weight", np.ones((4, 2), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFFile(folder / "model.gguf").metadata


def build(metadata: dict[str, Any]) -> GGUFTokenizer:
    tokenizer = from_gguf(metadata)
    assert tokenizer is not None
    return tokenizer


def pieces_of(tokenizer: GGUFTokenizer, text: str) -> list[str]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens


METADATA_SPM = sentencepiece_metadata(train_sentencepiece(True), True)
TOKENIZER_SPM = build(METADATA_SPM)
METADATA = byte_level_metadata("smollm", train_byte_level("smollm"))


@pytest.fixture(scope="module", params=PRE_TOKENIZERS)
def byte_level_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, GGUFTokenizer]:
    reference = train_byte_level(request.param)
    metadata = byte_level_metadata(request.param, reference)
    return reference, build(through_file(tmp_path_factory.mktemp("gguf"), metadata))


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "bare"])
def sentencepiece_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, GGUFTokenizer]:
    reference = train_sentencepiece(request.param)
    bos = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    reference.post_processor = bos
    metadata = sentencepiece_metadata(reference, request.param)
    return reference, build(through_file(tmp_path_factory.mktemp("gguf"), metadata))


def assert_equal(reference: Tokenizer, tokenizer: GGUFTokenizer, text: str) -> None:
    ids = reference.encode(text).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=False)


def test_a_long_text_is_encoded_alike(
    byte_level_pair: tuple[Tokenizer, GGUFTokenizer], sentencepiece_pair: tuple[Tokenizer, GGUFTokenizer]
) -> None:
    text = " ".join(NASTY)
    text *= 1 + LONG // len(text)
    assert_equal(*byte_level_pair, text)
    assert_equal(*sentencepiece_pair, text)


def test_many_texts_at_once_are_encoded_alike(byte_level_pair: tuple[Tokenizer, GGUFTokenizer]) -> None:
    texts = ["a text", "", "another one, with <|im_start|> in it", "ümlaut " * 50]
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level_pair[0])
    for tokenizer in (theirs, byte_level_pair[1]):
        for special in (False, True):
            each = [list(tokenizer.encode(text, add_special_tokens=special)) for text in texts]
            assert encode_all(tokenizer, texts, add_special_tokens=special) == each


def test_while_a_long_text_is_encoded_other_threads_run(byte_level_pair: tuple[Tokenizer, GGUFTokenizer]) -> None:
    """The engine's, above all: a prompt of 4 MB once stopped every stream for seconds."""
    stop, ran = threading.Event(), threading.Event()

    def run() -> None:
        while not stop.is_set():
            ran.set()
            time.sleep(0.0001)

    thread, interval = threading.Thread(target=run), sys.getswitchinterval()
    thread.start()
    try:
        sys.setswitchinterval(10.0)  # seconds: it runs only where this thread lets go of the interpreter itself
        ran.clear()
        byte_level_pair[1].encode("ab" * 50_000)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


@pytest.mark.parametrize("text", NASTY)
def test_byte_level(byte_level_pair: tuple[Tokenizer, GGUFTokenizer], text: str) -> None:
    assert_equal(*byte_level_pair, text)


@settings(deadline=None)
@given(text=st.text())
def test_byte_level_on_any_text(byte_level_pair: tuple[Tokenizer, GGUFTokenizer], text: str) -> None:
    assert_equal(*byte_level_pair, text)


@pytest.mark.parametrize("text", NASTY)
def test_sentencepiece(sentencepiece_pair: tuple[Tokenizer, GGUFTokenizer], text: str) -> None:
    assert_equal(*sentencepiece_pair, text)


@settings(deadline=None)
@given(text=st.text(st.sampled_from("thedogfxi n'\n12ü日👍<>")))
def test_sentencepiece_joins_the_best_pair(text: str) -> None:
    """SentencePiece's own rule, written plainly: while a pair of neighbours is a token, join the best-scored one."""
    score = dict(zip(METADATA_SPM["tokenizer.ggml.tokens"], METADATA_SPM["tokenizer.ggml.scores"], strict=True))
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in score]
        if not joins:
            break
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    expected = [
        token
        for piece in pieces
        for token in ([piece] if piece in score else [f"<0x{byte:02X}>" for byte in piece.encode()])
    ]
    assert pieces_of(TOKENIZER_SPM, text) == expected


def test_default_rule_of_llama_cpp() -> None:
    tokenizer = build(METADATA | {"tokenizer.ggml.pre": "default"})
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("it's 1234567, ok?!  x")
    assert [piece for piece, _ in pieces] == ["it", "'", "s", "Ġ", "123", "456", "7", ",", "Ġok", "?!", "Ġ", "Ġx"]


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("gpt-2", 4)])
def test_llama_3_takes_whole_tokens_first(pre: str, count: int) -> None:
    tokens = [*METADATA["tokenizer.ggml.tokens"], "zqzq"]  # no merge leads there
    types = [*METADATA["tokenizer.ggml.token_type"], 1]
    change = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.pre": pre}
    assert len(build(METADATA | change).encode("zqzq", add_special_tokens=False)) == count


def test_typed_names_of_bytes_are_text() -> None:
    change = {
        "tokenizer.ggml.tokens": [*METADATA_SPM["tokenizer.ggml.tokens"], "<0", "<0x", "<0x0", "0>"],
        "tokenizer.ggml.scores": [*METADATA_SPM["tokenizer.ggml.scores"], 4.0, 3.0, 2.0, 1.0],
        "tokenizer.ggml.token_type": [*METADATA_SPM["tokenizer.ggml.token_type"], 1, 1, 1, 1],
    }
    assert pieces_of(build(METADATA_SPM | change), "<0x00>")[1:] == ["<0x0", "0>"]


def wrapped(metadata: dict[str, Any], adds: dict[str, bool]) -> tuple[GGUFTokenizer, PreTrainedTokenizerFast]:
    """Ours, and what transformers makes of the same parts: it is told the roles, and adds BOS and EOS itself."""
    ours = build(metadata | {f"tokenizer.ggml.{key}": value for key, value in adds.items()})
    state = json.loads(ours.backend_tokenizer.to_str())
    types = metadata["tokenizer.ggml.token_type"]
    state["added_tokens"] = [token for token in state["added_tokens"] if types[token["id"]] in (3, 4)]
    parts = Tokenizer.from_str(json.dumps(state))
    return ours, PreTrainedTokenizerFast(
        tokenizer_object=parts, clean_up_tokenization_spaces=False, **ours.special_tokens_map, **adds
    )


@pytest.mark.parametrize("eos", [True, False])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("metadata", [METADATA, METADATA_SPM], ids=["byte level", "sentencepiece"])
def test_it_does_what_transformers_would(metadata: dict[str, Any], bos: bool, eos: bool) -> None:
    adds = {"add_bos_token": bos, "add_eos_token": eos}
    types = [*metadata["tokenizer.ggml.token_type"]]
    types[metadata["tokenizer.ggml.eos_token_id"]] = 1  # it has a role, and so is no text
    ours, theirs = wrapped(metadata | {"tokenizer.ggml.token_type": types}, adds)
    assert ours.get_vocab() == theirs.get_vocab()
    assert {id: str(token) for id, token in ours.added_tokens_decoder.items()} == {
        id: str(token) for id, token in theirs.added_tokens_decoder.items()
    }
    assert (ours.bos_token_id, ours.eos_token_id, len(ours)) == (theirs.bos_token_id, theirs.eos_token_id, len(theirs))
    assert end_ids(ours) == end_ids(theirs)
    for text in NASTY:
        for flag in (True, False):
            ids = ours.encode(text, add_special_tokens=flag)
            assert ids == theirs.encode(text, add_special_tokens=flag)
            pieces = [ids, *([id] for id in ids), *map(list, pairwise(ids))]
            for piece in pieces:
                assert ours.decode(piece, skip_special_tokens=flag) == theirs.decode(piece, skip_special_tokens=flag)


def test_bos_without_a_token_for_it() -> None:
    said = {key: value for key, value in METADATA.items() if "bos_token_id" not in key}
    tokenizer = build(said | {"tokenizer.ggml.add_bos_token": True})
    assert tokenizer.bos_token_id is None
    assert tokenizer.encode("dog") == tokenizer.encode("dog", add_special_tokens=False)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (METADATA, False),
        (METADATA | {"tokenizer.ggml.add_bos_token": True}, True),
        (METADATA | {"tokenizer.ggml.add_bos_token": None}, False),
        (METADATA | {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, True),
        (METADATA_SPM, True),
        (METADATA_SPM | {"tokenizer.ggml.add_bos_token": False}, False),
    ],
)
def test_bos(metadata: dict[str, Any], expected: bool) -> None:
    said = {key: value for key, value in metadata.items() if value is not None}
    tokenizer = build(said)
    assert (tokenizer.encode("dog")[:1] == [tokenizer.bos_token_id]) is expected
    assert tokenizer.encode("dog", add_special_tokens=False)[0] != tokenizer.bos_token_id


def test_named_tokens() -> None:
    tokenizer = build(METADATA | {"tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 1})
    assert tokenizer.special_tokens_map == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_start|>",
    }
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.decode([2, 3], skip_special_tokens=True) == "<tool>"  # user defined is text, control is not
    assert len(tokenizer) == len(METADATA["tokenizer.ggml.tokens"])


def test_end_ids() -> None:
    tokenizer = build(METADATA)
    assert end_ids(tokenizer, METADATA) == {0, 2}  # <|endoftext|> is said, <|im_end|> is known
    assert end_ids(tokenizer, METADATA | {"tokenizer.ggml.eot_token_id": 7}) == {0, 2, 7}
    assert end_ids(tokenizer) == {0, 2}
    as_text = METADATA | {"tokenizer.ggml.token_type": [3, 3, 4, *METADATA["tokenizer.ggml.token_type"][3:]]}
    assert end_ids(build(as_text), as_text) == {0}
    assert end_ids(TOKENIZER_SPM, METADATA_SPM) == {2}


def test_chat_template() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    tokenizer = build(METADATA | {"tokenizer.chat_template": template})
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_broken_chat_template_does_not_keep_the_model_from_prompts() -> None:
    tokenizer = build(METADATA | {"tokenizer.chat_template": "{% for %}"})
    assert tokenizer.decode(tokenizer.encode("the dog")) == "the dog"
    with pytest.raises(OutriderError, match="broken"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)


def test_a_file_without_tokenizer() -> None:
    assert from_gguf({}) is None
    assert from_gguf({"tokenizer.ggml.model": "no_vocab"}) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "gpt2, llama"),
        ({"tokenizer.ggml.pre": "martian"}, "smollm"),
        ({"tokenizer.ggml.merges": ["zz qq"]}, "download"),
        ({"tokenizer.ggml.merges": ["zz"]}, "download"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "vocabulary has"),
        ({"tokenizer.ggml.model": "llama"}, "download"),  # no scores
    ],
)
def test_refusals(change: dict[str, Any], words: str) -> None:
    with pytest.raises(OutriderError, match=words) as caught:
        from_gguf(METADATA | change)
    assert "\n" not in str(caught.value)


def test_a_folder(tmp_path: Path) -> None:
    assert from_folder(tmp_path) is None
    tokenizer = build(METADATA)
    to_transformers(tokenizer).save_pretrained(tmp_path)
    loaded = from_folder(tmp_path)
    assert loaded is not None
    for text in NASTY:
        assert loaded.encode(text) == tokenizer.encode(text)
    assert end_ids(loaded) == {0, 2}


def test_broken_folder(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(OutriderError, match="cannot be read") as caught:
        from_folder(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_a_folder_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    auto = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(auto))
    with pytest.raises(OutriderError):
        from_folder(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.real
def test_smollm2() -> None:
    from outrider.models.sources import pull

    metadata = GGUFFile(pull("smollm2-135m")).metadata
    tokenizer = build(metadata)
    assert len(tokenizer) == 49152
    assert tokenizer.encode("Hello  world 12345") == [19556, 216, 905, 216, 33, 34, 35, 36, 37]
    assert end_ids(tokenizer, metadata) == {0, 2}
    for text in NASTY:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    theirs = to_transformers(tokenizer)
    for text in NASTY:
        assert theirs.encode(text) == tokenizer.encode(text)
        for roles in (["user"], ["system", "user", "assistant"], ["assistant"]):
            chat = [{"role": role, "content": text} for role in roles]
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == expected


def test_a_gguf_file_is_run_without_transformers(tmp_path: Path) -> None:
    """Importing it would cost a second and 22 MB."""
    metadata = byte_metadata() | {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    vocab = len(metadata["tokenizer.ggml.tokens"])
    file = write_llama(tmp_path / "tiny.gguf", vocab, metadata)
    done = subprocess.run([sys.executable, "-c", RUN, str(file)], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.stdout.split() == ["True", "True", "False"]


RUN = """
import sys
from outrider import LLM, SamplingParams
params = SamplingParams(max_tokens=4, ignore_eos=True)
with LLM(sys.argv[1], device="cpu") as llm:
    print(len(llm.generate("the path", params).token_ids) == 4)
    print(len(llm.chat([{"role": "user", "content": "the path"}], params).token_ids) == 4)
print("transformers" in sys.modules)
"""


class TestDecoding:
    """`decoder_of` leaves out what transformers does around the decoding, and nothing that changes the text."""

    def tokenizer(self, kind: type = PreTrainedTokenizerFast, **options: Any) -> Any:
        trained = train_byte_level("gpt-2")
        return kind(tokenizer_object=trained, eos_token="<|endoftext|>", **options)

    @pytest.mark.parametrize("cleans", [False, True])
    def test_the_same_text(self, cleans: bool) -> None:
        tokenizer = self.tokenizer(clean_up_tokenization_spaces=cleans)
        decode = decoder_of(tokenizer)
        for text in [*CORPUS, "a .b , c do n't", "<|endoftext|>é <|endoftext|>x"]:
            ids = tokenizer.encode(text)
            for begin, end in ((0, len(ids)), (1, len(ids)), (0, 3), (2, 2)):
                assert decode(ids[begin:end]) == tokenizer.decode(ids[begin:end], skip_special_tokens=True)

    def test_the_library_below_is_asked_where_nothing_is_added(self) -> None:
        class Loud(PreTrainedTokenizerFast):
            def _decode(self, *args: Any, **options: Any) -> str:
                return super()._decode(*args, **options).upper()

        assert decoder_of(self.tokenizer(Loud))(self.tokenizer().encode("a fox")) == "A FOX"
        plain = self.tokenizer(clean_up_tokenization_spaces=False)
        assert decoder_of(plain).func.__self__ is plain.backend_tokenizer  # type: ignore[attr-defined]
