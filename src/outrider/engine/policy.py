"""What to draft in a pass, one answer for all sequences and drafters: which drafters are asked, and which nodes go in.

Everything is weighed in one currency. A step writes `tokens` in `seconds`; whatever would be added to it, a node of a
draft or the draft of another drafter, pays if it brings tokens faster than the step does without it: (tokens it brings)
/ (seconds it takes) > tokens / seconds. Costs are measured: of a pass by its rows (`cost.py`), of asking each drafter,
and of the text that a drafter must read before it can start. So are the tokens: a node's probability is calibrated, and
what a drafter brings is counted over what the others had guessed anyway.

What does not pay is tried again now and then, for a bounded share of the time of a request.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence as Seq
from dataclasses import dataclass

from outrider.core.draft import ROOT, Draft, followed_nodes, judged_tree
from outrider.core.sequence import Sequence
from outrider.drafters.base import Drafter
from outrider.engine import worth as worths
from outrider.engine.cost import SMOOTHING, PassCost, smoothed
from outrider.engine.throughput import ThroughputTrial

# Factor by which a record fades with every draft: it is an average over about the last 20. Chosen by hand.
FADE = 0.95
# The same while a drafter is tried that did not pay: tries are few, and are to tell whether that has changed.
TRIAL_FADE = 0.8
# Nodes kept and nodes tried that are assumed before any is seen: an acceptance of 0.7, outvoted after a few drafts.
ASSUMED_KEPT, ASSUMED_TRIED = 2.8, 4.0
# Standard deviations by which what a drafter brings is believed to be better than seen, over all its drafts so far: by
# two wrong guesses at first a draft model that paid was given up, and the text that it then had to read made every
# later try too dear (LOG, 2026-11-17, a draft model that was never asked again).
OPTIMISM = 1.0
# Tokens that a draft of a head brings, and the drafts that this counts for, before any is seen.
ASSUMED_TOKENS, ASSUMED_DRAFTS = 1.5, 4.0
# Tokens that a draft is never expected to bring less of, so that shares of it can be told.
LEAST_TOKENS = 0.01
# Share of a plain pass that is assumed until it is measured: of a head's draft, and of each token of a draft model's.
ASSUMED_DRAFT, ASSUMED_NODE = 0.15, 0.3
# Share of the target's time for a token of a prompt that a drafter is assumed to take to read it: a model of its own,
# and a head, which takes in the target's states (0.04 measured beside SmolLM2).
ASSUMED_READ, ASSUMED_HEAD_READ = 0.3, 0.05
# Share of a pass that the target is assumed to take for a token of a prompt on a device, until it is measured. On a CPU
# it is up to 0.28 (LOG, 2026-11-18, where head and lookup differ), so there it is waited for.
ASSUMED_PROMPT = 0.05
# Share of a plain token's time that drafts in rounds on a device are assumed to save, until both ways were tried.
ASSUMED_SAVED = 0.3
# Probability that what was found for nothing misses the next token, from which on a head is asked as if nothing had
# been found: it also tells whether the find is right, so that the tree follows it further or drops it (LOG, 2026-11-17,
# auto asks its head more often).
DOUBTFUL = 0.1
# Drafts of which the shortest counts: the first ones also fill caches and allocate memory.
FIRST_DRAFTS = 4
# Drafts of lookups in batches of one size after which it counts whether they pay.
FIRST_FREE = 8
# Tokens to be read from which on asking a drafter counts as its start and not as the cost of a draft.
START = 16
# Share of the time of all requests that may go into the first texts that drafters read, and the drafts after which what
# they are worth is known: one short request had 0.81x because a draft model that did not pay had read its prompt (LOG,
# 2026-11-18, where head and lookup differ).
STARTS, PROVEN = 0.04, 8
# Tokens that a request is assumed to write before any has ended: without it a head waited in the first request until it
# had written as much as its prompt takes to read (LOG, 2026-11-17, why auto was slower than the head).
ASSUMED_LENGTH = 64.0
# Passes in a row in which no draft of a drafter paid for several sequences, from which on only every fourth one is
# looked at: to find out takes as long as it might save where rows are dear (LOG, 2026-11-18, several at once).
LONG_DECLINED, LOOK_AGAIN = 32, 4
# How many times the cost of its row a node must be worth in a batch: a sequence that gets ahead ends earlier, and the
# passes of the others go on (LOG, 2026-11-18, several at once on a CPU; on recorded texts 1.1 to 1.5 do equally well).
BATCH_MARGIN = 1.2
# Share of a request's time that may go into drafts that are not expected to pay, so that a change is noticed; and the
# sequences from which on it becomes smaller in proportion to their number, since there is less to be gained (LOG,
# 2026-11-18, several at once on a CPU, once more: without it recorded texts lose 0.4 to 0.7 % with 4 and 8 at once).
EXPLORATION, FULLY_EXPLORED = 0.015, 2
# Seconds of it that requests left over and later ones may spend: with many sequences at once the share of a single
# request never suffices for one try, and a drafter that once did not pay would not be asked again.
MOST_CARRIED = 0.25
# Tokens of a sequence up to which a row costs the same: each doubling of the length has a cost curve of its own.
SHORT = 256


@dataclass(slots=True)
class PassSize:
    """A pass before any draft is added to it, over all drafters."""

    rows: int  # tokens that it runs, those of prompts too
    writing: int  # sequences that write a token


@dataclass(slots=True)
class PassPlan:
    """A pass as it is expected so far."""

    tokens: float  # that it writes
    seconds: float
    rows: int


@dataclass(slots=True)
class DraftOutcome:
    """One drafter's draft for one sequence."""

    drafter: Drafter
    draft: Draft  # in full
    chance: float  # that it was needed
    nodes: int  # of it that went into the pass


