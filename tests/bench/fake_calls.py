"""An engine for tests of whole calls: it counts instead of thinking, and misbehaves when told to by the mode."""

import os

PACKAGES = ("fake_engine",)


def load_batches(config):
    if config["own"].get("cache_memory") == 0.25:
        raise MemoryError("no memory")
    return generate


def generate(mode, texts, max_tokens):
    if mode == "medusa":
        os._exit(3)
    if mode == "block":
        raise RuntimeError("out of luck")
    return {"ids": [[len(text)] * max_tokens for text in texts], "seconds": 0.5}
