"""EAGLE (Li et al. 2024, 2025): a decoder layer that reads the target's own states and writes ahead.

The head is the one that vLLM runs, under the same names: at place s it reads the embedding of token s + 1 and the state
at s (the target's, joined from several of its blocks; while drafting its own last one) and says what token s + 2 is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.core.draft import EMPTY, Draft
from outrider.core.errors import OutriderError
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter, Parts, Step
from outrider.drafters.eagle.native_runner import PackedRunner
from outrider.drafters.eagle.torch_runner import Ahead, Shown, gathered, start
from outrider.drafters.eagle.tree import grow
from outrider.drafters.eagle.with_lookup import Lookup
from outrider.drafters.heads.chooser import Writer
from outrider.drafters.lesson import FADE, Figures, Laws, Lesson, distance
from outrider.drafters.trust import Trust
from outrider.models.base import Feed, Model, Readable
from outrider.models.rope import rope

PIECE = 512  # states of the target that may wait to be taken in
SOON = 64  # where the kernels do that: a prompt belongs to the time before the first token
NEVER = -1e9  # the logarithm of no chance
DEEP = 16  # levels of a tree, at most; it ends where no deeper node can be among its best
SHARP = 0.75  # a greedy target always takes its likeliest token, so a head's likely ones hold oftener than their chance
CUT = 8192  # tokens that a head writes on a CPU, where it writes trees or for many sequences
COMMON = 4096  # and with the tokens of the text itself, where it writes a chain for one


@dataclass(frozen=True)
class EagleConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    norm_eps: float
    rope_theta: float
    vocab_size: int  # the target's
    draft_vocab_size: int  # how many of those tokens the head can write
    layers: tuple[int, ...]  # the target's blocks whose residuals it reads, from 0; (): its final state (EAGLE-1, 2)
    depth: int = 1  # decoder layers
    context: int = 2048  # the target's
    norm_inputs: bool = False  # each block's residual is normalised (vLLM's fc_norm)
    norm_joined: bool = False  # all of them together are (vLLM's norm_before_fc)
    norm_residual: bool = False  # the normalised state goes round the first layer (vLLM's norm_before_residual)
    norm_output: bool = False  # the next step reads the normalised state
    fc_bias: bool = False
    attention_bias: bool = False
    own_output: bool = False  # else the target's output matrix, rows `draft_ids` of it
    own_embedding: bool = False
    rope_scaling: Mapping[str, Any] | None = None  # in Hugging Face's words

    @property
    def first(self) -> bool:
        """Of the first form (EAGLE-1, 2): embedding and final state joined by one matrix, no norms but one."""
        return not self.layers


class _Attention(nn.Module):
    def __init__(self, config: EagleConfig, inputs: int) -> None:
        super().__init__()
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(inputs, queries, config.attention_bias)
        self.k_proj = nn.Linear(inputs, keys, config.attention_bias)
        self.v_proj = nn.Linear(inputs, keys, config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, False)


class _MLP(nn.Module):
    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.inner_size, False)
        self.up_proj = nn.Linear(config.hidden_size, config.inner_size, False)
        self.down_proj = nn.Linear(config.inner_size, config.hidden_size, False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A decoder layer; the first one of EAGLE-3 reads [embedding, state]."""

    input_layernorm: Norm
    hidden_norm: Norm

    def __init__(self, config: EagleConfig, index: int) -> None:
        super().__init__()
        self.joins = index == 0 and not config.first
        self.bare = index == 0 and config.first  # without an input norm
        if not self.bare:
            self.input_layernorm = _norm(config, config.hidden_size)
        if self.joins:
            self.hidden_norm = _norm(config, config.hidden_size)
        self.self_attn = _Attention(config, config.hidden_size * (2 if self.joins else 1))
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.mlp = _MLP(config)


