"""/metrics says what the requests were told, under the names that people chart; the dashboard asks for nothing else."""

import json
import re
from importlib.resources import files

import pytest
from prometheus_client.parser import text_string_to_metric_families


@pytest.fixture(scope="module")
def metered(serve_module, quick):
    serve_module.launch(quick, uid="m", pace=False)
    return serve_module


def read(server):
    """(name, labels without the model) -> value"""
    found = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            labels = tuple(value for key, value in sample.labels.items() if key != "model_name")
            found[sample.name, labels] = sample.value
    return found


def ask(server, **more):
    body = {"prompt": "abcabcabcabc", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "speculative": {}}
    body["speculative"] = {"method": "layer_skip", "layers": 2, "length": 3}
    return server.post("/v1/completions", {**body, **more})


def test_counters_add_up_to_what_the_answers_say(metered):
    before = read(metered)
    told = [ask(metered, n=n).json() for n in (1, 2)]
    after = read(metered)

    def grown(name, *labels):
        return after[f"outrider_{name}", labels] - before.get((f"outrider_{name}", labels), 0)

    def total(key):
        return sum(each["metrics"][key] for each in told)

    assert grown("spec_decode_num_drafts_total") == total("drafts") > 0
    assert grown("spec_decode_num_draft_tokens_total") == total("drafted") > 0
    assert grown("spec_decode_num_accepted_tokens_total") == total("accepted") > 0
    depths = {depth for each in told for depth in each["metrics"]["by_depth"]}
    for depth in depths:
        kept = sum(each["metrics"]["by_depth"].get(depth, {"accepted": 0})["accepted"] for each in told)
        assert grown("spec_decode_num_accepted_tokens_per_pos_total", str(int(depth) - 1)) == kept
    assert grown("drafter_draft_tokens_total", "layer_skip") == total("drafted")
    assert grown("drafter_accepted_tokens_total", "layer_skip") == total("accepted")
    assert grown("generation_tokens_total") == sum(each["usage"]["completion_tokens"] for each in told) == 180
    assert grown("prompt_tokens_total") == sum(each["usage"]["prompt_tokens"] for each in told)
    assert grown("steps_total") == total("steps")
    assert grown("requests_total", "length") == 2
    assert grown("e2e_request_latency_seconds_count") == 2
    assert not any("estimated_speedup" in name for name, _ in after)  # without `pace` nobody knows what drafts cost


def test_streams_measure_the_first_token_and_the_gaps(metered):
    before = read(metered)
    assert ask(metered, stream=True, max_tokens=30).text.endswith("[DONE]\n\n")
    after = read(metered)
    name = "outrider_time_to_first_token_seconds_count", ()
    assert after[name] - before.get(name, 0) == 1
    name = "outrider_inter_token_latency_seconds_count", ()
    assert 0 < after[name] - before.get(name, 0) < 30


def test_gauges_tell_how_it_stands(metered):
    found = read(metered)
    assert found["outrider_worker_up", ()] == 1
    assert found["outrider_num_requests_running", ()] == 0
    assert found["outrider_num_requests_waiting", ()] == 0
    metered.wait_for(lambda: read(metered)["outrider_kv_cache_usage_perc", ()] == 0)


def test_answers_are_counted_by_route(metered):
    metered.get("/v1/nothing")
    metered.get("/health")
    found = read(metered)
    assert found["outrider_http_requests_total", ("/health", "200")] >= 1
    assert found["outrider_http_requests_total", ("other", "404")] >= 1  # not one series per path that somebody tries


def test_the_dashboard_asks_for_what_there_is(metered):
    """Every metric of the dashboard is one that the server shows."""
    dashboard = json.loads((files("outrider.server") / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in expressions for name in re.findall(r"\boutrider_\w+", expression)}
    ask(metered, stream=True)
    text = metered.get("/metrics").text
    declared = set(re.findall(r"^# TYPE (\w+)", text, re.M))
    assert asked
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} <= declared
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_an_estimate_counts_where_costs_are_known(serve_module, quick):
    serve_module.launch(quick, uid="paced")  # the last test here: from now on requests have to name a model
    before = read(serve_module)
    answer = ask(serve_module, model="paced").json()
    name = "outrider_estimated_speedup_count", ()
    assert answer["metrics"]["estimated_speedup"] is not None
    assert read(serve_module)[name] - before.get(name, 0) == 1
