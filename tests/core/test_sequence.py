"""A sequence commits tokens one by one or many at once, and knows whether the target can write it without the host."""

import pytest

from outrider.core.sampling import SamplingParams
from outrider.core.sequence import Sequence, Token

END = 9


def new(max_tokens=8, watch=None, **more):
    return Sequence(0, [1, 2], SamplingParams(max_tokens=max_tokens), ends=frozenset({END}), watch=watch, **more)


@pytest.mark.parametrize(
    ("ids", "count", "finish"),
    [
        ([3, 4, 5], 3, None),
        ([3, END, 5, 6], 2, "stop"),  # not at the last token
        ([END, 3], 1, "stop"),
        ([3, 4, END], 3, "stop"),
        ([3] * 8, 8, "length"),
        ([3] * 12, 8, "length"),
        ([3] * 7 + [END], 8, "stop"),
        ([3] * 8 + [END], 8, "length"),  # the end comes too late
    ],
)
@pytest.mark.parametrize("watched", [False, True])
def test_many_tokens_at_once_are_as_one_by_one(ids, count, finish, watched):
    watch = (lambda token: False) if watched else None
    many, single = new(watch=watch), new(watch=watch)
    assert many.extend(ids) == count
    for id in ids:
        if not single.append(Token(id)):
            break
    assert many.tokens == single.tokens == [1, 2, *ids[:count]]
    assert many.output == single.output
    assert many.finish == single.finish == finish


def test_a_stop_string_ends_many_tokens_where_it_is_complete():
    told = []

    def watch(token):
        told.append(token)
        return token == 5

    seq = new(watch=watch)
    assert seq.extend([3, 5, 4, 4]) == 2
    assert (told, seq.tokens, seq.finish) == ([3, 5], [1, 2, 3, 5], "stop")


def test_the_target_writes_alone_what_only_temperature_and_random_numbers_decide():
    assert Sequence(0, [1], SamplingParams()).plain
    cuts = dict(top_k=3, top_p=0.9, min_p=0.1, typical_p=0.9)
    assert Sequence(0, [1], SamplingParams(**cuts)).plain
    assert Sequence(0, [1], SamplingParams(temperature=1.0, **cuts), rule="rejection").plain
    assert Sequence(0, [1], SamplingParams(temperature=1.0, seed=1, **cuts)).plain
    assert Sequence(0, [1], SamplingParams(temperature=1.0, seed=1)).plain
    assert Sequence(0, [1], SamplingParams(temperature=1.0), rule="coupled").plain
    assert Sequence(0, [1], SamplingParams(temperature=1.0), rule="rejection").plain


@pytest.mark.parametrize(
    "options",
    [
        dict(logprobs=0),
        dict(repetition_penalty=1.1),
        dict(presence_penalty=0.1),
        dict(frequency_penalty=0.1),
        dict(logit_bias={1: 1.0}),
        dict(allowed_token_ids=[1]),
        dict(bad_words=[[1]]),
        dict(min_tokens=1),
        dict(processors=[lambda tokens, logits: logits]),
    ],
    ids=lambda options: next(iter(options)),
)
def test_it_does_not_where_anything_else_does(options):
    assert not Sequence(0, [1], SamplingParams(temperature=1.0, seed=1, **options)).plain
    assert not Sequence(0, [1], SamplingParams(temperature=1.0, **options), rule="rejection").plain
