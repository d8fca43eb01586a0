"""The playground in a real browser, against a real server with a tiny model."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from outrider.server.faces import playground
from outrider.server.fleet.limits import WorkerLimits
from outrider.server.options import ServerOptions

api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[test]'")
expect = api.expect

PROMPT = "the red fox and the blue fox count the stars and the red fox and the blue fox count"
SENTENCE = "the red fox and the blue fox count the stars; a river ends in the sea and the sea is green. "
LONG = 600  # tokens; it takes a while
IDLE = 24  # layers
OWN = "ngram:min_n=1,length=4"


def browser_path() -> str:
    named = os.environ.get("OUTRIDER_BROWSER")  # CI names it, so that nothing is skipped there
    found = named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("needs a browser: apt-get install chromium, or name one with OUTRIDER_BROWSER")
    return found


@pytest.fixture(scope="module")
def browser() -> Iterator[api.Browser]:
    path = browser_path()
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def reciter(tiny_folder, tmp_path_factory) -> Path:
    """The tiny model, taught to say one sentence over and over, and slowed down by layers that do nothing."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_folder)
    message = {"role": "user", "content": PROMPT}
    prompt = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = torch.tensor([tokenizer.encode(prompt + SENTENCE * 20, add_special_tokens=False)[:LONG]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(40):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.config.num_hidden_layers += IDLE
    slow = transformers.LlamaForCausalLM(model.config)
    slow.load_state_dict(model.state_dict(), strict=False)
    for layer in slow.model.layers[-IDLE:]:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    folder = tmp_path_factory.mktemp("models") / "reciter"
    slow.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny(serve_all, reciter):
    """Drafts whatever it can: what is tested must not depend on the clock."""
    server = serve_all()
    server.launch(reciter, uid="tiny", pace=False, draft=OWN)
    return server


@pytest.fixture
def visit(browser) -> Iterator[Callable[..., api.Page]]:
    """Opens pages; at the end no page may have said anything on its console, not even about a blocked style."""
    contexts, said = [], []

    def visit(url, quiet=True, **options):
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 800}} | options))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        api.expect.set_options(timeout=20_000)
        if quiet:
            page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(url)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture
def page(visit, tiny) -> api.Page:
    page = visit(tiny.url)
    expect(page.locator("#model")).to_have_value("tiny")
    return page


def set_number(page, name, value):
    page.locator("details:has(#" + name + ")").evaluate("box => box.open = true")
    page.locator("#" + name).fill(str(value))


def ask(page, text=PROMPT, tokens=48):
    """Send it, and wait for the end; the text of the last answer."""
    set_number(page, "max_tokens", tokens)
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".answered .foot").last).to_contain_text("tokens")
    expect(page.locator("#send")).to_be_visible()
    return page.locator(".answered .answer").last.inner_text()


def alone(server, tokens=48, **more):
    """The same request over plain HTTP."""
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "temperature": 0}
    return server.post("/v1/chat/completions", body | more).json()


def kept(page):
    return page.locator(".answered").last.locator(".token.kept").count()


def test_chat_shows_the_answer_and_who_wrote_it(page, tiny):
    shown = ask(page)
    told = alone(tiny)
    assert " ".join(shown.split()) == " ".join(told["choices"][0]["message"]["content"].split())
    assert page.locator(".answered .token").count() == told["usage"]["completion_tokens"]
    assert kept(page) == told["metrics"]["accepted"] > 0
    assert page.locator("#numbers").inner_text().split("\n")[:2] == ["Tokens", "48"]
    chart = page.locator("#depths svg").get_attribute("aria-label")
    depths = told["metrics"]["by_depth"]
    assert chart == ", ".join(f"depth {d}: {n['accepted']} of {n['drafted']}" for d, n in depths.items())
    asked = page.locator("#asked svg").get_attribute("aria-label")
    for name, counts in told["metrics"]["by_drafter"].items():
        assert f"{name}: asked in {told['metrics']['asked'][name]['steps']} steps" in asked
        assert f"{counts['accepted']} of {counts['drafted']} tokens kept" in asked


