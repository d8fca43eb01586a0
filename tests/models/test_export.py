"""A GGUF file written out as a folder is the same model, with the same tokenizer."""

import pytest
import torch
from ggufs import byte_metadata, write_llama

from outrider.models.base import Feed
from outrider.models.export import export, to_transformers
from outrider.models.load import LoadOptions, load
from outrider.models.tokenizer import from_gguf

WHERE = LoadOptions(torch.device("cpu"), torch.float32, 1 << 26)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
TEXTS = ["", "the <|im_end|> path\n", "naïve 日本", "  12345  <|im_start|>"]


def test_the_folder_computes_what_the_file_does(tmp_path):
    file, folder = write_llama(tmp_path / "tiny.gguf"), tmp_path / "folder"
    export(file, folder)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    of_file, of_folder = (load(str(path), WHERE).model.forward([Feed(0, tokens)])[0].logits for path in (file, folder))
    torch.testing.assert_close(of_folder, of_file, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("adds", [{}, dict(add_bos_token=True), dict(add_bos_token=True, add_eos_token=True)], ids=str)
def test_the_folder_reads_and_writes_text_as_the_file_does(tmp_path, adds):
    metadata = byte_metadata(**adds) | {"tokenizer.chat_template": TEMPLATE}
    vocab = len(metadata["tokenizer.ggml.tokens"])
    file, folder = write_llama(tmp_path / "tiny.gguf", vocab, metadata), tmp_path / "folder"
    export(file, folder)
    ours, theirs = (load(str(path), WHERE) for path in (file, folder))
    assert theirs.ends == ours.ends == {1}
    assert theirs.tokenizer.get_vocab() == ours.tokenizer.get_vocab()
    messages = [{"role": "user", "content": "hi"}]
    chats = {of.tokenizer.apply_chat_template(messages, tokenize=False) for of in (ours, theirs)}
    assert chats == {"<|im_start|>user: hi<|im_end|>"}
    for text in TEXTS:
        for special in (True, False):
            ids = ours.tokenizer.encode(text, add_special_tokens=special)
            assert theirs.tokenizer.encode(text, add_special_tokens=special) == ids
            assert theirs.tokenizer.decode(ids) == ours.tokenizer.decode(ids)


def test_exporting_leaves_the_tokenizer_as_it_is():
    tokenizer = from_gguf(byte_metadata(add_bos_token=True))
    before = tokenizer.encode("the path")
    assert to_transformers(tokenizer).encode("the path") == before
    assert tokenizer.encode("the path") == before
