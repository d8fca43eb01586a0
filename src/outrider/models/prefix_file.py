"""The file that keeps shared prefixes across restarts: pages of keys and values with the tokens that they are known by.

A line of JSON names the caches (each by a digest of all that its bits depend on), then come for each cache a table of
its pages (the page before, the tokens) and their content, and at the end a SHA-256 of everything before it.
A file of another model, version or processor, or one that is damaged, is ignored with a note and replaced at the end;
one that is no such file at all is refused. Only its owner can read it: it tells what prompts said.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import OutriderError
from outrider.core.sequence import Scope
from outrider.models.kept_file import KeptFile
from outrider.models.paged_cache import PagedCache
from outrider.models.pages import PageKey

KIND = "outrider prefixes"
FORMAT = (
    f"{KIND} 1"  # a file of another is ignored; also to be changed where Python makes other keys of the same weights
)
LONGEST_HEADER = 1 << 24  # bytes: enough for a hundred thousand tenants; a file without it is none of ours
PART = 1 << 20  # bytes read at a time where a cache is passed over
log = logging.getLogger("outrider")


@dataclass(frozen=True)
class CacheSection:
    """What the file's first line says of one cache."""

    identity: str
    pages: int
    page_bytes: int
    columns: int  # numbers of a page in the table: the page before, and the tokens
    roots: list[str]  # tenants; a first page's number of "the page before" is -1 less the tenant's place here

    @property
    def nbytes(self) -> int:
        return self.pages * (4 * self.columns + self.page_bytes)


class Damaged(Exception):
    """Why a file of ours is not used, as the rest of a sentence about it."""


class PrefixFile:
    """Used by the thread that opens it, and, when the engine has ended, by the one that closes it."""

    def __init__(self, path: Path, caches: Mapping[str, PagedCache], most: int) -> None:
        """The caches, by their identities, get what the file holds for them. `most`: bytes that it may take."""
        self._caches, self._most, self.notes = dict(caches), most, list[str]()
        self._file: KeptFile | None = KeptFile(path, "cache file", "--cache-file")
        self._named = -1  # pages that were computed when it was last written; -1: it must be written
        try:
            if not os.access(path.absolute().parent, os.W_OK):
                raise self._file.refusal("lies in a folder that cannot be written to")
            if self._read(self._file):
                self._named = self._computed
        except Damaged as why:
            for cache in self._caches.values():
                cache.forget_prefixes()
            self.notes.append(f"the cache file {path} {why}: it is not used, and replaced when the model is closed")
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Write the file where there is anything new, and let another process have it."""
        if self._file is None:
            return
        file, self._file = self._file, None
        try:
            if self._computed != self._named:
                file.replace(self._parts())
        except OutriderError as error:  # nobody waits for it; the file is as it was
            log.error("%s", error)
        finally:
            file.close()

    @property
    def _computed(self) -> int:
        return sum(cache.named for cache in self._caches.values())

    def _read(self, kept: KeptFile) -> bool:
        """Whether there was something to read."""
        file = kept.opened()
        try:
            line = file.readline(LONGEST_HEADER)
            if not line:
                return False  # it was made just now
            if not line.startswith(f'{{"format": "{KIND}'.encode()):
                raise kept.refusal("is not a cache file of Outrider's")
            sections = _sections(line)
            if not any(section.identity in self._caches for section in sections):
                raise Damaged("is of another model, or of another version or processor")
            end = len(line) + sum(section.nbytes for section in sections) + hashlib.sha256().digest_size
            if os.fstat(file.fileno()).st_size != end:
                raise Damaged("is damaged, or was only written in part")
            self._take(file, sections, hashlib.sha256(line))
        except OSError as error:
            raise kept.refusal(f"cannot be read ({error.strerror})") from error
        return True

    def _take(self, file: IO[bytes], sections: Iterable[CacheSection], digest: Any) -> None:
        """`digest`: of what was read before."""

        def read(size: int) -> bytes:
            data = file.read(size)
            digest.update(data)
            return data

        for section in sections:
            cache = self._caches.get(section.identity)
            if cache is None:
                for begin in range(0, section.nbytes, PART):
                    read(min(PART, section.nbytes - begin))
            else:
                _restore(cache, section, read)
        if file.read() != digest.digest():
            raise Damaged("is damaged")

    def _parts(self) -> Iterator[bytes]:
        """The whole file, page by page."""
        most = self._most // max(1, sum(cache.page_bytes + 4 * cache.size for cache in self._caches.values()))
        chosen = [(id, cache, dict([*cache.known_pages().items()][:most])) for id, cache in self._caches.items()]
        sections = [(_section(id, cache, pages), cache, pages) for id, cache, pages in chosen if pages]
        header = {"format": FORMAT, "caches": [asdict(section) for section, _, _ in sections]}
        line = json.dumps(header).encode() + b"\n"
        yield line
        digest = hashlib.sha256(line)
        for section, cache, pages in sections:
            contents = (cache.content(page).numpy().tobytes() for page in pages)
            for part in itertools.chain([_table(section, cache, pages)], contents):
                digest.update(part)
                yield part
        yield digest.digest()


def _sections(line: bytes) -> list[CacheSection]:
    try:
        header = json.loads(line)
        if header["format"] != FORMAT:
            raise Damaged("was written by another version of Outrider")
        sections = [CacheSection(**each) for each in header["caches"]]
        numbers = [(each.pages, each.page_bytes, each.columns) for each in sections]
        if not all(type(number) is int and number > 0 for three in numbers for number in three):
            raise Damaged("is damaged")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Damaged("is damaged, or was only written in part") from error
    return sections


def _section(identity: str, cache: PagedCache, pages: Mapping[int, PageKey]) -> CacheSection:
    roots = dict.fromkeys(before for before, _ in pages.values() if isinstance(before, str))
    columns = 1 + max(len(tokens) for _, tokens in pages.values())
    return CacheSection(identity, len(pages), cache.page_bytes, columns, list(roots))


def _table(section: CacheSection, cache: PagedCache, pages: Mapping[int, PageKey]) -> bytes:
    """For each page the place in this table of the page before it, and its tokens."""
    roots = {root: -1 - place for place, root in enumerate(section.roots)}
    table = np.empty((section.pages, section.columns), "<i4")
    places: dict[int | Scope, int] = {}
    places.update(roots)
    for place, (page, (before, tokens)) in enumerate(pages.items()):
        table[place, 0], table[place, 1:] = places[before], tokens
        places[cache.name_of(page)] = place
    return table.tobytes()


@torch.inference_mode()  # only there may the blocks be written
def _restore(cache: PagedCache, section: CacheSection, read: Any) -> None:
    if section.page_bytes != cache.page_bytes:
        raise Damaged("is damaged")
    table = np.frombuffer(read(4 * section.pages * section.columns), "<i4").reshape(section.pages, section.columns)
    names: dict[int, int | str] = {-1 - place: root for place, root in enumerate(section.roots)}
    for place, (before, *tokens) in enumerate(table.tolist()):
        data = read(section.page_bytes)
        if before >= place or before < -len(section.roots):
            raise Damaged("is damaged")
        found = cache.adopt(names[before], tokens) if before in names else None
        if found is not None:  # else there is no more space, for it and for what follows it
            page, names[place] = found
            content = cache.content(page)
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).view(content.shape))


def digest(*parts: str | Tensor | None) -> str:
    """Of all that the bits of keys and values depend on."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype} {list(part.shape)}".encode())
            found.update(part.detach().contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(part).encode())
    return found.hexdigest()
