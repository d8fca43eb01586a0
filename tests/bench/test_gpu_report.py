"""The report of a GPU: what was measured is in it, and parts that were not are left out."""

from outrider.bench.gpu_report import markdown

CARD = {"name": "A card", "copy_tb_s": 4.2, "matrix_tflop_s": 700.0}
PASS = {"rows": 1, "ms": 4.334, "wall_ms": 4.5, "share": 0.813, "ratio": 1.0}
SPEED = {"tokens_per_second": 50_011.0, "ms_between_tokens": 1.28, "tokens_per_pass": 3.5}
FOUND = {
    "command": "python -m outrider.bench.gpu",
    "versions": {"commit": "abc", "torch": "2.11", "python": "3.12"},
    "card": CARD,
}
BIG = {
    "passes": [PASS],
    "oracle": {
        "expected": 3.689,
        "batch 1": {"speed_up": 3.461, "oracle": SPEED, "ms_of_a_step": 4.58, "host_ms": 0.189, "same": True},
    },
}
SMALL = {
    "ready": {"load_s": 2.4, "first_token_s": 3.0},
    "one stream": {
        "plain": 921.0,
        "ngram": 1441.0,
        "ratio": 1.565,
        "same_texts": [63, 64],
        "kinds": {"edit": {"plain": 904.0, "ngram": 2465.0, "ratio": 2.24, "prompts": [1.5, 3.0]}},
    },
    "small": {"passes": [PASS]},
    "batches": [{"batch": 64, "none": SPEED, "ngram": SPEED, "same": 64}],
    "bulk": {"batch": 2048, "tokens_per_second": 152_023.0},
}


def test_every_part_is_shown():
    text = markdown({**FOUND, **SMALL, "8B shape": BIG, "transformers": {"default": 48.0, "compiled": "failed: why"}})
    for line in (
        "| 1 | 4.334 | 4.500 | 0.813 | 1.000 |",
        "| batch 1 | 3.461 | 3.500 | 4.580 | 0.189 | True |",
        "63 of 64 texts the same",
        "| edit | 904 | 2,465 | 2.240 | 1.50-3.00 |",
        "| 64 | 50,011 | 1.280 | 50,011 | 1.280 | 64 of 64 |",
        "152,023 tokens/s",
        "| default | 48.000 |",
        "| compiled | failed: why |",
    ):
        assert line in text


def test_what_was_not_measured_is_left_out():
    assert "small model" not in markdown({**FOUND, "8B shape": BIG})
    assert "8B" not in markdown({**FOUND, **SMALL})
