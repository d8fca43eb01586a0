"""Adapters from Python and the command line: by name, one per prompt, mixed, many more than memory holds."""

import json
import shutil
import threading
import time

import pytest
import torch
from small_adapters import write_adapter
from tiny import block_head, eagle_head

from outrider import LLM, AdapterMix, OutriderError, SamplingParams
from outrider.cli import main
from outrider.drafters.heads import files as heads
from outrider.drafters.heads.adapted import with_heads
from outrider.models.adapters import files

FOX = "the red fox and the blue fox and the"
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
LONG = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def plain(tiny_folder):
    with LLM(str(tiny_folder), draft="none", device="cpu", dtype="float32", threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def folders(plain, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, plain.engine.model, seed) for seed, name in enumerate("abc")}


@pytest.fixture(scope="module")
def llm(tiny_folder, folders):
    adapters = {name: str(path) for name, path in folders.items()}
    options = dict(device="cpu", dtype="float32", threads=1, pace=False)
    with LLM(str(tiny_folder), draft="ngram:min_n=1", adapters=adapters, **options) as llm:
        yield llm


def ids(results):
    return [result.token_ids for result in results]


class TestPython:
    def test_one_for_all_or_one_for_each(self, llm, plain):
        alone = [llm.generate(FOX, SHORT, adapter=name).token_ids for name in ("", "a", "b", "c")]
        assert len({tuple(each) for each in alone}) == 4, "each writes a text of its own"
        assert alone[0] == plain.generate(FOX, SHORT).token_ids
        together = llm.generate([FOX] * 8, SHORT, adapter=["", "a", "b", "c"] * 2)
        assert ids(together) == alone * 2
        assert ids(llm.generate([FOX] * 2, SHORT, adapter="b")) == [alone[2]] * 2

    def test_chat_and_stream(self, llm):
        messages = [{"role": "user", "content": "hello"}]
        expected = llm.chat(messages, SHORT, adapter="a").token_ids
        assert expected != llm.chat(messages, SHORT).token_ids
        streamed = [token.id for chunk in llm.stream(messages, SHORT, adapter="a") for token in chunk.tokens]
        assert streamed == expected

    def test_a_mix(self, llm):
        one = llm.generate(FOX, SHORT, adapter=AdapterMix(("a",), (1.0,)))
        assert one.token_ids == llm.generate(FOX, SHORT, adapter="a").token_ids
        none = llm.generate(FOX, SHORT, adapter=AdapterMix(("a", "b"), (0.0, 0.0)))
        assert none.token_ids == llm.generate(FOX, SHORT).token_ids
        ties = AdapterMix(("a", "b"), strategy="ties", density=0.5)
        assert llm.generate(FOX, SHORT, adapter=ties).finish_reason == "length"

    def test_names_that_are_not_there(self, llm):
        with pytest.raises(OutriderError, match="no adapter 'x'; loaded: a, b, c"):
            llm.generate(FOX, SHORT, adapter="x")
        with pytest.raises(OutriderError, match="2 adapters for 1 prompts"):
            llm.generate([FOX], SHORT, adapter=["a", "b"])

    def test_load_and_unload(self, llm, folders):
        info = llm.load_adapter("d", folders["b"])
        assert (info.name, info.rank, info.base, info.loaded) == ("d", 2, "tiny", True)
        assert "d" in [each.name for each in llm.adapters]
        expected = llm.generate(FOX, SHORT, adapter="b").token_ids
        assert llm.generate(FOX, SHORT, adapter="d").token_ids == expected
        llm.load_adapter("d", folders["a"])  # the name now means another
        assert llm.generate(FOX, SHORT, adapter="d").token_ids == llm.generate(FOX, SHORT, adapter="a").token_ids
        llm.unload_adapter("d")
        with pytest.raises(OutriderError, match="no adapter 'd'"):
            llm.generate(FOX, SHORT, adapter="d")

    def test_a_bad_one_is_refused_before_it_serves(self, llm, tiny_folder, tmp_path):
        with pytest.raises(OutriderError, match="is no adapter"):
            llm.load_adapter("x", tmp_path)
        with pytest.raises(OutriderError, match="is no adapter"):
            LLM(str(tiny_folder), adapters={"x": str(tmp_path)})