def test_a_conversation_goes_on(page):
    ask(page, "the red fox", tokens=8)
    first = page.locator(".answered .answer").first.evaluate("place => place.textContent")
    with page.expect_request("**/v1/chat/completions") as sent:
        page.locator("#prompt").fill("and the sea")
        page.keyboard.press("Enter")
    said = sent.value.post_data_json["messages"]
    assert said == [
        {"role": "user", "content": "the red fox"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and the sea"},
    ]
    expect(page.locator("#send")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answered")).to_have_count(0)


def test_pointing_and_walking_show_depth_drafter_and_probability(page):
    ask(page)
    tip = page.get_by_role("tooltip")
    token = page.locator(".token.kept").filter(has_text=re.compile(r"\w")).first
    token.hover()
    expect(tip).to_contain_text(re.compile(r"drafted by ngram at depth \d"))
    hovered = tip.inner_text()
    expect(tip).to_contain_text(re.compile(r"log-probability -\d+\.\d{3}"))
    page.mouse.move(2, 2)
    page.locator(".answered .answer").focus()
    page.keyboard.press("ArrowRight")
    expect(tip).to_contain_text("written by the model")
    index = int(token.get_attribute("data-index"))
    for _ in range(index):
        page.keyboard.press("ArrowRight")
    expect(tip).to_have_text(re.compile(re.escape(hovered.split("\n")[0])))
    expect(page.locator("#said")).to_contain_text("drafted by ngram")


def test_the_drafter_can_be_switched(page):
    texts = [ask(page)]
    assert kept(page) > 0
    page.get_by_role("button", name="New chat").click()
    page.locator("#drafter").select_option("none")
    with page.expect_request("**/v1/chat/completions") as sent:
        texts.append(ask(page))
    assert sent.value.post_data_json["speculative"] == {"off": True}
    assert kept(page) == 0
    page.get_by_role("button", name="New chat").click()
    page.locator("#drafter").select_option("layer_skip")
    page.locator("#length").fill("2")
    with page.expect_request("**/v1/chat/completions") as sent:
        texts.append(ask(page))
    assert sent.value.post_data_json["speculative"] == {"method": "layer_skip", "length": 2}
    expect(page.locator("#legend")).to_contain_text("layer_skip")
    assert texts[0] == texts[1] == texts[2]  # the drafter changes the colours, never the text


def test_a_prediction_is_drafted(page, tiny):
    expected = alone(tiny)["choices"][0]["message"]["content"]
    page.locator("#drafter").select_option("prediction")
    page.locator("#prompt").fill(PROMPT)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("needs the answer you expect")
    page.locator("#prediction").fill(expected)
    ask(page)
    expect(page.locator("#legend")).to_contain_text("prediction")


def test_settings_reach_the_server(page):
    for name, value in {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "seed": 5}.items():
        set_number(page, name, value)
    page.locator("#more").evaluate("box => box.open = true")
    page.locator("#system").fill("be green")
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, tokens=5)
    body = sent.value.post_data_json
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 12, "seed": 5, "max_completion_tokens": 5}
    assert wanted.items() <= body.items()
    assert body["messages"][0] == {"role": "system", "content": "be green"}
    set_number(page, "temperature", 7)
    page.locator("#prompt").fill("x")
    page.locator("#send").click()
    expect(page.get_by_role("alert")).to_contain_text("out of its range")


def test_an_answer_is_held_to_a_schema_and_forced_tokens_are_coloured(page):
    page.locator("#structure").evaluate("box => box.open = true")
    page.locator("#example").select_option("a verdict")
    assert json.loads(page.locator("#schema").input_value())["required"] == ["sentiment", "reason"]
    schema = {"enum": ["the red fox counts", "the red fox is blue"]}  # no spaces, of which a random model has no end
    page.locator("#schema").fill(json.dumps(schema))
    page.locator("#drafter").select_option("grammar")
    with page.expect_request("**/v1/chat/completions") as sent:
        shown = ask(page, tokens=30)
    assert sent.value.post_data_json["response_format"]["json_schema"]["schema"] == schema
    assert json.loads(shown) in schema["enum"]
    assert kept(page) > 0
    expect(page.locator("#legend")).to_contain_text("grammar")
    page.locator("#schema").fill("{")
    page.locator("#prompt").fill("x")
    page.locator("#send").click()
    expect(page.get_by_role("alert")).to_contain_text("no JSON")
    page.locator("#example").select_option("")
    page.get_by_role("button", name="New chat").click()
    with page.expect_request("**/v1/chat/completions") as sent:
        ask(page, tokens=5)
    assert "response_format" not in sent.value.post_data_json