class DrafterRecord:
    """What is known of one drafter."""

    def __init__(self) -> None:
        self._tried: dict[int, float] = {}  # by depth
        self._kept: dict[int, float] = {}
        self._tokens, self._drafts = ASSUMED_TOKENS * ASSUMED_DRAFTS, ASSUMED_DRAFTS
        self._seconds: dict[int, float] = {}  # of asking it for one sequence, by the bits of their number
        self._measured: dict[int, int] = {}  # how often, likewise
        self.read = 0.0  # seconds of reading a token; 0: not measured
        self.nodes = 1.0  # of a draft that go into the pass, on average
        self.trial = False  # whether it was last asked only to see whether it pays now
        self.outcomes = 0  # drafts that were judged, of all time

    def acceptance(self, depth: int) -> float:
        """The probability that a node at this depth is kept if its parent is."""
        return self._kept.get(depth, ASSUMED_KEPT) / self._tried.get(depth, ASSUMED_TRIED)

    @property
    def tokens(self) -> float:
        """Tokens that a draft brings, where nothing else was guessed."""
        return max(self._tokens / self._drafts, LEAST_TOKENS)

    @property
    def doubt(self) -> float:
        """How much more than seen a share of kept nodes may well be, while few drafts have been judged."""
        return OPTIMISM * 0.5 / math.sqrt(ASSUMED_TRIED + self.outcomes)

    def seconds(self, seqs: int) -> float | None:
        """Of asking it for one of so many sequences; None: not measured."""
        bits, known = seqs.bit_length(), self._seconds
        if bits in known:
            return known[bits]
        return known[min(known, key=lambda other: abs(other - bits))] if known else None

    def learn(self, draft: Draft, written: Seq[int]) -> None:
        """How often its nodes are kept, by depth; a node was tried if its parent was kept."""
        self.outcomes += 1
        fade, depths = TRIAL_FADE if self.trial else FADE, draft.depths()
        tried: dict[int, bool] = {}
        for node, kept in judged_tree(draft.tokens, draft.parents, written):
            tried[depths[node]] = tried.get(depths[node], False) or kept
        for depth, kept in tried.items():
            self._tried[depth] = fade * self._tried.get(depth, ASSUMED_TRIED) + 1.0
            self._kept[depth] = fade * self._kept.get(depth, ASSUMED_KEPT) + float(kept)

    def learn_gain(self, tokens: float, chance: float, nodes: int) -> None:
        """Tokens that a draft brought over what others had guessed; `chance`: that these were not enough. `nodes`: of
        it that went into the pass."""
        fade = TRIAL_FADE if self.trial else FADE
        self.nodes += (1.0 - fade) * (nodes - self.nodes)
        self._tokens, self._drafts = fade * self._tokens + tokens, fade * self._drafts + chance

    def learn_cost(self, seqs: int, seconds: float, most: float) -> None:
        """Seconds of asking it for one of so many sequences. `most`: that the first measurement may count."""
        bits = seqs.bit_length()
        count = self._measured[bits] = self._measured.get(bits, 0) + 1
        old = self._seconds.get(bits, most)
        self._seconds[bits] = min(old, seconds) if count <= FIRST_DRAFTS else smoothed(old, seconds)

    def learn_read(self, seconds: float) -> None:
        self.read = smoothed(self.read, seconds) if self.read else seconds


