"""Tokenizers: from the metadata of a GGUF file, or from a folder. Nothing here runs code that came with a model.

What a file leaves unsaid is filled in as llama.cpp does, for files are made for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # GPT-2; what is left is a piece
_CASELESS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = (_WORDS,)
_DIGITS = (r"\p{N}", _WORDS)  # SmolLM, StarCoder, Command R: every digit by itself
_LLAMA3 = (_CASELESS % r"\p{N}{1,3}",)
_QWEN2 = (_CASELESS % r"\p{N}",)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")  # llama.cpp's, where a file says "default"
_SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "command-r": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "default": _DEFAULT,
}

_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_TURN_ENDS = (
    "<|im_end|>",  # ChatML: Qwen, SmolLM
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",  # Llama 3.1, before a tool answers
    "<|end|>",  # Phi
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)


def from_gguf(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """The tokenizer that a GGUF file describes; None when it describes none."""
    from transformers import PreTrainedTokenizerFast

    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in _BUILDERS:
        raise OutriderError(
            f"the file's tokenizer is of kind {model!r}; Outrider knows {', '.join(_BUILDERS)}: use the model's folder"
        )
    named = {name: text for name, key in _NAMED.items() if (text := _named(metadata, key)) is not None}
    try:
        tokenizer = _BUILDERS[model](metadata)
    except OutriderError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise OutriderError(f"the file's tokenizer is broken ({error!r}); download the file again") from None
    tokenizer.add_special_tokens(list(_added(metadata, _CONTROL)))
    tokenizer.add_tokens(list(_added(metadata, _USER_DEFINED)))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos_token=_adds_bos(metadata),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        **named,
    )


def from_folder(path: str | Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a Hugging Face folder; None when it has no tokenizer files, for ids need none."""
    folder = Path(path).resolve()  # transformers asks the hub about a short relative path
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = " ".join(str(error).split())[:200]
        raise OutriderError(f"the tokenizer files in {folder} cannot be read ({reason}); download them again") from None


def end_ids(tokenizer: PreTrainedTokenizerBase, metadata: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Ids after which an answer is over: many files name one end, while chat turns end with another."""
    said = [(metadata or {}).get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    known = [
        id for id, token in tokenizer.added_tokens_decoder.items() if token.special and token.content in _TURN_ENDS
    ]
    return frozenset(id for id in (tokenizer.eos_token_id, *said, *known) if id is not None)


def _byte_level(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    splits = _splits(metadata)
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    # Llama 3 takes a piece that is a token as it is, even where its merges would end elsewhere
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), merges, ignore_merges=splits is _LLAMA3))
    if splits is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(splits)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    vocabulary = _vocabulary(metadata)
    unknown = _named(metadata, "unknown") or metadata["tokenizer.ggml.tokens"][0]
    merges = _merges(metadata)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    decoding = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoding, decoders.Strip(" ", 1, 0)] if prefix else decoding)
    return tokenizer


_BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair with the best union: every way to cut a token in two, best score first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    best = {token: score for token, score, type in zip(tokens, scores, types, strict=True) if type == _NORMAL}
    pairs = [
        (token[:cut], token[cut:])
        for token in best
        for cut in range(1, len(token))
        if token[:cut] in best and token[cut:] in best
    ]
    return sorted(pairs, key=lambda pair: (-best[pair[0] + pair[1]], -len(pair[0])))


def _splits(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    name = metadata.get("tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise OutriderError(
            f"the file splits text by the rule {name!r}, which Outrider does not know (it knows {', '.join(_SPLITS)}); "
            f"use the model's Hugging Face folder, or a file made by a current converter"
        )
    return _SPLITS[name]


def _pre_tokenizer(splits: tuple[str, ...]) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _added(metadata: Mapping[str, Any], type: int) -> Iterator[AddedToken]:
    from tokenizers import AddedToken

    types = metadata.get("tokenizer.ggml.token_type", ())
    for token, of in zip(metadata["tokenizer.ggml.tokens"], types, strict=False):
        if of == type:
            yield AddedToken(token, normalized=False, special=type == _CONTROL)


def _named(metadata: Mapping[str, Any], key: str) -> str | None:
    id, tokens = metadata.get(f"tokenizer.ggml.{key}_token_id"), metadata.get("tokenizer.ggml.tokens", ())
    if id is None:
        return None
    if not 0 <= id < len(tokens):
        raise OutriderError(f"the file's {key} token is {id} but its vocabulary has {len(tokens)}; download it again")
    return tokens[id]


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    byte_level = metadata["tokenizer.ggml.model"] == "gpt2"
    usual = not byte_level or _splits(metadata) is _LLAMA3
    return metadata.get("tokenizer.ggml.add_bos_token", usual)
