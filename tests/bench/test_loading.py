"""The memory of workers that are all loaded at the same time, and how many load at once."""

import pytest
from ggufs import llama_weights, write_llama

from outrider.bench import loading

GIB = loading.GIB
H200 = 139 * GIB
SMALL, EIGHT_BILLION = GIB // 4, 16 * GIB


@pytest.mark.parametrize("weights", [SMALL, EIGHT_BILLION])
@pytest.mark.parametrize("workers", [1, 2, 5, 6])
def test_all_fit(workers, weights):
    each = loading.cache_bytes(H200, workers, weights) + weights + loading.PROCESS
    assert workers * each <= H200
    assert each > weights + loading.PROCESS + 2 * GIB  # and it is worth something


def test_one_alone_takes_what_an_engine_takes_by_itself():
    assert loading.cache_bytes(H200, 1, SMALL) == H200 // 4


def test_where_nothing_is_left_each_asks_for_the_least_and_loading_says_that_it_does_not_fit():
    assert loading.cache_bytes(20 * GIB, 5, EIGHT_BILLION) == loading.LEAST
    assert not loading.fit(20 * GIB, 5, EIGHT_BILLION)
    assert loading.fit(H200, 6, EIGHT_BILLION)
    assert not loading.fit(H200, 7, EIGHT_BILLION)


def test_a_cpu_loads_one_at_a_time_unless_told():
    assert loading.at_once("cpu", 0) == 1
    assert loading.at_once("cpu", 3) == 3
    assert loading.at_once("cuda", 0) >= 1


def test_free_memory_of_a_cpu():
    free, total = loading.free_memory("cpu")
    assert 0 < free <= total


def test_weights_of_a_folder(tiny_folder):
    assert loading.weight_bytes(tiny_folder) == (tiny_folder / "model.safetensors").stat().st_size


def test_weights_of_a_file_are_counted_in_16_bits(tmp_path):
    file = write_llama(tmp_path / "tiny.gguf")
    assert loading.weight_bytes(file) == 2 * sum(each.size for each in llama_weights(vocab=40).values())