class FreeDrafts:
    """Whether the drafters that run no model are worth asking, by what that takes and saves: with many sequences a row
    costs so much that hardly any guess pays, and their lookups together take a tenth of a pass."""

    def __init__(self) -> None:
        self._asked = self._passed = 0  # times that they were asked; passes since then
        self.saved = self.spent = 0.0  # seconds, averages over their drafts

    def pay(self, seconds: float, exploration: float) -> bool:
        """Now, in a pass of so many seconds. If not, they are tried as often as this share of the time allows."""
        self._passed += 1
        if self._asked < FIRST_FREE or self.saved > self.spent:
            return True
        return self._passed * exploration * seconds >= self.spent

    def learn(self, saved: float, spent: float) -> None:
        fade = FADE if self._passed == 1 else TRIAL_FADE
        self._asked, self._passed = self._asked + 1, 0
        self.saved += (1.0 - fade) * (saved - self.saved)
        self.spent += (1.0 - fade) * (spent - self.spent) if self._asked > 1 else spent


class DraftingPolicy:
    """Drafters are told apart by their identity."""

    def __init__(self, cost: PassCost | None = None) -> None:
        """`cost`: of short sequences, where it is known."""
        self.cost = cost or PassCost()  # at the length of the sequences that run
        self.trial = ThroughputTrial()  # whether to draft at all in large batches on a device
        self._costs = {0: self.cost}  # by the bits of that length
        self._records: dict[Hashable, DrafterRecord] = {}
        self._free: dict[int, FreeDrafts] = {}  # by the bits of the number of sequences
        self._explored: dict[int, float] = {}  # by sequence: seconds of drafts that were not expected to pay
        self._share, self._carried = EXPLORATION, 0.0  # of a request's time, as last; seconds that were left over
        self._declined: dict[tuple[int, int], int] = {}  # by drafter and bits of sequences: passes since it paid
        self._prompt = 0.0  # seconds of the target for a token of a prompt; 0: not measured
        self._length = ASSUMED_LENGTH  # tokens that sequences write, on average
        self._lived = self._starts = 0.0  # seconds of all sequences that ended; of first texts that drafters read

    def use_length(self, tokens: int) -> None:
        """Sequences of this mean length run now: each row of a pass looks at all tokens before it."""
        bits = (tokens // SHORT).bit_length()
        if bits not in self._costs:
            nearest = min(self._costs, key=lambda known: abs(known - bits))
            self._costs[bits] = self._costs[nearest].beginning()
        self.cost = self._costs[bits]

    def worth(self, seqs: Seq[Sequence], together: bool) -> list[float]:
        """Of a token of each of the sequences that run, against the average. `together`: somebody waits for all."""
        if not together or len(seqs) < 2:
            return [1.0] * len(seqs)
        known = all(self._tokens_left(seq) == seq.left for seq in seqs)
        return worths.of_tokens(list(map(self._steps_left, seqs)), known, self.cost.at(1), self.cost.at(len(seqs)))

    # Which drafters are asked.

    def asks_free(self, seqs: int) -> bool:
        """Whether the drafters that run no model are asked for so many sequences."""
        return self._free.setdefault(seqs.bit_length(), FreeDrafts()).pay(self.cost.at(seqs), _exploration(seqs))

    def learn_free(self, seqs: int, plan: PassPlan, size: PassSize, seconds: float) -> None:
        """What asking them and joining their drafts took, and what the pass with these is expected to save over one
        without any."""
        plain = self.cost.at(size.writing)
        self._free[seqs.bit_length()].learn(plan.tokens / size.writing * plain - plan.seconds, seconds)

    def expected(self, free: Seq[Seq[Draft]], size: PassSize, worth: Seq[float] | None = None) -> PassPlan:
        """The pass with what was guessed for nothing: for each sequence, the drafts of it. `worth`: as of `trim`."""
        if not any(free):
            return PassPlan(float(size.writing), self.cost.at(size.writing), size.rows)
        found = [(drafts, each) for drafts, each in zip(free, worth or [1.0] * len(free), strict=True) if drafts]
        best = [max(drafts, key=lambda draft: sum(draft.reach())) for drafts, _ in found]
        return self._paying(best, size, 0.0, [each for _, each in found])[1]

    def chance(self, drafter: Drafter, seq: Sequence, found: Seq[Draft]) -> float:
        """The probability that a draft of this drafter is needed, because what was found so far misses the next token.
        Under rejection a drawn draft goes alone: then it is the share of its tokens that is more than would be kept."""
        if not found:
            return 1.0
        if seq.params.greedy or seq.rule != "rejection":
            return 1.0 - min(1.0, max(map(_first, found)))
        return 1.0 - min(1.0, max(sum(draft.reach()) for draft in found) / self.record(drafter).tokens)

    def wanted(
        self,
        drafter: Drafter,
        seqs: Seq[Sequence],
        budgets: Seq[int],
        chances: Seq[float],
        plan: PassPlan,
        worth: Seq[float] | None = None,
    ) -> list[int]:
        """How many nodes to ask a drafter for whose drafts cost something, for each sequence; 0: do not ask.
        `chances`: that each draft is needed. `worth`: as of `trim`."""
        record, case, worth = self.record(drafter), (id(drafter), len(seqs).bit_length()), worth or [1.0] * len(seqs)
        asked, record.trial = self._paid(drafter, seqs, budgets, chances, plan, worth), False
        if record.outcomes < PROVEN and not drafter.layers:
            self._starts += sum(self._start(drafter, seq) for seq, count in zip(seqs, asked, strict=True) if count)
        if any(asked):
            self._declined[case] = 0
        elif min(chances) == 1.0 or not any(self._paid(drafter, seqs, budgets, [1.0] * len(seqs), plan, worth)):
            self._declined[case] = self._declined.get(case, 0) + 1
            asked = self._tried(drafter, seqs, budgets, chances, plan)
            record.trial = any(asked)
        return asked

    def prices(self, drafter: Drafter, seqs: int, plan: PassPlan) -> tuple[float, float] | None:
        """What a row of the pass and a pass of the drafter's own cost for one of so many sequences, in tokens that are
        written in the same time with its drafts; None: not measured, or it does not end its drafts by itself. `plan`:
        the pass without them."""
        record = self.record(drafter)
        draft = record.seconds(seqs) if drafter.reports_acceptance else None  # of others the seconds are of a node
        if draft is None or not self.cost.known:
            return None
        rows = self._rows(plan.rows, seqs, record.nodes)
        token = (plan.seconds + seqs * (draft + rows)) / (plan.tokens + seqs * record.tokens)
        return self._rows(plan.rows, seqs, 1.0) / token, draft / (1.0 + record.nodes) / token

    def considers(self, drafter: Drafter, seqs: int) -> bool:
        """Whether it is worked out for which of so many sequences the drafter is asked: not in every pass where it was
        not asked for long."""
        case = id(drafter), seqs.bit_length()
        declined = self._declined.get(case, 0)
        if seqs == 1 or declined < LONG_DECLINED or declined % LOOK_AGAIN == 0:
            return True
        self._declined[case] = declined + 1
        return False

    def rests(self, drafter: Drafter, seqs: int) -> bool:
        """Whether no draft of it is expected where so many sequences run, so that what it would read can wait."""
        if seqs == 1 or not self.cost.known:
            return False
        if self._declined.get((id(drafter), seqs.bit_length()), 0) >= LONG_DECLINED:
            return True
        plan, record = PassPlan(float(seqs), self.cost.at(seqs), seqs), self.record(drafter)
        return self._best(drafter, seqs, 1, 1.0, plan, record.doubt)[1] <= 0.0

    def _paid(
        self,
        drafter: Drafter,
        seqs: Seq[Sequence],
        budgets: Seq[int],
        chances: Seq[float],
        plan: PassPlan,
        worth: Seq[float],
    ) -> list[int]:
        asked, record = [], self.record(drafter)
        # most sequences of a batch are in the same case
        found: dict[tuple[int, float, float, float], tuple[int, float]] = {}
        for seq, budget, chance, each in zip(seqs, budgets, chances, worth, strict=True):
            start = self._start(drafter, seq)
            case = budget, chance, 0.0 if start else record.doubt, each
            if case not in found:
                found[case] = self._best(drafter, len(seqs), budget, chance, plan, case[2], each)
            length, profit = found[case]
            pays = profit > 0.0 and (not start or profit > start / self._steps_left(seq))
            asked.append(length if pays and (not start or self._may_start(drafter, seq)) else 0)
        return asked

    def _may_start(self, drafter: Drafter, seq: Sequence) -> bool:
        """Whether a drafter of which little is known may read a text to show what it is worth. A head may: it takes in
        states that the target computed anyway."""
        if drafter.layers or self.record(drafter).outcomes >= PROVEN:
            return True
        lived = self._lived + sum(seq.stats.seconds.values()) + self._tokens_left(seq) * self.cost.at(1)
        return self._starts + self._start(drafter, seq) <= STARTS * lived

    def _best(
        self, drafter: Drafter, seqs: int, most: int, chance: float, plan: PassPlan, doubt: float, share: float = 1.0
    ) -> tuple[int, float]:
        """The number of nodes to ask for, and the seconds that such a draft is expected to save. `doubt`: how much more
        often its first node may be kept than was seen. `share`: of the average, what a token is worth."""
        record, each = self.record(drafter), self._seconds(drafter, seqs)
        worth = share * plan.seconds / plan.tokens  # of a token
        if drafter.reports_acceptance:
            rows, needed = self._rows(plan.rows, seqs, record.nodes), 1.0 if chance > DOUBTFUL else chance
            return most, needed * record.tokens * worth - each - rows
        best, profit, reach = 0, 0.0, chance
        saved = 0.0
        for depth in range(1, most + 1):
            reach *= min(1.0, record.acceptance(depth) + (doubt if depth == 1 else 0.0))
            saved += reach * worth - each
            if (after := saved - self._rows(plan.rows, seqs, depth)) > profit:
                best, profit = depth, after
            if reach * worth < each:
                break
        return best, profit

    def _rows(self, rows: int, seqs: int, nodes: float) -> float:
        """Seconds that so many nodes of each of these sequences add, for one of them; what they must be worth."""
        return _margin(seqs) * (self.cost.at(rows + round(seqs * nodes)) - self.cost.at(rows)) / seqs

    def _tried(
        self, drafter: Drafter, seqs: Seq[Sequence], budgets: Seq[int], chances: Seq[float], plan: PassPlan
    ) -> list[int]:
        """Asked although it is not expected to pay, as far as the time of each request allows. Not called where it pays
        in other steps, in which less was guessed for nothing: there it is asked anyway."""
        each, asked = self._seconds(drafter, len(seqs)) + self._rows(plan.rows, len(seqs), 1.0), []
        self._share = _exploration(len(seqs))
        for seq, budget, chance in zip(seqs, budgets, chances, strict=True):
            allowed = budget > 0 and chance > 0.0 and self._explore(seq, each + self._start(drafter, seq))
            asked.append((budget if drafter.reports_acceptance else 1) if allowed else 0)
        return asked

    def _explore(self, seq: Sequence, cost: float) -> bool:
        """Whether a try of that cost is paid for: by the request's own share, or once by what others left over."""
        spent = self._explored.get(seq.id, 0.0) + cost
        if spent <= self._share * sum(seq.stats.seconds.values()):
            self._explored[seq.id] = spent
            return True
        if cost > self._carried or seq.id in self._explored:
            return False
        self._carried, self._explored[seq.id] = self._carried - cost, 0.0
        return True

    def _seconds(self, drafter: Drafter, seqs: int) -> float:
        """Of asking it for one sequence; of each node where it is asked for a length."""
        known = self.record(drafter).seconds(seqs)
        if known is not None:
            return known
        return (ASSUMED_DRAFT if drafter.reports_acceptance else ASSUMED_NODE) * self.cost.at(seqs) / seqs

    def _start(self, drafter: Drafter, seq: Sequence, assumed: float = 0.0) -> float:
        """Seconds until it can draft for this sequence. `assumed`: what the target takes for a token of a prompt, until
        that is measured."""
        unread = drafter.unread(seq)
        if unread < START:
            return 0.0
        share = ASSUMED_HEAD_READ if drafter.layers else ASSUMED_READ
        each = self.record(drafter).read or share * (self._prompt or assumed)
        return unread * each if self.cost.known and each else math.inf  # one pass later it is known what a prompt takes

    def reading_repays(self, drafters: Seq[Drafter], seqs: Seq[Sequence], work: Hashable) -> bool:
        """Whether what these drafters have not read is worth reading, where they draft for such a batch in rounds on a
        device. `work`: as of `trial`."""
        prompt = ASSUMED_PROMPT * self.cost.at(1)
        start = sum(self._start(drafter, seq, prompt) for drafter in drafters for seq in seqs)
        if not start:
            return True
        saved = self.trial.saved(len(seqs), work)
        if saved is None:
            saved = ASSUMED_SAVED * self.cost.at(len(seqs)) / len(seqs)
        return saved * sum(map(self._tokens_left, seqs)) > start

    def _steps_left(self, seq: Sequence) -> float:
        """Steps that a sequence is expected to go on."""
        return max(1.0, self._tokens_left(seq) / max(1.0, seq.stats.tokens_per_step))

    def most_left(self, seqs: Seq[Sequence]) -> float:
        """Tokens that the longest of these sequences is expected to write."""
        return max(map(self._tokens_left, seqs), default=0.0)

    def longest(self, seqs: Seq[Sequence]) -> float:
        """Tokens that the longest of these sequences is expected to write in all."""
        return max((len(seq.output) + self._tokens_left(seq) for seq in seqs), default=0.0)

    def _tokens_left(self, seq: Sequence) -> float:
        """Tokens that a sequence is expected to write: as many as it has written, or as others have."""
        written = len(seq.output)
        return min(seq.left, max(written, self._length - written))

    # Which nodes go in.

    def trim(
        self, drafts: Seq[Draft], size: PassSize, drafting: float = 0.0, worth: Seq[float] | None = None
    ) -> list[Draft]:
        """The nodes that pay, of all drafts for one pass. `drafting`: the seconds that it took to draft them. `worth`:
        of a token of each sequence, against the average; None: all alike.

        What a row costs depends on all rows of the pass. What a token is worth does not depend on the prompts in it:
        they are read in any case.
        """
        if not any(drafts):
            return list(drafts)
        kept, _ = self._paying(drafts, size, drafting, worth or [1.0] * len(drafts))
        return [_keep(draft, nodes) for draft, nodes in zip(drafts, kept, strict=True)]

    def _paying(
        self, drafts: Seq[Draft], size: PassSize, drafting: float, worth: Seq[float]
    ) -> tuple[list[list[int]], PassPlan]:
        """The nodes of each draft that pay, those first that bring most."""
        order: list[tuple[float, int, int]] = []
        for i, draft in enumerate(drafts):
            for n, p in enumerate(draft.reach()):
                order.append((-p * worth[i], i, n))
        order.sort()
        # the step takes as long as the drafts took, whatever is kept of them
        tokens, seconds, rows = float(size.writing), self.cost.at(size.writing) + drafting, size.rows
        kept: list[list[int]] = [[] for _ in drafts]
        before, margin = self.cost.at(rows), _margin(size.writing)
        for negative, index, node in order:
            after = self.cost.at(rows + 1)
            if -negative * seconds <= margin * (after - before) * tokens:
                break
            kept[index].append(node)
            tokens, seconds, before, rows = tokens - negative, seconds + after - before, after, rows + 1
        return kept, PassPlan(tokens, seconds, rows)

    def stated(self, drafter: Drafter, draft: Draft) -> tuple[float, ...]:
        """The probabilities of the nodes of a drafter that does not report them."""
        return tuple(map(self.record(drafter).acceptance, draft.depths()))

    # What is learned.

    def record(self, drafter: Drafter) -> DrafterRecord:
        found = self._records.get(id(drafter))
        if found is None:
            found = self._records[id(drafter)] = DrafterRecord()
        return found

    def learn(self, found: Seq[DraftOutcome], written: Seq[int], kept: int) -> None:
        """What became of the drafts for one sequence. `kept`: tokens of them that were committed, of all that were
        `written`."""
        several = len(found) > 1
        depths = [min(followed_nodes(each.draft, written), kept) for each in found]
        for place, each in enumerate(found):
            record = self.record(each.drafter)
            if not each.drafter.reports_acceptance:
                record.learn(each.draft, written)
            if not each.drafter.is_free:
                others = max(depths[:place] + depths[place + 1 :]) if several else 0
                record.learn_gain(max(0, depths[place] - others), each.chance, each.nodes)

    def learn_cost(self, drafter: Drafter, seconds: float, drafts: Seq[Draft], unread: int) -> None:
        """What asking a drafter took. `unread`: tokens that it has read for it."""
        asked, record = sum(map(bool, drafts)), self.record(drafter)
        if not asked:
            return
        nodes = sum(map(len, drafts)) / asked
        per = seconds / asked if drafter.reports_acceptance else seconds / asked / nodes
        if unread >= START:
            known = record.seconds(asked) or 0.0
            usual = known * asked * (1.0 if drafter.reports_acceptance else nodes)
            record.learn_read(max(0.0, seconds - usual) / unread)
        else:
            record.learn_cost(asked, per, self.cost.at(1) if self.cost.known else per)

    def learn_prompt(self, rows: int, seconds: float) -> None:
        """What a pass took that read so many tokens of prompts."""
        each = seconds / rows
        self._prompt = smoothed(self._prompt, each) if self._prompt else each

    def end(self, seq: Sequence) -> None:
        """The sequence has ended."""
        seconds = sum(seq.stats.seconds.values())
        left = self._share * seconds - self._explored.pop(seq.id, 0.0)
        if self._share < EXPLORATION:  # of a request among few the share suffices for tries of its own
            self._carried = min(MOST_CARRIED, self._carried + max(0.0, left))
        self._lived += seconds
        self._length += (len(seq.output) - self._length) * SMOOTHING

    def forget(self, drafter: Hashable) -> None:
        """A drafter is gone, known by its identity."""
        self._records.pop(drafter, None)
        for case in list(self._declined):
            if case[0] == drafter:
                self._declined.pop(case, None)


def _exploration(seqs: int) -> float:
    return EXPLORATION * min(1.0, FULLY_EXPLORED / seqs)


def _margin(seqs: int) -> float:
    return 1.0 if seqs == 1 else BATCH_MARGIN


def _first(draft: Draft) -> float:
    """The probability that the next token is among the guesses."""
    return sum(p for parent, p in zip(draft.parents, draft.acceptance, strict=True) if parent == ROOT)


def _keep(draft: Draft, nodes: list[int]) -> Draft:
    first = max(nodes, default=ROOT) == len(nodes) - 1  # nothing in between is missing
    return draft.cut(len(nodes)) if first else draft.keep(sorted(nodes))
