"""`outrider generate --input q.jsonl --output a.jsonl`."""

import fcntl
import json

import pytest
from limits import file_size_limit

from outrider.cli.answers import Query

QUERIES = [
    {"query": "the fox"},
    {"id": "b", "query": "count", "retrieved": "one, two, three"},
    {"query": "the sea", "retrieved": ["a river", "ends here"]},
]


@pytest.fixture
def queries(tmp_path):
    return write(tmp_path / "q.jsonl", QUERIES)


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def answer(outrider, tiny_folder, tmp_path, queries):
    def run(*more, input=queries):
        args = ("-m", tiny_folder, "--max-tokens", 8, "--input", input, "--output", tmp_path / "a.jsonl")
        return outrider("generate", *args, *more)

    return run


def test_each_query_has_its_answer(answer, tmp_path, outrider, tiny_folder):
    done = answer()
    assert done.code == 0, done.err
    said = lines(tmp_path / "a.jsonl")
    assert [row["id"] for row in said] == ["1", "b", "3"]
    alone = outrider("generate", "the fox", "-m", tiny_folder, "--max-tokens", 8, "--json")
    assert said[0]["token_ids"] == json.loads(alone.out)["token_ids"]
    assert "3 of 3 answers" in done.err


def test_any_text_can_be_a_query_or_its_id(answer, tmp_path):
    """A line ends with a newline only, and half of a surrogate pair is a valid id in JSON."""
    row = {"id": "\ud800", "query": "the fox\u2028counts\x85"}
    (tmp_path / "odd.jsonl").write_text(json.dumps(row, ensure_ascii=False).replace("\ud800", "\\ud800") + "\r\n")
    for _ in range(2):  # the second run reads what the first one wrote
        done = answer(input=tmp_path / "odd.jsonl")
        assert done.code == 0, done.err
        assert [json.loads(line)["id"] for line in (tmp_path / "a.jsonl").read_bytes().splitlines()] == ["\ud800"]


def test_a_run_that_was_broken_off_goes_on(answer, tmp_path):
    answer()
    file = tmp_path / "a.jsonl"
    whole = file.read_bytes()
    first = whole.index(b"\n") + 1
    file.write_bytes(whole[: first + 40])  # killed while it wrote the second answer
    again = answer()
    assert again.code == 0, again.err
    assert "1 from before" in again.err
    kept, fresh = file.read_bytes()[:first], lines(file)
    assert kept == whole[:first]
    assert [(row["id"], row["token_ids"]) for row in fresh] == [
        (row["id"], row["token_ids"]) for row in map(json.loads, whole.splitlines())
    ]
    assert answer().code == 0
    assert len(lines(file)) == 3


def test_a_full_disk_loses_nothing(answer, tmp_path):
    """A limit on the size of files fails as a full disk does: in the middle of a line."""
    answer()
    file = tmp_path / "a.jsonl"
    whole, first = lines(file), len(file.read_bytes().splitlines()[0])
    file.unlink()
    with file_size_limit(first + 200):  # the times in a line have more or fewer digits
        full = answer()
    assert (full.code, full.err.count("\n")) == (2, 1)
    assert "the answer to query b could not be written: " in full.err
    assert answer().code == 0
    assert [row["token_ids"] for row in lines(file)] == [row["token_ids"] for row in whole]


def test_another_drafter_may_finish_the_run(answer, tmp_path):
    answer()
    assert answer("--draft", "none").code == 0
    assert len(lines(tmp_path / "a.jsonl")) == 3


def test_what_was_retrieved_stands_in_the_prompt():
    query = Query("1", "How many?", ("one fox", "two foxes"))
    assert query.prompt("Short: ", raw=True) == "Context:\none fox\n\ntwo foxes\n\nQuestion: Short: How many?\nAnswer:"
    assert query.prompt("", raw=False) == [{"role": "user", "content": "How many?\n\nContext:\none fox\n\ntwo foxes"}]
    assert Query("1", "How many?").prompt("Short: ", raw=True) == "Short: How many?"


