"""The launched set on disk, so that it survives a restart of the server: one JSON file, always whole.

Models that the command line names are not in it; they come with the command. What cannot be relaunched stays in the
file and is listed as failed, with the reason, until it is terminated or launched anew.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from outrider.core.errors import OutriderError
from outrider.server.fleet.fleet import Description, Fleet
from outrider.server.fleet.spec import LaunchSpec
from outrider.server.log import log

VERSION = 1  # of the file's format; a file of another version is refused


class State:
    def __init__(self, path: Path, fleet: Fleet) -> None:
        """Reads the file at once: an unreadable file is refused before anything runs, and never overwritten."""
        self._path, self._fleet = path, fleet
        self._saved = read(path)

    async def restore(self, given: Iterable[str] = ()) -> None:
        """Relaunch what the file names, one after the other; from then on each change of the fleet is written down.

        `given`: the uids of the models that came with the command.
        """
        self._given = frozenset(given)
        for spec in self._saved:
            if spec.uid not in {model.uid for model in self._fleet.list()}:
                await self._relaunch(spec)
        self._fleet.changed.append(self.save)
        self.save()

    def save(self) -> None:
        # a model that is loading is written down when it is ready
        launched = [model for model in self._fleet.list() if model.status != "loading"]
        specs = [model.spec for model in launched if model.uid not in self._given]
        try:
            write(self._path, specs)
        except OSError as error:  # the models run on; only a restart would miss them
            log("state not written", level="error", file=str(self._path), reason=error.strerror)

    async def _relaunch(self, spec: LaunchSpec) -> None:
        try:
            await self._fleet.launch(spec)
            log("relaunched", model=spec.uid)
        except OutriderError as error:
            log("not relaunched", level="error", model=spec.uid, reason=str(error))
            self._fleet.lost[spec.uid] = Description(spec, "failed", int(time.time()), 0, str(error), {}, 0, 0)


def read(path: Path) -> list[LaunchSpec]:
    remedy = "move it away or name another with --state"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise OutriderError(f"cannot read the state file {path}: {error.strerror}; {remedy}") from error
    except ValueError as error:
        raise OutriderError(f"the state file {path} is not JSON ({error}); {remedy}") from error
    known = isinstance(content, dict) and content.get("version") == VERSION
    if not known or not isinstance(content.get("models"), list):
        raise OutriderError(f"the state file {path} was not written by this version of Outrider; {remedy}")
    try:
        return [LaunchSpec.from_dict(model) for model in content["models"]]
    except OutriderError as error:
        raise OutriderError(f"the state file {path}: {error}; {remedy}") from error


def write(path: Path, specs: list[LaunchSpec]) -> None:
    """Whole or not at all: a reader sees the old file or the new one."""
    text = json.dumps({"version": VERSION, "models": [spec.as_dict() for spec in specs]}, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
