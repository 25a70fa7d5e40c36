import logging
import subprocess
import sys

import pytest

from distca.log import console, die, printer

SPEAK = """
import logging, sys
from distca.log import setup_logging
setup_logging(0)
setup_logging(int(sys.argv[1]))
logging.getLogger("distca.x").info("fine")
logging.getLogger("distca.x").warning("odd [value]")
logging.getLogger("elsewhere").info("chatter")
"""


def lines(rank: int) -> list[str]:
    result = subprocess.run([sys.executable, "-c", SPEAK, str(rank)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""
    return [line.split(" ", 1)[1] for line in result.stderr.splitlines()]


def test_rank_0_speaks_and_the_others_only_warn() -> None:
    assert lines(0) == ["INFO fine", "WARNING odd [value]"]
    assert lines(3) == ["WARNING [rank 3] odd [value]"]


def test_brackets_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    console.cache_clear()
    try:
        for screen in (printer(), console()):
            screen.print("runs/[red]a[/b]")
    finally:
        console.cache_clear()
    assert capsys.readouterr() == ("runs/[red]a[/b]\n",) * 2


@pytest.mark.parametrize(("rank", "everywhere", "waits"), [("0", False, False), ("2", False, True), ("2", True, False)])
def test_die_leaves_the_first_word_to_rank_0_and_is_never_silent(rank: str, everywhere: bool, waits: bool) -> None:
    """A rank that ended at once without a word made its launcher end rank 0 before that had said anything."""
    code = f"""
import time
from distca import log
log.SILENCE_S, began = 2.0, time.monotonic()
try:
    log.die(ValueError('tp is [3]; change it.'), 'do that.', {everywhere})
finally:
    assert (time.monotonic() - began > 1.9) == {waits}
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={"RANK": rank, "PYTHONPATH": "."}
    )
    assert result.returncode == 2
    assert result.stderr == "error: tp is [3]; change it.\nnext step: do that.\n"


def test_die_exits_this_process_too() -> None:
    with pytest.raises(SystemExit) as ended:
        die("no")
    assert ended.value.code == 2
    assert logging.getLogger("distca") is not None