def race(page, tokens=60):
    page.get_by_role("tab", name="Race").click()
    set_number(page, "max_tokens", tokens)
    page.locator("#prompt").fill(PROMPT)
    page.locator("#send").click()
    expect(page.locator("#send")).to_be_visible()
    return page.locator("#verdict")


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_race_ends_identical(page, together, temperature):
    page.get_by_role("tab", name="Race").click()
    page.locator("#together").set_checked(together)
    set_number(page, "temperature", temperature)
    asked = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    verdict = race(page)
    expect(verdict).to_contain_text("Identical output")
    one, other = ({key: value for key, value in body.items() if key != "speculative"} for body in asked)
    assert one == other
    assert ("seed" in one) == (temperature > 0)  # luck is shared
    expect(verdict).to_contain_text("compared one by one")
    plain, drafted = page.locator("#lane-plain .token"), page.locator("#lane-drafted .token")
    assert plain.count() == drafted.count() > 8
    assert page.locator("#lane-plain .kept").count() == 0
    assert page.locator("#lane-drafted .kept").count() > 0
    for lane in ("plain", "drafted"):
        expect(page.locator(f"#lane-{lane} .rate")).to_contain_text("tokens/s")
    assert page.locator("#track path").count() == 2


def test_each_view_keeps_its_figures(page):
    ask(page, tokens=9)
    race(page, tokens=20)
    expect(page.locator("#figures")).to_contain_text("The speculative answer")
    expect(page.locator("#numbers dd").first).to_have_text("20")
    page.get_by_role("tab", name="Chat").click()
    expect(page.locator("#figures")).to_contain_text("This answer")
    expect(page.locator("#numbers dd").first).to_have_text("9")


def test_a_race_shows_the_first_difference(page):
    """The fourth token of plain decoding is changed on its way."""

    def tamper(route):
        body = route.request.post_data_json
        response = route.fetch()
        if body["speculative"] != {"off": True}:
            route.fulfill(response=response)
            return
        numbers = itertools.count()
        changed = re.sub(  # an event may have several tokens, where the reader was slow
            r'\{"id":\d+', lambda m: '{"id":299' if next(numbers) == 3 else m[0], response.text()
        )
        route.fulfill(response=response, body=changed)

    page.route("**/v1/chat/completions", tamper)
    page.get_by_role("tab", name="Race").click()
    page.locator("#drafter").select_option("ngram")
    verdict = race(page)
    expect(verdict).to_contain_text("Different from token 4 on")
    expect(verdict).to_contain_text("(299)")
    assert page.locator(".token.differs").count() == 2


def test_stop_ends_the_answer_and_frees_the_server(page, tiny):
    page.locator("#drafter").select_option("none")
    set_number(page, "max_tokens", LONG)
    page.locator("#prompt").fill(PROMPT)
    page.keyboard.press("Enter")
    page.locator(".answered .token").first.wait_for(state="attached")
    page.locator("#stop").click()
    expect(page.locator(".answered .foot")).to_contain_text("stopped")
    expect(page.locator("#stop")).to_be_hidden()
    assert 0 < page.locator(".answered .token").count() < LONG
    assert page.locator(".answered .answer").inner_text()
    tiny.wait_for(lambda: tiny.fleet.describe("tiny").running == 0)
    ask(page, tokens=4)


def test_escape_stops_a_race(page, tiny):
    page.get_by_role("tab", name="Race").click()
    set_number(page, "max_tokens", LONG)
    page.locator("#prompt").fill(PROMPT)
    page.keyboard.press("Enter")
    page.locator("#lane-plain .token").first.wait_for(state="attached")
    page.keyboard.press("Escape")
    expect(page.locator("#verdict")).to_contain_text("No result")
    tiny.wait_for(lambda: tiny.fleet.describe("tiny").running == 0)