class EagleHead(nn.Module):
    def __init__(self, config: EagleConfig, draft_ids: Tensor | None = None) -> None:
        """`draft_ids`: the tokens it can write, in ascending order; None: all."""
        super().__init__()
        self.config = config
        joined = len(config.layers) or 2
        self.fc = nn.Linear(joined * config.hidden_size, config.hidden_size, config.fc_bias)
        if config.norm_inputs:
            self.fc_norm = nn.ModuleList(_norm(config, config.hidden_size) for _ in config.layers)
        if config.norm_joined:
            self.input_norm = _norm(config, joined * config.hidden_size)
        self.layers = nn.ModuleList(EagleLayer(config, index) for index in range(config.depth))
        if not config.first:
            self.norm = _norm(config, config.hidden_size)
        if config.own_output:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, False)
        if config.own_embedding:
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        ids = torch.arange(config.draft_vocab_size) if draft_ids is None else draft_ids.clone()
        self.register_buffer("draft_ids", ids, persistent=False)
        self.learned = ids  # all that it can write, however much it is narrowed
        self.draft_ids: Tensor
        scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
        self.rope = rope(config.head_dim, config.rope_theta, config.context, scaling)
        self.register_buffer("frequencies", self.rope.frequencies.float(), persistent=False)
        self.frequencies: Tensor

    @classmethod
    def fresh(
        cls,
        target: Readable,
        draft_ids: Tensor | None = None,
        layers: Seq[int] = (),
        depth: int = 1,
        norm_inputs: bool = True,
        norm_residual: bool = True,
        norm_output: bool = False,
    ) -> EagleHead:
        """A head to be trained, begun from the target's last layers. `layers`: blocks to read; (): three, evenly."""
        body = target.anatomy
        n = target.num_layers
        layers = tuple(sorted(set(layers) or {max(0, round(n * i / 3) - 1) for i in (1, 2, 3)}))
        if not all(0 <= layer < n for layer in layers) or not 1 <= depth <= n:
            raise OutriderError(f"a head cannot read blocks {layers} with {depth} layers: the target has {n} blocks")
        config = EagleConfig(
            body.hidden_size,
            body.num_heads,
            body.num_kv_heads,
            body.head_dim,
            body.intermediate_size,
            body.norm_eps,
            body.rope_theta,
            target.vocab_size,
            target.vocab_size if draft_ids is None else len(draft_ids),
            layers,
            depth,
            target.context,
            norm_inputs=norm_inputs,
            norm_residual=norm_residual,
            norm_output=norm_output,
            attention_bias=body.bias,
        )
        head = cls(config, draft_ids)
        with torch.no_grad():
            head._begin(target)
        return head

    def _begin(self, target: Readable) -> None:
        """The last block's state goes through; the layers are the target's last, and mix in the embedding as a value.

        The state's root mean square is 1 and that of the target's residual far larger, so what the layers add is made
        smaller by as much: without that a head of SmolLM2 had learned a quarter as much after the same 40 steps.
        """
        size, first = self.config.hidden_size, target.num_layers - self.config.depth
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        self.norm.weight.copy_(target.tensor("model.norm.weight"))
        loud = _loudness(target, max(first - 1, 0))
        for index, layer in enumerate(self.decoder):
            prefix = f"model.layers.{first + index}."
            for name, weight in layer.named_parameters():
                if name == "hidden_norm.weight" or (index == 0 and name == "input_layernorm.weight"):
                    continue  # stay 1: what the target's norm does is in the matrices that read it
                taken = target.tensor(prefix + name)
                if index == 0 and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                    taken = taken * target.tensor(prefix + "input_layernorm.weight")
                    taken = torch.cat([taken * float("v_proj" in name), taken], 1)
                weight.copy_(taken / loud if name.endswith(("o_proj.weight", "down_proj.weight")) else taken)

    @property
    def decoder(self) -> list[EagleLayer]:
        return cast("list[EagleLayer]", list(self.layers))

    @property
    def reads(self) -> tuple[int, ...]:
        """The target's blocks whose residuals it needs, in the order of `Lesson.hidden`."""
        return self.config.layers

    def narrow(self, vocab: int) -> None:
        """From now on it writes only the first so many of its tokens."""
        self.draft_ids = self.draft_ids[:vocab]
        self.config = replace(self.config, draft_vocab_size=len(self.draft_ids))
        if self.config.own_output:
            self.lm_head.weight = nn.Parameter(self.lm_head.weight[:vocab])

    def combine(self, hidden: Tensor) -> Tensor:
        """[..., layers, hidden] residuals of the target -> [..., hidden], the state that a step reads (EAGLE-3)."""
        if self.config.norm_inputs:
            hidden = torch.stack([norm(x) for norm, x in zip(self.fc_norm, hidden.unbind(-2), strict=True)], -2)
        joined = hidden.flatten(-2)
        if self.config.norm_joined:
            joined = self.input_norm(joined)
        return self.fc(joined.to(self.fc.weight.dtype))

    def loss(self, lesson: Lesson, steps: int = 6) -> tuple[Tensor, Figures]:
        """Distillation over `steps` draft steps from every place of the text, each with its own past of earlier steps.

        The figures: loss, and per depth (from 1) `hit`, how often its likeliest token is the target's, and `keep`, the
        share of draws that rejection would keep.
        """
        answers, ids = lesson.answers(), None if self._writes_all else self.draft_ids
        laws, output = Laws.of(lesson, answers, ids), self._output(lesson.output)
        embedding = self.embed_tokens.weight if self.config.own_embedding else lesson.embedding
        state = lesson.last if self.config.first else self.combine(lesson.hidden)
        pasts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        turns = self._turns(lesson.tokens.shape[1] + steps, state.device)
        total, figures, rows = torch.zeros((), device=state.device), {}, lesson.tokens.shape[1]
        for step in range(min(steps, rows - 2)):
            embedded = F.embedding(_ahead(lesson.tokens, 1 + step), embedding)
            state, normed = self._step(embedded, state, pasts, turns[:, step : step + rows])
            places, counts = answers.before(2 + step)
            normed = normed.flatten(0, 1).index_select(0, places)
            part, figures[f"keep{step + 1}"], figures[f"hit{step + 1}"] = distance(normed, output, laws, counts)
            total = total + FADE**step * part
        figures["loss"] = total.detach()
        return total, figures

    @property
    def _writes_all(self) -> bool:
        return self.config.draft_vocab_size == self.config.vocab_size

    def _output(self, target: Tensor) -> Tensor:
        """[draft vocabulary, hidden]"""
        if self.config.own_output:
            return self.lm_head.weight
        return target if self._writes_all else target[self.draft_ids]

    def _turns(self, places: int, device: torch.device) -> Tensor:
        """cos and signed sin, [2, places, head_dim]"""
        angles = torch.outer(torch.arange(places, device=device, dtype=torch.float32), self.frequencies)
        cos, sin = angles.cos() * self.rope.scale, angles.sin() * self.rope.scale
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])

    def _step(
        self, embedded: Tensor, state: Tensor, pasts: list[list[tuple[Tensor, Tensor]]], turns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One draft step at every place: the next state, and what the logits are made of, [b, t, hidden] each."""
        x = self.fc(torch.cat([embedded.to(state.dtype), state], -1)) if self.config.first else state
        for layer, past in zip(self.decoder, pasts, strict=True):
            if layer.joins:
                normed = layer.hidden_norm(x)
                read = torch.cat([layer.input_layernorm(embedded.to(x.dtype)), normed], -1)
                x = normed if self.config.norm_residual else x
            else:
                read = x if layer.bare else layer.input_layernorm(x)
            x = x + self._attend(layer.self_attn, read, past, turns)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        if self.config.first:
            return x, x
        normed = self.norm(x)
        return (normed if self.config.norm_output else x), normed

    def _attend(self, attention: _Attention, x: Tensor, past: list[tuple[Tensor, Tensor]], turns: Tensor) -> Tensor:
        """Place s of step j sees the places up to s of step 0 and place s of the steps 1 to j."""
        config = self.config
        (b, t, _), groups = x.shape, config.num_heads // config.num_kv_heads
        q = _turned(attention.q_proj(x).view(b, t, config.num_heads, -1).transpose(1, 2), turns)
        k = _turned(attention.k_proj(x).view(b, t, config.num_kv_heads, -1).transpose(1, 2), turns)
        v = attention.v_proj(x).view(b, t, config.num_kv_heads, -1).transpose(1, 2)
        past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))  # [b, heads, t, head_dim]
        mixed = _mixed(q, past, config.head_dim**-0.5)
        return attention.o_proj(mixed.transpose(1, 2).reshape(b, t, -1))


class Norm(nn.Module):
    """Root mean square, in float32 whatever the rest is computed in."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


def _loudness(target: Readable, block: int) -> float:
    """The root mean square of the target's residual after a block, over some text."""
    model = cast(Model, target)
    tokens = [(7919 * i) % target.vocab_size for i in range(1, 65)]
    (output,) = model.forward([Feed(-1, tokens)], [block])
    model.free(-1)
    assert output.hidden is not None
    return float(output.hidden[:, 0].float().pow(2).mean(-1).sqrt().median())


def _mixed(q: Tensor, past: Seq[tuple[Tensor, Tensor]], scale: float) -> Tensor:
    """Values [b, heads, t, head_dim]: place s sees the places up to s of past[0], and place s of all others."""
    if q.is_cuda and q.dtype != torch.float32:
        from outrider.drafters.fused import attend

        return attend(q, past, scale)
    (k, v), later, t = past[0], past[1:], q.shape[2]
    q = q * scale
    unseen = torch.ones(t, t, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2)).float().masked_fill(unseen, float("-inf"))
    own = [(q * key).sum(-1, keepdim=True).float() for key, _ in later]
    weights = torch.cat([scores, *own], -1).softmax(-1).to(v.dtype)
    mixed = weights[..., :t] @ v
    for place, (_, value) in enumerate(later):
        mixed = mixed + weights[..., t + place, None] * value
    return mixed


