"""Adapters as data: files, refusals in one line, merging as PEFT merges, the store and its memory."""

import copy
import json
import random
import shutil
import struct
import threading
import time
import warnings

import gguf
import loras
import numpy as np
import packs
import pytest
import safetensors.torch
import tiny
import torch
from loras import ALL, ENDS, THREE

from outrider.core.adapter import AdapterMix
from outrider.core.errors import OutriderError
from outrider.models.adapters import files
from outrider.models.adapters.adapter import Adapter, LowRank
from outrider.models.adapters.export import write_merged
from outrider.models.adapters.merge import merged
from outrider.models.adapters.store import AdapterStore
from outrider.models.load import load


@pytest.fixture(scope="module")
def target():
    return tiny.reference("llama", seed=3)


@pytest.fixture(scope="module")
def own(target):
    return tiny.ours(target)


@pytest.fixture
def folder(target, tmp_path):
    """A PEFT folder with an adapter on all seven matrices."""
    wrapped = loras.with_adapters(target, {"first": dict(r=4, lora_alpha=8, target_modules=ALL)})
    return loras.save(wrapped, tmp_path / "saved")["first"]


def rewrite(folder, change):
    """The folder's config, changed."""
    config = json.loads((folder / "adapter_config.json").read_text())
    change(config)
    (folder / "adapter_config.json").write_text(json.dumps(config))


def tensors(folder):
    return safetensors.torch.load_file(folder / "adapter_model.safetensors")


