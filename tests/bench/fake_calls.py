"""An engine for tests of whole calls: it counts instead of thinking, and misbehaves when told to by the mode."""

import os
import time
from pathlib import Path

PACKAGES = ("fake_engine",)
HERE = "FAKE_CALLS_LOADING"  # of the environment: a folder where each worker that loads leaves its process number


def load_batches(config):
    if config["own"].get("cache_memory") == 0.25:
        raise MemoryError("no memory")
    (mode,) = config["modes"]
    if HERE in os.environ:
        _leave_word(Path(os.environ[HERE]), mode)
    if mode == "draft_model:model=missing":
        import fake_engine  # noqa: F401
    if mode == "draft_model:model=broken":
        raise ValueError("no such model")
    if mode == "draft_model:model=slow":
        time.sleep(600)
    return generate


def _leave_word(folder, mode):
    """The number of the process; those of `eagle` and `ngram` load until both are there."""
    (folder / mode).write_text(str(os.getpid()))
    if mode in ("eagle", "ngram"):
        while not all((folder / other).exists() for other in ("eagle", "ngram")):
            time.sleep(0.01)


def generate(mode, texts, max_tokens):
    if mode == "medusa":
        os._exit(3)
    if mode == "block":
        raise RuntimeError("out of luck")
    return {"ids": [[len(text)] * max_tokens for text in texts], "seconds": 0.5 if mode == "none" else 0.25}
