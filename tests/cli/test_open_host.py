"""A server that others can reach says so where no key keeps them out."""

import socket

import pytest


@pytest.mark.parametrize(
    ("options", "noted"),
    [(["--host", "0.0.0.0"], True), (["--host", "0.0.0.0", "--api-key", "SECRET"], False), ([], False)],
)
def test_who_may_ask(outrider, tiny_folder, options, noted):
    with socket.create_server(("0.0.0.0", 0)) as taken:  # so that it ends
        done = outrider("serve", tiny_folder, *options, "--port", taken.getsockname()[1])
    told = "everybody who can reach 0.0.0.0 may ask; --api-key keeps strangers out"
    assert (told in done.err) == noted
    assert "cannot listen" in done.err.splitlines()[-1]
