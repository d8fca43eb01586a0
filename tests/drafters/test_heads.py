"""Heads in files: every public form is read, ours is the one that vLLM loads, and what does not fit is refused."""

import functools
import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import eagle_head, family, lesson, medusa_head, ours, prompts, reference
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.core.errors import OutriderError
from outrider.drafters.eagle.head import EagleHead
from outrider.drafters.heads import files as heads
from outrider.drafters.medusa.head import MedusaHead
from outrider.train import kinds
from outrider.train.objective import Comparison

TEXTS = [prompt[:7] for prompt in prompts(12) if len(prompt) >= 7]
EVERY_OTHER = torch.arange(0, 40, 2)


def model():
    return family("llama")[1]


@functools.cache
def other():
    """Another model of the same shape."""
    return ours(reference("llama", seed=99))


def says(head):
    """What the head's loss is made of: equal figures mean equal heads."""
    with torch.no_grad():
        _, figures = kinds.loss(head, lesson(model(), head, TEXTS), Comparison(3))
    return pytest.approx({name: float(value) for name, value in figures.items()}, abs=1e-5)


FORMS = {
    "eagle": lambda: eagle_head(model()),
    "eagle, cut": lambda: eagle_head(model(), EVERY_OTHER, depth=2, norm_output=True, norm_residual=False),
    "eagle, normed together": lambda: eagle_head(model(), norm_inputs=False, norm_joined=True, layers=(0, 2)),
    "eagle, all its own": lambda: eagle_head(
        model(), EVERY_OTHER, own_output=True, own_embedding=True, attention_bias=True
    ),
    "eagle-1": lambda: eagle_head(model(), layers=(), fc_bias=True),
    "medusa": lambda: medusa_head(model()),
    "medusa, cut": lambda: medusa_head(model(), EVERY_OTHER, depth=2, bias=True),
    "medusa, own outputs": lambda: medusa_head(model(), own_output=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_written_is_what_is_read(tmp_path, form, whole):
    head = FORMS[form]()
    heads.write(head, tmp_path, model(), "tiny", whole, torch.float32)
    found = heads.read(tmp_path, model())
    assert found.config == head.config
    assert says(found).expected == says(head)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_in_bfloat16_it_is_half_as_large_and_all_but_the_same(tmp_path):
    head = FORMS["eagle"]()
    heads.write(head, tmp_path / "full", model(), dtype=torch.float32)
    heads.write(head, tmp_path / "half", model())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("full", "half")]
    assert sizes[1] < 0.6 * sizes[0]
    half, full = (says(heads.read(tmp_path / name, model())).expected["loss"] for name in ("half", "full"))
    assert half == pytest.approx(full, rel=0.02)


def test_our_form_is_the_one_that_vllm_loads(tmp_path):
    """The names that vLLM 0.32 reads (its speculators config, and Eagle3LlamaForCausalLM)."""
    heads.write(FORMS["eagle, cut"](), tmp_path, model(), "somebody/model")
    said, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    assert said["speculators_model_type"] == "eagle3"
    assert said["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]  # counted from the embedding
    assert (said["fc_norm"], said["norm_output"], said["norm_before_residual"]) == (True, True, False)
    assert said["draft_vocab_size"] == 20
    assert said["speculators_config"]["verifier"]["name_or_path"] == "somebody/model"
    assert said["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    layer = said["transformer_layer_config"]
    assert (layer["num_hidden_layers"], layer["num_aux_hidden_states"], layer["vocab_size"]) == (2, 3, 40)
    assert torch.equal(tensors["d2t"] + torch.arange(20), EVERY_OTHER)
    assert tensors["t2d"].nonzero().squeeze(1).tolist() == EVERY_OTHER.tolist()
    assert tensors["lm_head.weight"].shape == (20, 32)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 64
    assert {"fc.weight", "fc_norm.2.weight", "layers.0.hidden_norm.weight", "norm.weight"} <= tensors.keys()


# The other public forms, made here by hand.


def write(folder, said, tensors, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(said))
    if name.endswith("safetensors"):
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    else:
        torch.save(tensors, folder / name)
    return folder


PLAIN = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-6,
    "vocab_size": 40,
}


def eagle_3(folder):
    """As EAGLE's authors save it: a `midlayer`, offsets d2t, the blocks not named."""
    head = eagle_head(model(), EVERY_OTHER, own_output=True, norm_inputs=False, norm_residual=False, layers=(0, 1, 2))
    tensors = {name.replace("layers.0.", "midlayer."): value for name, value in head.state_dict().items()}
    tensors["d2t"] = EVERY_OTHER - torch.arange(20)
    tensors["t2d"] = torch.zeros(40, dtype=torch.bool).index_fill_(0, EVERY_OTHER, True)
    said = {**PLAIN, "draft_vocab_size": 20, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 1, 2]}}
    return head, write(folder, said, tensors)


