"""The distribution that a token is drawn from, exact at every node of a draft.

`adjust` changes the logits by what the context says (penalties, bans, bias, processors); `warp` turns logits into
probabilities (temperature, then top-k, top-p, min-p and typical-p, each on what the one before left).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
    # the highest becomes 0, so that a small temperature cannot overflow
    law = torch.softmax((logits - logits.max()) / params.temperature, -1)
    if 0 < params.top_k < law.shape[0]:
        law = _keep(law, _likeliest(law, params.top_k))
    if params.top_p < 1.0:
        head = _head(law)
        # the head holds the likeliest tokens: if it has the mass, the nucleus lies inside
        within = head if float(law[head].sum()) >= params.top_p else torch.arange(law.shape[0], device=law.device)
        law = _nucleus(law, law, params.top_p, within)
    if params.min_p > 0.0:
        law = _renormalise(law.where(law >= params.min_p * law.max(), 0.0))
    if params.typical_p < 1.0:
        surprise = -law.log()
        entropy = (law * surprise.where(law > 0, 0.0)).sum(dtype=torch.float64).float()
        everything = torch.arange(law.shape[0], device=law.device)
        law = _nucleus(law, -(surprise - entropy).abs(), params.typical_p, everything)
    return law


def warp_batch(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`warp` for [n, vocab] logits, each row under its own parameters; none of them greedy."""
    logits, device = logits.float(), logits.device

    def column(values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), device=device).unsqueeze(1)

    highest = logits.max(-1, keepdim=True).values
    laws = torch.softmax((logits - highest) / column(p.temperature for p in params), -1)
    size = laws.shape[1]
    if any(0 < p.top_k < size for p in params):
        order = laws.argsort(dim=-1, stable=True, descending=True)
        rank = torch.arange(size, device=device)
        laws = _keep_first(laws, order, rank < column(p.top_k or size for p in params))
    if any(p.top_p < 1.0 for p in params):
        laws = _nuclei(laws, laws, column(p.top_p if p.top_p < 1.0 else math.inf for p in params))
    if any(p.min_p > 0.0 for p in params):
        least = column(p.min_p for p in params) * laws.max(-1, keepdim=True).values
        laws = _renormalise_rows(laws, laws >= least)
    if any(p.typical_p < 1.0 for p in params):
        surprise = -laws.log()
        entropy = (laws * surprise.where(laws > 0, 0.0)).sum(-1, keepdim=True, dtype=torch.float64).float()
        mass = column(p.typical_p if p.typical_p < 1.0 else math.inf for p in params)
        laws = _nuclei(laws, -(surprise - entropy).abs(), mass)
    return laws


def _keep(law: Tensor, tokens: Tensor) -> Tensor:
    return _renormalise(torch.zeros_like(law).index_copy_(0, tokens, law[tokens]))


def _head(law: Tensor) -> Tensor:
    """The tokens that matter, in order of their ids: to sort a whole vocabulary takes as long as a pass."""
    return (law >= 1e-3 * law.max()).nonzero().squeeze(1)


def _likeliest(law: Tensor, count: int) -> Tensor:
    head = _head(law)
    if head.shape[0] < count:
        return law.topk(count).indices
    return head[law[head].topk(count).indices]


def _nucleus(law: Tensor, score: Tensor, mass: float, within: Tensor) -> Tensor:
    """The tokens of highest score that together have at least `mass`, out of those `within`; always at least one."""
    order = within[score[within].argsort(descending=True, stable=True)]
    before = law[order].cumsum(0, dtype=torch.float64) - law[order]
    return _keep(law, order[: max(1, int((before < mass).sum()))])


def _nuclei(laws: Tensor, scores: Tensor, masses: Tensor) -> Tensor:
    """`_nucleus` for every row."""
    order = scores.argsort(dim=-1, stable=True, descending=True)
    sorted_laws = laws.gather(1, order)
    before = sorted_laws.cumsum(-1, dtype=torch.float64) - sorted_laws
    kept = before < masses
    kept[:, 0] = True
    return _keep_first(laws, order, kept)


def _keep_first(laws: Tensor, order: Tensor, kept: Tensor) -> Tensor:
    """`kept` [n, vocab] bool says which places of each row's order stay."""
    return _renormalise_rows(laws, torch.zeros_like(kept).scatter_(1, order, kept))


def _renormalise_rows(laws: Tensor, kept: Tensor) -> Tensor:
    """A row that loses nothing stays as it is, to the last bit: its company must not show."""
    rest = laws.where(kept, 0.0)
    return torch.where(kept.all(-1, keepdim=True), laws, rest / rest.sum(-1, keepdim=True, dtype=torch.float64).float())


def _renormalise(law: Tensor) -> Tensor:
    return law / law.sum(dtype=torch.float64).float()
