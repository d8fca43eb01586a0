"""The parts of a GPU's report beside batches: what was measured is in it, and parts that were not are left out."""

from outrider.bench.gpu_report import lines, tables

CARD = {"name": "A card", "copy_tb_s": 4.2, "matrix_tflop_s": 700.0}
PASS = {"rows": 1, "ms": 4.334, "wall_ms": 4.5, "share": 0.813, "ratio": 1.0}
SPEED = {"tokens_per_second": 50_011.0, "ms_between_tokens": 1.28, "tokens_per_pass": 3.5}
ORACLE = {
    "expected": 3.689,
    "batch 1": {
        "speed_up": 3.461,
        "plain": SPEED,
        "oracle": SPEED,
        "ms_of_a_step": 4.58,
        "host_ms": 0.189,
        "same": True,
    },
}


def test_every_part_is_shown():
    found = {
        "card": CARD, "ready": {"load_s": 2.4, "first_token_s": 3.0}, "passes": [PASS],
        "bulk": {"batch": 2048, "tokens_per_second": 152_023.0}, "8B shape": {"passes": [PASS], "oracle": ORACLE},
    }  # fmt: skip
    small, big, oracle = tables(found)
    assert small.rows == big.rows == [("1", "4.334", "4.500", "0.813", "1.000")]
    assert oracle.rows == [("batch 1", "50,011", "50,011", "3.461", "3.500", "4.580", "0.189", "True")]
    said = " ".join(lines(found))
    for part in ("copy 4.20 TB/s", "first token after 3.0 s", "152,023 tokens/s"):
        assert part in said


def test_what_was_not_measured_is_left_out():
    assert tables({}) == lines({}) == []
    [big] = tables({"8B shape": {"passes": [PASS]}})  # cut off before its oracle
    assert "8B" in big.title
