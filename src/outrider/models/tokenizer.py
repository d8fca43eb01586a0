"""Tokenizers: from the metadata of a GGUF file, or from a folder. Nothing here runs code that came with a model.

What a file leaves unsaid is filled in as llama.cpp does, for files are made for it.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from outrider.core.errors import OutriderError, one_line, quoted

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer as Backend
    from tokenizers.pre_tokenizers import PreTokenizer

    from outrider.models.chat_template import ChatTemplate

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"  # GPT-2; the rest is a word too
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
_BY_FILE = ("TokenizersBackend", "PreTrainedTokenizerFast")  # classes that do all as tokenizer.json says
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)

# Characters from which on a text is encoded as a batch of one: only then does the library let other threads of Python
# run meanwhile (the engine's, above all). Below, a text takes a few milliseconds, and the call itself less.
LONG = 8192


class Tokenizer(Protocol):
    """What is used of a tokenizer, under the names of transformers, whose tokenizers serve as well."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def get_vocab(self) -> dict[str, int]: ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> str: ...


class GGUFTokenizer:
    """The tokenizer of a GGUF file. Not one of transformers: importing that costs a second and 22 MB."""

    def __init__(
        self,
        backend: Backend,
        special_tokens_map: Mapping[str, str],
        chat_template: str | None = None,
        add_bos_token: bool = False,
        add_eos_token: bool = False,
    ) -> None:
        """`special_tokens_map`: what the file has of bos_token, eos_token, unk_token and pad_token."""
        self.backend_tokenizer, self.special_tokens_map = backend, dict(special_tokens_map)
        self.chat_template, self.add_bos_token, self.add_eos_token = chat_template, add_bos_token, add_eos_token
        self.bos_token_id, self.eos_token_id = self._id("bos_token"), self._id("eos_token")
        self._before = [self.bos_token_id] if add_bos_token and self.bos_token_id is not None else []
        self._after = [self.eos_token_id] if add_eos_token and self.eos_token_id is not None else []

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = self._ids(text)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Many texts at once, on all cores."""
        found = [each.ids for each in self.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]
        return [[*self._before, *ids, *self._after] for ids in found] if add_special_tokens else found

    def _ids(self, text: str) -> list[int]:
        if len(text) < LONG:
            return self.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.backend_tokenizer.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> str:
        """The text of a chat; `extra` are more variables for the template."""
        variables = _template_variables(self.special_tokens_map, tokenize, add_generation_prompt, extra)
        return self._template.render(messages, variables)

    @cached_property
    def _template(self) -> ChatTemplate:
        """Compiled when first asked for: with a broken template a model can still continue a prompt."""
        from outrider.models.chat_template import ChatTemplate

        if self.chat_template is None:
            raise OutriderError("the model has no chat template; give a prompt instead of messages (--raw)")
        return ChatTemplate(self.chat_template)

    def _id(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self.backend_tokenizer.token_to_id(token)


def encode_all(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Many texts at once, on all cores where the tokenizer can."""
    if isinstance(tokenizer, GGUFTokenizer):
        return tokenizer.encode_all(texts, add_special_tokens=add_special_tokens)
    if getattr(tokenizer, "is_fast", False) and callable(tokenizer):
        return list(tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"])
    return [list(tokenizer.encode(text, add_special_tokens=add_special_tokens)) for text in texts]


def from_gguf(metadata: Mapping[str, Any]) -> GGUFTokenizer | None:
    """The tokenizer that a GGUF file describes; None when it describes none."""
    _check_types(metadata)
    model = metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model not in _BUILDERS:
        raise OutriderError(
            f"the file's tokenizer is of kind {quoted(model)}; Outrider knows {', '.join(_BUILDERS)}: "
            "use the model's folder"
        )
    named = {name: text for name, key in _NAMED.items() if (text := _named(metadata, key)) is not None}
    try:
        backend = _BUILDERS[model](metadata)
        _add(backend, metadata, named.values())
    except OutriderError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        reason = one_line(error, named=True)
        raise OutriderError(f"the file's tokenizer is broken ({reason}); download the file again") from None
    return GGUFTokenizer(
        backend,
        named,
        metadata.get("tokenizer.chat_template"),
        _adds_bos(metadata),
        metadata.get("tokenizer.ggml.add_eos_token", False),
    )


def _check_types(metadata: Mapping[str, Any]) -> None:
    """Entries of other types than llama.cpp reads: they would fail later, or pass for another value (true is 1)."""
    for key, (holds, what) in _TYPES.items():
        if (value := metadata.get(key)) is not None and not holds(value):
            raise OutriderError(f"the file's {key} must be {what}, not {quoted(value)}; download the file again")


def _is_id(value: Any) -> bool:
    return type(value) is int


def _is_list(kinds: type | UnionType) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(item, kinds) for item in value)