def test_the_keyboard_is_enough(page):
    page.locator("#prompt").focus()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    assert page.locator("#prompt").input_value() == "one\ntwo"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("#tab-chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#race")).to_be_visible()
    expect(page.get_by_role("tab", name="Race")).to_have_attribute("aria-selected", "true")
    names = page.evaluate(
        "[...document.querySelectorAll('button, select, input, textarea')]"
        ".filter(e => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map(e => e.id)"
    )
    assert names == []  # everything that can be used has a name


def background(page):
    return page.evaluate("getComputedStyle(document.body).backgroundColor")


def test_light_and_dark(visit, tiny):
    page = visit(tiny.url, color_scheme="light")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.get_by_role("button", name="Light colours").click()
    assert background(page) == light
    page.reload()
    assert background(page) == light
    page.get_by_role("button", name="Dark colours").click()
    page.emulate_media(color_scheme="light")
    assert background(page) == dark


def test_every_text_has_contrast_in_both_schemes(visit, tiny):
    for scheme in ("light", "dark"):
        page = visit(tiny.url, color_scheme=scheme)
        ask(page, tokens=24)
        paper = background(page)
        for place in ("body", ".foot", "#about", "#numbers dt", ".keys", ".token.kept"):
            ink = page.locator(place).first.evaluate("e => getComputedStyle(e).color")
            assert contrast(ink, paper) >= 4.5, (scheme, place)


def contrast(*colours):
    """As WCAG counts it."""

    def light(colour):
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(light, colours))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("view", ["Chat", "Race"])
def test_a_phone_never_scrolls_sideways(visit, tiny, view):
    page = visit(tiny.url, viewport={"width": 320, "height": 640}, has_touch=True)
    page.locator("details").evaluate_all("boxes => boxes.forEach(box => box.open = true)")
    if view == "Chat":
        ask(page, PROMPT + "x" * 200, tokens=60)
        page.locator(".token").filter(has_text=re.compile(r"\w")).first.tap()
        expect(page.get_by_role("tooltip")).to_be_visible()
    else:
        expect(race(page)).to_contain_text("Identical output")
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    wide = page.evaluate(
        "[...document.querySelectorAll('main *, aside *, header *')]"
        ".filter(e => e.getClientRects().length && e.getBoundingClientRect().right > 321)"
        ".map(e => e.className || e.tagName)"
    )
    assert wide == []


def test_markup_of_a_model_stays_text(page):
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    token = {"id": 1, "text": evil, "drafter": evil, "depth": 1, "logprob": -1.0, "special": False}
    event = {"choices": [{"index": 0, "delta": {"content": evil}, "outrider": {"tokens": [token]}}]}
    stream = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=stream))
    assert ask(page) == evil
    page.locator(".answered .token").hover()
    assert page.locator("main img, .tip img, .tip script, #legend img, main script").count() == 0


def test_giving_up_on_a_busy_server(visit, tiny):
    page = visit(tiny.url, quiet=False)
    busy = {"status": 429, "headers": {"retry-after": "30"}, "json": {"error": {"message": "full"}}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**busy))
    page.locator("#prompt").fill(PROMPT)
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Trying again in 30 s")
    page.keyboard.press("Escape")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(page.locator("#send")).to_be_visible()


@pytest.fixture(scope="module")
def frail(serve_all, reciter):
    """One request at a time, and only with the key. The tests below use it in turn; the last one ends it."""
    server = serve_all(ServerOptions(api_key="secret"), WorkerLimits(queue=0, first_wait=0.05, longest_wait=0.2))
    server.launch(reciter, uid="tiny", max_batch=1, draft="none")
    return server


@pytest.fixture
def unlocked(visit, frail) -> api.Page:
    page = visit(frail.url, quiet=False)
    page.evaluate("sessionStorage.setItem('outrider-key', 'secret')")
    page.reload()
    expect(page.locator("#model")).to_have_value("tiny")
    return page


