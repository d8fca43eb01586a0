from outrider import LLM


def test_the_demo_says_how_fast_and_that_nothing_changed(outrider, tiny_folder):
    done = outrider("demo", "-m", tiny_folder, "--max-tokens", 24, "--rounds", 2)
    assert done.code == 0, done.err
    for said in ("came from drafts", "tokens/step", "plain", "auto", "ratio", "identical, token by token"):
        assert said in done.out


def test_it_fails_when_the_outputs_differ(outrider, tiny_folder, monkeypatch):
    honest = LLM.stream

    def stream(self, prompt, params, *, draft):
        return honest(self, "the sea" if draft == "none" else prompt, params, draft=draft)

    monkeypatch.setattr(LLM, "stream", stream)
    done = outrider("demo", "-m", tiny_folder, "--max-tokens", 8, "--rounds", 1)
    assert done.code == 1
    assert "DIFFER" in done.out


def test_a_race_is_not_won_by_the_answer_before(outrider, tiny_folder):
    """With a drafter that copies earlier answers: each run begins without any."""
    done = outrider("demo", "-m", tiny_folder, "--draft", "history", "--rounds", 2)
    assert done.code == 0
    assert "\n0 of " in done.out
    steps = [line.split()[1:3] for line in done.out.splitlines() if line.strip().startswith(("plain", "history"))]
    assert all(tokens == count for tokens, count in steps)
