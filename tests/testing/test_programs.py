"""Forked programs end and speak as those that Python starts."""

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.testing import programs

PROGRAMS = {
    "answer": ("import os, sys; print(sys.argv[1:], __name__, os.environ['WORD']); print('x', file=sys.stderr)", 0),
    "code": ("import sys; sys.exit(7)", 7),
    "sentence": ("import sys; sys.exit('no')", 1),
    "error": ("raise ValueError('a bug')", 1),
    "at its end": ("import atexit; atexit.register(print, 'bye')", 0),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_and_speaks_as_one_that_is_started(tmp_path: Path, name: str) -> None:
    text, code = PROGRAMS[name]
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "program.py", "--option", "value"]
    real = subprocess.run(command, cwd=tmp_path, env={"WORD": "word"}, capture_output=True, text=True, timeout=60)
    forked = programs.run(*command[1:], cwd=tmp_path, WORD="word")
    assert forked.returncode == real.returncode == code
    assert forked.stdout == real.stdout
    assert forked.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_two_threads_may_wait_for_one_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text("import sys; sys.exit(7)")
    read = forkserver.read_signed

    def later(pipe: int) -> int:
        time.sleep(0.2)
        return read(pipe)

    monkeypatch.setattr(forkserver, "read_signed", later)
    program = programs.Program([sys.executable, "program.py"], cwd=tmp_path)
    with ThreadPoolExecutor(2) as threads:
        assert [each.result() for each in [threads.submit(program.wait) for _ in range(2)]] == [7, 7]


def test_torchrun_ends_all_ranks_with_one_that_fails(tmp_path: Path) -> None:
    text = "import os, sys, time; time.sleep(60 * int(os.environ['RANK'])); sys.exit(3)"
    (tmp_path / "program.py").write_text(text)
    done = programs.torchrun(2, "program.py", cwd=tmp_path, timeout=50)
    assert done.returncode == 1
    assert "exitcode  : 3" in done.stderr and "Sending process" in done.stderr, done.stderr


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import time; time.sleep(60)")
    with pytest.raises(subprocess.TimeoutExpired):
        programs.run("program.py", cwd=tmp_path, timeout=0.5)