def _norm(config: EagleConfig, size: int) -> Norm:
    return Norm(size, config.norm_eps)


def _ahead(x: Tensor, places: int) -> Tensor:
    """[b, t] -> the same with x[:, i + places] at i; zeros where there is nothing."""
    return F.pad(x[:, places:], (0, places))


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    """[b, heads, t, head_dim] rotated; turns [2, t, head_dim]."""
    cos, sin = turns.to(x.dtype)
    return x * cos + x.unflatten(-1, (2, -1)).flip(-2).flatten(-2) * sin


class Eagle(Drafter):
    name = "eagle"
    sure = True

    @dataclass(frozen=True)
    class Options:
        head: str = ""  # folder; "": the one that is shipped for the target
        length: int = 0  # of a chain, or how deep a tree may be; 0: 5 and 16
        tree: int = 0  # nodes; 0: a chain
        width: int = 6  # nodes of a tree that are followed at each depth
        stop: float = -1.0  # no drafting below nodes with less chance; -1: 0.4 beside a packed target, else 0
        vocab: int = 0  # write only the first so many of its tokens, and on a CPU those of the text; 0: what suits
        lookup: int = 0  # copy from the text where at least so many tokens match; 0: never
        greedy: bool = False  # guess the likeliest token even where the request samples
        quantize: Literal["auto", "none", "int8", "int4"] = "auto"  # auto: int4 beside a packed target
        allow_pickle: bool = False

    def __init__(self, options: Options, parts: Parts) -> None:
        _check(options)
        head = parts.head("eagle", options.head, options.allow_pickle)
        if not isinstance(head, EagleHead):
            raise OutriderError(f"{options.head} holds a Medusa head; write medusa:head={options.head}")
        self._begin(head, parts, options)

    def _begin(self, head: EagleHead, parts: Parts, options: Options) -> None:
        target = parts.readable("an EAGLE head")
        self._options, self._seen = options, parts.target.length
        self._length = options.length or (DEEP if options.tree else 5)
        packed = bool(getattr(target, "packed", False))
        if options.vocab or packed:
            head.narrow(options.vocab or CUT)
        self.layers = head.config.layers or (target.num_layers - 1,)
        self._runner = start(head, target, options.quantize, options.vocab or (COMMON if packed else 0))
        self._stop = options.stop if options.stop >= 0.0 else 0.4 if packed else 0.0
        self._ids, self._vocab = head.draft_ids.to(target.device), target.vocab_size
        self._states: dict[int, _State] = {}
        self._guessing, self._drawing = Trust(), Trust()
        self._lookup = Lookup(options.lookup, parts) if options.lookup else None

    def propose(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        copies = self.cheap(seqs, rooms)
        asked = [
            i for i, copy in enumerate(copies) if rooms[i] > 0 and self._ready(seqs[i]) and self._wants(seqs[i], copy)
        ]
        most = self._options.tree or self._length
        writers = {i: Writer(seqs[i], min(rooms[i], most), self._options.greedy) for i in asked}
        begin = time.perf_counter()
        if writers and not self._at_once(list(writers.values())):
            self._write(list(writers.values()), self._catch_up([seqs[i] for i in asked]))
        if writers and self._lookup is not None:
            self._lookup.spend((time.perf_counter() - begin) / len(writers))
        drafts = list(copies)
        for i, writer in writers.items():
            draft = writer.draft(self._drawing if writer.draws else self._guessing)
            # nodes that were drawn come alone: verification has to know the law of every one
            if self._lookup is not None and draft and copies[i] and draft.probs is None:
                draft = self._lookup.merge(seqs[i], draft, copies[i])
            drafts[i] = draft or copies[i]
            state = self._states[writer.seq.id]
            state.written, state.length = writer, len(writer.seq.tokens)
        return drafts

    def cheap(self, seqs: Seq[Sequence], rooms: Seq[int]) -> list[Draft]:
        return [self._looked_up(seq, room) for seq, room in zip(seqs, rooms, strict=True)]

    def observe(self, step: Step) -> None:
        if self._lookup is not None:
            self._lookup.observe(step)
        if step.hidden is None:
            return
        state = self._states.get(step.seq.id)
        count, path = len(step.tokens), () if step.verdict is None else step.verdict.path
        rows = [*range(count), *(count + node for node in path)]
        if state is None:
            end = self._seen(step.seq.id) if step.verdict is None else len(step.seq.tokens) - 1
            state = self._states[step.seq.id] = _State(max(end - len(rows), 0))
        state.show(step.hidden, rows)
        if step.verdict is not None:
            self._learn(state, step)
        most = SOON if isinstance(self._runner, PackedRunner) else PIECE
        if state.waiting > most:  # a prompt, or long not asked: all but the last, from which a draft begins
            self._take_in([step.seq], keep=1)

    def forget(self, id: int) -> None:
        self._states.pop(id, None)
        self._runner.free(id)
        if self._lookup is not None:
            self._lookup.forget(id)

    def _looked_up(self, seq: Sequence, room: int) -> Draft:
        return EMPTY if self._lookup is None else self._lookup.propose(seq, room)

    def _wants(self, seq: Sequence, copy: Draft) -> bool:
        """Whether the head is asked as well."""
        return self._lookup is None or not self._lookup.enough(seq, copy)

    def _ready(self, seq: Sequence) -> bool:
        """Whether the target has shown its states up to the last token, and no draft began from there yet."""
        state = self._states.get(seq.id)
        return state is not None and 0 < state.waiting == len(seq.tokens) - 1 - state.first - state.taken

    def _catch_up(self, seqs: Seq[Sequence]) -> Ahead:
        return self._take_in(seqs, keep=0)

    def _take_in(self, seqs: Seq[Sequence], keep: int) -> Ahead:
        """Run what the target has shown, but for the last `keep` rows: each state with the token after it."""
        tokens, hidden = [], []
        for seq in seqs:
            some, shown = self._shown(seq, keep)
            tokens.append(some)
            hidden += shown
        return self._runner.extend([seq.id for seq in seqs], tokens, gathered(hidden))

    def _shown(self, seq: Sequence, keep: int) -> tuple[list[int], list[Shown]]:
        """The tokens to be taken in, and the target's states before them."""
        state = self._states[seq.id]
        count, first = state.waiting - keep, state.first + state.taken + 1
        return seq.tokens[first : first + count], state.take(keep)

    def _at_once(self, writers: Seq[Writer]) -> bool:
        """Catch up and write in one call where that can be: the plain chain of one sequence, of a packed head."""
        runner, writer = self._runner, writers[0]
        if len(writers) > 1 or self._options.tree or not writer.plain:
            return False
        if not isinstance(runner, PackedRunner) or not runner.chains:
            return False
        tokens, shown = self._shown(writer.seq, keep=0)
        for token, chance in runner.chain(writer.seq.id, tokens, shown, writer.length, self._stop):
            writer.put(token, chance)
        return True

    def _write(self, writers: Seq[Writer], ahead: Ahead) -> None:
        """Drawn tokens come as chains: which of several draws are shown would have to be decided without a look."""
        trees = [i for i, w in enumerate(writers) if self._options.tree and w.length > 1 and not w.draws]
        chains = sorted(set(range(len(writers))) - set(trees))
        blind = ahead.logits.device.type != "cpu" and all(writer.plain for writer in writers)
        for some, write in ((chains, self._blind_chains if blind else self._chains), (trees, self._trees)):
            if some:
                write([writers[i] for i in some], ahead.pick(some))

    def _chains(self, writers: Seq[Writer], ahead: Ahead) -> None:
        for depth in range(self._length):
            self._choose(writers, ahead.logits)
            going = [i for i, w in enumerate(writers) if depth + 1 == len(w.tokens) < w.length and self._goes_on(w)]
            if not going or depth + 1 == self._length:
                return
            writers, ahead = [writers[i] for i in going], ahead.pick(going)
            device = ahead.states.device
            tokens = torch.tensor([w.tokens[-1] for w in writers], device=device)
            trails = torch.arange(depth, device=device).expand(len(writers), -1)
            ahead = self._runner.step([w.seq.id for w in writers], tokens, ahead.states, trails)

    def _blind_chains(self, writers: Seq[Writer], ahead: Ahead) -> None:
        """The same on a device, without waiting for it: whole chains, looked at when they are done."""
        ids, device, said = [w.seq.id for w in writers], ahead.logits.device, []
        for depth in range(self._length):
            chances, places = torch.softmax(ahead.logits, -1).max(-1)
            tokens = self._ids[places]
            said.append(torch.stack([tokens.double(), chances.double()], -1))
            if depth + 1 < self._length:
                trails = torch.arange(depth, device=device).expand(len(ids), -1)
                ahead = self._runner.step(ids, tokens, ahead.states, trails)
        for writer, chain in zip(writers, torch.stack(said, 1).tolist(), strict=True):
            for token, chance in chain[: writer.length]:
                writer.put(int(token), chance)
                if not self._goes_on(writer):
                    break

    def _goes_on(self, writer: Writer) -> bool:
        return writer.reach >= self._stop

    def _choose(self, writers: Seq[Writer], logits: Tensor) -> None:
        """One more token for each."""
        plain = [i for i, writer in enumerate(writers) if writer.plain]
        if plain:
            laws = torch.softmax(logits if len(plain) == len(writers) else logits[plain], -1)
            chances, places = laws.max(-1)
            chosen = zip(plain, self._ids[places].tolist(), chances.tolist(), strict=True)
            for i, token, chance in chosen:
                writers[i].put(token, chance)
        for i, writer in enumerate(writers):
            if not writer.plain:
                writer.write(self._full(logits[i]))

    def _full(self, logits: Tensor) -> Tensor:
        """[draft vocabulary] -> [vocab]: what the head cannot write has no chance."""
        if len(self._ids) == self._vocab:
            return logits
        return logits.new_full((self._vocab,), float("-inf")).index_copy_(0, self._ids, logits)

    def _trees(self, writers: Seq[Writer], ahead: Ahead) -> None:
        options = self._options
        width = min(options.width, options.tree, len(self._ids))

        def offers(logits: Tensor, paths: Tensor, depth: int) -> tuple[Tensor, Tensor]:
            return self._offers(writers, logits, paths, width)

        ids, sizes = [w.seq.id for w in writers], [w.length for w in writers]
        for writer, grown in zip(
            writers, grow(self._runner, ids, ahead, offers, self._length, sizes, self._stop), strict=True
        ):
            writer.tokens, writer.parents, writer.said = grown.tokens, grown.parents, grown.chances

    def _offers(self, writers: Seq[Writer], logits: Tensor, paths: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """The likeliest tokens after each row and the logarithms of their chances, [rows, width]; each writer has the
        same number of rows."""
        chances, places = torch.log_softmax(logits / SHARP, -1).topk(width)
        tokens, each = self._ids[places], len(logits) // len(writers)
        for row in range(len(logits)):
            writer = writers[row // each]
            if not writer.plain:
                tokens[row], chances[row] = self._offered(writer, self._full(logits[row]), paths[row].tolist(), width)
        return tokens, chances

    def _offered(self, writer: Writer, logits: Tensor, path: list[int], width: int) -> tuple[Tensor, Tensor]:
        """Exactly `width`; where there are less, some that have no chance."""
        try:
            tokens, chances = writer.offers(logits, path, width)
        except Exception:  # of a processor, or no token is left that the head may write: the target will judge
            tokens, chances = self._ids[:0], logits[:0]
        short = width - len(tokens)
        return F.pad(tokens, (0, short)), F.pad(chances, (0, short), value=NEVER)

    def _learn(self, state: _State, step: Step) -> None:
        """How sure the head was of the tokens that came to be judged, and whether they were kept."""
        written, state.written = state.written, None
        if written is None or not written.tokens:
            return
        trust = self._drawing if written.draws else self._guessing
        shown = len(step.draft) if written.draws else len(written.tokens)  # a draw that was not shown was not judged
        node = -1
        for token in step.seq.tokens[state.length :]:
            below = [i for i in range(node + 1, shown) if written.parents[i] == node]
            for i in below:
                trust.learn(written.said[i], written.tokens[i] == token)
            node = next((i for i in below if written.tokens[i] == token), shown)


@dataclass(eq=False)
class _State:
    """What the target has shown of one sequence, and what of that the head has taken in."""

    first: int  # the place of the first state; not 0 where the target knew the beginning already
    taken: int = 0
    pending: list[Shown] = field(default_factory=list)
    waiting: int = 0  # rows that are pending
    written: Writer | None = None  # the last draft, in full
    length: int = 0  # tokens that were committed then

    def show(self, hidden: Tensor, rows: list[int]) -> None:
        """Rows of a pass, which hang on to all of it: what lay here before is copied."""
        self.pending = [*([] if not self.pending else [_own(self.pending)]), (hidden, rows)]
        self.waiting += len(rows)

    def take(self, keep: int) -> list[Shown]:
        """All but the last `keep` rows."""
        taken, self.pending = self.pending, []
        if keep:
            hidden, rows = _own(taken)
            taken, self.pending = [(hidden, rows[:-keep])], [(hidden[-keep:].clone(), list(range(keep)))]
        self.taken, self.waiting = self.taken + self.waiting - keep, keep
        return taken


def _own(pending: Seq[Shown]) -> Shown:
    hidden = gathered(pending)
    return hidden, list(range(len(hidden)))


def _check(options: Eagle.Options) -> None:
    for name, least in (("length", 0), ("tree", 0), ("width", 1), ("vocab", 0), ("lookup", 0)):
        if getattr(options, name) < least:
            raise OutriderError(f"eagle:{name} must be at least {least}, not {getattr(options, name)}")
    if not 0.0 <= options.stop < 1.0 and options.stop != -1.0:
        raise OutriderError(f"eagle:stop must be at least 0 and below 1, not {options.stop}")
