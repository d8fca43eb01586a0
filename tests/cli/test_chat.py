import pytest

from outrider.cli import screen
from outrider.core.request import Chunk
from outrider.core.sequence import Token

ARGS = ("--max-tokens", 8)


def test_a_conversation(outrider, tiny_folder):
    lines = ["hello fox", "/stats", "/draft", "/draft none", "the sea", "/reset", "/help", "/quit", "never read"]
    done = outrider("chat", "-m", tiny_folder, *ARGS, stdin="\n".join(lines))
    assert done.code == 0
    assert done.err == ""
    for said in ("tokens in", "draft: auto\n", "draft: none\n", "(a new conversation)", "/stats"):
        assert said in done.out
    assert "\x1b" not in done.out
    assert "> " not in done.out


def test_the_end_of_the_input_ends_it(outrider, tiny_folder):
    assert outrider("chat", "-m", tiny_folder, *ARGS, stdin="").code == 0


def test_the_drafter_does_not_change_the_answers(outrider, tiny_folder):
    lines = "count the stars\nand again\n"
    one = outrider("chat", "-m", tiny_folder, *ARGS, stdin=lines)
    other = outrider("chat", "-m", tiny_folder, *ARGS, stdin="/draft layer_skip:layers=1\n" + lines)
    assert other.out == "draft: layer_skip:layers=1\n" + one.out


def test_a_mistake_is_reported_and_the_conversation_goes_on(outrider, tiny_folder):
    done = outrider("chat", "-m", tiny_folder, *ARGS, stdin="/draft ouija\n/dance\n" + "x" * 9000 + "\n/draft\n")
    assert done.code == 0
    errors = done.err.splitlines()
    assert [line.startswith("error: ") for line in errors] == [True] * 3
    assert "ngram" in errors[0]
    assert "/help" in errors[1]
    assert "shorten" in errors[2]
    assert done.out.endswith("draft: auto\n")


def test_old_turns_are_dropped_with_a_note(outrider, tiny_folder):
    done = outrider("chat", "-m", tiny_folder, *ARGS, stdin=("y" * 400 + "\n") * 4)
    assert done.code == 0
    assert "forgotten" in done.err
    assert len(done.out.splitlines()) >= 4


def test_a_model_that_cannot_chat(outrider, tiny_mute):
    done = outrider("chat", "-m", tiny_mute, stdin="hello\n")
    assert done.code == 2
    assert "chat template" in done.err


def test_ctrl_c_stops_the_answer_only(outrider, tiny_folder, monkeypatch):
    write = screen.Painter.write

    def interrupted(self: screen.Painter, chunk: Chunk) -> None:
        write(self, chunk)
        monkeypatch.setattr(screen.Painter, "write", write)
        raise KeyboardInterrupt

    monkeypatch.setattr(screen.Painter, "write", interrupted)
    done = outrider("chat", "-m", tiny_folder, *ARGS, stdin="one\n/draft\n")
    assert done.code == 0
    assert "(stopped)" in done.out
    assert done.out.endswith("draft: auto\n")


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setattr(screen, "coloured", lambda file: True)


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters are spread over several of them."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_drafted_tokens_are_coloured_and_characters_stay_whole(terminal, capsys):
    tokens = [Token(byte, "ngram" if i >= 1 else None) for i, byte in enumerate("aé€b".encode())]
    painter = screen.Painter(Bytes())
    for token in tokens:
        painter.write(Chunk("", (token,)))
    painter.write(Chunk("", (), finish_reason="stop"))
    green = "".join(f"\x1b[32m{letter}\x1b[0m" for letter in "é€b")
    assert capsys.readouterr().out == "a" + green


def test_no_color(monkeypatch):
    class Screen:
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert screen.coloured(Screen())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not screen.coloured(Screen())
