"""A machine for pretrain_llama.sh: stand-ins for srun, scontrol, nvidia-smi, nsys and torchrun on PATH, no network."""

import io
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import chdir, redirect_stderr, redirect_stdout
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import pytest

from distca.train.launch import pretrain, say

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "pretrain_llama.sh"

# Each stand-in writes its name, arguments and some environment, one a line, into $RECORD.
RECORDER = """#!/bin/bash
{
    basename "$0"
    printf '%s\\n' "$@"
    env | grep -E '^(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES|MASTER_|WORLD_SIZE)'
} > "$RECORD"
"""


def launched(launch: Callable[[], int], variables: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Launches in this process, as its scripts do in one of their own: quickly, and without words of other programs."""
    out, error = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, variables, clear=True),
        chdir(folder),
        redirect_stdout(out),
        redirect_stderr(error),
        pytest.raises(SystemExit) as left,
    ):
        say.leave(launch)
    return subprocess.CompletedProcess("launch", left.value.code, out.getvalue(), error.getvalue())


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.record = folder / "record"
        # A Python that has everything, so that nothing is installed, and finds nothing wrong with any settings.
        is_torchrun = '"$1 $2" == "-m torch.distributed.run" || "$1 $2" == "-m distca.cluster.torchrun"'
        self._start = f'if [[ {is_torchrun} ]]; then shift 2; exec torchrun "$@"; fi'
        self._launch = f'if [[ "$*" == *distca.train.launch.* ]]; then exec {shlex.quote(sys.executable)} "$@"; fi'
        nothing_wrong = '[[ $1 == -* || $2 == --check ]] && exit 0; echo "python was started: $*" >&2; exit 1'
        self.tool("python", f"#!/bin/bash\n{self._start}\n{self._launch}\n{nothing_wrong}\n")
        self.tool("torchrun", RECORDER)
        self.variables = {"PATH": f"{self.bin}:/usr/bin:/bin", "RECORD": str(self.record), "HOME": str(folder)}

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def checks_settings(self) -> None:
        """Let the real Python check settings."""
        self.tool("python", f'#!/bin/bash\n{self._start}\nexec {shlex.quote(sys.executable)} "$@"\n')

    def gpus(self, count: int) -> None:
        lines = "".join(f"echo 'GPU {number}: NVIDIA H100 80GB HBM3 (UUID: x)'\n" for number in range(count))
        self.tool("nvidia-smi", f"#!/bin/bash\n{lines}")

    def slurm(self, nodes: int, gpus: int | str | None, **variables: str) -> None:
        self.tool("srun", RECORDER)
        hosts = "".join(f"echo host{number}\n" for number in range(1, nodes + 1))
        self.tool("scontrol", f'#!/bin/bash\n[[ "$*" == "show hostnames host[1-{nodes}]" ]] || exit 1\n{hosts}')
        self.variables |= {
            "SLURM_JOB_ID": "20017",
            "SLURM_JOB_NUM_NODES": str(nodes),
            "SLURM_JOB_NODELIST": f"host[1-{nodes}]",
        }
        if gpus is not None:
            self.variables["SLURM_GPUS_ON_NODE"] = str(gpus)
        self.variables |= variables

    def requeues(self) -> None:
        """Let Slurm's job be requeued, which is recorded."""
        hosts, requeue = self.bin / "scontrol", '[[ $1 == requeue ]] && echo "$@" >> "$RECORD" && exit'
        self.tool("scontrol", hosts.read_text().replace("#!/bin/bash", f"#!/bin/bash\n{requeue}"))

    def run(self, *arguments: str, script: Path = SCRIPT, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(script), *arguments],
            env=self.variables | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def launch(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """What :meth:`run` gives, by :func:`launched`."""
        return launched(lambda: pretrain.launch(list(arguments)), self.variables | variables, self.folder)

    def dry(self, *arguments: str, **variables: str) -> list[str]:
        result = self.launch(*arguments, DRY_RUN="1", **variables)
        assert result.returncode == 0, result.stderr
        assert not self.record.exists(), "a dry run started something"
        return shlex.split(result.stdout)


def has_pair(command: list[str], option: str, value: str) -> bool:
    return (option, value) in pairwise(command)
