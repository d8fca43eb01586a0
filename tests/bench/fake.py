"""An engine for tests of the protocol: it counts instead of thinking, and misbehaves when told to by the mode."""

import os
import time

PACKAGES = ("fake_engine",)


def load(config):
    if "no-package" in config["modes"]:
        import fake_engine  # noqa: F401
    if "bad-load" in config["modes"]:
        raise ValueError("no such\nmodel")
    if "dead-load" in config["modes"]:
        os._exit(7)
    print("an engine that talks on stdout")
    os.system("echo and a child that talks too")
    return generate


def generate(mode, ids, max_tokens):
    if mode == "crash":
        os.write(2, b"terrible things happened\n")
        os._exit(3)
    if mode == "hang":
        time.sleep(60)
    if mode == "raise":
        raise RuntimeError("not today")
    if mode == "nothing":
        return {}
    written = [ids[-1] + n for n in range(max_tokens)]
    if mode == "wrong":
        written[-1] = 0
    if mode == "who":
        written = [os.getpid()]
    times = {"prefill_s": 0.1, "decode_s": 1.0 if mode == "plain" else 0.5, "timing": "engine"}
    return {"ids": written, "tokens": max_tokens, "first": 1, **times}