def refusal(path, own, allow_pickle=False):
    with pytest.raises(OutriderError) as caught:
        files.read(path, own.adapter_base, allow_pickle)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestPeftFolders:
    def test_scales(self, target, own, tmp_path):
        """alpha / rank, alpha / root of rank, and patterns: the first that matches."""
        wrapped = loras.with_adapters(target, THREE)
        found = {n: files.read(p, own.adapter_base) for n, p in loras.save(wrapped, tmp_path).items()}
        for name, adapter in found.items():
            for matrix, pair in adapter.pairs.items():
                module = wrapped.get_submodule(f"base_model.model.{matrix}")
                assert pair.scale == pytest.approx(module.scaling[name]), matrix
                assert pair.rank == module.r[name]
        assert found["many"].pairs["model.layers.1.self_attn.o_proj"].rank == 3

    @pytest.mark.parametrize(
        ("key", "value", "said"),
        [
            ("use_dora", True, "DoRA"),
            ("peft_type", "IA3", "IA3"),
            ("bias", "all", "bias"),
            ("fan_in_fan_out", True, "transposed"),
            ("init_lora_weights", "pissa_niter_4", "changes the base"),
            ("r", 5, "its config says 5"),
            ("r", "x", "not a number"),
            ("lora_alpha", None, "not a number"),
            ("rank_pattern", {"(a+)+$": 3}, "pattern"),
            ("rank_pattern", ["a"], "not names with numbers"),
            ("trainable_token_indices", [1], "single rows"),
            ("layer_replication", [[0, 2]], "repeats layers"),
        ],
    )
    def test_a_config_that_cannot_be_served(self, folder, own, key, value, said):
        rewrite(folder, lambda config: config.update({key: value}))
        assert said in refusal(folder, own)

    def test_another_model(self, folder):
        other = tiny.ours(tiny.reference("llama", num_hidden_layers=2))
        assert "layers.2" in refusal(folder, other)
        assert "does not have" in refusal(folder, other)
        wider = tiny.ours(tiny.reference("llama", hidden_size=64))
        assert "made for another model" in refusal(folder, wider)

    def test_values_that_are_not_finite(self, folder, own):
        found = tensors(folder)
        next(iter(found.values()))[0, 0] = float("nan")
        safetensors.torch.save_file(found, folder / "adapter_model.safetensors")
        assert "not finite" in refusal(folder, own)

    def test_half_of_a_pair(self, folder, own):
        found = tensors(folder)
        found.pop(next(name for name in found if "lora_B" in name))
        safetensors.torch.save_file(found, folder / "adapter_model.safetensors")
        assert "only one of the two" in refusal(folder, own)

    def test_a_rank_that_is_too_large(self, target, own, tmp_path):
        wrapped = loras.with_adapters(target, {"first": dict(r=257, lora_alpha=8, target_modules=["q_proj"])})
        assert "1 to 256" in refusal(loras.save(wrapped, tmp_path)["first"], own)

    def test_a_pickle_only_where_it_is_allowed(self, folder, own):
        torch.save(tensors(folder), folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").unlink()
        assert "pickle" in refusal(folder, own)
        assert files.read(folder, own.adapter_base, allow_pickle=True).pairs

    def test_whole_matrices_are_refused_per_request(self, target, own, tmp_path):
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        peft.get_peft_model(copy.deepcopy(target), config).save_pretrained(tmp_path)
        with pytest.raises(OutriderError, match="outrider merge"):
            AdapterStore(own, 1 << 30).register("a", tmp_path)

    def test_what_is_no_adapter(self, own, tmp_path):
        assert "no adapter" in refusal(tmp_path, own)
        assert "no adapter" in refusal(tmp_path / "gone", own)


def write_gguf(path, adapter, architecture, heads, kv_heads, alpha=8.0, **more):
    """As llama.cpp's converter writes it: llama's rows of B for queries and keys are pairs that rotate."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    names = {
        "q_proj": "attn_q",
        "k_proj": "attn_k",
        "v_proj": "attn_v",
        "o_proj": "attn_output",
        "gate_proj": "ffn_gate",
        "up_proj": "ffn_up",
        "down_proj": "ffn_down",
    }
    for name, pair in adapter.pairs.items():
        a, b = pair.a.numpy(), pair.b.numpy()
        if name == "model.embed_tokens":
            place, a = "token_embd", np.ascontiguousarray(a.T)
        elif name == "lm_head":
            place = "output"
        else:
            _, _, layer, _, part = name.split(".")
            place = f"blk.{layer}.{names[part]}"
            count = {"q_proj": heads, "k_proj": kv_heads}.get(part)
            if architecture == "llama" and count:
                halves = b.reshape(count, 2, b.shape[0] // count // 2, -1)
                b = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(b.shape)
        writer.add_tensor(f"{place}.weight.lora_a", a)
        writer.add_tensor(f"{place}.weight.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def gguf_file(target, own, tmp_path):
    wrapped = loras.with_adapters(target, {"first": dict(r=4, lora_alpha=8, target_modules=[*ALL, *ENDS])})
    adapter = files.read(loras.save(wrapped, tmp_path / "saved")["first"], own.adapter_base)
    path = tmp_path / "a.gguf"
    write_gguf(path, adapter, "llama", 4, 2)
    return path, adapter


class TestGguf:
    def test_the_same_adapter(self, gguf_file, own):
        path, expected = gguf_file
        found = files.read(path, own.adapter_base)
        assert found.pairs.keys() == expected.pairs.keys()
        for name, pair in expected.pairs.items():
            assert torch.equal(found.pairs[name].a, pair.a), name
            assert torch.equal(found.pairs[name].b, pair.b), name
            assert found.pairs[name].scale == pair.scale

    def test_other_architectures_have_rows_in_order(self, gguf_file, own, tmp_path):
        _, expected = gguf_file
        path = tmp_path / "b.gguf"
        write_gguf(path, expected, "qwen2", 4, 2)
        found = files.read(path, own.adapter_base)
        assert all(torch.equal(found.pairs[name].b, pair.b) for name, pair in expected.pairs.items())

    def test_a_model_is_no_adapter(self, own, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        assert "not a LoRA adapter" in refusal(tmp_path / "m.gguf", own)


def mutants(data, count, seed):
    """Bytes flipped, cut, doubled and filled, all near the beginning where the structure is, and anywhere."""
    pick = random.Random(seed)
    for _ in range(count):
        out = bytearray(data)
        kind = pick.randrange(4)
        place = pick.randrange(min(len(out), 2000) if pick.random() < 0.7 else len(out))
        if kind == 0:
            out[place] ^= 1 << pick.randrange(8)
        elif kind == 1:
            del out[place:]
        elif kind == 2:
            out[place:place] = out[place : place + pick.randrange(1, 64)]
        else:
            out[place : place + 8] = struct.pack("<Q", pick.choice([0, 1, 2**31, 2**63, 2**64 - 1]))[: len(out) - place]
        yield bytes(out)


def outcome(path, own):
    """Whether a file is read; anything but an adapter or a refusal in one line fails the test."""
    try:
        return bool(files.read(path, own.adapter_base).pairs)
    except OutriderError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1000
    return False


class TestBadFiles:
    def test_two_hundred_weights(self, folder, own):
        path = folder / "adapter_model.safetensors"
        whole = path.read_bytes()
        read = 0
        for data in mutants(whole, 200, 1):
            path.write_bytes(data)
            read += outcome(folder, own)
        assert read < 150, "most mutants must be seen"

    def test_two_hundred_configs(self, folder, own):
        path = folder / "adapter_config.json"
        whole = path.read_bytes()
        for data in mutants(whole, 200, 2):
            path.write_bytes(data)
            outcome(folder, own)

    def test_values_of_other_types(self, folder, own):
        whole = json.loads((folder / "adapter_config.json").read_text())
        for key in whole:
            for value in (None, True, -1, 0, 1e400, "x", [], [1], {}, {"q_proj": "x"}, {"": None}):
                (folder / "adapter_config.json").write_text(json.dumps({**whole, key: value}))
                outcome(folder, own)

    def test_two_hundred_gguf_files(self, gguf_file, own):
        path, _ = gguf_file
        whole = path.read_bytes()
        for data in mutants(whole, 200, 3):
            path.write_bytes(data)
            outcome(path, own)

    @pytest.mark.parametrize("text", ["", "[" * 100_000, "{}", "[]", "null", "\udcff".encode("utf-8", "surrogatepass")])
    def test_texts_that_are_no_config(self, folder, own, text):
        data = text if isinstance(text, bytes) else text.encode()
        (folder / "adapter_config.json").write_bytes(data)
        if data != b"{}":  # without any option PEFT's own defaults hold
            refusal(folder, own)


STRATEGIES = [
    dict(strategy="linear"),
    dict(strategy="ties", density=0.4),
    dict(strategy="ties", density=0.4, majority_sign_method="frequency"),
    dict(strategy="dare_linear", density=0.5),
    dict(strategy="dare_ties", density=0.5),
]


@pytest.fixture(scope="module")
def pair(target, own, tmp_path_factory):
    configs = {
        "first": dict(r=4, lora_alpha=8, target_modules=ALL),
        "second": dict(r=4, lora_alpha=2, target_modules=["q_proj", "down_proj"]),
    }
    wrapped = loras.with_adapters(target, configs)
    paths = loras.save(wrapped, tmp_path_factory.mktemp("pair"))
    return wrapped, [files.read(paths[name], own.adapter_base) for name in ("first", "second")]


class TestMerging:
    @pytest.mark.parametrize("weights", [(0.7, 0.5), (1.0, -0.6)])
    @pytest.mark.parametrize("how", STRATEGIES, ids=str)
    def test_as_peft_does(self, pair, how, weights, monkeypatch):
        wrapped, adapters = pair
        mix = AdapterMix(("a", "b"), weights, seed=5, **how)
        theirs = copy.deepcopy(wrapped)
        more = {key: value for key, value in how.items() if key != "strategy"}
        generator = torch.Generator().manual_seed(5)
        drawn = torch.bernoulli
        monkeypatch.setattr(torch, "bernoulli", lambda input, **_: drawn(input, generator=generator))
        theirs.add_weighted_adapter(["first", "second"], list(weights), "m", combination_type=how["strategy"], **more)
        monkeypatch.undo()
        found = merged(adapters, mix)
        # PEFT goes through the matrices in the order of its modules, we in that of the file: what is dropped at random
        # is compared with its own numbers in its own order
        order = [name for name, module in theirs.named_modules() if hasattr(module, "lora_A")]
        names = [name.removeprefix("base_model.model.") for name in order]
        if "dare" in how["strategy"]:
            adapters = [Adapter({n: each.pairs[n] for n in names if n in each.pairs}) for each in adapters]
            found = merged(adapters, mix)
        for full, name in zip(order, names, strict=True):
            module = theirs.get_submodule(full)
            assert torch.allclose(found.pairs[name].a, module.lora_A["m"].weight, atol=1e-6), name
            assert torch.allclose(found.pairs[name].b, module.lora_B["m"].weight, atol=1e-6), name
            assert found.pairs[name].scale == module.scaling["m"]

    def test_the_sum_is_exact(self, pair):
        _, (a, b) = pair
        found = merged([a, b], AdapterMix(("a", "b"), (0.5, -2.0)))
        for name, each in found.pairs.items():
            expected = 0.5 * a.pairs[name].delta
            if name in b.pairs:
                expected = expected - 2.0 * b.pairs[name].delta
            assert torch.allclose(each.delta, expected, atol=1e-5)

    def test_a_seed_decides_what_dare_drops(self, pair):
        _, adapters = pair
        name = "model.layers.0.mlp.up_proj"
        found = [
            merged(adapters, AdapterMix(("a", "b"), strategy="dare_linear", density=0.5, seed=seed)).pairs[name].a
            for seed in (1, 1, 2)
        ]
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])

    @pytest.mark.parametrize(
        ("more", "said"),
        [
            (dict(names=()), "1 to 16"),
            (dict(weights=(1.0,)), "each adapter needs one finite weight"),
            (dict(weights=(1.0, float("nan"))), "finite"),
            (dict(strategy="svd"), "unknown merge strategy"),
            (dict(strategy="ties"), "density"),
            (dict(strategy="ties", density=0.0), "density"),
            (dict(strategy="linear", density=0.5), "leave it out"),
            (dict(majority_sign_method="most"), "majority_sign_method"),
        ],
    )
    def test_a_mix_that_makes_no_sense(self, more, said):
        with pytest.raises(OutriderError, match=said):
            AdapterMix(**{"names": ("a", "b"), **more})

    def test_ranks_that_differ(self, pair):
        _, (a, _) = pair
        name = "model.layers.0.mlp.up_proj"
        other = Adapter({name: LowRank(torch.zeros(2, 32), torch.zeros(48, 2))})
        with pytest.raises(OutriderError, match="one rank"):
            merged([a, other], AdapterMix(("a", "b"), strategy="linear"))


class TestExport:
    @pytest.mark.parametrize("tied", [False, True])
    def test_the_text_is_that_of_the_adapter(self, tmp_path, tied):
        target = tiny.reference("qwen2", seed=3, tie_word_embeddings=tied)
        target.save_pretrained(tmp_path / "base", max_shard_size="40KB")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT doubts tied weights
            wrapped = loras.with_adapters(target, {"first": dict(r=4, lora_alpha=8, target_modules=[*ALL, *ENDS])})
            path = loras.save(wrapped, tmp_path / "saved")["first"]
        write_merged(tmp_path / "base", [path], AdapterMix(("a",)), tmp_path / "out")
        model = load(str(tmp_path / "out"), tiny.CPU).model
        for tokens in tiny.prompts(3):
            expected = loras.greedy_by_peft(wrapped, "first", tokens, 12)
            assert tiny.outputs([tiny.plainly(model, tokens, tiny.SamplingParams(max_tokens=12))]) == [expected]
        assert sorted(each.name for each in tmp_path.iterdir()) == ["base", "out", "saved"]  # nothing half-written

    def test_what_is_there_is_left_alone(self, target, folder, tmp_path):
        target.save_pretrained(tmp_path / "base")
        (tmp_path / "out").mkdir()
        with pytest.raises(OutriderError, match="there already"):
            write_merged(tmp_path / "base", [folder], AdapterMix(("a",)), tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())

    def test_whole_matrices_are_written(self, target, tmp_path):
        import peft

        config = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        wrapped = peft.get_peft_model(copy.deepcopy(target), config).eval()
        with torch.no_grad():
            wrapped.base_model.model.lm_head.modules_to_save["default"].weight.mul_(-1)
        wrapped.save_pretrained(tmp_path / "a")
        target.save_pretrained(tmp_path / "base")
        write_merged(tmp_path / "base", [tmp_path / "a"], AdapterMix(("a",)), tmp_path / "out")
        model, tokens = load(str(tmp_path / "out"), tiny.CPU).model, tiny.prompts(3)[2]
        expected = loras.greedy_by_peft(wrapped, "default", tokens, 12)
        assert tiny.outputs([tiny.plainly(model, tokens, tiny.SamplingParams(max_tokens=12))]) == [expected]


def small(own, seed, rank=2):
    random = torch.Generator().manual_seed(seed)
    outputs, inputs = own.adapter_base.shapes["model.layers.0.mlp.up_proj"]
    a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
    return Adapter({"model.layers.0.mlp.up_proj": LowRank(a, b)})


@pytest.fixture
def many(target, tmp_path):
    """Folders with one small adapter each."""
    first = loras.save(
        loras.with_adapters(target, {"first": dict(r=2, lora_alpha=2, target_modules=["up_proj"])}), tmp_path / "saved"
    )["first"]
    out = []
    for number in range(12):
        shutil.copytree(first, tmp_path / str(number))
        found = {name: tensor + number for name, tensor in tensors(first).items()}
        safetensors.torch.save_file(found, tmp_path / str(number) / "adapter_model.safetensors")
        out.append(tmp_path / str(number))
    return out


class TestStore:
    def store(self, own, many, places):
        size = own.adapter_bytes(files.read(many[0], own.adapter_base))
        store = AdapterStore(own, places * size)
        for number, path in enumerate(many):
            store.register(str(number), path)
        return store, size

    def loaded(self, store):
        return [int(info.name) for info in store.infos() if info.loaded]

    def test_the_longest_unused_leave(self, own, many):
        store, size = self.store(own, many, 3)
        assert self.loaded(store) == [9, 10, 11]
        for name in ("0", "9", "1"):
            store.release(store.load(name))
        assert store.used <= 3 * size
        assert self.loaded(store) == [0, 1, 9]  # 10 was the longest unused, then 11

    def test_a_place_is_never_given_to_two(self, own, many, monkeypatch):
        """One place, four threads: an adapter that is ready takes the place that was kept for it before others look."""
        store, size = self.store(own, many, 1)
        most, insert = [], store._insert

        def late(*args, **more):
            time.sleep(0.002)  # whoever can come in between does
            return insert(*args, **more)

        monkeypatch.setattr(store, "_insert", late)

        def ask(first):
            for number in range(20):
                ready = store.load(str((number + 3 * first) % len(many)))
                most.append(store.used)
                store.release(ready)

        threads = [threading.Thread(target=ask, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(most) == 80
        assert max(most) <= size

    def test_what_is_in_use_stays(self, own, many):
        store, _ = self.store(own, many, 2)
        held = [store.load("0"), store.load("1")]
        assert store.take("2") is None
        done = threading.Event()
        found = []
        thread = threading.Thread(target=lambda: (found.append(store.load("2")), done.set()))
        thread.start()
        assert not done.wait(0.2), "there is no memory for a third"
        assert store.crowded
        store.release(held[0])
        assert done.wait(10)
        thread.join()
        assert self.loaded(store) == [1, 2]
        assert not store.crowded

    def test_waiting_can_be_stopped(self, own, many):
        store, _ = self.store(own, many, 1)
        store.load("0")
        stop = threading.Event()
        found = []
        thread = threading.Thread(target=lambda: found.append(store.load("1", stop.is_set)))
        thread.start()
        time.sleep(0.1)
        stop.set()
        store.wake()
        thread.join(10)
        assert found == [None]

    def test_a_name_that_is_replaced_while_its_adapter_waits(self, own, many):
        store, size = self.store(own, many, 1)
        held = store.load("0")
        found = []
        thread = threading.Thread(target=lambda: found.append(store.load("1")))
        thread.start()
        time.sleep(0.1)
        store.register("1", many[5])
        store.release(held)
        thread.join(10)
        assert found[0] is not None, "it was asked for when the name meant it"
        store.release(found[0])
        again = store.load("1")
        assert again.key != found[0].key
        assert store.used <= size
        store.release(again)

    def test_a_name_that_is_replaced(self, own, many):
        store, _ = self.store(own, many, 12)
        old = store.load("0")
        store.register("0", many[5])
        new = store.load("0")
        assert old.key != new.key, "or they would share prefixes"
        pairs = [each.weights.layers[0]["gate_up"][0].a for each in (old, new)]
        assert not torch.equal(*pairs)
        store.release(old)
        store.release(new)
        store.unregister("0")
        with pytest.raises(OutriderError, match="no adapter '0'"):
            store.take("0")

    def test_files_that_change_are_noticed(self, own, many):
        store, _ = self.store(own, many, 2)
        (many[0] / "adapter_model.safetensors").write_bytes((many[3] / "adapter_model.safetensors").read_bytes())
        shutil.rmtree(many[1])
        for name in "01":
            with pytest.raises(OutriderError, match="load it again"):
                store.load(name)
        assert store.load("2") is not None

    def test_an_adapter_that_is_too_large(self, own, many):
        with pytest.raises(OutriderError, match="adapter_memory"):
            AdapterStore(own, 100).register("a", many[0])

    def test_a_mix_is_an_adapter_of_its_own(self, own, many):
        store, _ = self.store(own, many, 12)
        mixes = [AdapterMix(("0", "1"), weights) for weights in ((1.0, 0.5), (1.0, 0.5), (0.5, 1.0))]
        keys = [store.load(mix).key for mix in mixes]
        assert keys[0] == keys[1] != keys[2]
        with pytest.raises(OutriderError, match="no adapter 'x'"):
            store.check(AdapterMix(("0", "x")))

    def test_a_model_of_transformers_takes_none(self, many):
        with pytest.raises(OutriderError, match="outrider merge"):
            AdapterStore(tiny.ours(tiny.reference("opt")), 1 << 30).register("a", many[0])


@pytest.mark.native
class TestPacked:
    def test_close_to_the_dense_ones(self):
        """8 bits: what is added differs by about one percent."""
        target = packs.reference("qwen3", seed=3)
        packed, dense = packs.packed(target, 8), packs.rounded(copy.deepcopy(target), 8)
        wrapped = loras.with_adapters(target, THREE)
        ours, theirs = loras.ready(packed, wrapped), loras.ready(dense, wrapped)
        tokens = tiny.prompts(4, vocab=packs.VOCAB)[3]
        for name in THREE:
            feeds = [tiny.Feed(0, tokens, adapter=each[name]) for each in (ours, theirs)]
            (found,), (expected,) = packed.forward(feeds[:1]), dense.forward(feeds[1:])
            (plain,) = dense.forward([tiny.Feed(1, tokens)])
            packed.free(0), dense.free(0), dense.free(1)
            added = (expected.logits - plain.logits).norm()
            assert (found.logits - expected.logits).norm() < 0.05 * added
            assert added > 0.1 * plain.logits.norm()

    @pytest.mark.parametrize("rank", [1, 7, 256, 257, 700])
    def test_any_rank_is_close_to_the_dense_one(self, rank):
        """A mix of several has the ranks of all."""
        target = packs.reference("llama", seed=3)
        packed, dense = packs.packed(target, 8), packs.rounded(copy.deepcopy(target), 8)
        tokens = tiny.prompts(4, vocab=packs.VOCAB)[3]
        adapter = small(packed, 1, rank)
        (found,) = packed.forward([tiny.Feed(0, tokens, adapter=packed.adapt(adapter, "a"))])
        (expected,) = dense.forward([tiny.Feed(0, tokens, adapter=dense.adapt(adapter, "a"))])
        (plain,) = dense.forward([tiny.Feed(1, tokens)])
        added = (expected.logits - plain.logits).norm()
        assert (found.logits - expected.logits).norm() < 0.05 * added
        assert added > 0.1 * plain.logits.norm()

    def test_a_value_that_is_none_shows(self):
        model = packs.packed(packs.reference("llama", seed=3), 8)
        adapter = small(model, 1, 8)
        pair = next(iter(adapter.pairs.values()))
        pair.b.mul_(float("inf"))
        (found,) = model.forward([tiny.Feed(0, [1, 2, 3], adapter=model.adapt(adapter, "a"))])
        assert not found.logits.isfinite().any()

    def test_its_bytes_are_counted(self):
        packed = packs.packed(packs.reference("llama", seed=3), 4)
        for rank in (1, 7, 16, 33):
            adapter = small(packed, 1, rank)
            ready = packed.adapt(adapter, "a")
            assert 0 < ready.nbytes <= packed.adapter_bytes(adapter)

    def test_the_same_bits_with_any_number_of_threads_and_rows(self):
        """Inputs of several segments: threads share one row's sums, or each takes rows of its own."""
        sizes = dict(hidden_size=416, intermediate_size=448, num_hidden_layers=2)
        model = packs.packed(packs.reference("llama", seed=3, **sizes), 8)
        configs = {
            "first": dict(r=5, lora_alpha=5, target_modules=ALL),
            "second": dict(r=33, lora_alpha=5, target_modules=["v_proj", "o_proj", "up_proj", "down_proj"]),
        }
        adapters = loras.ready(model, loras.with_adapters(packs.reference("llama", seed=3, **sizes), configs))
        text = (tiny.prompts(4, vocab=packs.VOCAB)[3] * 9)[:60]
        names = ("first", "second", "", "second", "first", "first")

        def rows(counts, chosen):
            feeds = [
                tiny.Feed(i, text[: 60 - n], tiny.Draft.chain(text[60 - n :]), adapters.get(name))
                for i, (n, name) in enumerate(zip(counts, chosen, strict=True))
            ]
            found = [output.logits.clone() for output in model.forward(feeds)]
            for feed in feeds:
                model.free(feed.id)
            return found

        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            alone = {name: rows([59], [name])[0] for name in ("first", "second", "")}
            assert not torch.equal(alone["first"], alone["second"])
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                for chosen in (("first",), ("second",), ("first", "second"), ("second", "", "first")):
                    for count in (2, 3, 4, 8)[: 5 - len(chosen)]:  # few rows after a text that is read: sums are shared
                        for i, name in enumerate(chosen):
                            model.forward([tiny.Feed(i, text[:50], adapter=adapters.get(name))])
                        draft = tiny.Draft.chain(text[51 : 50 + count])
                        few = [tiny.Feed(i, text[50:51], draft, adapters.get(name)) for i, name in enumerate(chosen)]
                        for name, output in zip(chosen, model.forward(few), strict=True):
                            assert torch.equal(output.logits, alone[name][50 : 50 + count])
                        for i in range(len(chosen)):
                            model.free(i)
                assert torch.equal(rows([59], ["second"])[0], alone["second"])
                for name, found in zip(names, rows((1, 3, 2, 7, 12, 1), names), strict=True):
                    assert torch.equal(found, alone[name][-len(found) :])
                for name in names:  # the last tokens one by one: one row, whose sums are shared
                    model.forward([tiny.Feed(0, text[:57], adapter=adapters.get(name))])
                    for place in range(57, 60):
                        (output,) = model.forward([tiny.Feed(0, text[place : place + 1], adapter=adapters.get(name))])
                        assert torch.equal(output.logits[0], alone[name][place])
                    model.free(0)
        finally:
            torch.set_num_threads(before)
