"""What was drafted and kept, counted."""

from outrider.core.draft import Draft
from outrider.core.stats import Stats


def test_steps_at_once_count_as_steps_one_by_one():
    steps = [
        (Draft((1, 2, 3), (-1, 0, 0)), (0, 2)),
        (Draft((4, 5), (-1, -1)), ()),
        (Draft(), ()),
        (Draft.chain([6, 7, 8]), (0, 1, 2)),
    ]
    one, other = Stats(), Stats()
    for draft, path in steps:
        one.record(draft, path, len(path) + 1, "eagle")
    by_depth = [sum(draft.depths().count(depth) for draft, _ in steps) for depth in (1, 2, 3)]
    kept = [["eagle"] * len(path) for _, path in steps]
    nodes = {"eagle": sum(len(draft) for draft, _ in steps)}
    other.record_steps(kept, sum(bool(draft) for draft, _ in steps), by_depth, nodes)
    assert one == other


def test_who_was_asked_and_what_that_took():
    one, other = Stats(), Stats()
    one.ask("eagle", 0.5)
    one.ask("eagle", 0.25)
    other.ask("eagle", 0.25)
    other.ask("ngram", 0.125)
    total = one + other
    assert total.asked == {"eagle": {"steps": 3, "seconds": 1.0}, "ngram": {"steps": 1, "seconds": 0.125}}
    assert total.as_dict()["asked"] == total.asked
    assert one.asked == {"eagle": {"steps": 2, "seconds": 0.75}}  # a sum leaves its parts alone
    assert total.untimed().asked == {"eagle": {"steps": 3, "seconds": 0.0}, "ngram": {"steps": 1, "seconds": 0.0}}


def test_nothing_yet_reads_well():
    assert str(Stats()).endswith("0 of 0 drafted tokens kept (0%)")
