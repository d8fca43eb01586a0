"""How many replicas there are, and what each one gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.core.errors import OutriderError
from outrider.settings import Settings


@dataclass(frozen=True)
class Scale:
    least: int = 1
    most: int = 1
    cpus: float = 1.0  # of each replica
    gpus: float = 0.0

    @classmethod
    def of(cls, replicas: str, cpus: float, gpus: float, settings: Settings) -> Scale:
        """`replicas`: a number, or LEAST:MOST. `cpus` 0: one for each thread of the model."""
        match = re.fullmatch(r"(\d{1,4})(?::(\d{1,4}))?", replicas)
        least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= least <= most:
            raise OutriderError(f"{replicas!r} is no number of replicas: N, or LEAST:MOST, from 1 up")
        if cpus < 0 or gpus < 0:
            raise OutriderError("a replica cannot have fewer than 0 CPUs or GPUs")
        if settings.device.startswith("cuda") and not gpus:
            raise OutriderError("on Ray a replica sees only the GPUs it is given; add --gpus-per-replica 1")
        if settings.history:
            raise OutriderError("on Ray every replica would write the history file; leave out history, or --ray")
        if settings.cache_file:
            raise OutriderError("on Ray every replica would write the cache file; leave out cache_file, or --ray")
        return cls(least, most, cpus or float(settings.threads or 1), gpus)

    def fitted(self, settings: Settings) -> Settings:
        """As many threads as it has CPUs, unless it was told."""
        return settings if settings.threads else replace(settings, threads=max(1, int(self.cpus)))

    def replicas(self, batch: int) -> dict[str, Any]:
        """For Ray Serve: fixed, or one more for every full batch of requests that run or wait."""
        if self.least == self.most:
            return {"num_replicas": self.most}
        asked = {"min_replicas": self.least, "max_replicas": self.most, "target_ongoing_requests": batch}
        return {"autoscaling_config": asked}

    def check(self, there: Mapping[str, float]) -> None:
        """Ray would wait for ever for what its machines do not have."""
        for kind, each in (("CPU", self.cpus), ("GPU", self.gpus)):
            has = there.get(kind, 0.0)
            if self.least * each > has:
                raise OutriderError(
                    f"{self.least} replicas of {each:g} {kind}s each do not fit: Ray has {has:g}; fewer --replicas, "
                    f"or less --{kind.lower()}s-per-replica (a share such as 0.5 may be given)"
                )
