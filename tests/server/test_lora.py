"""LoRA adapters over HTTP: LoRAX's client and openai's, vLLM's paths, and all that can go wrong with a file."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import shutil
import signal
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import torch
from foreign import lorax
from small_adapters import write_adapter
from tiny import medusa_head

from outrider import LLM, AdapterMix, OutriderError, SamplingParams
from outrider.backends.base import BackendLoad
from outrider.cli import main
from outrider.core.request import Request
from outrider.drafters.heads import files as heads
from outrider.server.access import Access
from outrider.server.errors import Forbidden, Gone, TooManyModels
from outrider.server.fleet import adapters as books, wire
from outrider.server.fleet.adapters import AdapterBook
from outrider.server.fleet.worker import Session
from outrider.server.options import ServerOptions

PROMPT = "the red fox and the blue fox count"
SHORT = SamplingParams(max_tokens=12, ignore_eos=True)
GIB = 1 << 30
PLACE = {"device": "cpu", "dtype": "float32", "threads": 1, "cache_memory": 0.05}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """What requests may open."""
    return tmp_path_factory.mktemp("allowed")


@pytest.fixture(scope="module")
def llm(tiny_folder, root):
    """The library, with the same adapters and no drafts."""
    with LLM(str(tiny_folder), draft="none", **PLACE) as llm:
        for seed, name in enumerate("abcd"):
            llm.load_adapter(name, write_adapter(root / name, llm.engine.model, seed))
        torch.manual_seed(0)
        heads.write(medusa_head(llm.engine.model), root / "medusa-head", llm.engine.model)
        yield llm


@pytest.fixture(scope="module")
def server(serve_all, tiny_folder, llm, root):
    """`a` and `b` are given at the start; `c` and `d` lie in an allowed folder."""
    server = serve_all(ServerOptions(folders=(root,)))
    given = {name: str(root / name) for name in "ab"}
    server.launch(tiny_folder, uid="tiny", pace=False, dtype="float32", device="cpu", adapters=given)
    return server


@pytest.fixture(scope="module")
def text(llm):
    """What the library writes with an adapter or a mix."""
    return lambda adapter="": llm.generate(PROMPT, SHORT, adapter=adapter).text


def generate(server, adapter_id=None, **more):
    parameters = {"max_new_tokens": 12, "ignore_eos_token": True, "adapter_id": adapter_id, **more}
    return server.post("/generate", {"inputs": PROMPT, "parameters": parameters})


def complete(server, model="tiny", **more):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **more}
    return server.post("/v1/completions", body)


def load(server, name, path, **more):
    return server.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server, name):
    return server.post("/v1/unload_lora_adapter", {"lora_name": name})


def listed(server):
    return {each["id"]: each for each in server.get("/v1/models").json()["data"]}


def gauge(server, name):
    lines = server.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"outrider_{name}{{"))


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def broken(folder, count):
    """File names of an adapter, each with contents that make it one that cannot be served."""
    chance = random.Random(7)
    config, weights = (folder / name for name in ("adapter_config.json", "adapter_model.safetensors"))
    ways = [
        lambda: (weights.name, cut(weights.read_bytes(), chance)),
        lambda: (config.name, cut(config.read_bytes().rstrip(), chance)),
        lambda: (weights.name, other_length(weights.read_bytes(), chance)),
        lambda: (weights.name, weights.read_bytes() + chance.randbytes(chance.randrange(1, 64))),
        lambda: (weights.name, other_header(weights.read_bytes(), chance)),
        lambda: (weights.name, other_values(weights.read_bytes(), chance)),
        lambda: (config.name, other_config(json.loads(config.read_bytes()), chance)),
        lambda: (chance.choice((config, weights)).name, chance.randbytes(chance.randrange(300))),
    ]
    for turn in range(count):
        yield ways[turn % len(ways)]()


def cut(data, chance):
    return data[: chance.randrange(len(data))]


def other_length(data, chance):
    """Of the header: shorter, longer than the file, or more than can be counted."""
    own = int.from_bytes(data[:8], "little")
    new = chance.choice((0, own // 2, own - 1, len(data), 1 << 31, 1 << 62, (1 << 64) - 1))
    return new.to_bytes(8, "little") + data[8:]


def other_header(data, chance):
    """One tensor that is not as its bytes are, or that no matrix has."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    name = chance.choice([each for each in header if each != "__metadata__"])
    entry = header[name]
    (rows, columns), (begin, end) = entry["shape"], entry["data_offsets"]
    changes = [
        {"shape": [rows + 1, columns]},
        {"shape": [columns, rows]},
        {"shape": [rows * columns]},
        {"shape": [-rows, columns]},
        {"shape": [1 << 62, 1 << 62]},
        {"dtype": "F64"},
        {"dtype": "I32"},
        {"dtype": "nothing"},
        {"data_offsets": [begin, end + 4]},
        {"data_offsets": [end, begin]},
        {"data_offsets": [1 << 60, (1 << 60) + end - begin]},
        {},
    ]
    change = chance.choice(changes)
    del header[name]
    header[name if change else chance.choice((f"{name}.x", name.replace("layers.", "layers.9"), "x" * 500))] = (
        entry | change
    )
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def other_values(data, chance):
    """A number that is none, or infinite."""
    place = 8 + int.from_bytes(data[:8], "little")
    place += 4 * chance.randrange((len(data) - place) // 4)
    return data[:place] + struct.pack("<f", chance.choice((math.nan, math.inf, -math.inf))) + data[place + 4 :]


def other_config(config, chance):
    changes = [
        *({"r": value} for value in (0, -1, 3, 257, 1e400, "2", None, [2], True)),
        *({"lora_alpha": value} for value in (1e400, -1e400, math.nan, "x", None, [1], {}, False)),
        *({"peft_type": value} for value in ("LOHA", "", None, 1, [])),
        *({"bias": value} for value in ("all", "lora_only", 1, ["none"])),
        *({name: True} for name in ("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora")),
        *({"rank_pattern": value} for value in ([], "x", {"q_proj": 3}, {"(": 2}, {"q_proj": "x"}, {"a" * 300: 1})),
        *({"init_lora_weights": value} for value in ("pissa", "olora")),
    ]
    return json.dumps({**config, **chance.choice(changes)}).encode()


class TestClients:
    def test_lorax(self, server, text, root):
        asked = {"prompt": PROMPT, "max_new_tokens": 12, "ignore_eos_token": True}
        ties = {"merge_strategy": "ties", "density": 0.5, "majority_sign_method": "frequency"}
        answers = lorax(
            server.url,
            ("generate", asked),
            ("generate", {**asked, "adapter_id": "a"}),
            ("generate", {**asked, "adapter_id": str(root / "c"), "adapter_source": "local"}),
            ("generate_stream", {**asked, "adapter_id": "b"}),
            ("generate", {**asked, "merged_adapters": {"ids": ["a", "b"], "weights": [0.5, 1.5], "density": 0.0}}),
            ("generate", {**asked, "merged_adapters": {"ids": ["a", str(root / "d")], "weights": [1.0, 1.0], **ties}}),
            ("generate", {**asked, "adapter_id": "/etc"}),
            ("generate", {**asked, "adapter_id": "a", "api_token": "secret"}),
        )
        written = [each[-1] if isinstance(each, list) else each for each in answers[:6]]
        mixes = [AdapterMix(("a", "b"), (0.5, 1.5), "linear"), AdapterMix(("a", "d"), (1, 1), "ties", 0.5, "frequency")]
        assert [each.get("generated_text") for each in written] == [text(each) for each in ("", "a", "c", "b", *mixes)]
        assert len({text(each) for each in ("", "a", "c", "b", *mixes)}) == 6, "each writes a text of its own"
        assert "--allow-folder" in answers[6]["message"]
        assert "own login" in answers[7]["message"]

    def test_openai(self, server, text, llm):
        messages = [{"role": "user", "content": PROMPT}]
        more = {"max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for name in ("a", "tiny:a"):
                answer = client.completions.create(model=name, prompt=PROMPT, **more)
                assert (answer.choices[0].text, answer.model) == (text("a"), "tiny:a")
            answer = client.chat.completions.create(model="b", messages=messages, **more)
            assert answer.choices[0].message.content == llm.chat(messages, SHORT, adapter="b").text
            models = {each.id: each for each in client.models.list()}
            assert {name: getattr(models[name], "parent", None) for name in ("tiny", "a", "b")} == {
                "tiny": None,
                "a": "tiny",
                "b": "tiny",
            }
            assert client.models.retrieve("a").parent == client.models.retrieve("tiny:a").parent == "tiny"
            with pytest.raises(openai.NotFoundError, match="no adapter 'nobody'; loaded: a, b"):
                client.completions.create(model="tiny:nobody", prompt=PROMPT, **more)
            with pytest.raises(openai.NotFoundError, match="no model 'nobody' is launched"):
                client.completions.create(model="nobody", prompt=PROMPT, **more)

    def test_anthropic_and_responses_name_adapters_too(self, server, llm):
        messages = [{"role": "user", "content": PROMPT}]
        expected = llm.chat(messages, SHORT, adapter="a").text
        body = {"model": "a", "max_tokens": 12, "temperature": 0, "messages": messages, "ignore_eos": True}
        assert server.post("/v1/messages", body).json()["content"][0]["text"] == expected
        body = {"model": "a", "max_output_tokens": 12, "temperature": 0, "input": PROMPT, "ignore_eos": True}
        assert server.post("/v1/responses", body).json()["output"][0]["content"][0]["text"] == expected

    def test_llama_cpps_numbers_and_scales(self, server, text):
        numbers = {each["path"]: each["id"] for each in server.get("/lora-adapters").json()}
        scales = [{"id": numbers["a"], "scale": 0.5}, {"id": numbers["b"], "scale": -1.0}]
        assert complete(server, lora=scales).json()["choices"][0]["text"] == text(AdapterMix(("a", "b"), (0.5, -1.0)))
        assert complete(server, lora=[{"id": numbers["a"]}]).json()["choices"][0]["text"] == text("a")
        for nothing in ([], [{"id": numbers["a"], "scale": 0.0}]):
            assert complete(server, lora=nothing).json()["choices"][0]["text"] == text()
        for model, lora, reason in (
            ("tiny", [{"id": 99}], "no adapter with the id 99"),
            ("a", scales, "leave out one"),
        ):
            response = complete(server, model, lora=lora)
            assert (response.status_code, reason in response.json()["error"]["message"]) == (400, True)
        assert "with each request" in server.post("/lora-adapters", scales).json()["error"]["message"]

    def test_both_kinds_in_one_batch(self, server, text, root):
        """Each adapter has its own text, and a head has the model's."""
        asked = [None, "a", "b", str(root / "c"), str(root / "medusa-head")] * 4
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda id: generate(server, id).json().get("generated_text"), asked))
        assert answers == [text(each) for each in ("", "a", "b", "c", "")] * 4
        head = {"method": "medusa", "head": str(root / "medusa-head")}
        answer = complete(server, "a", speculative=head).json()
        assert answer["choices"][0]["text"] == text("a")
        assert "medusa" in answer["metrics"]["by_drafter"]

    def test_the_playground_lists_them(self, server):
        ids = [each["id"] for each in server.get("/outrider/models").json()["models"]]
        assert ids[:3] == ["tiny", "tiny:a", "tiny:b"]


