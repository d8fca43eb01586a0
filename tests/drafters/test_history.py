"""The drafter `history`: suffix matching over earlier texts, by tenant, and the file that keeps them."""

import json
import multiprocessing
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiny import Markov, drain, histories, new_engine, outputs, plainly, run

from outrider import drafters
from outrider.core.draft import Draft
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence
from outrider.core.verify import Verdict
from outrider.drafters.base import BuildContext, Step
from outrider.drafters.confidence import ALONE, DIFFERED, MatchCalibration, match_kind
from outrider.drafters.history import CAPACITY
from outrider.drafters.history.drafter import History, grown
from outrider.drafters.history.store import FIRST, HistoryFile, HistoryStore
from outrider.drafters.history.suffixes import CONTEXT, GAP, MOST, ORDERS, SuffixIndex
from outrider.engine.scheduler import Limits

EVERY = 10_000  # tries: a chain is followed to its end


class Naive:
    """The same by looking through everything: the places of the ring in a list, the oldest first."""

    def __init__(self, capacity):
        self.capacity, self.places = capacity, []

    def add(self, text):
        text = [*text[-(self.capacity - 1) :], GAP]
        left = self.capacity - len(self.places) % self.capacity
        if left < len(text):
            self.places += [GAP] * left
        self.places += text

    @property
    def held(self):
        return self.places[-self.capacity :]

    def continuations(self, tokens, length):
        held = self.held
        order = next((k for k in reversed(ORDERS) if k <= len(tokens) and self.ends(held, tokens[-k:])), 0)
        if not order:
            return 0, []
        ends = self.ends(held, tokens[-order:])[:MOST]
        matched = [next(k for k in range(CONTEXT, 0, -1) if self.stands(held, end, tokens, k)) for end in ends]
        found = [end for end, size in zip(ends, matched, strict=True) if size == max(matched)]
        return max(matched), [self.after(held, end, length) for end in found]

    def ends(self, held, suffix):
        """Where the suffix ended that something follows, the latest first."""
        ends = [i for i in range(len(suffix), len(held)) if held[i - len(suffix) : i] == suffix and held[i] != GAP]
        return ends[::-1]

    def stands(self, held, end, tokens, k):
        return k <= len(tokens) and k <= end and held[end - k : end] == tokens[-k:]

    def after(self, held, end, length):
        text = held[end : end + length]
        return text[: text.index(GAP)] if GAP in text else text


texts = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), max_size=30)


