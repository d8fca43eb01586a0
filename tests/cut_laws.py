"""Laws and cuts of all kinds, for tests of what is left of them."""

import torch

from outrider.core.params import SamplingParams

INF = float("inf")


def law(size, luck, made):
    """Logits sharp or flat, with ties or without, some tokens banned or not; `luck` and `made` are random."""
    logits = torch.randn(size, generator=made) * luck.choice([0.01, 1.0, 3.0, 8.0])
    if luck.random() < 0.4:
        logits = (2 * logits).round() / luck.choice([1.0, 2.0])
    if luck.random() < 0.2:
        logits[torch.rand(size, generator=made) < 0.4] = -INF
        logits[luck.randrange(size)] = 0.5
    return logits


def cuts(size, luck):
    """Alone and together, at their ends too."""
    return SamplingParams(
        temperature=luck.choice([1e-37, 0.3, 1.0, 1.7, 100.0]),
        top_k=luck.choice([0, 0, 1, 2, 40, size // 2, size, size + 3]),
        top_p=luck.choice([1.0, 1.0, 1e-9, 0.3, 0.9, 0.99, 1 - 1e-12]),
        min_p=luck.choice([0.0, 0.0, 1e-5, 0.1, 1.0]),
        typical_p=luck.choice([1.0, 1.0, 1.0, 0.2, 0.95]),
    )
