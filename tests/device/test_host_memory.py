"""Memory that is freed stays with the process, so that taking it again costs no page faults."""

import subprocess
import sys

import pytest

FAULTS = """
import resource

import torch

from distca.device.host_memory import keep_freed_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(12_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


given_back = faults()
keep_freed_memory()
print(given_back, min(faults() for _ in range(6)))  # the first blocks have yet to find their places
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_taken_again_costs_no_page_faults() -> None:
    result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, result.stdout.split())
    assert kept < 20 < given_back