class TestSuffixes:
    @settings(max_examples=200, deadline=None)
    @given(texts, st.integers(8, 300), st.lists(st.integers(0, 3), max_size=30))
    def test_what_is_found_is_what_a_search_through_everything_finds(self, texts, capacity, tail):
        index, naive = SuffixIndex(capacity, tries=EVERY), Naive(capacity)
        for text in texts:
            index.add(text, kept=0)
            naive.add(text)
            for tokens in (tail, text, text[: len(text) // 2], [*tail, *text[:3]]):
                assert index.continuations(tokens, 5) == naive.continuations(tokens, 5)
        assert index.tokens().tolist() == naive.held
        assert len(index) == len(naive.held) <= capacity

    @settings(max_examples=100, deadline=None)
    @given(texts, st.integers(8, 300))
    def test_texts_written_at_once_are_found_as_if_written_one_by_one(self, texts, capacity):
        index, again = SuffixIndex(capacity, tries=EVERY), SuffixIndex(capacity, tries=EVERY)
        for text in texts:
            index.add(text, kept=0)
        again.write(index.tokens())
        for text in texts:
            for end in range(1, len(text)):
                assert again.continuations(text[:end], 5) == index.continuations(text[:end], 5)

    @settings(max_examples=100, deadline=None)
    @given(texts, st.integers(0, 2**33))
    def test_positions_may_pass_any_count(self, texts, begin):
        """They are kept modulo 2^32."""
        begin -= begin % 150
        index, naive = SuffixIndex(150, tries=EVERY), Naive(150)
        index.written = begin
        for text in texts:
            index.add(text, kept=0)
            naive.add(text)
            assert index.continuations(text[:-1], 5) == naive.continuations(text[:-1], 5)

    def test_the_end_of_the_ring_is_emptied_where_a_text_does_not_fit(self):
        index, naive = SuffixIndex(10), Naive(10)
        for text in (range(9), range(20, 25), range(30, 36)):  # 10 places, 6, and 7 that begin at the front again
            index.add([*text], kept=0)
            naive.add([*text])
        assert index.tokens().tolist() == naive.held == [GAP] * 3 + [*range(30, 36), GAP]

    def test_what_stands_there_already_is_not_stored_again(self):
        index = SuffixIndex(10_000)
        conversation = list(range(1000))
        for turn in range(100, 1001, 100):
            index.add(conversation[:turn])
        assert len(index) < 1000 + 10 * (CONTEXT + 1)  # 5500 tokens were given
        for end in (150, 505, 917):
            matched, rows = index.continuations(conversation[:end], 8)
            assert matched == CONTEXT
            assert conversation[end : end + 8] in rows
        before = len(index)
        index.add(conversation)
        assert len(index) == before

    def test_an_answer_is_stored_each_time_it_is_given(self):
        """So that frequencies count, and that what is in use is not forgotten."""
        index = SuffixIndex(1000)
        question, answer = list(range(50)), list(range(100, 120))
        for _ in range(3):
            index.add(question + answer, kept=50)
        assert index.continuations(question + answer[:4], 3) == (CONTEXT, [answer[4:7]] * 3)

    @settings(max_examples=100, deadline=None)
    @given(texts)
    def test_of_the_latest_text_everything_is_found_however_little_of_it_was_stored(self, texts):
        index = SuffixIndex(2000, tries=EVERY)
        for text in texts:
            index.add(text)
            for end in range(2, len(text)):
                matched, rows = index.continuations(text[:end], 4)
                assert matched >= min(end, CONTEXT)
                assert rows

    def test_memory_is_bounded_by_the_capacity_alone(self):
        for capacity in (1 << 12, (1 << 12) + 1, 5000, 8191):
            index, random = SuffixIndex(capacity), np.random.default_rng(0)
            for _ in range(40):
                index.add(random.integers(0, 50, 400).tolist())
            assert len(index) == capacity
            assert 36 <= index.nbytes / capacity <= 52.1
            assert sum(each.nbytes for each in vars(index).values() if isinstance(each, np.ndarray)) < index.nbytes

    def test_a_text_longer_than_the_ring_leaves_its_end(self):
        index = SuffixIndex(64)
        index.add(list(range(500)), kept=0)
        assert index.continuations([497, 498], 4) == (2, [[499]])
        assert index.continuations([300, 301], 4) == (0, [])


def target():
    return Markov(6, seed=1)


def drafter(store=None, spec="history"):
    return drafters.build(spec, BuildContext(target(), None, histories=store or HistoryStore(1 << 10)))


def sequence(id, tokens, tenant="", count=20):
    return Sequence(id, list(tokens), SamplingParams(max_tokens=count), tenant=tenant)


A, B, C = ([30 * k + i for i in range(20)] for k in (1, 2, 3))


class TestDrafts:
    def test_what_followed_the_longest_match_is_drafted(self):
        made = drafter(histories([A, [*A[5:8], 7, 7], B]))
        [draft] = made.propose([sequence(0, A[:8])], [50])
        assert draft.tokens == tuple(A[8:])  # eight tokens match there, three in the other
        assert draft.is_chain
        assert list(draft.acceptance) == sorted(draft.acceptance)  # the longer the match, the likelier

    def test_two_frequent_continuations_make_a_tree(self):
        store = histories([[*A[:8], *B[:4]]] * 5 + [[*A[:8], *C[:4]]] * 3)
        [draft] = drafter(store).propose([sequence(0, A[:8])], [50])
        roots = [node for node, parent in enumerate(draft.parents) if parent == -1]
        assert {draft.tokens[node] for node in roots} == {B[0], C[0]}
        first, second = (draft.acceptance[node] for node in roots)
        assert first / second == pytest.approx(5 / 3)
        assert {draft.tokens[node] for node in range(len(draft))} == {*B[:4], *C[:4]}

    def test_of_a_rare_continuation_nothing_is_drafted(self):
        store = histories([[*A[:8], *B[:4]]] * 7 + [[*A[:8], *C[:4]]])
        [draft] = drafter(store).propose([sequence(0, A[:8])], [50])
        assert draft.tokens == tuple(B[:4])

    def test_width_1_is_a_chain(self):
        store = histories([[*A[:8], *B[:4]], [*A[:8], *C[:4]]] * 4)
        [draft] = drafter(store, "history:width=1").propose([sequence(0, A[:8])], [50])
        assert draft.is_chain
        assert len(draft) == 4

    def test_likely_nodes_come_first_so_that_a_small_budget_keeps_them(self):
        rows = [B[:6]] * 5 + [C[:6]] * 3
        whole = grown(rows, 8, MatchCalibration(), 50, 2)
        reach = []
        for node, parent in enumerate(whole.parents):
            reach.append(whole.acceptance[node] * (1.0 if parent == -1 else reach[parent]))
        assert reach == sorted(reach, reverse=True)
        for budget in range(1, len(whole)):
            small = grown(rows, 8, MatchCalibration(), budget, 2)
            assert (small.tokens, small.parents) == (whole.tokens[:budget], whole.parents[:budget])

    def test_probabilities_of_siblings_sum_to_what_is_known_of_their_match(self):
        draft = grown([[1], [1], [2], [2]], 5, MatchCalibration(), 50, 2)
        assert sum(draft.acceptance) == pytest.approx(MatchCalibration().probability(5 + 2 * 17))

    @pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
    def test_stated_probabilities_are_the_measured_ones(self, right):
        """Of single tokens, by what the drafter said of them before it saw what came."""
        random = np.random.default_rng(3)
        made, said, kept = drafter(histories([A], capacity=1 << 14)), 0.0, 0
        for id in range(600):
            seq = sequence(id, A[:8])
            [draft] = made.propose([seq], [1])
            held = random.random() < right
            if id >= 200:
                said, kept = said + draft.acceptance[0], kept + held
            seq.tokens.append(A[8] if held else 999)
            made.observe(Step(seq, A[:8], draft, Verdict((0,) if held else (), 999), None))
            made._states.clear()  # the sequence leaves no text
        assert said / 400 == pytest.approx(kept / 400, abs=0.06)

    def test_what_is_learned_is_of_the_continuations_that_came_true(self):
        """After the first token, those that began otherwise are out: what they would have said was never asked."""
        made = drafter(histories([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 2, 3, 6, 7]]))
        seq = sequence(0, [1, 2, 3])
        made.propose([seq], [4])
        state, learned = made._states[0], []
        state.calibration.learn = lambda kind, right: learned.append((kind, right))
        seq.tokens += [4, 7]  # the second was said by the others only
        made.observe(Step(seq, [1, 2, 3], Draft(), Verdict((), 7), None))
        assert learned == [(match_kind(3, DIFFERED), True), (match_kind(4, ALONE), False)]

    def test_an_option_that_cannot_work_is_refused(self):
        for name in ("length", "width"):
            with pytest.raises(OutriderError, match=f"history:{name} must be at least 1, not 0"):
                drafter(spec=f"history:{name}=0")


class TestRequests:
    """In an engine: exact whatever is in the history, and what goes into it."""

    def test_a_repeated_question_is_drafted_from_the_first_answer(self):
        model, made = target(), drafter()
        first, second = sequence(0, [0, 1, 2, 3]), sequence(1, [0, 1, 2, 3])
        run(model, made, [first])
        run(model, made, [second])
        assert outputs([first]) == outputs([second]) == outputs([plainly(model, [0, 1, 2, 3], first.params)])
        assert second.stats.accepted > first.stats.accepted
        assert second.stats.steps < first.stats.steps
        assert second.stats.by_drafter["history"]["accepted"] == second.stats.accepted > 5

    def test_requests_that_run_at_once_copy_from_each_others_prompts(self):
        made = drafter()
        long = [5, 4, 3, 2, 1, 0, 5, 3, 1]
        made.propose([sequence(0, long)], [8])
        [draft] = made.propose([sequence(1, long[:4])], [8])
        assert draft.tokens == tuple(long[4:])

    def test_a_cancelled_request_leaves_its_text_and_nothing_else(self):
        model, made = target(), drafter()
        engine = new_engine(model, made, Limits(batch=4))
        seqs = [sequence(i, [i, 1, 2], count=30) for i in range(3)]
        for seq in seqs:
            engine.add(seq)
        for _ in range(4):
            engine.step()
        engine.cancel(1)
        assert made._states.keys() == {0, 2}
        written = [*seqs[1].tokens]
        assert 3 < len(written) < 33
        matched, rows = made._store.of("").index.continuations(written[:-1], 4)
        assert matched == min(CONTEXT, len(written) - 1)
        assert written[-1:] in [row[:1] for row in rows]
        drain(engine)
        assert not made._states
        assert outputs([seqs[0]]) == outputs([plainly(model, [0, 1, 2], seqs[0].params)])

    def test_eviction_in_the_middle_of_a_match_changes_no_text(self):
        """A ring so small that what a sequence copies from is overwritten while it copies."""
        model = target()
        store = HistoryStore(64)
        made = drafter(store)
        prompts = [[i % 6, i % 5, (2 * i) % 6, 1] for i in range(40)]
        seqs = [sequence(i, prompt, count=20) for i, prompt in enumerate(prompts)]
        engine = run(model, made, seqs, Limits(batch=3))
        assert outputs(seqs) == [outputs([plainly(model, seq.tokens[: seq.prompt], seq.params)])[0] for seq in seqs]
        assert engine.stats.accepted > 0
        assert len(store.of("").index) == 64

    def test_a_history_takes_its_memory_when_texts_need_it_and_keeps_what_it_had(self):
        whole, first = HistoryStore(), HistoryStore().of("").index.nbytes
        whole.add("", A, 0)
        assert whole.of("").index.nbytes == first < 2**20
        text = [int(each) for each in np.random.default_rng(1).integers(0, 1000, FIRST)]
        whole.add("", text, 0)
        index = whole.of("").index
        assert index.capacity == CAPACITY
        assert index.continuations(A[:9], 5) == (9, [A[9:14]])
        assert index.continuations(text[-25:-5], 5) == (16, [text[-5:]])

    def test_a_prompt_that_is_the_only_text_is_left_to_lookup_where_told_so(self):
        prompt = [*A, *A[:9]]
        for own, others in ((True, False), (False, False), (False, True)):
            store = HistoryStore()
            if others:
                store.add("", B, 0)
            made = History(History.Options(own=own), BuildContext(target(), None, histories=store))
            seq = sequence(0, prompt)
            assert made.serves(seq)  # it has to see the prompt once
            [draft] = made.propose([seq], [4])
            assert bool(draft) == made.serves(seq) == (own or others), (own, others)
            store.add("", B, 0)
            assert made.serves(seq)

    def test_what_was_evicted_is_not_drafted(self):
        store = HistoryStore(64)
        made, seq = drafter(store), sequence(0, A[:8])
        store.add("", A, 0)
        [draft] = made.propose([seq], [8])
        assert draft.tokens == tuple(A[8:16])
        seq.tokens += A[8:12]
        for other in (B, C, B, C):
            store.add("", other, 0)
        [draft] = made.propose([seq], [8])
        assert not draft


class TestTenants:
    def trace(self, store, seqs, batch):
        """What the drafter proposes for each sequence, step by step."""
        made = drafter(store)
        engine, seen = new_engine(target(), made, Limits(batch=batch)), []
        propose = made.propose

        def recorded(seqs, budgets):
            drafts = propose(seqs, budgets)
            for seq, draft in zip(seqs, drafts, strict=True):
                if seq.tenant == "own":
                    seen.append((seq.id, len(seq.tokens), draft.tokens, draft.parents, draft.acceptance))
            return drafts

        made.propose = recorded
        for seq in seqs:
            engine.add(seq)
        drain(engine)
        return sorted(seen), Counter(str(seq.stats.by_drafter) for seq in seqs if seq.tenant == "own")

    @pytest.mark.parametrize("batch", [1, 64])  # one after the other, and all at once
    def test_the_traffic_of_one_changes_no_draft_and_no_figure_of_another(self, batch):
        prompts = [[i % 6, (i + 1) % 6, 2, 1] for i in range(6)]

        def own():
            return [sequence(i, prompt, "own") for i, prompt in enumerate(prompts)]

        def foreign(tenant):
            return [sequence(100 + i, prompt, tenant, count=30) for i, prompt in enumerate(prompts * 3)]

        alone = self.trace(HistoryStore(1 << 10), own(), batch)
        store = HistoryStore(1 << 10)
        run(target(), drafter(store), foreign("other"))
        mixed = [seq for pair in zip(own(), foreign("other"), strict=False) for seq in pair]
        assert self.trace(store, mixed, batch) == alone
        # the same traffic of the tenant's own does speed it up, so the test would see it
        store = HistoryStore(1 << 10)
        run(target(), drafter(store), foreign("own"))
        assert self.trace(store, own(), batch) != alone

    def test_prompts_and_answers_go_into_the_history_of_their_own_tenant(self):
        store = HistoryStore(1 << 10)
        made, seq = drafter(store), sequence(0, A, "own")
        made.propose([seq], [0])
        prompt = store.of("own").index.tokens().tolist()
        assert prompt == [*A, GAP]
        seq.tokens += B
        made.forget(0)
        held = {tenant: store.of(tenant).index.tokens().tolist() for tenant in ("own", "other", "")}
        assert held == {"own": [*A, GAP, *A[-CONTEXT:], *B, GAP], "other": [], "": []}


WORDS = "the vocabulary"


def opened(path, vocabulary=WORDS, size=200, capacity=1 << 10):
    return HistoryStore.opened(Path(path), vocabulary, size, capacity)


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "history"

    def filled(self, path):
        store = opened(path)
        store.add("", A, 0)
        store.add("key", B, 0)
        store.close()
        return path.read_bytes()

    def test_after_a_restart_the_same_is_drafted_for_each_tenant(self, path):
        self.filled(path)
        store = opened(path)
        for tenant, text in (("", A), ("key", B)):
            assert store.of(tenant).index.continuations(text[:9], 5) == (9, [text[9:14]])
        assert store.of("").index.continuations(B[:9], 5) == (0, [])
        store.close()

    def test_only_its_owner_can_read_it_and_no_part_of_it_lies_about(self, path):
        self.filled(path)
        assert path.stat().st_mode & 0o777 == 0o600
        assert [each.name for each in path.parent.iterdir()] == ["history"]

    def test_a_text_that_ends_without_a_gap_is_not_joined_with_the_next(self, path):
        file = HistoryFile(path, WORDS)
        file.write({"": np.array(A, np.int32)})
        file.close()
        store = opened(path)
        store.add("", B, 0)
        assert store.of("").index.continuations(A[:9], 20) == (9, [A[9:]])
        store.close()

    def test_a_smaller_history_takes_the_latest(self, path):
        store = opened(path, capacity=200)
        for text in (A, B, C):
            store.add("", text, 0)
        store.close()
        store = opened(path, capacity=64)
        assert store.of("").index.continuations(C[:9], 3) == (9, [C[9:12]])
        assert len(store.of("").index) <= 64
        store.close()

    def test_a_file_that_is_cut_anywhere_is_refused_and_untouched(self, path):
        whole = self.filled(path)
        for end in [*range(1, len(whole), 7), len(whole) - 1]:
            path.write_bytes(whole[:end])
            with pytest.raises(OutriderError, match=r"history file .* (damaged|not a history).* untouched") as caught:
                opened(path)
            assert "\n" not in str(caught.value)
            assert path.read_bytes() == whole[:end]

    def test_a_changed_byte_is_seen(self, path):
        whole = self.filled(path)
        for at in range(0, len(whole), 5):
            changed = bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]])
            path.write_bytes(changed)
            try:
                store = opened(path)
            except OutriderError:
                assert path.read_bytes() == changed
            else:  # the name of a tenant may have changed, no text
                store.close()
                assert json.loads(changed.splitlines()[0])["tokens"].keys() != {"", "key"}

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"not JSON\n", "not a history file"),
            (b"[]\n", "not a history file"),
            (b'{"format": 1}\n', "not a history file"),
            (b'{"tokens": {"a": "x"}}\n', "not a history file"),
            (b"[" * 100_000 + b"\n", "not a history file"),
            (b'{"format": "x", "vocabulary": "", "tokens": {}, "sha256": ""}\n', "another version"),
            (b"\x00" * 5000, "not a history file"),
        ],
    )
    def test_a_file_of_something_else_is_refused(self, path, content, reason):
        path.write_bytes(content)
        with pytest.raises(OutriderError, match=reason):
            opened(path)
        assert path.read_bytes() == content

    def test_a_file_of_another_model_is_refused(self, path):
        whole = self.filled(path)
        with pytest.raises(OutriderError, match="a model with another vocabulary; it is untouched"):
            opened(path, vocabulary="another")
        with pytest.raises(OutriderError, match="tokens that this model does not know"):
            opened(path, size=50)
        assert path.read_bytes() == whole

    def test_a_place_that_cannot_be_written_to_is_refused_at_the_start(self, tmp_path):
        for place in (tmp_path, tmp_path / "no" / "folder"):
            with pytest.raises(OutriderError, match="cannot be opened"):
                opened(place)

    def test_two_at_once_are_refused_also_after_the_first_has_written(self, path):
        store = opened(path)
        for _ in range(2):
            with pytest.raises(OutriderError, match="in use by another process"):
                opened(path)
            store._file.write(store._texts())
        store.close()
        opened(path).close()

    def test_of_a_process_that_is_killed_the_lock_goes_and_the_file_stays_whole(self, path):
        self.filled(path)
        child = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(str(path),))
        child.start()
        first = path.stat().st_mtime_ns
        while path.stat().st_mtime_ns == first and child.is_alive():
            child.join(0.01)
        child.kill()
        child.join()
        store = opened(path)
        assert store.of("").index.continuations(A[:9], 5)[0] == 9
        store.close()

    def test_a_full_disk_is_told_in_the_log_and_ends_nothing(self, path, monkeypatch, caplog):
        store = opened(path)
        store.add("", A, 0)
        before = path.read_bytes()

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("os.fsync", full)
            store.close()
        assert "No space left on device" in caplog.text
        assert path.read_bytes() == before
        assert [each.name for each in path.parent.iterdir()] == ["history"]

    def test_it_is_written_while_requests_end(self, path, monkeypatch):
        monkeypatch.setattr("outrider.drafters.history.store.SAVE", 0.0)
        store = opened(path)
        before = path.read_bytes()
        store.add("", A, 0)
        store._writer.join()
        assert path.read_bytes() != before
        store.close()


def _write_for_ever(path):
    store = opened(path)
    while True:
        store.add("", B, 0)
        store._file.write(store._texts())
