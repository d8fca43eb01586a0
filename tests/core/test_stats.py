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
