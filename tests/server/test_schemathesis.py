"""Whatever our own description of the interface allows, or does not, the server answers without a 500 and goes on."""

import pytest
import schemathesis
from ggufs import byte_metadata, write_llama
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from outrider.server.app import create_app
from outrider.server.fleet.fleet import Fleet

SCHEMA = schemathesis.openapi.from_dict(create_app(Fleet()).openapi())
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}
BODIES = [label for label, operation in OPERATIONS.items() if list(operation.body)]


@pytest.fixture(scope="module")
def target(serve_module, tmp_path_factory):
    """A model of a short context, so that no answer is long."""
    metadata = byte_metadata() | {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    vocab = len(metadata["tokenizer.ggml.tokens"])
    file = write_llama(tmp_path_factory.mktemp("short") / "short.gguf", vocab, metadata, context=64)
    serve_module.launch(file, uid="short")
    yield serve_module
    assert serve_module.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert serve_module.fleet.describe("short").restarts == 0


def ask(target, operation, mode):
    @given(case=OPERATIONS[operation].as_strategy(generation_mode=mode))
    @settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def each(case):
        case.call_and_validate(base_url=target.url, checks=[not_a_server_error], timeout=30)

    each()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_is_allowed_is_no_500(target, operation):
    ask(target, operation, GenerationMode.POSITIVE)


@pytest.mark.parametrize("operation", BODIES)
def test_what_is_not_is_none_either(target, operation):
    ask(target, operation, GenerationMode.NEGATIVE)


def test_the_faces_are_described():
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /generate"} <= set(BODIES)