def eagle_1(folder, **more):
    """EAGLE-1 and 2: with the target's embedding, which is not kept twice."""
    head = eagle_head(model(), layers=(), **more)
    tensors = {**head.state_dict(), "embed_tokens.weight": model().tensor("model.embed_tokens.weight")}
    return head, write(folder, PLAIN, tensors)


def medusa(folder, name="medusa_lm_head.safetensors", version="2"):
    """Medusa as its authors save it: blocks with a bias, an output matrix for each head."""
    head = medusa_head(model(), own_output=True, bias=True, depth=2)
    tensors = {}
    for key, value in head.state_dict().items():
        parts = key.split(".")
        own = f"{parts[1]}.2.weight" if parts[0] == "lm_heads" else f"{parts[1]}.{parts[3]}.linear.{parts[4]}"
        tensors[own if version == "1" else f"medusa_head.{own}"] = value
    said = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x", "version": version}
    return head, write(folder, said, tensors, name)


@pytest.mark.parametrize("made", [eagle_3, eagle_1, functools.partial(eagle_1, fc_bias=True), medusa])
def test_public_forms_are_read(tmp_path, made):
    head, folder = made(tmp_path)
    found = heads.read(folder, model())
    assert replace(found.config, context=0) == replace(head.config, context=0) if isinstance(head, EagleHead) else True
    assert says(found).expected == says(head)


def test_the_older_medusa_form_is_read(tmp_path):
    head, folder = medusa(tmp_path, version="1")
    assert says(heads.read(folder, model())).expected == says(head)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_a_pickle_is_refused_unless_it_is_allowed(tmp_path, name):
    head, folder = medusa(tmp_path, name, "1")
    with pytest.raises(OutriderError, match=rf"{name} is a pickle.*allow_pickle"):
        heads.read(folder, model())
    assert says(heads.read(folder, model(), allow_pickle=True)).expected == says(head)


def test_code_in_a_pickle_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    write(tmp_path, {"medusa_num_heads": 1}, {"0.0.linear.weight": Evil()}, "medusa_lm_head.pt")
    with pytest.raises(OutriderError, match="cannot be read"):
        heads.read(tmp_path, model(), allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_the_blocks_that_eagle_3_reads_where_the_file_does_not_say(tmp_path):
    """2, n / 2 and n - 3 counted from the embedding: with 12 blocks the residuals after the 2nd, 6th and 9th."""
    deep = ours(reference("llama", num_hidden_layers=12))
    head, folder = eagle_3(tmp_path)
    said = {**PLAIN, "draft_vocab_size": 20}
    (folder / "config.json").write_text(json.dumps(said))
    assert heads.read(folder, deep).config.layers == (1, 5, 8)
    assert head.config.layers == (0, 1, 2)
    with pytest.raises(OutriderError, match="reads the target after 2, 1, 0 blocks, but the target has 3"):
        heads.read(folder, model())


def test_theta_and_scaling_of_the_positions_are_read(tmp_path):
    _, folder = eagle_3(tmp_path)
    said = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps({**said, "rope_theta": 5e5, "rope_scaling": scaling}))
    head = heads.read(folder, model())
    assert head.config.rope_theta == 5e5
    plain = 5e5 ** -(torch.arange(0, 8, 2) / 8)
    torch.testing.assert_close(head.frequencies, plain / 2)


# What does not fit.


def change_config(folder, **changes):
    said = json.loads((folder / "config.json").read_text())
    for key, value in changes.items():
        place = said.get("transformer_layer_config", said) if key in said.get("transformer_layer_config", {}) else said
        place[key] = value
    (folder / "config.json").write_text(json.dumps(said))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(hidden_size=64), "has 64 hidden numbers and the target 32"),
        (dict(vocab_size=50), "has 50 tokens and the target 40"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2, 9]), "after 1, 2, 9 blocks, but the target has 3"),
        (dict(eagle_aux_hidden_state_layer_ids=[1, 2]), "reads 2 blocks of 32 numbers but its fc.weight has 96"),
        (dict(intermediate_size=56), r"mlp.gate_proj.weight .* has shape \(48, 32\), but its config says \(56, 32\)"),
        (dict(num_hidden_layers=2), "lacks the tensor layers.1"),
        (dict(num_attention_heads=None), "does not say num_attention_heads"),
        (dict(speculators_model_type="mlp"), "of type 'mlp'; Outrider runs eagle3"),
        (dict(outrider={"num_layers": 30, "vocab_size": 40}), "has 30 layers of its target and the target 3"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path, changes, reason):
    heads.write(FORMS["eagle"](), tmp_path, model())
    change_config(tmp_path, **changes)
    with pytest.raises(OutriderError, match=reason):
        heads.read(tmp_path, model())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("norm.weight"), "lacks the tensor norm.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "has a tensor extra that its config does not speak of"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), "fc.weight has 64 inputs"),
        (lambda t: t.pop("fc.weight"), "no head that Outrider knows"),
        (lambda t: t.update(d2t=torch.full((20,), 39)), "writes token 58, but the target has 40"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, change, reason):
    heads.write(FORMS["eagle"](), tmp_path, model())
    change_tensors(tmp_path, change)
    with pytest.raises(OutriderError, match=reason):
        heads.read(tmp_path, model())


