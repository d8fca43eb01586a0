"""Tiny models for tests, and the few lines that drive an engine over them."""

import copy
import functools
import math
import tempfile
from collections.abc import Iterable

import torch
import transformers
from scipy import stats

from outrider import drafters
from outrider.core.draft import Draft
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.block.head import BlockConfig, BlockHead
from outrider.drafters.eagle.head import EagleConfig, EagleHead
from outrider.drafters.history.store import HistoryStore
from outrider.drafters.medusa.head import MedusaConfig, MedusaHead
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Anatomy, Feed, Output
from outrider.models.load import LoadOptions, load
from outrider.train import kinds
from outrider.train.objective import Comparison, TeacherBatch

torch.set_num_threads(1)  # tiny products: more threads only wait for each other
transformers.utils.logging.disable_progress_bar()

VOCAB = 40
MEMORY = 1 << 28
CPU = LoadOptions(torch.device("cpu"), torch.float32, MEMORY)

_SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    initializer_range=0.25,  # peaky: drafts are sometimes right, and a greedy choice is rarely a near tie
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
_OPT = dict(ffn_dim=48, word_embed_proj_dim=16, init_std=0.25)
_GPT2 = dict(n_embd=32, n_layer=3, n_head=4, n_positions=256)
_GEMMA3 = dict(head_dim=16, query_pre_attn_scalar=16, sliding_window=8)
_GEMMA3_LAYERS = dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"], tie_word_embeddings=False
)

CONFIGS = {
    "llama": lambda **more: transformers.LlamaConfig(**_SIZES | more),
    "mistral": lambda **more: transformers.MistralConfig(**_SIZES | dict(sliding_window=8, head_dim=8) | more),
    "qwen2": lambda **more: transformers.Qwen2Config(**_SIZES | more),
    "qwen3": lambda **more: transformers.Qwen3Config(**_SIZES | dict(head_dim=16) | more),
    "opt": lambda **more: transformers.OPTConfig(**_SIZES | _OPT | more),
    "gpt2": lambda **more: transformers.GPT2Config(**_SIZES | _GPT2 | more),
    "gemma3": lambda **more: transformers.Gemma3TextConfig(**_SIZES | _GEMMA3 | _GEMMA3_LAYERS | more),
}
OWN = ("llama", "mistral", "qwen2", "qwen3")  # kinds that our own forward runs


def reference(kind, seed=0, **changes):
    """A random model of transformers in float32; biases and norms are random too, so that leaving one out shows."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**changes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(torch.randn_like(weight) * (0.2 if "norm" in name or "ln" in name else 0.1))
    return model


def noisy(model, scale=0.025, seed=1):
    """A copy of the model with disturbed weights: a draft model that is often, not always, right."""
    torch.manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * scale)
    return model


def resized(model, vocab):
    """The same model with its vocabulary padded or cut."""
    model.resize_token_embeddings(vocab, mean_resizing=False)
    return model


def ours(model, memory=MEMORY):
    """The same model as Outrider runs it: saved into a folder and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load(folder, LoadOptions(CPU.device, CPU.dtype, memory)).model


@functools.cache
def family(kind):
    """A target of that kind as transformers runs it, as we run it, and draft models for it by name."""
    target = reference(kind, seed=3)
    models = {
        "itself": ours(target),
        "noisy": ours(noisy(target)),
        "stranger": ours(reference("llama", seed=14, num_hidden_layers=1)),
        "longer": ours(resized(noisy(target), VOCAB + 8)),
        "shorter": ours(resized(noisy(target), VOCAB - 8)),
    }
    return target, ours(target), models


def parts(kind):
    _, model, models = family(kind)
    texts = histories(written(model))
    return BuildContext(model, lambda name, quantize: models[name], heads=family_heads(kind), histories=texts)


@functools.cache
def written(model):
    """What the target has written before, with some tokens changed: copies are sometimes right."""
    asked = prompts(8, vocab=model.vocab_size)
    seqs = [Sequence(i, prompt, SamplingParams(max_tokens=24)) for i, prompt in enumerate(asked)]
    run(model, Drafter(Drafter.Options(), BuildContext(model, load=None)), seqs)
    return [[(token + (i % 7 == 6)) % model.vocab_size for i, token in enumerate(seq.tokens)] for seq in seqs]


