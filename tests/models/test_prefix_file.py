"""The file of shared prefixes: after a restart the same pages are there, and a file that is not right is never used."""

import json
import multiprocessing
import os
from dataclasses import replace

import packs
import pytest
import torch

from outrider.core.errors import OutriderError
from outrider.models.llama import PackedLlama
from outrider.models.native.packed import Packed
from outrider.models.native.stack import NativeStack
from outrider.models.paged_cache import SIZE, PagedCache
from outrider.models.prefix_file import PrefixFile, digest

LAYERS, HEADS, DIM = 2, 1, 4
PAGE = 2 * LAYERS * HEADS * DIM * 4 * SIZE  # bytes
GIB = 1 << 30


def cache(pages=16, **more):
    return PagedCache(LAYERS, HEADS, DIM, pages * PAGE, **more)


def text(*parts):
    return [part * 1000 + i for part in parts for i in range(SIZE)]


def wrote(held, id, tokens, tenant=""):
    """A sequence of these tokens has ended; every page of it holds its last token."""
    held.begin(id, tokens, tenant)
    slot = held.extend(id, len(tokens) - held.length(id))
    with torch.inference_mode():
        for place in range(len(tokens) // SIZE):
            held.page(slot, place).view(torch.int32).fill_(tokens[(place + 1) * SIZE - 1])
    held.name(id, tokens, tenant)
    held.free(id)


def taken(held, tokens, tenant=""):
    """How many tokens a sequence gets, each page of which must be the right one."""
    got = held.begin(-1, [*tokens, 1], tenant)
    slot = held.extend(-1, 0)
    for place in range(got // SIZE):
        assert (held.page(slot, place).view(torch.int32) == tokens[(place + 1) * SIZE - 1]).all()
    held.free(-1)
    return got


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


def kept(path, held, most=GIB, **others):
    file = PrefixFile(path, {"model": held, **others}, most)
    assert file.notes == []
    return file


def filled(path, **more):
    held = cache(**more)
    file = kept(path, held)
    wrote(held, 1, text(1, 2, 3))
    wrote(held, 2, text(1, 2, 4))
    wrote(held, 3, text(5, 6), "tenant")
    file.close()
    return path.read_bytes()


def again(path, pages=16):
    held = cache(pages)
    file = PrefixFile(path, {"model": held}, GIB)
    return held, file


class TestARestart:
    def test_gives_each_tenant_its_own_prefixes_again(self, path):
        filled(path)
        held, file = again(path)
        assert file.notes == []
        assert taken(held, text(1, 2, 3)) == taken(held, text(1, 2, 4)) == 3 * SIZE
        assert taken(held, text(1, 9)) == SIZE
        assert taken(held, text(5, 6)) == taken(held, text(1, 2), "tenant") == 0
        assert taken(held, text(5, 6), "tenant") == 2 * SIZE
        file.close()

    def test_knows_nothing_of_adapters(self, path):
        """An adapter's key means another one in another process: what was computed with it is not kept."""
        held, scope = cache(), ("tenant", "haiku#1")
        file = kept(path, held)
        wrote(held, 1, text(1, 2), scope)
        wrote(held, 2, text(1, 3), "tenant")
        assert taken(held, text(1, 2), scope) == 2 * SIZE
        file.close()
        held, file = again(path)
        assert file.notes == []
        assert (taken(held, text(1, 2), scope), taken(held, text(1, 3), "tenant")) == (0, 2 * SIZE)
        assert taken(held, text(1, 2), "tenant") == SIZE
        file.close()

    def test_without_anything_new_leaves_the_file_as_it_is(self, path):
        filled(path)
        before = path.stat()
        held, file = again(path)
        taken(held, text(1, 2))
        file.close()
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        held, file = again(path)
        wrote(held, 7, text(7))
        file.close()
        held, file = again(path)
        assert (taken(held, text(7)), taken(held, text(1, 2))) == (SIZE, 2 * SIZE)
        file.close()

    def test_keeps_what_was_used_last_within_the_size(self, path):
        held = cache()
        file = kept(path, held, most=3 * (PAGE + 4 * SIZE) + 10)
        for part in (1, 3, 5):
            wrote(held, part, text(part, part + 1))
        taken(held, text(1, 2)[: SIZE + 1])
        file.close()
        assert path.stat().st_size <= 3 * (PAGE + 4 * SIZE + 4) + 400
        held, file = again(path)
        assert [taken(held, text(part, part + 1)) for part in (1, 3, 5)] == [SIZE, 0, 2 * SIZE]
        file.close()

    def test_with_less_memory_takes_what_fits_and_the_last_used_first(self, path):
        held = cache()
        file = kept(path, held)
        wrote(held, 1, text(1, 2))
        wrote(held, 2, text(3, 4, 5))
        file.close()
        held, file = again(path, pages=4)
        assert [taken(held, text(3, 4, 5)), taken(held, text(1, 2))] == [3 * SIZE, SIZE]
        assert held.free_count == 4
        wrote(held, 3, text(8, 9))  # and it makes way for what is new, the longest unused first
        assert taken(held, text(1, 2)) + taken(held, text(3, 4, 5)) == 2 * SIZE
        file.close()

    def test_brings_back_the_pages_of_several_caches(self, path):
        held, head = cache(), cache(ahead=1)
        file = kept(path, held, head=head)
        for each in (held, head):
            wrote(each, 1, [*text(1, 2), 5])
        file.close()
        held, head = cache(), cache(ahead=1)
        file = kept(path, held, head=head)
        assert (taken(held, text(1, 2)), taken(head, [*text(1, 2), 5])) == (2 * SIZE, 2 * SIZE)
        file.close()
        held = cache()
        file = kept(path, held, another=cache(ahead=1))  # another head: its pages are passed over
        assert taken(held, text(1, 2)) == 2 * SIZE
        file.close()

    def test_leaves_out_what_follows_a_page_that_was_forgotten(self, path):
        held = cache()
        file = kept(path, held)
        held.extend(1, SIZE)
        held.name(1, text(1))
        held.forget_prefixes()
        held.extend(1, SIZE)
        held.name(1, text(1, 2))
        wrote(held, 2, text(5))
        file.close()
        held, file = again(path)
        assert (taken(held, text(5)), taken(held, text(1, 2)), taken(held, text(2))) == (SIZE, 0, 0)
        file.close()

    def test_of_pages_of_8_bits(self, path):
        held = PagedCache(LAYERS, HEADS, 32, GIB, bits=8)
        file = kept(path, held)
        wrote(held, 1, text(1, 2))
        file.close()
        held = PagedCache(LAYERS, HEADS, 32, GIB, bits=8)
        file = kept(path, held)
        assert taken(held, text(1, 2)) == 2 * SIZE
        file.close()


class TestAFileThatIsNotRight:
    def test_is_not_used_where_it_is_cut(self, path):
        whole = filled(path)
        for end in [*range(1, 400, 9), *range(400, len(whole), 997), len(whole) - 1]:
            path.write_bytes(whole[:end])
            try:
                held, file = again(path)
            except OutriderError:  # not even its first words are there
                assert end < 30
                assert path.read_bytes() == whole[:end]
            else:
                assert len(file.notes) == 1
                assert "damaged" in file.notes[0]
                assert "\n" not in file.notes[0]
                assert held.known_pages() == {}
                assert held.free_count == 16
                file._file.close()

    def test_is_not_used_where_a_byte_has_changed(self, path):
        whole = filled(path)
        for at in [*range(0, 700, 3), *range(700, len(whole), 499), len(whole) - 1]:
            path.write_bytes(bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]))
            try:
                held, file = again(path)
            except OutriderError:
                continue
            assert len(file.notes) == 1
            assert held.known_pages() == {}
            file._file.close()

    def test_is_replaced_at_the_end(self, path):
        whole = filled(path)
        path.write_bytes(whole[:-1])
        held, file = again(path)
        assert "not used, and replaced when the model is closed" in file.notes[0]
        wrote(held, 1, text(8))
        file.close()
        held, file = again(path)
        assert (file.notes, taken(held, text(8)), taken(held, text(1))) == ([], SIZE, 0)
        file.close()

    def test_of_another_model_is_not_used(self, path):
        filled(path)
        held = cache()
        file = PrefixFile(path, {"other": held}, GIB)
        assert "is of another model, or of another version or processor" in file.notes[0]
        assert held.known_pages() == {}
        file.close()
        assert json.loads(path.read_bytes().splitlines()[0])["caches"] == []

    @pytest.mark.parametrize("content", [b"a text of mine\n", b"[]\n", b'{"format": "other"}\n', b"\x00" * 5000])
    def test_that_is_none_of_ours_is_refused_and_untouched(self, path, content):
        path.write_bytes(content)
        with pytest.raises(OutriderError, match="is not a cache file of Outrider's; it is untouched: name another"):
            again(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize(
        "caches",
        [
            "[]",
            "7",
            '[{"identity": "model"}]',
            '[{"identity": "model", "pages": -1, "page_bytes": 1, "columns": 1, "roots": []}]',
            '[{"identity": "model", "pages": true, "page_bytes": 1, "columns": 1, "roots": []}]',
            '[{"identity": "model", "pages": 99999999999, "page_bytes": 999999, "columns": 33, "roots": []}]',
            "[" * 9000,
        ],
    )
    def test_whose_first_line_is_wrong_is_not_used(self, path, caches):
        path.write_text(f'{{"format": "outrider prefixes 1", "caches": {caches}}}\n')
        _held, file = again(path)
        assert len(file.notes) == 1
        file.close()

    def test_of_another_version_is_not_used(self, path):
        path.write_bytes(filled(path).replace(b"outrider prefixes 1", b"outrider prefixes 9"))
        file = again(path)[1]
        assert "another version" in file.notes[0]
        file.close()


class TestTheFile:
    def test_only_its_owner_can_read_it_and_no_part_of_it_lies_about(self, path):
        filled(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in path.parent.iterdir()] == ["cache"]

    def test_two_processes_at_once_are_refused(self, path):
        _held, file = again(path)
        with pytest.raises(OutriderError, match=r"cache file .* is in use by another process"):
            again(path)
        file.close()
        file.close()
        again(path)[1].close()

    def test_a_place_that_cannot_be_written_to_is_refused_at_the_start(self, tmp_path):
        for place in (tmp_path, tmp_path / "no" / "folder"):
            with pytest.raises(OutriderError, match="cannot be opened"):
                again(place)

    def test_a_full_disk_is_told_in_the_log(self, path, monkeypatch, caplog):
        before = filled(path)
        held, file = again(path)
        wrote(held, 9, text(9))

        def full(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        file.close()
        assert "No space left on device" in caplog.text
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == ["cache"]

    def test_of_a_process_that_is_killed_while_it_writes_stays_whole(self, path):
        filled(path)
        child = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(str(path),))
        child.start()
        first = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == first and child.is_alive():
            child.join(0.01)
        child.kill()
        child.join()
        held, file = again(path)
        assert file.notes == []
        assert taken(held, text(1, 2)) == 2 * SIZE
        file.close()


def _write_for_ever(path):
    _held, file = again(path)
    while True:
        file._file.replace(file._parts())


class TestIdentity:
    def model(self, **changes):
        return packs.packed(packs.reference("llama", seed=3), 4, **changes)

    def test_is_the_same_for_the_same_weights(self):
        assert self.model().identity() == self.model().identity()

    def test_is_another_for_whatever_makes_other_keys(self):
        found = {self.model().identity(), self.model(kv_bits=8).identity(), self.model(activations=8).identity()}
        found.add(packs.packed(packs.reference("llama", seed=4), 4).identity())
        found.add(packs.packed(packs.reference("llama", seed=3), 8).identity())
        assert len(found) == 5

    @pytest.mark.parametrize("part", ["norm", "weight", "rope", "embedding"])
    def test_sees_one_number_of_any_part(self, part):
        model, same = self.model(), self.model()
        layer = model.weights.stack.layers[-1]
        if part == "norm":
            layer.mlp_norm[3] += 0.5
        elif part == "rope":
            model.weights.rope.frequencies[0] *= 2
        else:
            packed = layer.down if part == "weight" else model.weights.embedding
            assert isinstance(packed, Packed)
            numbers = [each for each in packed.numbers if isinstance(each, torch.Tensor)]
            numbers[0].view(-1)[-1] ^= 1
        assert model.identity() != same.identity()

    def test_depends_on_the_kernels(self, monkeypatch):
        before = self.model().identity()
        monkeypatch.setattr("outrider.models.native.library.identity", lambda: "others")
        assert self.model().identity() != before

    def test_tells_tensors_apart_by_type_and_shape(self):
        one = torch.arange(4, dtype=torch.int32)
        found = [
            digest(one),
            digest(one.view(2, 2)),
            digest(one.view(torch.float32)),
            digest(one, None),
            digest(None, one),
        ]
        assert len(set(found)) == 5


def test_a_restored_model_computes_the_same_bits(path):
    """With keys and values of both kinds; the addresses that the kernels read are those of the pages that came back."""
    from outrider.models.base import Feed

    for bits in (32, 8):
        first = packs.packed(packs.reference("llama", seed=3), 4, kv_bits=bits)
        tokens = [(7 * i * i + i) % packs.VOCAB for i in range(100)]
        (plain,) = first.forward([Feed(0, tokens)])
        first.seen(0, tokens)
        file = PrefixFile(path, {first.identity(): first.pages}, GIB)
        file.close()
        config = replace(first.config)
        stack = NativeStack(config, first.weights.stack.layers)
        second = PackedLlama(config, replace(first.weights, stack=stack), 1 << 24)
        file = PrefixFile(path, {second.identity(): second.pages}, GIB)
        assert second.begin(1, tokens) == 96
        (output,) = second.forward([Feed(1, tokens[96:])])
        assert torch.equal(output.logits, plain.logits)
        file.close()
        path.unlink()
