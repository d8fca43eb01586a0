"""Rounds without the host where there is no device: a small target, drafters beside it, and plain texts.

The kernels are interpreted on a CPU."""

import functools
from dataclasses import replace

import torch
from block_forms import block_forms
from eagle_forms import FORMS
from pool_adapters import lora
from tiny import VOCAB, eagle_head, family, medusa_head, noisy, ours, plainly, prompts

from outrider import drafters
from outrider.core.dice import Dice
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext
from outrider.drafters.rounds.loop import DeviceLoop
from outrider.engine.engine import Engine
from outrider.models.cuda.model import CudaLlama

SHORT_CONTEXT = 64


def draft_table(drafts, header, nodes):
    """Drafts as kernels have them: `header` numbers that begin with how many nodes, then tokens, parents and more."""
    table = torch.zeros(len(drafts), header + 3 * nodes, dtype=torch.int32)
    for row, draft in zip(table, drafts, strict=True):
        row[:header] = len(draft)
        row[header : header + len(draft)] = torch.tensor(draft.tokens)
        row[header + nodes : header + nodes + len(draft)] = torch.tensor(draft.parents)
    return table


@functools.cache
def target():
    model = family("llama")[1]
    return CudaLlama(model.config, model.weights, 1 << 22)


@functools.cache
def head(form):
    torch.manual_seed(7)
    return eagle_head(target(), **FORMS[form]).requires_grad_(False)


def sequences(params, ends=frozenset()):
    asked = prompts(len(params), vocab=VOCAB)
    return [Sequence(i, list(asked[i]), each, ends=ends, dice=Dice(i)) for i, each in enumerate(params)]


def plain(params, ends=frozenset()):
    return [
        plainly(family("llama")[1], seq.tokens, seq.params, ends=ends, dice=Dice(seq.id)) for seq in sequences(params)
    ]


@functools.cache
def heads():
    medusa = medusa_head(target()).requires_grad_(False)
    medusa.tree = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
    blocks = {name: block_forms(target(), form) for name, form in (("slots", "own"), ("seen", "public"))}
    return {"it": head("eagle-3"), "three": medusa, **blocks}


def draft_weights(name, quantize="none"):
    """Draft models on a CPU. "same": the target itself, so that all is kept; "like": nearly it; "short": the same with
    a short context; "longer": of more tokens."""
    if name in ("same", "longer"):
        return family("llama")[1] if name == "same" else family("llama")[2][name]
    return _like()


@functools.cache
def _like():
    return ours(noisy(family("llama")[0], 0.05))


def draft_model(name, quantize="none"):
    """The same on a device."""
    return _draft_model(name)


@functools.cache
def _draft_model(name):
    model = draft_weights(name)
    config = replace(model.config, context=SHORT_CONTEXT) if name == "short" else model.config
    return CudaLlama(config, model.weights, 1 << 22)


def engine(spec="eagle:head=it,tree=6,width=3,length=3", policy=None, rounds=True):
    drafter = drafters.build(spec, BuildContext(target(), draft_model, heads=heads()))
    return Engine(target(), drafter, policy=policy, rounds=rounds)


def drain(made, seqs):
    for seq in seqs:
        made.add(seq)
    while made.busy:
        made.step()
    return seqs


@functools.cache
def adapters():
    """Of two ranks on the target, and the same of the plain model; the last of each is none."""
    made = [lora(target(), rank, seed, strength=2.0) for rank, seed in ((3, 1), (20, 2))]
    target().reserve_adapters(sum(map(target().adapter_bytes, made)))
    own, other = (
        [model.adapt(each, str(n)) for n, each in enumerate(made)] for model in (target(), family("llama")[1])
    )
    return [*own, None], [*other, None]


def watch(monkeypatch, seen):
    """`seen` is shown the sequences and the rounds of each part of the device's loop."""
    run = DeviceLoop.run

    def watched(self, seqs, plan, wait):
        for found in run(self, seqs, plan, wait):
            seen(seqs, found)
            yield found

    monkeypatch.setattr(DeviceLoop, "run", watched)