class TestLoading:
    def test_loaded_listed_used_replaced_and_unloaded(self, server, text, root):
        before = gauge(server, "adapters")
        answer = load(server, "new", root / "c")
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'new' added successfully.")
        assert listed(server)["new"]["parent"] == "tiny"
        assert gauge(server, "adapters") == before + 1
        assert gauge(server, "adapters_in_memory") >= 1
        assert complete(server, "new").json()["choices"][0]["text"] == text("c")
        again = load(server, "new", root / "d")
        assert (again.status_code, "load_inplace" in again.json()["error"]["message"]) == (400, True)
        assert load(server, "new", root / "d", load_inplace=True).status_code == 200
        assert generate(server, "new").json()["generated_text"] == text("d")
        assert unload(server, "new").status_code == 200
        assert "new" not in listed(server)
        assert complete(server, "new").status_code == 404
        assert (unload(server, "new").status_code, unload(server, "../etc").status_code) == (400, 400)

    @pytest.mark.parametrize(
        ("name", "status", "reason"),
        [("tiny", 409, "a launched model"), ("/x", 400, "a path"), ("x" * 300, 400, "no name"), (" x", 400, "no name")],
    )
    def test_a_name_that_cannot_be(self, server, root, name, status, reason):
        answer = load(server, name, root / "c")
        assert (answer.status_code, reason in answer.json()["error"]["message"]) == (status, True)

    def test_no_launch_and_keys(self, serve, tiny_folder, llm, root):
        closed = serve(ServerOptions(folders=(root,), no_launch=True, api_key="K"))
        closed.launch(tiny_folder, uid="tiny", dtype="float32", device="cpu", adapters={"a": str(root / "a")})
        bodies = {"load": {"lora_name": "c", "lora_path": str(root / "c")}, "unload": {"lora_name": "a"}}
        with httpx.Client(base_url=closed.url, timeout=60) as client:
            for action, body in bodies.items():
                path = f"/v1/{action}_lora_adapter"
                assert client.post(path, json=body).status_code == 401
                answer = client.post(path, json=body, headers={"authorization": "Bearer K"})
                assert (answer.status_code, "--no-launch" in answer.text) == (403, True)
            assert client.get("/lora-adapters").status_code == 401

    def test_reading_holds_up_no_request(self):
        class Slow:
            """A backend whose disk does not answer."""

            tokenizer = None

            def load_adapter(self, name, path):
                begun.set()
                assert go.wait(30)
                raise OutriderError("too late")

            def submit(self, request):
                raise OutriderError("refused")

            def load(self):
                return BackendLoad()

        class Frames(list):
            send = list.append

        begun, go, frames = threading.Event(), threading.Event(), Frames()
        session = Session(frames, Slow())
        for id in range(8):
            session.hear({"adapter": id, "load_adapter": "x", "path": "x"})
        assert begun.wait(30)
        fit = {"pieces": False, "clip": False, "truncate": 0}
        session.hear({"submit": 0, "request": wire.request_to_json(Request("x")), "fit": fit})
        while not any("refused" in frame for frame in frames):
            session.send()
        assert not any("adapter_refused" in frame for frame in frames)
        go.set()
        while sum(len(frame.get("adapter_refused", ())) for frame in frames) < 8:
            session.send()


