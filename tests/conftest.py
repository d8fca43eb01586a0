"""Tiny models in folders, made once per run: random weights, a real byte-level tokenizer, a chat template."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import compilers
import on_vllm
import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: what we start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

with contextlib.suppress(ImportError):  # a GPU machine may not have it
    import hypothesis

    hypothesis.settings.register_profile("outrider", deadline=None)  # a busy machine is no fault
    hypothesis.settings.load_profile("outrider")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels of a GPU run here too, interpreted; read when triton is imported
    with contextlib.suppress(ImportError):
        import triton

        triton.knobs.runtime.interpret = True

        import interpreted

        interpreted.hasten()
    del os.environ["TRITON_INTERPRET"]  # what the tests start is not to inherit it

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>"]
TEXT = "the red fox and the blue fox count the stars, one, two, three; a river ends in the sea and the sea is green"
CONTEXT = 1024
# What takes minutes begins first, so that no process is left alone with it in the end.
SLOW_FILES = (
    "conformance/test_law",
    "conformance/test_real",
    "models/test_native",
    "server/test_ray",
    "drafters/test_rounds",
    "server/test_workers",
    "server/test_stay_up",
    "train/test_train",
    "drafters/test_rejection_rounds",
    "drafters/test_model_rounds",
    "drafters/test_cut_rounds",
    "models/test_cut_kernels",
    "server/test_lora",
    "server/test_hostile",
    "conformance/test_greedy",
    "train/test_progress",
)
SLOW = ("vllm", *(f"tests/{name}.py" for name in SLOW_FILES))
ON_VLLM = re.compile(r"test_vllm_|[\[-]vllm(-drafting)?[\]-]")  # node ids of tests that are marked so


def save_tiny(
    folder: Path,
    text: str = TEXT,
    layers: int = 3,
    seed: int = 0,
    chat: bool = True,
    head_dim: int = 8,
    inner: int = 48,
    vocab: int = 0,
) -> Path:
    """A random Llama and the tokenizer learned from `text`. `vocab`: 0 for what the tokenizer has."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = _tokenizer(text, chat)
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=vocab or len(tokenizer),
        hidden_size=32,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        initializer_range=0.25,  # peaky: drafts are sometimes right, and a greedy choice is rarely a near tie
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer(text: str, chat: bool):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text] * 4, trainer)
    template = TEMPLATE if chat else None
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can chat, in at most CONTEXT tokens."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def packable_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that can chat, of sizes that `quantize` packs for the kernels."""
    return save_tiny(tmp_path_factory.mktemp("models") / "packable", inner=64, vocab=304)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same vocabulary."""
    return save_tiny(tmp_path_factory.mktemp("models") / "draft", layers=1)


@pytest.fixture(scope="session")
def tiny_twin(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """tiny_folder with every weight a little off: as a draft model it is often right, and sometimes wrong."""
    return save_twin(tiny_folder, tmp_path_factory.mktemp("models") / "twin")


def save_twin(original: Path, folder: Path) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(original, folder)
    noise = torch.Generator().manual_seed(1)
    weights = load_file(folder / "model.safetensors")
    off = {name: w * (1 + 0.03 * torch.randn(w.shape, generator=noise)) for name, w in weights.items()}
    save_file(off, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def wide_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 32: the kernels of others know none that are narrower."""
    return save_tiny(tmp_path_factory.mktemp("models") / "wide", head_dim=32)


@pytest.fixture(scope="session")
def wide_twin(tmp_path_factory: pytest.TempPathFactory, wide_folder: Path) -> Path:
    return save_twin(wide_folder, tmp_path_factory.mktemp("models") / "wide-twin")


@pytest.fixture(scope="session")
def tiny_stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose token ids mean something else."""
    return save_tiny(tmp_path_factory.mktemp("models") / "stranger", text="zoo quiz jazz wizard buzz fizz puzzle " * 3)


@pytest.fixture(scope="session")
def tiny_mute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template."""
    return save_tiny(tmp_path_factory.mktemp("models") / "mute", chat=False, head_dim=32)


@pytest.fixture(scope="session")
def kept_objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the quick compiler has compiled."""
    return tmp_path_factory.mktemp("objects")


@pytest.fixture
def quick_compiler(kept_objects: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The g++ on the path is a quick one."""
    monkeypatch.delenv("CXX", raising=False)
    if found := shutil.which("g++"):
        (tmp_path / "quick").mkdir()
        compilers.quick(tmp_path / "quick" / "g++", found, kept_objects)
        monkeypatch.setenv("PATH", str(tmp_path / "quick"), prepend=os.pathsep)


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of vLLM's own environment."""
    return on_vllm.install()


@pytest.fixture(scope="session")
def vllm_sessions(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[on_vllm.Sessions]:
    with on_vllm.sessions(tmp_path_factory.mktemp("sessions") / "log") as found:
        yield found


@functools.cache
def why_no_kernels():
    from outrider.models.native.library import NoCompiler, library

    try:
        library()
    except NoCompiler as reason:
        return str(reason)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """One process runs all tests of a file, and one all of those that share vLLM's servers."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "vllm" if ON_VLLM.search(nodeid) else nodeid.partition("::")[0]

        def _assign_work_unit(self, node):
            for scope in reversed(SLOW):
                if scope in self.workqueue:
                    self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return Files(config, log)


def pytest_runtest_setup(item):
    if item.get_closest_marker("native") and why_no_kernels():
        pytest.skip(why_no_kernels())
