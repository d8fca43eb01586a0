"""The distribution that a token is drawn from, exact at every node of a draft.

`adjust` changes the logits by what the context says (penalties, bans, bias, processors); `warp` turns logits into
probabilities (temperature, then top-k, top-p, min-p and typical-p, each on what the one before left: `cuts.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.cuts import kept, kept_rows
from outrider.core.errors import OutriderError
from outrider.core.params import SamplingParams as SamplingParams

MINUS_INF = float("-inf")
NOTHING_LEFT = "the grammar leaves no token to write; loosen it"


def adjust(
    logits: Tensor,
    tokens: Sequence[int],
    prompt: int,
    params: SamplingParams,
    ends: frozenset[int],
    mask: Tensor | None = None,
) -> Tensor:
    """Logits [vocab] after `tokens`, of which the first `prompt` are the prompt, as the parameters change them.

    `ends` are the tokens that end the sequence; they are banned until `min_tokens` are written. `mask` [vocab] bool:
    the tokens that a grammar allows here; where it allows nothing but the end, there is no more to wait for.
    """
    if params.penalises:
        logits = _penalised(logits, tokens, prompt, params, frozenset() if _only(mask, ends) else ends)
    elif mask is not None and on_host(logits):  # by numpy, as in `likeliest`: a third of the time
        return torch.from_numpy(_masked(logits, mask))
    if mask is not None:
        logits = logits.where(mask.to(logits.device), MINUS_INF)
    if params.adjusts and bool((logits == MINUS_INF).all()):
        raise OutriderError("bans, allowed_token_ids and the grammar leave no token to write; loosen one of them")
    return logits


def _only(mask: Tensor | None, ends: frozenset[int]) -> bool:
    """Whether a grammar allows nothing but the tokens that end the sequence."""
    return mask is not None and ends.issuperset(mask.nonzero().squeeze(1).tolist())


def _penalised(
    logits: Tensor, tokens: Sequence[int], prompt: int, params: SamplingParams, ends: frozenset[int]
) -> Tensor:
    """Penalties, bias, bans and processors."""
    logits, device = logits.float().clone(), logits.device
    if params.repetition_penalty != 1.0 and tokens:
        seen = torch.tensor(sorted(set(tokens)), device=device)
        score = logits[seen]
        logits[seen] = torch.where(score > 0, score / params.repetition_penalty, score * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and len(tokens) > prompt:
        counts = Counter(tokens[prompt:])
        often = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits[torch.tensor(list(counts), device=device)] -= params.presence_penalty + params.frequency_penalty * often
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, device=device)
        logits = torch.full_like(logits, MINUS_INF).index_copy(0, allowed, logits[allowed])
    if ends and len(tokens) - prompt < params.min_tokens:
        logits[torch.tensor(sorted(ends), device=device)] = MINUS_INF
    for word in params.bad_words:
        if len(word) == 1 or tuple(tokens[1 - len(word) :]) == word[:-1]:
            logits[word[-1]] = MINUS_INF  # type: ignore[index]
    for processor in params.processors:
        logits = processor(tokens, logits)
    return logits


def likeliest(logits: Tensor) -> list[int]:
    """[rows, vocab] -> the greedy choice of each row, the first of equals.

    On a CPU by numpy, which needs a tenth of the time, and does not wake torch's threads: they would stay awake for a
    while, on the cores that the kernels' own threads need.
    """
    if on_host(logits):
        found: list[int] = logits.numpy().argmax(-1).tolist()
        return found
    return logits.argmax(-1).tolist()


def likeliest_allowed(logits: Tensor, mask: Tensor) -> int:
    """[vocab] -> the greedy choice among the tokens of the mask [vocab] bool, the first of equals."""
    if not on_host(logits):
        return int(logits.where(mask.to(logits.device), MINUS_INF).argmax())
    values, found = mask.numpy(), int(logits.numpy().argmax())
    if values[found]:  # mostly: then it is the likeliest of those, too, and the first of equals
        return found
    allowed = values.nonzero()[0]
    if not len(allowed):
        raise OutriderError(NOTHING_LEFT)
    return int(allowed[logits.numpy()[allowed].argmax()])


def _masked(logits: Tensor, mask: Tensor) -> NDArray[np.float32]:
    """Logits on the host without the tokens that the mask forbids."""
    allowed = mask.numpy()
    if not allowed.any():
        raise OutriderError(NOTHING_LEFT)
    return np.where(allowed, logits.numpy(), np.float32(MINUS_INF))


def on_host(logits: Tensor) -> bool:
    """Whether numpy can read them as they are."""
    return logits.device.type == "cpu" and logits.dtype == torch.float32


def warp(logits: Tensor, params: SamplingParams) -> Tensor:
    """[vocab] logits -> [vocab] probabilities, float32."""
    logits = logits.float()
    if params.greedy:
        return torch.zeros_like(logits).index_fill_(0, logits.argmax(), 1.0)
    tokens = kept(logits, params) if params.cuts else None
    # the highest becomes 0, so that a small temperature cannot overflow
    scores = ((logits if tokens is None else logits[tokens]) - logits.max()) / params.temperature
    law = torch.softmax(scores, -1)
    return law if tokens is None else torch.zeros_like(logits).index_copy_(0, tokens, law)


def warp_batch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`warp` for [n, vocab] logits, each row under its own parameters; none of them greedy."""
    logits = logits.float()
    heat = torch.tensor([each.temperature for each in params], device=logits.device).unsqueeze(1)
    scores = (logits - logits.max(-1, keepdim=True).values) / heat
    if any(each.cuts for each in params):
        scores = scores.where(kept_rows(logits, params), MINUS_INF)
    return torch.softmax(scores, -1)