def histories(texts, capacity=1 << 12, tenant=""):
    """A store that holds these texts."""
    store = HistoryStore(capacity)
    for text in texts:
        store.add(tenant, text, 0)
    return store


@functools.cache
def family_heads(kind):
    """Heads for the target of that kind, by name, taught a little so that they are sometimes right."""
    return {} if kind not in OWN else {name: taught(head, family(kind)[1]) for name, head in new_heads(family(kind)[1])}


def random_heads(model):
    """The same heads, not taught at all."""
    return {name: head.requires_grad_(False) for name, head in new_heads(model)}


def new_heads(model):
    """A head of every form, by the names that the specs use."""
    torch.manual_seed(5)
    every_other = torch.arange(0, model.vocab_size, 2)
    yield "eagle", eagle_head(model)
    yield "eagle_cut", eagle_head(model, every_other, depth=2, norm_output=True)
    yield "eagle_1", eagle_head(model, layers=())
    yield "block", block_head(model)
    yield "block_public", block_head(model, every_other, starts=False, causal=False, qk_norm=True, sequential="gated")
    yield "block_bare", block_head(model, rank=0, depth=1, confidence=False)
    yield "medusa", medusa_head(model)
    yield "medusa_cut", medusa_head(model, every_other, depth=2)


def eagle_head(model, ids=None, layers=None, **more):
    body, n = model.anatomy, model.num_layers
    layers = tuple(range(n)) if layers is None else layers
    sizes = (body.hidden_size, body.num_heads, body.num_kv_heads, body.head_dim, body.intermediate_size)
    vocab = model.vocab_size if ids is None else len(ids)
    if layers:
        more = dict(norm_inputs=True, norm_residual=True) | more
    config = EagleConfig(
        *sizes, body.norm_eps, body.rope_theta, model.vocab_size, vocab, layers, context=model.context, **more
    )
    return _peaky(EagleHead(config, ids))


def block_head(model, ids=None, **more):
    body, n = model.anatomy, model.num_layers
    sizes = (body.hidden_size, body.num_heads, body.num_kv_heads, body.head_dim, body.intermediate_size)
    vocab = model.vocab_size if ids is None else len(ids)
    more = dict(block=5, depth=2, rank=8) | more
    config = BlockConfig(
        *sizes, body.norm_eps, body.rope_theta, model.vocab_size, vocab, tuple(range(n)), context=model.context, **more
    )
    return _peaky(BlockHead(config, ids))


def medusa_head(model, ids=None, heads=3, **more):
    vocab = model.vocab_size if ids is None else len(ids)
    return _peaky(MedusaHead(MedusaConfig(model.anatomy.hidden_size, model.vocab_size, vocab, heads, **more), ids))


def _peaky(head):
    with torch.no_grad():
        for weight in head.parameters():
            weight.add_(torch.randn_like(weight) * (0.25 if weight.dim() == 2 else 0.1))
    return head


def lesson(model, head, texts):
    """What the target makes of texts of one length."""
    final = model.num_layers - 1
    wanted = sorted({*head.reads, final})
    outs = model.forward([Feed(-1 - i, text) for i, text in enumerate(texts)], wanted)
    for i in range(len(texts)):
        model.free(-1 - i)
    states = torch.stack([output.hidden for output in outs]).clone()  # [b, t, layers, hidden]
    hidden = states[:, :, [wanted.index(layer) for layer in head.reads]]
    last = model.normed(states[:, :, wanted.index(final)]).clone()
    tokens = torch.tensor(texts)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    output, embedding = model.tensor("lm_head.weight").clone(), model.tensor("model.embed_tokens.weight").clone()
    return TeacherBatch(tokens, hidden, last, mask, output, embedding)


