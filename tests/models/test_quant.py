"""What a file's blocks mean: the numbers that the `gguf` package reads, bit for bit; and what rounding may cost."""

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from packs import blocks, per_block

from outrider.models.gguf import FLOATS, QUANTS, GGUFTensor
from outrider.models.quant import KINDS, from_gguf, quantise

# zero, the smallest and the largest halves, and some between, of both signs
HALVES = [0.0, 6e-8, 3e-5, 6.1e-5, 0.013, 1.0, 333.3, 65504.0]
HALVES += [-half for half in HALVES]


def bits(tensor):
    return tensor.view(torch.int32)


@pytest.mark.parametrize("kind", KINDS)
class TestBlocksOfAFile:
    @pytest.mark.parametrize(("outputs", "count"), [(1, 1), (16, 1), (3, 7), (32, 6)])
    def test_mean_what_gguf_says(self, kind, outputs, count):
        tensor = blocks(kind, outputs, count * per_block(kind)[0])
        ours = from_gguf(tensor).dense()
        theirs = dequantize(tensor.raw, gguf.GGMLQuantizationType[kind])
        assert ours.dtype == torch.float32
        assert torch.equal(bits(ours), bits(torch.from_numpy(theirs)))

    @pytest.mark.parametrize("seed", range(4))
    def test_with_scales_at_the_ends_of_their_range(self, kind, seed):
        tensor = blocks(kind, 16, 4 * per_block(kind)[0], seed, HALVES)
        theirs = dequantize(tensor.raw, gguf.GGMLQuantizationType[kind])
        assert torch.equal(bits(from_gguf(tensor).dense()), bits(torch.from_numpy(theirs)))

    def test_become_integers_that_fit_their_bits(self, kind):
        made = from_gguf(blocks(kind, 16, 512))
        groups = (16, 512 // made.group)
        assert made.q.dtype == torch.uint8
        assert made.q.shape == (16, 512)
        assert int(made.q.max()) < 2**made.bits
        assert made.scales.shape == groups
        assert made.minimums is None or (made.minimums.shape == groups and made.zero == 0)

    def test_in_a_mapped_file_are_only_read(self, kind):
        tensor = blocks(kind, 16, 256)
        tensor.raw.setflags(write=False)
        made = from_gguf(tensor)
        made.q.zero_()
        made.scales.zero_()
        assert tensor.dequantize().any()


@pytest.mark.parametrize("kind", [kind for kind in FLOATS + QUANTS if kind not in KINDS])
def test_kinds_that_are_not_kept_as_they_are(kind):
    assert from_gguf(GGUFTensor(kind, (16, 256), np.zeros((16, 256), np.uint8))) is None


def test_a_vector_is_not_a_matrix():
    assert from_gguf(GGUFTensor("Q8_0", (32,), np.zeros(34, np.uint8))) is None


def spread(weight):
    groups = weight.unflatten(1, (-1, 32))
    return groups.amin(2), groups.amax(2)


def error(weight, bits):
    """The largest error of each group."""
    made = quantise(weight, bits)
    assert made.q.dtype == torch.uint8
    assert int(made.q.max()) < 2**bits
    return (made.dense() - weight).abs().unflatten(1, (-1, 32)).amax(2)


@pytest.mark.parametrize("scale", [3e-4, 0.02, 1.0, 50.0])
class TestRounding:
    weight = torch.randn(48, 160, generator=torch.Generator().manual_seed(0))

    def test_to_8_bits_errs_by_half_a_step(self, scale):
        """A step is a 127th of the group's largest weight; that step itself is a half, so the last one may be cut."""
        low, high = spread(self.weight * scale)
        step = torch.maximum(-low, high) / 127
        cut = 127 * (step * 2**-11 + 2**-25)
        assert (error(self.weight * scale, 8) <= step / 2 + cut).all()

    def test_to_4_bits_errs_by_half_a_step(self, scale):
        """A step is a 15th of the group's spread; step and minimum are halves."""
        low, high = spread((self.weight + 0.3) * scale)
        step = (high - low) / 15
        cut = 15 * (step * 2**-11 + 2**-25) + low.abs() * 2**-11 + 2**-25
        assert (error((self.weight + 0.3) * scale, 4) <= step / 2 + cut).all()


@pytest.mark.parametrize("bits", [4, 8])
class TestRoundingOddWeights:
    def test_zeros_stay_zero(self, bits):
        assert not quantise(torch.zeros(16, 64), bits).dense().any()

    def test_a_constant(self, bits):
        weight = torch.full((16, 64), -0.37)
        torch.testing.assert_close(quantise(weight, bits).dense(), weight, rtol=1e-3, atol=0)

    def test_what_is_too_small_for_a_half_becomes_zero(self, bits):
        made = quantise(torch.randn(16, 64) * 1e-9, bits).dense()
        assert made.abs().max() < 1e-7

    def test_half_precision_weights(self, bits):
        weight = torch.randn(16, 64).bfloat16()
        assert torch.equal(quantise(weight, bits).dense(), quantise(weight.float(), bits).dense())