class TestHeads:
    """A head beside an adapter's folder drafts for the requests with that adapter, and changes no text."""

    @pytest.fixture
    def near(self, plain, folders, tmp_path):
        """Adapters with an EAGLE head in their folder, a block head and both beside it; and one without a head."""
        model = plain.engine.model
        found = {name: shutil.copytree(folders[name], tmp_path / name) for name in "abc"}
        found["d"] = shutil.copytree(folders["a"], tmp_path / "d")
        torch.manual_seed(0)
        heads.write(eagle_head(model), found["a"] / "heads" / "eagle", model)
        heads.write(block_head(model), tmp_path / "b.outrider-head", model)
        heads.write(eagle_head(model), tmp_path / "c.outrider-head" / "eagle", model)
        heads.write(block_head(model), tmp_path / "c.outrider-head" / "block", model)
        return found

    @pytest.fixture
    def own(self, tiny_folder, near):
        adapters = {name: str(path) for name, path in near.items()}
        with LLM(str(tiny_folder), draft="auto", adapters=adapters, dtype="float32", threads=1, pace=False) as llm:
            yield llm

    def test_found_without_being_named(self, own, plain, near):
        names = ["a", "b", "c", "d", ""]
        expected = ids(own.generate([FOX] * 5, LONG, adapter=names, draft="none"))
        assert len({tuple(each) for each in expected}) == 4, "a and d are the same adapter"
        assert expected[-1] == plain.generate(FOX, LONG).token_ids
        for draft in ("", "auto"):
            assert ids(own.generate([FOX] * 5, LONG, adapter=names, draft=draft)) == expected
        used = {spec for spec in own.engine.drafters if "head=" in spec}
        root = near["a"].parent
        places = {
            f"auto:head={near['a'] / 'heads' / 'eagle'}",
            f"auto:head={root / 'b.outrider-head'}",
            f"auto:head={root / 'c.outrider-head' / 'eagle'}",
        }
        assert used
        assert used <= places, "idle ones may have left"

    def test_each_kind_by_its_name(self, own, near):
        for name, draft in (("a", "eagle"), ("b", "block"), ("c", "eagle:tree=8"), ("c", "block+ngram")):
            expected = own.generate(FOX, LONG, adapter=name, draft="none").token_ids
            result = own.generate(FOX, LONG, adapter=name, draft=draft)
            assert result.token_ids == expected
            assert result.stats.drafted > 0
            with pytest.raises(OutriderError, match="no head for"):
                own.generate(FOX, LONG, adapter="d", draft=draft)
        half = AdapterMix(("a",), (0.5,))
        plainly = own.generate(FOX, LONG, adapter=half, draft="none").token_ids
        assert own.generate(FOX, LONG, adapter=half, draft="eagle").token_ids == plainly
        with pytest.raises(OutriderError, match="no head for"):  # a mix of several has none
            own.generate(FOX, LONG, adapter=AdapterMix(("a", "b")), draft="eagle")

    @pytest.mark.native
    def test_beside_packed_weights(self, packable_folder, tmp_path):
        place = dict(quantize="int8", device="cpu", threads=1, pace=False)
        with LLM(str(packable_folder), draft="auto", **place) as llm:
            model = llm.engine.model
            torch.manual_seed(0)
            for seed, name in enumerate("ab"):
                llm.load_adapter(name, write_adapter(tmp_path / name, model, seed))
            heads.write(eagle_head(model), tmp_path / "a" / "heads" / "eagle", model)
            heads.write(block_head(model), tmp_path / "b" / "heads" / "block", model)
            names = ["a", "b", ""] * 2
            expected = ids(llm.generate([FOX] * 6, LONG, adapter=names, draft="none"))
            results = llm.generate([FOX] * 6, LONG, adapter=names)
            assert ids(results) == expected
            assert sum("head=" in spec for spec in llm.engine.drafters) == 2
            assert all(result.stats.drafted > 0 for result in results[:2])

    def test_one_that_is_named_comes_first(self, near):
        assert with_heads("eagle:head=x", str(near["a"])) == "eagle:head=x"
        assert with_heads("none", str(near["a"])) == "none"
        found = with_heads("eagle:length=2,allow_pickle=true+ngram", str(near["a"]))
        assert found == f"eagle:head={near['a'] / 'heads' / 'eagle'},length=2+ngram", "pickles were allowed for another"

    def test_a_broken_one_is_refused_in_a_line(self, own, near):
        (near["a"] / "heads" / "eagle" / "model.safetensors").write_bytes(b"x")
        with pytest.raises(OutriderError, match="cannot be read"):
            own.generate(FOX, LONG, adapter="a")
        assert own.generate(FOX, LONG, adapter="d").token_ids

    def test_a_link_to_elsewhere_is_not_followed(self, own, near, tmp_path_factory):
        head = near["a"] / "heads" / "eagle"
        away = shutil.move(head, tmp_path_factory.mktemp("away") / "eagle")
        head.symlink_to(away)
        with pytest.raises(OutriderError, match="link to elsewhere"):
            own.generate(FOX, LONG, adapter="a")

    def test_more_heads_than_may_be_in_use(self, tiny_folder, plain, tmp_path):
        """Requests beyond the most that may draft with heads of their own are served with the model's drafter."""
        model, most = plain.engine.model, 6
        torch.manual_seed(0)
        head, given = eagle_head(model), {}
        for n in range(most):
            given[str(n)] = str(write_adapter(tmp_path / str(n), model, n))
            heads.write(head, tmp_path / f"{n}.outrider-head", model)
        with LLM(str(tiny_folder), draft="auto", adapters=given, dtype="float32", threads=1, pace=False) as llm:
            expected = ids(llm.generate([FOX] * most, LONG, adapter=list(given), draft="none"))
            assert ids(llm.generate([FOX] * most, LONG, adapter=list(given))) == expected