@pytest.mark.parametrize("form", ["eagle", "medusa"])
def test_a_head_for_another_model_of_the_same_shape_is_refused(tmp_path, form):
    heads.write(FORMS[form](), tmp_path, model())
    with pytest.raises(OutriderError, match="was made for another model"):
        heads.read(tmp_path, other())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(hidden_size=64), "has 64 hidden numbers and the target 32"),
        (dict(vocab_size=41), "has 41 tokens and the target 40"),
        (dict(num_heads=4), "lacks the tensor blocks.3"),
    ],
)
def test_a_medusa_head_that_does_not_fit_is_refused(tmp_path, changes, reason):
    heads.write(FORMS["medusa"](), tmp_path, model())
    change_config(tmp_path, **changes)
    with pytest.raises(OutriderError, match=reason):
        heads.read(tmp_path, model())


STRANGE = ["x", -1, 0.5, 10**12, True, [], [[1]], {}, {"a": 1}, [None]]


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("eagle", dict(eagle_aux_hidden_state_layer_ids=[1, [2], 3]), "is not a list of whole numbers"),
        ("eagle", dict(eagle_aux_hidden_state_layer_ids="abc"), "is not a list of whole numbers"),
        ("eagle", dict(rope_scaling=4), "rope_scaling in .* is not an object or null"),
        ("eagle", dict(num_hidden_layers=10**9), "not a whole number between 1 and 128"),
        ("medusa", dict(num_heads=[3]), "num_heads in .* is not a whole number between 1 and 128"),
        ("medusa", dict(num_heads=10**9), "num_heads in .* is not a whole number between 1 and 128"),
        ("eagle", dict(outrider={"num_layers": 3, "vocab_size": 40}), "is not rows of numbers"),
        ("eagle", dict(outrider={"num_layers": 3, "vocab_size": 40, "embedding": {"a": 1}}), "is not rows of numbers"),
        (
            "eagle",
            dict(outrider={"num_layers": 3, "vocab_size": 40, "embedding": [[1], "x"]}),
            "is not rows of numbers",
        ),
    ],
)
def test_a_config_with_values_of_other_types_is_refused_in_one_line(tmp_path, form, changes, reason):
    heads.write(FORMS[form](), tmp_path, model())
    change_config(tmp_path, **changes)
    with pytest.raises(OutriderError, match=reason) as refused:
        heads.read(tmp_path, model())
    assert "\n" not in str(refused.value)


def answer(folder):
    try:
        return type(heads.read(folder, model())).__name__
    except OutriderError as error:
        return str(error)


@pytest.mark.parametrize("form", ["eagle", "medusa"])
def test_any_value_of_a_config_may_be_strange(tmp_path, form):
    """The head is read or refused in one line; it never ends in another error."""
    heads.write(FORMS[form](), tmp_path, model())
    config = json.loads((tmp_path / "config.json").read_text())
    for place in (config, config.get("transformer_layer_config", {}), config["outrider"]):
        for key, value in list(place.items()):
            for strange in STRANGE:
                place[key] = strange
                (tmp_path / "config.json").write_text(json.dumps(config))
                assert "\n" not in answer(tmp_path), (key, strange)
            place[key] = value


@pytest.mark.parametrize("eps", [None, "1e-6", True, [1], 0, -1e-6, float("inf"), float("nan"), 2], ids=str)
def test_a_head_whose_eps_is_no_number_is_refused(tmp_path, eps):
    heads.write(FORMS["eagle"](), tmp_path, model())
    change_config(tmp_path, rms_norm_eps=eps)
    with pytest.raises(OutriderError, match=r"rms_norm_eps in .* is not a number between 0 and 1"):
        heads.read(tmp_path, model())