class TestAccess:
    def test_nothing_outside_is_read_or_told(self, server, root, tmp_path, llm):
        outside = write_adapter(tmp_path / "outside", llm.engine.model, 9)
        (root / "link").symlink_to(outside)
        inside = root / "half"
        inside.mkdir()
        shutil.copy(outside / "adapter_config.json", inside)
        (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
        said = set()
        for place in (outside, tmp_path / "absent", root / "link", root / ".." / outside.name, inside):
            answers = generate(server, str(place)), load(server, "x", place)
            merged = generate(server, merged_adapters={"ids": ["a", str(place)], "weights": [1.0, 1.0], "density": 1.0})
            assert [answer.status_code for answer in (*answers, merged)] == [403] * 3, place
            said.add(answers[0].json()["error"].replace(str(place), "P").replace(str(inside), "P"))
            assert complete(server, f"tiny:{place}").status_code == complete(server, str(place)).status_code == 404
        assert (
            len({line.replace("/adapter_config.json", "").replace("/adapter_model.safetensors", "") for line in said})
            == 1
        )
        assert "x" not in listed(server)

    def test_a_registered_name_opens_what_lies_anywhere(self, tmp_path):
        with pytest.raises(Forbidden):
            Access().source(str(tmp_path))
        named = Access(names={"mine": str(tmp_path)})
        assert (named.source("mine"), named.knows("mine"), named.knows(str(tmp_path))) == (str(tmp_path), True, False)


class TestFaults:
    def test_bad_files_are_refused_in_a_line_and_the_server_goes_on(self, server, root, text):
        """Files with bytes changed, cut off, or lengthened: each is served or refused."""
        chance, bad = random.Random(5), root / "bad"
        seen = set()
        for turn in range(60):
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(root / "c", bad)
            file = bad / ("adapter_config.json" if turn % 2 else "adapter_model.safetensors")
            content = bytearray(file.read_bytes())
            if turn % 3 == 0:
                content = content[: chance.randrange(len(content))]
            else:
                for _ in range(1 + turn % 7):
                    content[chance.randrange(min(len(content), 400))] = chance.randrange(256)
            file.write_bytes(content)
            answer = load(server, "bad", bad, load_inplace=True) if turn % 4 else generate(server, str(bad))
            seen.add(answer.status_code)
            line = "" if answer.status_code == 200 else str(answer.json()["error"])
            assert answer.status_code in (200, 400), answer.text
            assert "\n" not in line
            assert "Traceback" not in line
        assert 400 in seen
        shutil.rmtree(bad)
        unload(server, "bad")
        assert complete(server, "a").json()["choices"][0]["text"] == text("a")
        assert server.fleet.describe("tiny").restarts == 0

    def test_three_hundred_broken_adapters(self, server, root, text):
        """Files that no reader may take, each over HTTP: a 4xx in one line, and the same worker serves on."""
        bad = root / "broken"
        for turn, (name, content) in enumerate(broken(root / "c", 300)):
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(root / "c", bad)
            (bad / name).write_bytes(content)
            answer = load(server, "broken", bad) if turn % 2 else generate(server, str(bad))
            assert 400 <= answer.status_code < 500, (turn, name, answer.text)
            line = str(answer.json()["error"])
            assert "\n" not in line, (turn, name, line)
            assert "Traceback" not in line
            assert len(line) < 1000
            if turn % 50 == 0:
                assert complete(server, "a").json()["choices"][0]["text"] == text("a")
        assert turn == 299
        shutil.rmtree(bad)
        assert "broken" not in listed(server)
        assert complete(server, "a").json()["choices"][0]["text"] == text("a")
        assert server.fleet.describe("tiny").restarts == 0

    def test_a_worker_that_is_killed_while_it_loads_comes_back_with_its_adapters(
        self, serve, tiny_folder, llm, root, text
    ):
        server = serve(ServerOptions(folders=(root,)))
        given = {"a": str(root / "a")}
        server.launch(tiny_folder, uid="tiny", dtype="float32", device="cpu", adapters=given)
        assert load(server, "late", root / "b").status_code == 200
        assert generate(server, str(root / "c")).json()["generated_text"] == text("c")
        numbers = server.get("/lora-adapters").json()
        pid = server.pid("tiny")
        os.kill(pid, signal.SIGSTOP)  # so that it is sure to be in the middle of it
        with ThreadPoolExecutor(2) as pool:
            loading = pool.submit(load, server, "never", root / "d")
            asking = pool.submit(generate, server, str(root / "d"))
            wait_for(lambda: len(server.fleet._workers["tiny"].adapters._waits) == 2)
            os.kill(pid, signal.SIGKILL)
            for answer in (loading.result(), asking.result()):
                assert (answer.status_code, "try again" in answer.text) == (503, True)
        wait_for(lambda: server.fleet.describe("tiny").status == "ready")
        assert server.pid("tiny") != pid
        assert set(listed(server)) == {"tiny", "a", "late"}
        assert server.get("/lora-adapters").json() == numbers
        for name, own in (("a", "a"), ("late", "b"), (str(root / "c"), "c"), (None, "")):
            assert generate(server, name).json()["generated_text"] == text(own)
        assert load(server, "never", root / "d").status_code == 200

    def test_what_has_changed_or_is_gone_does_not_come_back(self, serve, tiny_folder, llm, root, text):
        server = serve(ServerOptions(folders=(root,)))
        places = {name: shutil.copytree(root / "c", root / f"mortal-{name}") for name in ("gone", "changed", "kept")}
        server.launch(tiny_folder, uid="tiny", dtype="float32", device="cpu", adapters={"kept": str(places["kept"])})
        for name in ("gone", "changed"):
            assert load(server, name, places[name]).status_code == 200
        shutil.rmtree(places["gone"])
        shutil.copytree(root / "d", places["changed"], dirs_exist_ok=True)
        for name in places:  # while they are in memory they serve on, as they were loaded
            assert complete(server, name).json()["choices"][0]["text"] == text("c")
        assert generate(server, str(places["gone"])).status_code == 400  # a path means what lies there now
        assert generate(server, str(places["changed"])).json()["generated_text"] == text("d")
        os.kill(server.pid("tiny"), signal.SIGKILL)
        wait_for(lambda: server.fleet.describe("tiny").restarts and server.fleet.describe("tiny").status == "ready")
        assert set(listed(server)) == {"tiny", "kept"}
        for name in ("gone", "changed"):
            for answer in (complete(server, name), complete(server, f"tiny:{name}"), generate(server, name)):
                assert (answer.status_code, "load it again" in answer.text) == (400, True)
        assert complete(server, "kept").json()["choices"][0]["text"] == text("c")
        assert load(server, "changed", places["changed"]).status_code == 200
        assert complete(server, "changed").json()["choices"][0]["text"] == text("d")
        assert unload(server, "gone").status_code == 200
        assert complete(server, "gone").status_code == 404

    def test_files_that_are_gone_when_they_are_read_again(self, serve, tiny_folder, llm, root, text):
        """There is memory for one adapter."""
        one = 1.5 * llm.adapters[0].nbytes / GIB
        server = serve(ServerOptions(folders=(root,)))
        server.launch(tiny_folder, uid="tiny", dtype="float32", device="cpu", adapter_memory=one)
        place = shutil.copytree(root / "c", root / "leaving")
        assert [load(server, "leaving", place).status_code, load(server, "d", root / "d").status_code] == [200, 200]
        assert complete(server, "leaving").json()["choices"][0]["text"] == text("c")
        assert complete(server, "d").json()["choices"][0]["text"] == text("d")
        shutil.rmtree(place)
        for answer in (complete(server, "leaving"), generate(server, "leaving")):
            assert (answer.status_code, "changed or are gone" in answer.text) == (400, True)
        assert complete(server, "d").json()["choices"][0]["text"] == text("d")
        assert server.fleet.describe("tiny").restarts == 0


class TestBook:
    """What the server knows of a worker's adapters; the worker's side of it is written out here."""

    @staticmethod
    def told(name):
        return {"name": name, "path": f"/{name}", "stamp": [["f", 1, 2, 3]], "rank": 4}

    def answering(self, book, sent):
        def send(message):
            sent.append(message)
            if "load_adapter" in message:
                book.hear({"adapter_loaded": [[message["adapter"], self.told(message["load_adapter"])]]})
            else:
                book.hear({"adapter_unloaded": [[message["adapter"], message["unload_adapter"]]]})

        return send

    def test_the_longest_unused_folder_leaves_and_names_never_do(self, monkeypatch):
        monkeypatch.setattr(books, "MOST_ADAPTERS", 2)

        async def scene():
            book, sent = AdapterBook("tiny"), []
            send = self.answering(book, sent)
            for name in ("x", "y"):
                await book.load(send, name, f"/{name}", named=True)
                await book.load(send, f"/{name}", f"/{name}", named=False)
            assert book.use("/x", [["f", 1, 2, 3]])
            assert not book.use("/x", [["f", 1, 2, 4]])
            await book.load(send, "/z", "/z", named=False)
            assert (list(book.opened), list(book.named)) == (["/x", "/z"], ["x", "y"])
            assert sent[-2]["unload_adapter"] == "/y"
            with pytest.raises(TooManyModels):
                await book.load(send, "z", "/z", named=True)
            await book.load(send, "x", "/z", named=True)  # in the place of another

        asyncio.run(scene())

    def test_who_waits_for_a_worker_that_dies_hears_so(self):
        async def scene():
            book = AdapterBook("tiny")
            waiting = asyncio.create_task(book.load(lambda message: None, "x", "/x", named=True))
            await asyncio.sleep(0)
            book.drop("its worker has died")
            with pytest.raises(Gone, match="its worker has died"):
                await waiting
            book.hear({"adapter_loaded": [[0, self.told("x")]]})  # too late, and no harm

        asyncio.run(scene())


class TestCommandLine:
    @pytest.mark.parametrize(
        ("args", "reason"),
        [
            (("--adapter", "a=X", "--backend", "vllm"), "adapters cannot be chosen on the backend vllm"),
            (("--adapter", "a=X", "--adapter", "a=Y"), "two adapters are called 'a'"),
            (("--adapter", "=X"), "write NAME=PATH"),
            (("--adapter-id", "LORA"), "serve it with --adapter NAME=PATH"),
        ],
    )
    def test_refused_in_a_line(self, capsys, tiny_folder, llm, root, args, reason):
        args = [str(root / "a") if each == "LORA" else each for each in args]
        assert main(["serve", str(tiny_folder), *args]) == 2
        said = capsys.readouterr().err.strip()
        assert reason in said
        assert "\n" not in said
