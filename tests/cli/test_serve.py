"""`outrider serve` with options that do not go together: one line, before anything starts."""

import pytest


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["x", "--model-id", "y"], "leave out one"),
        (["x", "--draft", "ngram", "--speculative-tokens", "3"], "leave out one"),
        (["x", "--draft", "teapot"], "unknown drafter"),
        (["x", "--log-level", "loud"], "unknown log level"),
        (["x", "--speculative-tokens", "-1"], "at least 0"),
        (["x", "--api-key", "K", "--tenant-key", ""], "--tenant-key is empty"),
    ],
)
def test_what_cannot_be_served_is_one_line(outrider, monkeypatch, args, reason):
    monkeypatch.setenv("COLUMNS", "200")
    done = outrider("serve", *args, "--port", 0)
    assert done.code == 2
    assert reason in done.err.strip().splitlines()[-1]
    assert "Traceback" not in done.err