class TestMemory:
    def test_many_more_than_memory_holds(self, tiny_folder, plain, tmp_path):
        """200 adapters, memory for 8, 500 requests over all of them from 8 threads: none lost, none wrong."""
        model = plain.engine.model
        paths = [write_adapter(tmp_path / str(i), model, 100 + i) for i in range(200)]
        size = model.adapter_bytes(files.read(paths[0], model.adapter_base))
        with LLM(
            str(tiny_folder), draft="none", dtype="float32", threads=1, adapter_memory=8 * size / (1 << 30)
        ) as llm:
            for number, path in enumerate(paths):
                llm.load_adapter(str(number), path)
            assert sum(info.loaded for info in llm.adapters) == 8
            params = SamplingParams(max_tokens=4, ignore_eos=True)
            expected = {n: llm.generate(FOX, params, adapter=str(n)).token_ids for n in range(0, 200, 7)}
            found, most = {}, []

            def ask(first):
                for number in range(first, 500, 8):
                    found[number] = llm.generate(FOX, params, adapter=str(number * 37 % 200)).token_ids
                    most.append(sum(info.loaded for info in llm.adapters))

            threads = [threading.Thread(target=ask, args=(first,)) for first in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(found) == list(range(500))
            assert max(most) <= 8
            assert all(found[n] == expected[n * 37 % 200] for n in found if n * 37 % 200 in expected)
            # and all in one call: more adapters than fit are asked for at once
            names = [str(n) for n in range(0, 200, 7)]
            assert ids(llm.generate([FOX] * len(names), params, adapter=names)) == [expected[int(n)] for n in names]

    def test_a_request_that_waits_for_memory_can_be_cancelled(self, tiny_folder, plain, folders):
        model = plain.engine.model
        size = model.adapter_bytes(files.read(folders["a"], model.adapter_base))
        with LLM(str(tiny_folder), draft="none", dtype="float32", threads=1, adapter_memory=size / (1 << 30)) as llm:
            for name, path in folders.items():
                llm.load_adapter(name, path)
            long = SamplingParams(max_tokens=200, ignore_eos=True)
            first = llm.submit(FOX, long, adapter="a", stream=True)
            next(iter(first))
            second = llm.submit(FOX, SHORT, adapter="b")
            other = llm.generate(FOX, SHORT)  # one without an adapter is not held up
            assert len(other.token_ids) == 8
            second.cancel()
            assert second.result().finish_reason == "cancelled"
            third = llm.submit(FOX, SHORT, adapter="b")
            first.cancel()
            assert len(third.result().token_ids) == 8

    def test_closing_ends_what_waits(self, tiny_folder, plain, folders):
        model = plain.engine.model
        size = model.adapter_bytes(files.read(folders["a"], model.adapter_base))
        llm = LLM(str(tiny_folder), draft="none", dtype="float32", threads=1, adapter_memory=size / (1 << 30))
        for name, path in folders.items():
            llm.load_adapter(name, path)
        first = llm.submit(FOX, SamplingParams(max_tokens=200, ignore_eos=True), adapter="a", stream=True)
        next(iter(first))
        second = llm.submit(FOX, SHORT, adapter="b")
        llm.close()
        assert {first.result().finish_reason, second.result().finish_reason} == {"cancelled"}

    def test_files_that_are_gone_end_the_request_not_the_engine(self, tiny_folder, plain, folders, tmp_path):
        model = plain.engine.model
        gone = write_adapter(tmp_path / "gone", model, 9)
        size = model.adapter_bytes(files.read(gone, model.adapter_base))
        with LLM(str(tiny_folder), draft="none", dtype="float32", threads=1, adapter_memory=size / (1 << 30)) as llm:
            llm.load_adapter("gone", gone)
            llm.load_adapter("a", folders["a"])
            (gone / "adapter_model.safetensors").unlink()
            with pytest.raises(OutriderError, match="changed or are gone"):
                llm.generate(FOX, SHORT, adapter="gone")
            assert len(llm.generate(FOX, SHORT, adapter="a").token_ids) == 8


def test_a_slow_load_holds_up_nobody_else(llm, folders, monkeypatch):
    """Requests with adapters that are in memory, and with none, are answered while another is read."""
    llm.load_adapter("slow", folders["c"])
    store = llm.backend._adapters.store
    store._drop(store._names["slow"].key)
    read, begun, go_on = files.read, threading.Event(), threading.Event()

    def slowly(*given):
        begun.set()
        assert go_on.wait(30)
        return read(*given)

    monkeypatch.setattr(files, "read", slowly)
    waiting = llm.submit(FOX, SHORT, adapter="slow")
    assert begun.wait(10)
    assert len(llm.generate(FOX, SHORT, adapter="a").token_ids) == 8
    assert len(llm.generate(FOX, SHORT).token_ids) == 8
    assert not waiting.done
    go_on.set()
    assert waiting.result().token_ids == llm.generate(FOX, SHORT, adapter="c").token_ids
    llm.unload_adapter("slow")
    for _ in range(100):
        if "slow" not in [info.name for info in llm.adapters]:
            break
        time.sleep(0.01)


class TestCommandLine:
    def run(self, capsys, *args):
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return code, *capsys.readouterr()

    def test_generate(self, capsys, tiny_folder, folders, llm):
        args = ("generate", "hello", "-m", tiny_folder, "--max-tokens", 8, "--json", "--dtype", "float32")
        code, out, _ = self.run(capsys, *args, "--adapter", f"haiku={folders['a']}")
        assert code == 0
        messages = [{"role": "user", "content": "hello"}]
        found = json.loads(out)["token_ids"]
        assert found == llm.chat(messages, SamplingParams(max_tokens=8), adapter="a").token_ids
        assert found != llm.chat(messages, SamplingParams(max_tokens=8)).token_ids

    @pytest.mark.parametrize("given", [["a=x", "b=y"], ["=x"], ["a=x", "a=y"], ["nowhere"]])
    def test_adapters_that_cannot_be(self, capsys, tiny_folder, given):
        options = [word for each in given for word in ("--adapter", each)]
        code, _, err = self.run(capsys, "generate", "hello", "-m", tiny_folder, *options)
        assert code == 2
        assert err.startswith("error: ")
        assert len(err.splitlines()) == 1

    def test_chat(self, capsys, tiny_folder, folders, monkeypatch):
        import io

        lines = "hello\n/adapter\n/adapter none\nhello\n/adapter x\n/adapter b\n/reset\nhello\n"
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        both = ("--adapter", f"a={folders['a']}", "--adapter", f"b={folders['b']}")
        code, out, err = self.run(capsys, "chat", "-m", tiny_folder, "--max-tokens", 8, *both)
        assert code == 0
        assert [line for line in out.splitlines() if line.startswith("adapter: ")] == [
            "adapter: a",
            "adapter: none",
            "adapter: b",
        ]
        assert err == "error: there is no adapter x; loaded: a, b\n"

    def test_merge(self, capsys, tiny_folder, folders, tmp_path, llm):
        out = tmp_path / "merged"
        given = ("merge", "-m", tiny_folder, "--adapter", f"a={folders['a']}", "--out", out)
        assert self.run(capsys, *given)[0] == 0
        with LLM(str(out), draft="none", dtype="float32", threads=1) as other:
            assert other.generate(FOX, SHORT).token_ids == llm.generate(FOX, SHORT, adapter="a").token_ids
        code, _, err = self.run(capsys, *given)
        assert (code, "there already" in err) == (2, True)
        code, _, err = self.run(capsys, "merge", "-m", tiny_folder, "--out", tmp_path / "x")
        assert (code, "which adapters" in err) == (2, True)
