"""A GGUF file written out as a folder is the same model."""

import numpy as np
import torch
from gguf import GGUFWriter

from outrider.bench.export import export
from outrider.models.base import Feed
from outrider.models.load import Target, load

SIZES = dict(hidden=32, inner=48, heads=4, kv_heads=2, vocab=40)


def write_gguf(path):
    """A llama of two layers in bfloat16 values, so that nothing is rounded on the way."""
    random = torch.Generator().manual_seed(0)

    def weight(*shape):
        return torch.randn(shape, generator=random).mul(0.3).bfloat16().float().numpy()

    hidden, inner, head_dim = SIZES["hidden"], SIZES["inner"], SIZES["hidden"] // SIZES["heads"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(SIZES["kv_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50000.0)
    writer.add_tensor("token_embd.weight", weight(SIZES["vocab"], hidden))
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(2):
        at = f"blk.{layer}."
        writer.add_tensor(at + "attn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(at + "ffn_norm.weight", np.ones(hidden, np.float32))
        writer.add_tensor(at + "attn_q.weight", weight(hidden, hidden))
        writer.add_tensor(at + "attn_k.weight", weight(SIZES["kv_heads"] * head_dim, hidden))
        writer.add_tensor(at + "attn_v.weight", weight(SIZES["kv_heads"] * head_dim, hidden))
        writer.add_tensor(at + "attn_output.weight", weight(hidden, hidden))
        writer.add_tensor(at + "ffn_gate.weight", weight(inner, hidden))
        writer.add_tensor(at + "ffn_up.weight", weight(inner, hidden))
        writer.add_tensor(at + "ffn_down.weight", weight(hidden, inner))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_computes_what_the_file_does(tmp_path):
    file, folder = tmp_path / "tiny.gguf", tmp_path / "folder"
    write_gguf(file)
    export(file, folder)
    where = Target(torch.device("cpu"), torch.float32, 1 << 26)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    of_file, of_folder = (load(str(path), where).model.forward([Feed(0, tokens)])[0].logits for path in (file, folder))
    torch.testing.assert_close(of_folder, of_file, rtol=1e-4, atol=1e-4)
