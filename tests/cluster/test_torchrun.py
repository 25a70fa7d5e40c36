"""What torchrun adds to what ranks that failed have said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from distca.cluster import torchrun
from distca.log import MISTAKE


@pytest.mark.parametrize(("code", "ended_with", "table"), [(1, 1, True), (MISTAKE, MISTAKE, False), (-11, 1, True)])
def test_a_table_of_ranks_that_failed_unless_one_has_said_what_is_wrong(
    code: int,
    ended_with: int,
    table: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: list[str]) -> None:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(tmp_path / "none"))
        raise ChildFailedError("program.py", {0: failure})

    for holder in (dist, torchrun.c10d_rendezvous_backend, torchrun.static_tcp_rendezvous):
        monkeypatch.setattr(holder, "TCPStore", holder.TCPStore)  # run changes it
    monkeypatch.setattr(PContext, "close", PContext.close)
    monkeypatch.setattr(torchrun, "main", fail)
    with pytest.raises(SystemExit) as ended:
        torchrun.run(["program.py"])
    assert ended.value.code == ended_with
    assert ("exitcode  : " in capsys.readouterr().err) is table
