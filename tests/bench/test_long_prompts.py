"""Prompts of one length, whose reading is measured."""

from outrider.bench.prepare import TokenizedPrompt, long_prompts

TASKS = [TokenizedPrompt(f"p{n}", "chat", [100 * n + i for i in range(7)]) for n in range(1, 9)]


def test_they_have_exactly_that_many_tokens_and_begin_differently():
    prompts = long_prompts(TASKS, 20)
    assert [len(prompt.ids) for prompt in prompts] == [20] * 4
    assert [prompt.ids[0] for prompt in prompts] == [100, 300, 500, 700]
    assert prompts[3].ids[14:] == [100, 101, 102, 103, 104, 105]  # after the last prompt comes the first
    assert long_prompts(TASKS, 0) == []
    assert len(long_prompts(TASKS[:1], 100)[0].ids) == 100


def test_no_round_repeats_a_beginning_that_an_engine_may_have_kept():
    (prompt, *_) = long_prompts(TASKS, 20)
    turned = [prompt.turned(number) for number in range(1, 6)]
    assert len({tuple(other.ids[:3]) for other in (prompt, *turned)}) == 6
    assert all(sorted(other.ids) == sorted(prompt.ids) for other in turned)
    assert {other.id for other in turned} == {prompt.id}
