"""Ranks that do not start or plan alike must end with a sentence, not wait for each other."""

from pathlib import Path

import pytest
import torch.distributed as dist

from distca.errors import ConfigError, SupportError
from distca.testing.ranks import run_ranks
from distca.train.run import consistency
from tests.train.small_runs import arguments, train_all, write_texts


def _train_with_own_settings(lines: list[list[str]], compared: bool) -> str:
    if not compared:
        consistency.by_setting = lambda _: {}  # type: ignore[assignment]
    with pytest.raises(ConfigError if compared else SupportError) as caught:
        train_all([lines[dist.get_rank()]])
    return str(caught.value)


@pytest.mark.parametrize(
    "setting, values, compared, said",
    [
        ("optimizer__lr", (0.01, 0.02), True, "Rank 1 was started with optimizer.lr 0.02, rank 0 with 0.01"),
        ("train__steps", (6, 7), True, "Rank 1 was started with train.steps 7, rank 0 with 6"),
        ("data__path", ("texts", "fewer"), True, "Ranks [1] see other documents than rank 0"),
        ("cad__enabled", (True, False), False, "disaggregate is False on rank 1 and True on rank 0"),
    ],
)
def test_a_rank_that_was_started_otherwise_ends_the_run(
    tmp_path: Path, setting: str, values: tuple[object, object], compared: bool, said: str
) -> None:
    lengths = [96, 90, 3, 2, 80, 70, 5, 4] * 4
    texts = write_texts(tmp_path / "texts", lengths)
    write_texts(tmp_path / "fewer", lengths[:-1])
    lines = []
    for value in values:
        own = {setting: tmp_path / value if isinstance(value, str) else value}
        lines.append(arguments(**({"output": tmp_path, "data__path": texts} | own)))
    for heard in run_ranks(2, _train_with_own_settings, lines, compared, timeout=100):
        assert said in heard