@pytest.mark.parametrize("sizes", [dict(num_kv_heads=8), dict(num_kv_heads=3), dict(head_dim=7)])
def test_heads_that_cannot_share_keys_are_refused(tmp_path, sizes):
    """The file is whole and fits its config; the kernels would divide by zero, or read what nobody wrote."""
    heads.write(EagleHead(replace(FORMS["eagle"]().config, **sizes)), tmp_path, model())
    with pytest.raises(OutriderError, match=r"4 heads of . numbers cannot share . heads of keys and values"):
        heads.read(tmp_path, model())


class Allocated(TorchDispatchMode):
    """Counts the numbers that tensors in memory are made for."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and made.device.type == "cpu":
            self.numbers += made.numel()
        return made


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("eagle", dict(intermediate_size=1 << 18)),
        ("eagle", dict(num_attention_heads=1 << 20, num_key_value_heads=1 << 20, head_dim=1 << 20)),
        ("medusa", dict(num_heads=64, num_hidden_layers=32)),
    ],
)
def test_shapes_are_compared_before_memory_is_taken(tmp_path, form, changes):
    heads.write(FORMS[form](), tmp_path, model())
    change_config(tmp_path, **changes)
    with Allocated() as allocated, pytest.raises(OutriderError, match=r"its config says|lacks the tensor"):
        heads.read(tmp_path, model())
    assert allocated.numbers < 100_000


@pytest.mark.parametrize("ids", [[40, 1], [-1, 2], [[1, 2]], [0.5, 1.0], []])
def test_a_token_map_that_does_not_fit_is_refused(tmp_path, ids):
    heads.write(FORMS["medusa"](), tmp_path, model())
    change_tensors(tmp_path, lambda tensors: tensors.update(token_map=torch.tensor(ids)))
    with pytest.raises(OutriderError, match=r"token_map|but the target has 40 tokens"):
        heads.read(tmp_path, model())


def test_a_folder_whose_name_is_too_long_is_refused(tmp_path):
    with pytest.raises(OutriderError, match="there is no folder"):
        heads.find("eagle", f"{tmp_path}/{'x' * 300}", model(), "tiny")


def test_folders_that_hold_no_head_are_refused(tmp_path):
    with pytest.raises(OutriderError, match=r"no config\.json"):
        heads.read(tmp_path, model())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(OutriderError, match="not valid JSON"):
        heads.read(tmp_path, model())
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(OutriderError, match="not a JSON object"):
        heads.read(tmp_path, model())
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OutriderError, match=r"no \.safetensors"):
        heads.read(tmp_path, model())
    (tmp_path / "model.safetensors").write_text("broken")
    with pytest.raises(OutriderError, match="cannot be read"):
        heads.read(tmp_path, model())


def test_a_head_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    head = FORMS["eagle"]()
    heads.write(head, tmp_path, model(), dtype=torch.float32)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OutriderError, match="No space left"):
        heads.write(FORMS["eagle, cut"](), tmp_path, model())
    monkeypatch.undo()
    assert says(heads.read(tmp_path, model())).expected == says(head)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


# Those that are shipped.


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(heads, "SHIPPED", tmp_path / "heads")
    return tmp_path / "heads"


def test_a_shipped_head_is_found_by_the_targets_name(shipped):
    head = FORMS["eagle"]()
    heads.write(head, shipped / "tiny" / "eagle", model(), whole=False, dtype=torch.float32)
    assert says(heads.find("eagle", "", model(), "tiny")).expected == says(head)


def test_and_under_any_other_name_by_its_embedding(shipped):
    heads.write(FORMS["medusa"](), shipped / "another" / "medusa", other())
    heads.write(FORMS["medusa, cut"](), shipped / "tiny" / "medusa", model())
    assert isinstance(heads.find("medusa", "", model(), "/some/folder"), MedusaHead)
    shutil.rmtree(shipped / "tiny")
    with pytest.raises(OutriderError, match="no head for medusa is shipped for /some/folder; train one"):
        heads.find("medusa", "", model(), "/some/folder")


def test_a_measured_tree_is_written_and_read(tmp_path):
    head = FORMS["medusa"]()
    head.tree = ((0,), (1,), (0, 0))
    heads.write(head, tmp_path, model())
    assert heads.read(tmp_path, model()).tree == head.tree
    for wrong in ([[0], [2, 0]], [[]], 5, [[-1]], [["x"]]):
        change_config(tmp_path, medusa_choices=wrong)
        with pytest.raises(OutriderError, match="is not a tree"):
            heads.read(tmp_path, model())
