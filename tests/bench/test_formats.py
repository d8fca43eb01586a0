"""One model in several formats: the same metadata, the same weights as far as the format can hold them."""

import gguf
import ggufs
import numpy as np
import pytest

from outrider.bench import formats
from outrider.core.errors import OutriderError
from outrider.models.gguf import GGUFFile


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    metadata = ggufs.byte_metadata() | {"general.file_type": 0, "general.name": "tiny"}
    return ggufs.write_llama(tmp_path / "tiny.gguf", len(metadata["tokenizer.ggml.tokens"]), metadata)


def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize(("name", "error"), [("q4_0", 0.15), ("q4_1", 0.1), ("q8_0", 0.01)])
def test_the_matrices_of_the_layers_are_rounded_and_nothing_else(source, name, error):
    path = formats.write(source, name, None)
    before, after = tensors(source), tensors(path)
    assert list(before) == list(after)
    for key, tensor in before.items():
        assert tuple(after[key].shape) == tuple(tensor.shape)
        changed = len(tensor.shape) == 2 and key != "token_embd.weight" and tensor.shape[0] % 32 == 0
        assert after[key].tensor_type.name == (name.upper() if changed else "F32")
        values = gguf.quants.dequantize(after[key].data, after[key].tensor_type).reshape(-1)
        apart = np.linalg.norm(values - tensor.data.reshape(-1)) / np.linalg.norm(tensor.data)
        assert apart <= (error if changed else 0)
        assert not changed or apart > 0


def test_the_metadata_is_the_same_but_for_the_type(source):
    before, after = (GGUFFile(path).metadata for path in (source, formats.write(source, "q4_0", None)))
    differ = {key for key in before | after if before.get(key) != after.get(key)}
    assert differ == {"general.file_type"}
    assert after["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0


def test_a_file_is_written_once_and_taken_as_it_is_where_it_has_the_format(source):
    path = formats.write(source, "q4_0", None)
    written = path.stat().st_mtime_ns
    assert formats.write(source, "q4_0", None) == path
    assert path.stat().st_mtime_ns == written
    assert formats.write(path, "q4_0", None) == path
    source.touch()
    assert formats.write(source, "q4_0", None) != path


def test_a_recipe_is_left_to_llama_quantize(source, tmp_path):
    tool = tmp_path / "llama-quantize"
    tool.write_text('#!/bin/sh\n[ "$1" = --allow-requantize ] && [ "$4" = Q4_K_M ] && cp "$2" "$3"\n')
    tool.chmod(0o755)
    assert formats.write(source, "q4_k_m", str(tool)).read_bytes() == source.read_bytes()
    tool.write_text("#!/bin/sh\necho no luck >&2\nexit 1\n")
    with pytest.raises(OutriderError, match="could not write Q5_K_M: no luck"):
        formats.write(source, "q5_k_m", str(tool))
    with pytest.raises(OutriderError, match="q6_k: only llama-quantize writes it; add --build-peers"):
        formats.write(source, "q6_k", None)
    assert not list((tmp_path / "cache" / "formats").glob("tmp*"))


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(OutriderError, match="writes files from a GGUF file"):
        formats.write(tmp_path, "q4_0", None)


def test_names():
    assert formats.parse("Q4_0, q4_1,q4_0,") == ("q4_0", "q4_1")
    assert formats.parse("") == ()
