"""The parts of a training run: conversations, texts, batches, the reading target, the optimiser, files."""

import itertools
from random import Random
from types import SimpleNamespace

import pytest
import torch
from tiny import block_head, family
from torch import nn

from outrider.core.errors import OutriderError
from outrider.core.stats import Stats
from outrider.drafters.base import BuildContext, Drafter
from outrider.drafters.heads import files
from outrider.engine.engine import Engine
from outrider.engine.scheduler import Limits
from outrider.models.base import Feed
from outrider.models.load import LoadOptions, load
from outrider.train import eagle, job as jobs, kinds
from outrider.train.atomic import write_text
from outrider.train.data import conversations
from outrider.train.data.batches import BatchOrder, TextBatch
from outrider.train.data.conversations import (
    ChatFormat,
    WriteRequest,
    WrittenText,
    answer_to,
    conversation,
    trim,
)
from outrider.train.data.corpus import FOLDER, Corpus, CorpusFolder, CorpusInfo
from outrider.train.data.writer import ConversationRunner
from outrider.train.draft_model import DraftNet, spread
from outrider.train.loop import LossLog
from outrider.train.optimiser import Optimiser, rate
from outrider.train.results import Evaluator, figures
from outrider.train.run import reserved
from outrider.train.teacher import Teacher

WHERE = LoadOptions(torch.device("cpu"), torch.float32, 1 << 28)


@pytest.fixture(scope="module")
def loaded(tiny_folder):
    return load(str(tiny_folder), WHERE)


def written(loaded, numbers, batch, seed=0):
    engine = Engine(loaded.model, Drafter(Drafter.Options(), BuildContext(loaded.model, None)), Limits(batch, 512, 0))
    chat = ChatFormat.of(loaded.tokenizer)
    numbered = [(number, conversation(chat, loaded.ends, Random(number))) for number in numbers]
    return ConversationRunner(engine, loaded.ends, batch, seed).run(numbered)


@pytest.fixture
def brief(monkeypatch):
    """Conversations of few tokens: how many there are plays no part in when and beside which others they run."""
    for name, value in {"TURN": (4, 12), "ANSWER": (10, 24), "LONG_ANSWER": 32}.items():
        monkeypatch.setattr(conversations, name, value)


def test_a_conversation_is_the_same_whatever_runs_beside_it(loaded, brief):
    together, alone = written(loaded, range(4), 3), [text for n in range(4) for text in written(loaded, [n], 1)]
    assert together == alone
    assert written(loaded, range(4), 3, seed=1) != together


def test_conversations_that_begin_ahead_are_the_same_and_leave_nothing_behind(loaded, brief):
    engine = Engine(loaded.model, Drafter(Drafter.Options(), BuildContext(loaded.model, None)), Limits(3, 512, 0))
    chat = ChatFormat.of(loaded.tokenizer)
    line = ((number, conversation(chat, loaded.ends, Random(number))) for number in itertools.count())
    runner = ConversationRunner(engine, loaded.ends, 3, 0)
    steps = iter(range(120))  # many conversations have a source and an answer
    first = runner.run(line, goes_on=lambda: next(steps) < 80)
    second = runner.run(line, goes_on=lambda: next(steps, 120) < 119)
    assert engine.busy  # with the conversations after them
    ended = {text.talk: [one for one in first + second if one.talk == text.talk] for text in first + second}
    assert len(ended) > 2
    assert ended == {talk: written(loaded, [talk], 1) for talk in ended}
    cut = runner.stop()
    assert not engine.busy
    assert all(len(text.tokens) - text.answer >= 16 for text in cut)
    assert {text.talk for text in cut}.isdisjoint(ended)


class InstantEngine:
    """Ends every sequence in the step after it came; keeps the random numbers that each was given."""

    model = SimpleNamespace(context=1000)

    def __init__(self):
        self.waiting, self.keys = [], []

    def add(self, seq):
        self.waiting.append(seq)
        self.keys.append(seq.dice.key)

    @property
    def busy(self):
        return bool(self.waiting)

    def step(self):
        ended, self.waiting = self.waiting, []
        return ended


def test_every_request_has_random_numbers_of_its_own():
    def three_turns():
        for _ in range(3):
            yield WriteRequest([1, 2], 4, 1.0)
        return []

    found = []
    for batch, seed in ((2, 0), (5, 0), (5, 1)):
        engine = InstantEngine()
        ConversationRunner(engine, frozenset(), batch, seed).run([(number, three_turns()) for number in range(5)])
        found.append(set(engine.keys))
        assert len(engine.keys) == len(found[-1]) == 15
    assert found[0] == found[1]  # by its number alone
    assert not found[1] & found[2]


