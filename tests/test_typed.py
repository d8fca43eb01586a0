"""What a user's type checker sees of the library."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[1] / "src"
USER = """\
from outrider import LLM, Client, SamplingParams

llm = LLM("smollm2-135m", draft="ngram")
reveal_type(llm.generate("one"))
reveal_type(llm.generate([1, 2, 3], SamplingParams(max_tokens=3), draft="none", prediction="text"))
reveal_type(llm.generate(["one", "two"], [SamplingParams(), SamplingParams()], prediction=[None, "text"]))
reveal_type(llm.generate([[1, 2], [3]]))
reveal_type(llm.chat([{"role": "user", "content": "Hello"}]))
reveal_type(llm.chat([[{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]], progress=False))
reveal_type(llm.generate("one").text)
reveal_type(llm.stream("one").result())
llm.generate("one", drafter="ngram")
llm.generate(3)
"""
CONFIG = """\
[mypy]
[mypy-torch.*,transformers.*,numpy.*,ray.*]
follow_imports = skip
"""
RESULT = "outrider.core.request.Result"
SEEN = [RESULT, RESULT, f"list[{RESULT}]", f"list[{RESULT}]", RESULT, f"list[{RESULT}]", "str", RESULT]


def test_generate_and_chat_are_typed_for_a_user(tmp_path):
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "user.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(SRC)}, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    revealed = [line.split('"')[1] for line in lines if "Revealed type" in line]
    assert revealed == SEEN, done.stdout + done.stderr
    errors = {line.split(":")[1] for line in lines if line.startswith("user.py") and "error:" in line}
    assert errors == {"12", "13"}, done.stdout


def test_the_types_are_part_of_the_package():
    assert (SRC / "outrider" / "py.typed").is_file()
