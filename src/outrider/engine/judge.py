"""After a pass: what becomes of each draft, and the tokens that are committed for good."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Seq
from itertools import chain

import torch
from torch import Tensor

from outrider.core.draft import ROOT, Draft
from outrider.core.errors import one_line
from outrider.core.request import Token
from outrider.core.sequence import Sequence, guessed_tokens, logprobs, plain_token
from outrider.core.verify import Verdict, followed, verify
from outrider.core.verify_batch import Case, choose, verify_batch
from outrider.drafters.base import JudgedSteps
from outrider.engine.scheduler import FeedPlan
from outrider.models.base import Output, Outputs


def verdicts(plans: Seq[FeedPlan], drafts: Seq[Draft], outputs: Seq[Output]) -> list[Verdict | Exception | None]:
    """What becomes of each draft; None where there is nothing to judge yet. An exception is of one of the caller's own
    processors."""
    found: list[Verdict | Exception | None] = []
    for plan, draft, output in zip(plans, drafts, outputs, strict=True):
        found.append(_verdict(plan.seq, draft, output) if plan.last else None)
    return found


def batch_verdicts(plans: Seq[FeedPlan], drafts: Seq[Draft], outputs: Outputs) -> list[Verdict | Exception | None]:
    """The same where the logits are."""
    last = [place for place, plan in enumerate(plans) if plan.last]
    cases = [Case(plans[place].seq, drafts[place], outputs.starts[place]) for place in last]
    judged = verify_batch(cases, outputs.logits, outputs.best, outputs.choose or choose) if cases else []
    found: list[Verdict | Exception | None] = [None] * len(plans)
    for place, verdict in zip(last, judged, strict=True):
        found[place] = verdict
    return found


def _verdict(seq: Sequence, draft: Draft, output: Output) -> Verdict | Exception:
    try:
        if output.best is not None and seq.takes_best:
            return followed(draft, output.best)
        return verify(seq, draft, output.logits)
    except Exception as error:
        return error


def prepare(plans: Seq[FeedPlan], drafts: Seq[Draft]) -> None:
    """The masks of grammars for every node, while the device is at work: then the verdicts find them there."""
    for plan, draft in zip(plans, drafts, strict=True):
        if plan.last and plan.seq.matcher is not None:
            with contextlib.suppress(Exception):  # the verdict meets it again, and it ends this sequence only
                for node in range(ROOT, len(draft)):
                    plan.seq.matcher.mask(guessed_tokens(draft, node))


def commit(seq: Sequence, draft: Draft, verdict: Verdict, logits: Tensor | None, drafter: str) -> Verdict:
    """Append the kept tokens and the target's own; what comes after the end of the sequence is not kept.

    `logits` [1 + nodes, vocab]: where log-probabilities are wanted. `drafter`: the name of the drafter that was asked.
    """
    path, parent, written = verdict.path, ROOT, 0
    try:
        for node in path:
            written += 1
            source = (draft.sources and draft.sources[node]) or drafter
            if not seq.append(_token(seq, draft.tokens[node], source, written, logits, parent)):
                break
            parent = node
        else:
            written += 1
            seq.append(_token(seq, verdict.token, None, 0, logits, parent))
    except Exception as error:  # of the text that a stop string is looked for in: it ends this sequence only
        seq.fail(one_line(error, named=True))
    if written < len(path):
        path = path[:written]
    seq.stats.record(draft, path, written, drafter)
    return verdict if path is verdict.path else Verdict(path, verdict.token)


def commit_steps(seq: Sequence, steps: JudgedSteps, drafter: str) -> None:
    """Steps that were judged elsewhere, up to the end of the sequence. Where none of them can end it before the last,
    they are committed at once: a large batch has thousands of them."""
    ids = list(chain.from_iterable(steps.tokens))
    if seq.watch is None and len(ids) <= seq.left and seq.ends.isdisjoint(ids):
        seq.tokens += ids
        for written, sources in zip(steps.tokens, steps.sources, strict=True):
            for depth, (token, source) in enumerate(zip(written, sources, strict=False), 1):
                seq.output.append(plain_token(token, source, depth))
            seq.output.append(plain_token(written[-1]))
        seq.stats.record_steps(steps.sources, steps.drafts, steps.drafted_by_depth, steps.drafted_by_source)
        if seq.left == 0:
            seq.finish = "length"
        return
    for place in range(len(steps.tokens)):
        if seq.finish is None:
            commit(seq, *steps.step(place), None, drafter)


def commit_plain(seq: Sequence, tokens: list[int]) -> None:
    """Append what the target wrote by itself, up to the end of the sequence."""
    before = len(seq.output)
    try:
        seq.extend(tokens)
    except Exception as error:  # as above
        seq.fail(one_line(error, named=True))
    seq.stats.steps += len(seq.output) - before
    seq.stats.tokens += len(seq.output) - before


def of_layers(hidden: Tensor | None, layers: Seq[int], wanted: Seq[int]) -> Tensor | None:
    """[rows, layers, hidden] -> [rows, wanted, hidden]: one drafter's part of what all of them asked for."""
    if hidden is None:
        return None
    if list(wanted) == list(layers):
        return hidden
    return torch.stack([hidden[:, layers.index(layer)] for layer in wanted], 1)


def _token(seq: Sequence, id: int, drafter: str | None, depth: int, logits: Tensor | None, parent: int) -> Token:
    """The committed token, which follows the node `parent`; `logits`: as of `commit`."""
    if logits is None or seq.params.logprobs is None:
        return plain_token(id, drafter, depth)
    logprob, top = logprobs(logits[parent + 1], id, seq.params.logprobs)
    return Token(id, drafter, depth, logprob, top)