def test_a_conversation_has_a_question_and_an_answer(loaded):
    chat, texts = ChatFormat.of(loaded.tokenizer), written(loaded, range(6), 6)
    begin, after = chat.begin(""), list(chat.after)
    for text in texts:
        assert list(text.tokens[: len(begin)]) == begin
        assert list(text.tokens[text.answer - len(after) : text.answer]) == after
        assert 0 < len(text.tokens) - text.answer <= 256
        assert not set(text.tokens[text.answer : -1]) & loaded.ends


def test_a_given_prompt_is_asked_as_the_template_has_it(loaded):
    chat = ChatFormat.of(loaded.tokenizer)
    ask = next(answer_to(chat, "count the stars", Random(0)))
    messages = [{"role": "user", "content": "count the stars"}]
    whole = loaded.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert loaded.tokenizer.decode(ask.tokens) == whole


def test_a_model_without_a_template_writes_on(tiny_mute):
    chat = ChatFormat.of(load(str(tiny_mute), WHERE).tokenizer)
    assert chat.after == ()
    assert chat.ask("the sea") == chat.begin("the sea")
    assert len(chat.begin("")) > 0  # something to go on from
    with pytest.raises(OutriderError, match="no tokenizer"):
        ChatFormat.of(None)


def test_a_conversation_that_outgrows_the_context_ends(tmp_path, monkeypatch, loaded):
    monkeypatch.setattr(loaded.model, "context", 60)
    engine = Engine(loaded.model, Drafter(Drafter.Options(), BuildContext(loaded.model, None)), Limits(2, 512, 0))
    chat = ChatFormat.of(loaded.tokenizer)
    numbered = [(0, answer_to(chat, "a " * 100, Random(0))), (1, answer_to(chat, "a", Random(0)))]
    texts = ConversationRunner(engine, loaded.ends, 2, 0).run(numbered)
    assert [len(text.tokens) <= 60 for text in texts] == [True]