_TEXT = (lambda value: isinstance(value, str), "text")
_FLAG = (lambda value: isinstance(value, bool), "true or false")
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "tokenizer.chat_template": _TEXT,
    **{f"tokenizer.ggml.{key}": _TEXT for key in ("model", "pre")},
    **{f"tokenizer.ggml.{key}": _FLAG for key in ("add_bos_token", "add_eos_token", "add_space_prefix")},
    **{f"tokenizer.ggml.{key}": (_is_list(str), "a list of texts") for key in ("tokens", "merges")},
    "tokenizer.ggml.scores": (_is_list(int | float), "a list of numbers"),
    "tokenizer.ggml.token_type": (_is_list(int), "a list of whole numbers"),
    **{
        f"tokenizer.ggml.{key}_token_id": (_is_id, "the number of a token")
        for key in ("bos", "eos", "unknown", "padding", "eot", "eom")
    },
}


def from_folder(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder; None when it has no tokenizer files, for ids need none."""
    folder = Path(path).resolve()  # transformers asks the hub about a short relative path
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        return None
    try:
        found: Tokenizer = _reader(folder)(str(folder), local_files_only=True)
        found.decode(found.encode("Is it whole?"))  # some wrong values are looked at only now
        return _with_bounded_template(found)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise OutriderError(
            f"the tokenizer files in {folder} cannot be read ({one_line(error)}); download them again"
        ) from None


def _reader(folder: Path) -> Callable[..., Any]:
    """What reads the tokenizer: AutoTokenizer, or the class that it would choose where the files say that they need no
    class of the model's family. To import AutoTokenizer takes 0.3 s more, and what it reads config.json with 1.4 s."""
    if _by_file(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained
    from transformers import AutoTokenizer

    return functools.partial(AutoTokenizer.from_pretrained, trust_remote_code=False)


def _by_file(folder: Path) -> bool:
    """Whether the tokenizer of a Llama does all as tokenizer.json says."""
    try:
        names = ("config.json", "tokenizer_config.json")
        config, settings = (json.loads((folder / name).read_text()) for name in names)
        plain = config["model_type"] == "llama" and "model_name" not in config
        return plain and settings["tokenizer_class"] in _BY_FILE and "auto_map" not in settings
    except (OSError, ValueError, RecursionError, LookupError, TypeError):  # transformers says what is wrong
        return False


def _template_variables(
    special: Mapping[str, Any], tokenize: bool, add_generation_prompt: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """What a chat template can read beside the messages."""
    if tokenize:
        raise ValueError("give tokenize=False and encode the text with add_special_tokens=False")
    return {**special, "add_generation_prompt": add_generation_prompt, **extra}


def _with_bounded_template(tokenizer: Any) -> Tokenizer:
    """A tokenizer of transformers whose template runs in our sandbox: theirs bounds neither time nor size."""
    from outrider.models.chat_template import ChatTemplate

    compiled = functools.cache(ChatTemplate)

    def apply_chat_template(
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        **extra: Any,
    ) -> str:
        variables = _template_variables(tokenizer.special_tokens_map, tokenize, add_generation_prompt, extra)
        source = tokenizer.get_chat_template(None, extra.get("tools"))  # a folder may have several
        return compiled(source).render(messages, variables)

    tokenizer.apply_chat_template = apply_chat_template
    bounded: Tokenizer = tokenizer
    return bounded


def end_ids(tokenizer: Tokenizer | None, metadata: Mapping[str, Any] | None = None) -> frozenset[int]:
    """Ids after which an answer is over: many files name one end, while chat turns end with another."""
    ids = [(metadata or {}).get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if tokenizer is not None:
        added = tokenizer.added_tokens_decoder.items()
        ids += [tokenizer.eos_token_id, *(id for id, token in added if token.special and token.content in _TURN_ENDS)]
    return frozenset(id for id in ids if id is not None and id >= 0)  # -1: the file has no such token


def _byte_level(metadata: Mapping[str, Any]) -> Backend:
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


def _sentencepiece(metadata: Mapping[str, Any]) -> Backend:
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
            f"the file splits text by the rule {quoted(name)}, which Outrider does not know "
            f"(it knows {', '.join(_SPLITS)}); use the model's Hugging Face folder, or a file from a current converter"
        )
    return _SPLITS[name]


def _pre_tokenizer(splits: tuple[str, ...]) -> PreTokenizer:
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _add(backend: Backend, metadata: Mapping[str, Any], named: Iterable[str]) -> None:
    """Tokens that are found in a text before it is split. A token with a role is one, whatever its type."""
    from tokenizers import AddedToken

    tokens, types = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", ())
    control, text = (
        [token for token, type in zip(tokens, types, strict=False) if type == wanted]
        for wanted in (_CONTROL, _USER_DEFINED)
    )
    control += set(named) - set(control) - set(text)
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in text])


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


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Token ids to text, special tokens left out. A stream decodes after every step, and half of the time that a
    tokenizer of transformers takes is around the decoding: where that adds nothing, what it stands on is asked."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and _only_decodes(tokenizer):
        return functools.partial(backend.decode, skip_special_tokens=True)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


def _only_decodes(tokenizer: Any) -> bool:
    """Whether its `decode` is transformers' own, and does nothing to the text afterwards."""
    if "transformers" not in sys.modules:  # then it is none of theirs
        return False
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(tokenizer)
    own = all(getattr(kind, name, None) is getattr(Plain, name) for name in ("decode", "_decode"))
    return own and not getattr(tokenizer, "clean_up_tokenization_spaces", True)
