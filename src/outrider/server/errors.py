"""What goes wrong in the server, as a status and a line; each API writes it in its own shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.core.errors import OutriderError

LONGEST_MESSAGE = 2000  # characters of an error: a line of ours is shorter, what it repeats may not be


class ServerError(OutriderError):
    """An error with an HTTP status. A plain OutriderError is a 400: the request asks for what cannot be."""

    status, kind = 500, "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.param, self.headers = param, headers or {}


class Bad(ServerError):
    """A field of the body is wrong, or asks for what cannot be."""

    status, kind = 400, "invalid_request_error"


class Unauthorised(ServerError):
    status, kind, code = 401, "authentication_error", "invalid_api_key"


class Forbidden(ServerError):
    """A file or model outside of what the server may open for a request."""

    status, kind, code = 403, "permission_error", "not_allowed"


class Unknown(ServerError):
    status, kind, code = 404, "invalid_request_error", "model_not_found"


class Timeout(ServerError):
    status, kind, code = 408, "timeout_error", "timeout"


class Exists(ServerError):
    status, kind, code = 409, "invalid_request_error", "already_launched"


class TooManyModels(ServerError):
    status, kind, code = 409, "invalid_request_error", "too_many_models"


class WrongHost(ServerError):
    """The request is for another host than this one: a page whose name was bound to our address asks."""

    status, kind, code = 421, "permission_error", "wrong_host"


class TooLarge(ServerError):
    status, kind, code = 413, "invalid_request_error", "body_too_large"


class Busy(ServerError):
    status, kind, code = 429, "rate_limit_error", "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


class Gone(ServerError):
    """The model's worker has died, or the server is about to end."""

    status, kind, code = 503, "server_error", "unavailable"

    def __init__(self, message: str, retry_after: int = 2) -> None:
        super().__init__(message, headers={"retry-after": str(retry_after)})


class Failed(ServerError):
    """Something of ours went wrong inside a worker; the request is lost, the worker goes on."""

    status, kind, code = 500, "server_error", "worker_error"


# (status, kind, code, param, message) -> the body of the answer
Shape = Callable[[int, str, str | None, str | None, str], dict[str, Any]]


def openai_shape(status: int, kind: str, code: str | None, param: str | None, message: str) -> dict[str, Any]:
    """OpenAI's; `detail` is what Xinference's client reads."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}, "detail": message}


def lorax_shape(status: int, kind: str, code: str | None, param: str | None, message: str) -> dict[str, Any]:
    """What lorax-client turns into its own exceptions."""
    return {"error": message, "error_type": LORAX_TYPES.get(status, "generation")}


def anthropic_shape(status: int, kind: str, code: str | None, param: str | None, message: str) -> dict[str, Any]:
    """What Anthropic's client turns into its own exceptions."""
    named = message if param is None or param in message else f"{param}: {message}"
    return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(status, kind), "message": named}}


ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}
ANTHROPIC_PATHS = ("/v1/messages",)
LORAX_TYPES = {**dict.fromkeys((400, 403, 404, 413, 421, 422), "validation"), 429: "overloaded"}
LORAX_PATHS = ("/", "/generate", "/generate_stream", "/info", "/tokenize")


def shape_of(path: str) -> Shape:
    """The API that a path belongs to says how errors look."""
    if path in ANTHROPIC_PATHS:
        return anthropic_shape
    return lorax_shape if path in LORAX_PATHS else openai_shape


def body_of(path: str, error: Exception) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of the answer to a request that failed; also the data of an error event in a stream."""
    line = str(error)[:LONGEST_MESSAGE]
    if isinstance(error, ServerError):
        return error.status, shape_of(path)(error.status, error.kind, error.code, error.param, line), error.headers
    if isinstance(error, OutriderError):
        return 400, shape_of(path)(400, "invalid_request_error", None, None, line), {}
    reason = "the server failed; the log has the reason under this request id"
    return 500, shape_of(path)(500, "server_error", None, None, reason), {}