def taught(head, model, steps=20):
    """The head after some steps on what the target itself writes."""
    asked = [prompt for prompt in prompts(8, vocab=model.vocab_size) if len(prompt) > 6]
    texts = [[*each, *outputs([plainly(model, each, SamplingParams(max_tokens=24))])[0]] for each in asked]
    learned = lesson(model, head, [text[:30] for text in texts])
    optimizer = torch.optim.AdamW(head.parameters(), 1e-2)
    for _ in range(steps):
        loss, _ = kinds.loss(head, learned, Comparison(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False)


def prompts(count, seed=0, vocab=VOCAB):
    """Ragged prompts in which parts repeat."""
    random = torch.Generator().manual_seed(seed)

    def tokens(n):
        return torch.randint(vocab, (n,), generator=random).tolist()

    out = []
    for i in range(count):
        part = tokens(3 + i % 4)
        out.append(tokens(1 + 5 * (i % 3)) + part + tokens(i % 2) + part)
    return out


def new_engine(model, drafter, limits=Limits()):
    """An engine that drafts whatever it can: what is tested must not depend on the clock."""
    return Engine(model, drafter, limits)


def run(model, drafter, seqs: Iterable[Sequence], limits=Limits()):
    """Run the sequences to their end; the engine that ran them."""
    engine = new_engine(model, drafter, limits)
    for seq in seqs:
        engine.add(seq)
    drain(engine)
    assert not engine._pool._failed, "a drafter has failed: the text is right without it, and the test proves nothing"
    return engine


def drain(engine, most=5_000):
    """Step until nothing is left to do."""
    for _ in range(most):
        if not engine.busy:
            return
        engine.step()
    raise AssertionError(f"the engine is still busy after {most} steps")


def outputs(seqs):
    return [[token.id for token in seq.output] for seq in seqs]


def plainly(model, tokens, params=SamplingParams(), **more):
    """What plain decoding writes after the tokens."""
    seq = Sequence(0, list(tokens), params, **more)
    run(model, Drafter(Drafter.Options(), BuildContext(model, load=None)), [seq])
    return seq


def greedy_by_transformers(model, tokens, count):
    with torch.inference_mode():
        ids = model.generate(torch.tensor([tokens]), max_new_tokens=count, do_sample=False)
    return ids[0, len(tokens) :].tolist()


class Markov:
    """A model whose logits are a table over the last two tokens. It costs nothing and checks what it is told.

    It remembers the tokens of each sequence as a cache does: nodes lie after the committed tokens until `crop` keeps a
    path of them. It is a `Model`, so every drafter runs on it.
    """

    num_layers, context, capacity, device = 3, 64, 1 << 30, torch.device("cpu")
    packed = False
    anatomy = Anatomy(32, 4, 2, 8, 48, 1e-6, 10_000.0, False)  # for heads: its states tell the last two tokens

    def __init__(self, vocab_size=6, seed=0, sharpness=1.5, tables=None):
        self.vocab_size = vocab_size
        random = torch.Generator().manual_seed(seed)
        self.states = torch.randn(
            3, vocab_size + 1, self.anatomy.hidden_size, generator=torch.Generator().manual_seed(3)
        )
        shape = (vocab_size + 1, vocab_size, vocab_size)  # the last row: nothing before the last token
        self.tables = torch.randn(shape, generator=random) * sharpness if tables is None else tables
        self.seen = {}

    def length(self, id):
        return len(self.seen.get(id, ()))

    def logits(self, tokens):
        return self.tables[tokens[-2] if len(tokens) > 1 else -1, tokens[-1]]

    def forward(self, feeds: Iterable[Feed], layers=()):
        assert len({feed.id for feed in feeds}) == len(feeds) > 0
        return [self._one(feed, layers) for feed in feeds]

    def _one(self, feed, layers):
        assert len(feed.tokens) > 0
        before = [*self.seen.get(feed.id, ()), *feed.tokens]
        rows = [self.logits(before)]
        texts = [before[: len(before) - i] for i in reversed(range(len(feed.tokens)))]
        for node in range(len(feed.draft)):
            texts.append([*before, *(feed.draft.tokens[i] for i in feed.draft.path(node))])
            rows.append(self.logits(texts[-1]))
        self.seen[feed.id] = [*before, *feed.draft.tokens]
        return Output(torch.stack(rows), torch.stack([self._state(text, layers) for text in texts]) if layers else None)

    def _state(self, text, layers):
        last = self.states[0, text[-1]] + self.states[1, text[-2] if len(text) > 1 else -1]
        return torch.stack([last * (1 + layer) for layer in layers])

    def embed(self, ids):
        return self.states[2, ids]

    def output_rows(self, ids):
        return self.states[1, ids] * 0.3

    def normed(self, x):
        return x / 3.0

    def crop(self, id, length, path=()):
        tokens = self.seen.get(id, [])
        assert length <= len(tokens) + 1
        self.seen[id] = tokens[:length] + [tokens[length + node] for node in path if length + node < len(tokens)]

    def free(self, id):
        self.seen.pop(id, None)

    def first(self, layers):
        """A model that is alike: the table with some of it forgotten."""
        random = torch.Generator().manual_seed(layers)
        noise = torch.randn(self.tables.shape, generator=random)
        return Markov(self.vocab_size, tables=self.tables + noise * (self.num_layers - layers) / self.num_layers)


class Scripted(Drafter):
    """Trees that are right, wrong, branched and doubled, decided by the sequence alone. Not in the table; tests use it.

    `oracle(seq, guessed)` guesses the next token well; four of ten nodes are noise. Nodes that are `drawn`
    come from random laws instead, and bring them.
    """

    name = "scripted"

    def __init__(self, oracle, vocab, drawn=False, nodes=9):
        self._oracle, self._vocab, self._drawn, self._nodes = oracle, vocab, drawn, nodes

    def propose(self, seqs, budgets):
        return [self._propose(seq, min(budget, self._nodes)) for seq, budget in zip(seqs, budgets, strict=True)]

    def _propose(self, seq, count):
        # numbers that differ from place to place and from sequence to sequence, independent of the sequence's dice
        random = torch.Generator().manual_seed(hash((seq.id, len(seq.tokens), *seq.tokens)) % 2**31)
        tokens, parents, laws = [], [], []
        for node in range(count):
            parent = int(torch.randint(-1, node, (), generator=random)) if node else -1
            if self._drawn:
                law = torch.rand(self._vocab, generator=random).pow(3)
                law /= law.sum()
                token = int(torch.multinomial(law, 1, generator=random))
                laws.append(law)
            elif torch.rand((), generator=random) < 0.6:
                path = Draft(tuple(tokens), tuple(parents)).path(parent)
                token = self._oracle(seq, [tokens[i] for i in path])
            else:
                token = int(torch.randint(self._vocab, (), generator=random))
            tokens.append(token)
            parents.append(parent)
        return Draft(tuple(tokens), tuple(parents), torch.stack(laws) if laws else None)


def law_by_hand(logits, tokens, prompt, params, ends=()):
    """The law after `tokens`, written down from its definition, slowly and in float64. Returns a list."""
    output, vocab = tokens[prompt:], range(len(logits))
    scores = [float(score) for score in logits]
    for token in vocab:
        if token in tokens:
            scores[token] *= params.repetition_penalty ** (-1 if scores[token] > 0 else 1)
        if token in output:
            scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * output.count(token)
        scores[token] += params.logit_bias.get(token, 0.0)
        banned = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        banned |= token in ends and len(output) < params.min_tokens
        banned |= any([*tokens, token][-len(word) :] == list(word) for word in params.bad_words)
        if banned:
            scores[token] = -math.inf
    if params.temperature == 0:
        return [float(token == scores.index(max(scores))) for token in vocab]

    def normalised(weights):
        return [weight / sum(weights) for weight in weights]

    def only(law, kept):
        return normalised([p if token in kept else 0.0 for token, p in enumerate(law)])

    def first_with_mass(law, order, mass):
        kept = []
        while sum(law[token] for token in kept) < mass and len(kept) < len(order):
            kept.append(order[len(kept)])
        return kept

    law = normalised([math.exp((score - max(scores)) / params.temperature) for score in scores])
    if params.top_k:
        law = only(law, sorted(vocab, key=lambda t: -law[t])[: params.top_k])
    if params.top_p < 1:
        law = only(law, first_with_mass(law, sorted(vocab, key=lambda t: -law[t]), params.top_p))
    if params.min_p:
        law = only(law, [t for t in vocab if law[t] >= params.min_p * max(law)])
    if params.typical_p < 1:
        entropy = -sum(p * math.log(p) for p in law if p)
        possible = [t for t in vocab if law[t]]
        order = sorted(possible, key=lambda t: abs(-math.log(law[t]) - entropy))
        law = only(law, first_with_mass(law, order, params.typical_p))
    return law


def continuations(logits, prompt, params, length):
    """Every continuation of that length and its exact probability; `logits(tokens)` is the model."""
    out = {(): 1.0}
    for _ in range(length):
        out = {
            (*path, token): chance * p
            for path, chance in out.items()
            for token, p in enumerate(law_by_hand(logits([*prompt, *path]), [*prompt, *path], len(prompt), params))
            if p
        }
    return out


def assert_follows(samples, law, alpha=1e-4):
    """Chi-square of the samples against {outcome: probability}; rare outcomes are pooled."""
    counts = dict.fromkeys(law, 0)
    for sample in samples:
        assert sample in law, f"{sample} has probability 0"
        counts[sample] += 1
    cells = [(counts[outcome], chance * len(samples)) for outcome, chance in law.items()]
    usual = [cell for cell in cells if cell[1] >= 5]
    rare = [cell for cell in cells if cell[1] < 5]
    if rare:
        usual.append((sum(c for c, _ in rare), sum(e for _, e in rare)))
    observed, expected = zip(*usual, strict=True)
    if len(usual) == 1:
        return
    total = sum(expected)
    p = stats.chisquare(observed, [e * len(samples) / total for e in expected]).pvalue
    assert p > alpha, f"p = {p:.2g} over {len(usual)} cells"


def assert_rate(hits, trials, rate, sigmas=4.5):
    """A share of trials against its exact expectation."""
    spread = math.sqrt(max(rate * (1 - rate), 1e-9) / trials)
    assert abs(hits / trials - rate) < sigmas * spread + 1e-6, (
        f"{hits / trials:.4f} instead of {rate:.4f} ± {spread:.4f}"
    )


# What each drafter of the table is tested with. A test demands that no drafter is missing.
SPECS = {
    "none": ["none"],
    "auto": ["auto:length=4", "auto:head=eagle,model=noisy"],
    "ngram": [
        "ngram:min_n=1,length=5",
        "ngram:store=adaptive,min_n=1,max_n=3,length=4",
        "ngram:min_n=1,length=4,tree=9",
    ],
    "history": ["history:length=5,width=3"],
    "draft_model": [
        "draft_model:model=noisy,length=3",
        "draft_model:model=noisy,length=4,greedy=true",
        "draft_model:model=itself,length=4",
        "draft_model:model=stranger,length=2",
        "draft_model:model=longer,length=3",
        "draft_model:model=shorter,length=3",
    ],
    "prediction": ["prediction:length=6"],
    "layer_skip": ["layer_skip:layers=2,length=3"],
    "eagle": [
        "eagle:head=eagle,length=3",
        "eagle:head=eagle,length=4,tree=9,width=3",
        "eagle:head=eagle_cut,length=4,stop=0.05,lookup=2",
        "eagle:head=eagle_1,length=2,greedy=true,vocab=5",
    ],
    "block": [
        "block:head=block",
        "block:head=block,tree=9,width=3",
        "block:head=block_public,length=4,stop=0.05",
        "block:head=block_bare,length=3,greedy=true,vocab=5",
    ],
    "medusa": ["medusa:head=medusa,nodes=9,length=3", "medusa:head=medusa_cut,nodes=4,length=2"],
    "grammar": ["grammar:length=5"],
    "oracle": ["oracle:rate=0.7,length=4"],
}
IDLE = ("none", "grammar:length=5")  # draft nothing for a sequence without a grammar
# Several together: one that draws beside one that guesses, two that draw, trees beside chains, and nearly all.
COMBINED = [
    "eagle:head=eagle,length=3+ngram:min_n=1,length=4",
    "layer_skip:layers=2,length=2+draft_model:model=noisy,length=3",
    "medusa:head=medusa,nodes=5+eagle:head=eagle_cut,length=4,tree=7,width=3+history:length=5,width=3",
    "block:head=block,length=4,tree=6,width=2+ngram:min_n=1,length=4,tree=7",
    "grammar:length=4+draft_model:model=shorter,length=3+prediction:length=6+ngram:min_n=1+history+oracle:rate=0.6",
]
ALL_SPECS = [*(spec for name in drafters.TABLE for spec in SPECS.get(name, ())), *COMBINED]
HEADS = ("eagle", "block", "medusa")  # drafters that need a target that they can read
CASES = [(kind, spec) for kind in CONFIGS for spec in ALL_SPECS if kind in OWN or "head=" not in spec]