CORPUS = Corpus.of([WrittenText(range(1000 * n, 1001 * n), n // 2) for n in (5, 70, 64, 3, 130, 66, 20)])


def test_an_epoch_has_every_text_once_and_goes_on_anywhere():
    order = BatchOrder(CORPUS, 192, 1024, 0, torch.device("cpu"))
    rows = order.batches(0)
    first = [next(rows) for _ in range(2 * order.per_epoch)]
    counted = sorted(
        int((batch.tokens[i] > 0).sum()) for batch in first[: order.per_epoch] for i in range(len(batch.tokens))
    )
    assert counted == sorted(CORPUS.lengths.tolist())
    for step in (1, order.per_epoch, order.per_epoch + 1):
        assert torch.equal(next(order.batches(step)).tokens, first[step].tokens)
    epochs = [[batch.tokens.tolist() for batch in first[i : i + order.per_epoch]] for i in (0, order.per_epoch)]
    assert epochs[0] != epochs[1]


def test_a_batch_is_padded_masked_and_cut():
    for batch in (next(BatchOrder(CORPUS, 64, 64, seed, torch.device("cpu")).batches(0)) for seed in range(8)):
        assert batch.tokens.shape[1] == 64
        for tokens, mask in zip(batch.tokens, batch.mask, strict=True):
            held = int((tokens > 0).sum())
            whole = int(tokens[0]) // 1000
            assert mask.tolist() == [whole // 2 <= place < held for place in range(64)]
        assert batch.known.tolist() == batch.mask.flatten().nonzero().squeeze(1).tolist()


def test_the_most_frequent_tokens_of_answers():
    corpus = Corpus.of([WrittenText([1, 1, 1, 5, 5, 7], 3), WrittenText([2, 2, 5, 7, 7], 2)])
    assert corpus.frequent(2, 10, ()).tolist() == [5, 7]
    assert corpus.frequent(2, 10, [9]).tolist() == [9, 5]
    assert corpus.frequent(4, 10, ()).tolist() == [5, 7, 1, 2]  # then what was only asked


@pytest.mark.parametrize("vocab", [300, 100_000])
def test_texts_come_back_from_their_folder(tmp_path, vocab):
    folder = CorpusFolder(tmp_path)
    assert folder.info() is None
    texts = [WrittenText([1, 65_535 if vocab > 65_536 else 299, 3], 1)]
    folder.add(Corpus.of(texts), CorpusInfo("m", vocab, 0, waves=1))
    folder.add(Corpus.of(texts * 2), CorpusInfo("m", vocab, 0, waves=2))
    read = folder.read(folder.info().waves)
    assert read.tokens.tolist() == list(texts[0].tokens) * 3
    assert read.answers.tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_the_teacher_reads_what_the_engine_writes(kind):
    _, model, _ = family(kind)
    torch.manual_seed(0)
    tokens = torch.randint(40, (3, 30))
    lesson = Teacher(model, (0, 2), 64).read(TextBatch(tokens, tokens > 0))
    for row in range(3):
        whole = model.forward([Feed(row, tokens[row].tolist())], [0, 2])[0]
        model.free(row)
        assert torch.allclose(lesson.hidden[row], whole.hidden, atol=1e-4)
        assert torch.allclose(lesson.last[row, -1] @ lesson.output.T, whole.logits[0], atol=1e-3)


def test_only_dense_llamas_teach():
    with pytest.raises(OutriderError, match="llama-like"):
        Teacher(object(), (), 8)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_draft_model_of_all_layers_is_the_target(kind, tmp_path):
    """Same weights, same folder form: what is saved loads and writes what the target writes."""
    target, model, _ = family(kind)
    target.save_pretrained(tmp_path / "target")
    net = DraftNet(model, model.num_layers, 64)
    net.write(tmp_path / "draft", tmp_path / "target", None)
    again = load(str(tmp_path / "draft"), WHERE).model
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    assert torch.equal(again.forward([Feed(0, tokens)])[0].logits, model.forward([Feed(99, tokens)])[0].logits)
    model.free(99)
    batch = TextBatch(torch.tensor([tokens]), torch.ones(1, 8, dtype=torch.bool))
    _, figures = net.loss(Teacher(model, (), 64).read(batch))
    assert float(figures["hit1"]) == 1.0
    assert float(figures["keep1"]) == pytest.approx(1.0, abs=1e-4)
    net.norm.data.zero_()
    assert float(net.loss(Teacher(model, (), 64).read(batch))[1]["keep1"]) < 0.9


def test_what_a_fresh_layer_adds_has_the_size_of_its_state():
    """The target's last layer writes for residuals of its own size; a head's state is normalised."""
    _, model, _ = family("llama")
    head = eagle.fresh(model)
    tokens = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(0))
    lesson = Teacher(model, head.reads, 64).read(TextBatch(tokens, torch.arange(30).expand(2, -1) >= 10))
    sizes = sorted(lesson.hidden[:, 10:, -1].reshape(-1, 32).square().mean(-1).sqrt().tolist())
    before = [
        weight.clone() for weight in (head.decoder[0].self_attn.o_proj.weight, head.decoder[0].mlp.down_proj.weight)
    ]
    kinds.prepare(head, lesson)
    after = (head.decoder[0].self_attn.o_proj.weight, head.decoder[0].mlp.down_proj.weight)
    for old, new in zip(before, after, strict=True):
        assert torch.allclose(old / new, torch.tensor(sizes[19]), rtol=1e-4)


def test_layers_are_spread():
    assert spread(1, 30) == [29]
    assert spread(2, 30) == [0, 29]
    assert spread(4, 30) == [0, 10, 19, 29]
    with pytest.raises(OutriderError, match="1 to 3"):
        DraftNet(family("llama")[1], 4, 8)


def steps(module, optimiser, count, first=0):
    losses = []
    for step in range(first, first + count):
        torch.manual_seed(step)
        loss = (module(torch.randn(4, 8)) - 1).square().mean()
        loss.backward()
        optimiser.step(rate(step, 2, 10))
        losses.append(loss.item())
    return losses


def test_a_step_moves_by_its_share_of_the_peak():
    moved = []
    for share in (1.0, 0.5, 0.0):
        torch.manual_seed(0)
        module = nn.Linear(6, 4)
        optimiser, before = Optimiser(module, 0.02, 0.01), [weight.detach().clone() for weight in module.parameters()]
        module(torch.ones(3, 6)).square().sum().backward()
        optimiser.step(share)
        moved.append([weight.detach() - old for weight, old in zip(module.parameters(), before, strict=True)])
        assert not any(bool(weight.grad.any()) for weight in module.parameters())  # none is left for the next step
    for whole, half, none in zip(*moved, strict=True):
        assert torch.allclose(half, whole / 2, atol=1e-6)
        assert whole.abs().max() > 1e-3
        assert not none.any()


def test_a_single_row_moves_by_its_own_size():
    """It is no matrix: a gradient that has faded moves it little, as Adam does."""
    module = nn.Linear(6, 1, bias=False)
    optimiser = Optimiser(module, 0.02, 0.001)
    before = module.weight.detach().clone()
    module(torch.ones(3, 6)).sum().backward()
    optimiser.step(1.0)
    assert torch.allclose(before - module.weight, torch.tensor(0.001), rtol=1e-3)


def test_the_optimiser_goes_on_where_it_was():
    def new():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 6), nn.RMSNorm(6), nn.Linear(6, 3))
        return module, Optimiser(module, 0.02, 0.01)

    module, optimiser = new()
    whole = steps(module, optimiser, 10)
    assert whole[-1] < whole[0]
    module, optimiser = new()
    assert steps(module, optimiser, 5) == whole[:5]
    kept = {name: value.clone() for name, value in optimiser.state().items()}
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    module, optimiser = new()
    module.load_state_dict(weights)
    optimiser.restore(kept)
    assert steps(module, optimiser, 5, 5) == whole[5:]
    module, optimiser = new()
    module.load_state_dict(weights)  # without its memory it goes elsewhere
    assert steps(module, optimiser, 5, 5) != whole[5:]


def test_the_rate_goes_up_and_down():
    shares = [rate(step, 5, 50) for step in range(50)]
    assert shares[:5] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert shares[5] == 1.0
    assert sorted(shares[5:], reverse=True) == shares[5:]
    assert 0.02 <= shares[-1] < 0.03
    assert [rate(step, 5, 0) for step in range(4)] == shares[:4]  # before anything is planned


def test_the_losses_of_a_run_as_a_curve(tmp_path):
    (tmp_path / FOLDER).mkdir()
    log = LossLog(tmp_path, 0)
    for step in range(45):
        log.add(step, {"hit1": torch.tensor(0.5), "loss": torch.tensor(float(step))})
    log.flush()
    assert log.curve(20) == [[step, step - 1.0] for step in range(2, 45, 3)]  # the mean of the three steps up to it
    again = LossLog(tmp_path, 10)  # resumed at a checkpoint of 10 steps
    assert again.curve(20) == [[step, float(step)] for step in range(10)]
    assert again.recent() == {"hit1": 0.5, "loss": 4.5}


def test_tokens_per_pass_with_and_without_the_passes_of_prompts():
    """8 answers: 8 passes over prompts, then 8 of 10 drafts of five nodes keep two."""
    stats = Stats(tokens=8 + 10 + 16, steps=8 + 10, drafts=10, drafted=50, accepted=16)
    shown = figures({"chain 5": {"chat": stats, "code": stats}})["chain 5"]
    assert list(shown) == ["chat", "code", "all"]
    for kind, passes in {"chat": 18, "all": 36}.items():
        assert shown[kind]["tokens_per_pass"] == 2.6
        assert shown[kind]["with_prompts"] == round(34 / 18, 3)
        assert shown[kind]["passes"] == passes


def test_a_head_is_measured_with_the_whole_of_every_text(loaded, tmp_path):
    """As many prompts as Spec-Bench's half has, at once: none is begun anew in the head for want of memory."""
    torch.manual_seed(0)
    files.write(block_head(loaded.model), tmp_path, loaded.model, "tiny", dtype=torch.float32)
    drafter = Evaluator(loaded, ChatFormat.of(loaded.tokenizer), WHERE, 512)._drafter(f"block:head={tmp_path}")
    assert drafter._places >= 240 * 2048


def test_a_file_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_text(path, "old")
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["b.json"]


def test_a_job_says_what_is_wrong_with_it():
    assert jobs.TrainingJob("eagle").minutes == 10
    assert jobs.TrainingJob("eagle", tokens=5).minutes == 0
    assert jobs.TrainingJob("eagle").draft_tokens(300) == 300
    assert jobs.TrainingJob("eagle").draft_tokens(50_000) == 32_768
    assert jobs.TrainingJob("eagle", draft_vocab=-1).draft_tokens(50_000) == 50_000
    with pytest.raises(OutriderError, match="known: eagle, block, medusa, draft"):
        jobs.TrainingJob("lookahead")
    with pytest.raises(OutriderError, match="--batch-tokens must be at least 64"):
        jobs.TrainingJob("eagle", batch_tokens=1)
    stored = jobs.as_dict(jobs.TrainingJob("eagle", tokens=5, reads=(1, 2)))
    assert jobs.resumed("eagle", {"minutes": 3.0, "reads": (1, 2)}, stored).minutes == 3.0
    with pytest.raises(OutriderError, match="begun with seed 0, not 1"):
        jobs.resumed("eagle", {"seed": 1}, stored)


def test_what_ended_a_turn_is_not_part_of_it():
    assert trim([1, 2, 9], frozenset([9])) == [1, 2]
    assert trim([1, 2], frozenset([9])) == [1, 2]


@pytest.mark.parametrize(("seconds", "left", "kept"), [(50.0, 320.0, 50.0), (70.0, 80.0, 20.0), (5.0, 0.0, 0.0)])
def test_a_short_run_learns_before_it_measures(seconds, left, kept):
    assert reserved(seconds, left) == kept