def test_prompt_lookup_sees_it(answer, tmp_path):
    """The end of the prompt stands in the context too: only there can a match of six tokens be found."""
    config = tmp_path / "c.yaml"
    config.write_text("pace: false\n")  # how much is drafted must not depend on the machine
    text = "Question: x\nAnswer: the red fox and the blue fox count the stars"
    drafted = []
    for row in ({"query": "x", "retrieved": text}, {"query": "x"}):
        rows = write(tmp_path / "r.jsonl", [row])
        more = ("--config", config, "--draft", "ngram:min_n=6,max_n=8", "--ignore-eos", "--max-tokens", 4, "--raw")
        done = answer(*more, input=rows)
        assert done.code == 0, done.err
        drafted.append(lines(tmp_path / "a.jsonl")[0]["stats"]["drafted"])
        (tmp_path / "a.jsonl").unlink()
    assert drafted[0] > drafted[1] == 0


def test_one_that_fails_does_not_stop_the_others_and_is_tried_again(answer, tmp_path):
    rows = write(tmp_path / "q2.jsonl", [{"query": "x" * 9000}, {"query": "the sea"}])
    for _ in range(2):
        done = answer(input=rows)
        assert done.code == 1
        assert "query 1:" in done.err
        assert "shorten the prompt" in done.err
        assert "tries them again" in done.err
    assert [row["id"] for row in lines(tmp_path / "a.jsonl")] == ["2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 has no query"),
        ('{"id": 1}', "line 1 has no query"),
        ('{"query": "x", "context": "y"}', "unknown key 'context'; known: id, query, retrieved"),
        ('{"query": "x", "retrieved": [1]}', "retrieved must be text or a list"),
        ('{"query": "x", "id": 2}\n{"query": "y"}', "two queries with the id '2'"),
        ("\n", "holds no queries"),
    ],
)
def test_bad_queries(answer, tmp_path, row, reason):
    (tmp_path / "bad.jsonl").write_text(row)
    done = answer(input=tmp_path / "bad.jsonl")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert reason in done.err


def test_an_output_of_something_else_is_left_alone(answer, tmp_path):
    for content in (
        "my diary\n",
        '{"id": "9", "query": "the fox", "run": ""}\n',
        '{"id": "1", "query": "no", "run": ""}\n',
    ):
        (tmp_path / "a.jsonl").write_text(content)
        assert answer().code == 2
        assert (tmp_path / "a.jsonl").read_text() == content


def test_an_output_that_is_no_file_is_refused(outrider, queries, tiny_folder):
    done = outrider("generate", "-m", tiny_folder, "--input", queries, "--output", "/dev/full")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "/dev/full is not a file" in done.err


def test_another_model_or_sampling_does_not_go_on(answer):
    answer()
    done = answer("--max-tokens", 9)
    assert done.code == 2
    assert "another model or sampling" in done.err


def test_two_runs_at_once(answer, tmp_path):
    with (tmp_path / "a.jsonl").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = answer()
    assert done.code == 2
    assert "another run is writing" in done.err


def test_options_that_do_not_fit(outrider, queries, tmp_path, tiny_folder):
    for args in (
        ["--input", queries],
        ["--output", tmp_path / "a"],
        ["x", "--input", queries, "--output", tmp_path / "a"],
    ):
        done = outrider("generate", "-m", tiny_folder, *args)
        assert (done.code, done.err.count("\n")) == (2, 1)
    assert outrider("generate", "-m", tiny_folder, "--input", tmp_path / "no", "--output", tmp_path / "a").code == 2
    assert outrider("generate", "-m", tiny_folder, "--input", queries, "--output", tmp_path / "no" / "a").code == 2
    assert "give a prompt" in outrider("generate", "-m", tiny_folder).err