def test_the_api_key_stays_in_the_tab(visit, frail):
    page = visit(frail.url, quiet=False)
    expect(page.get_by_role("alert")).to_contain_text("wants an API key")
    expect(page.locator("#key")).to_be_focused()
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_value("tiny")
    expect(page.get_by_role("alert")).to_be_hidden()
    ask(page, tokens=4)
    assert page.evaluate("[...Object.values(sessionStorage)]") == ["secret"]
    assert page.evaluate("[...Object.values(localStorage), document.cookie].join('')") == ""


def test_a_busy_server_is_asked_again(unlocked, frail):
    held, release = threading.Event(), threading.Event()

    def occupy():
        said = [{"role": "user", "content": PROMPT}]
        body = {"messages": said, "max_tokens": 900, "ignore_eos": True, "stream": True}
        key = {"authorization": "Bearer secret"}
        with httpx.stream("POST", frail.url + "/v1/chat/completions", json=body, headers=key, timeout=60):
            held.set()
            release.wait(20)

    thread = threading.Thread(target=occupy)
    thread.start()
    assert held.wait(20)
    unlocked.locator("#prompt").fill(PROMPT)
    set_number(unlocked, "max_tokens", 8)
    unlocked.locator("#send").click()
    expect(unlocked.get_by_role("alert")).to_contain_text(re.compile(r"The server is busy.*Trying again in \d+ s"))
    release.set()
    thread.join()
    expect(unlocked.locator(".answered .foot")).to_contain_text("8 tokens", timeout=20_000)
    expect(unlocked.get_by_role("alert")).to_be_hidden()


def test_a_worker_that_dies_is_told_in_words(unlocked, frail):
    set_number(unlocked, "max_tokens", LONG)
    unlocked.locator("#prompt").fill(PROMPT)
    unlocked.locator("#send").click()
    unlocked.locator(".answered .token").first.wait_for(state="attached")
    os.kill(frail.pid("tiny"), signal.SIGKILL)
    expect(unlocked.get_by_role("alert")).to_be_visible()
    expect(unlocked.locator(".answered .foot")).to_contain_text("broke off")
    set_number(unlocked, "max_tokens", 8)
    unlocked.get_by_role("button", name="Try again").click()  # while it starts again, the page waits
    expect(unlocked.locator(".answered .foot")).to_contain_text("8 tokens", timeout=60_000)
    expect(unlocked.get_by_role("alert")).to_be_hidden()


def test_a_server_that_is_gone(unlocked, frail):
    frail.close()
    unlocked.locator("#prompt").fill("anybody there?")
    unlocked.locator("#send").click()
    expect(unlocked.get_by_role("alert")).to_contain_text("The server does not answer")
    expect(unlocked.get_by_role("button", name="Try again")).to_be_visible()
    expect(unlocked.locator(".asked")).to_have_text("anybody there?")


def test_what_the_server_offers(tiny):
    told = tiny.get("/outrider/models").json()
    assert [(model["id"], model["draft"], model["chat"]) for model in told["models"]] == [("tiny", OWN, True)]
    names = set(told["models"][0]["drafters"])
    assert {"none", "ngram", "prediction", "layer_skip"} <= names
    assert not {"draft_model", "eagle", "medusa", "oracle"} & names  # they need a model, a head, or to be told ids
    about = {drafter["name"]: drafter for drafter in told["drafters"]}
    assert about.keys() >= names
    words = "Prompt lookup: drafts what followed when the last tokens occurred earlier in the text."
    assert about["ngram"]["about"] == words
    assert all(len(drafter["about"]) > 10 for drafter in about.values())  # of every drafter in the table
    assert "length" in about["ngram"]["options"]


@pytest.mark.parametrize("name", ["..%2fapp.py", "%2e%2e/app.py", "nothing.js", "index.html%00", "..%5capp.py"])
def test_nothing_else_is_handed_out(tiny, name):
    response = tiny.get(f"/static/{name}")
    assert response.status_code == 404
    assert "import" not in response.text


def test_the_page_loads_nothing_from_elsewhere(tiny):
    response = tiny.get("/")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    files = [path.name for path in Path(playground.__file__).with_name("static").iterdir()]
    assert {"index.html", "app.js", "style.css"} <= set(files)
    for name in files:
        text = tiny.get(f"/static/{name}").text
        assert not re.search(r"https?:(?!//www\.w3\.org)", text), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
