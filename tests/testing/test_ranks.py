"""The harness that runs ranks: a rank that goes wrong fails the test, whenever it does."""

import multiprocessing.util
import os

import pytest

from distca.testing.ranks import RankFailure, run_ranks


def _answer_then_die(rank):
    if rank == _rank():
        multiprocessing.util.Finalize(None, os._exit, args=(3,), exitpriority=0)
    return _rank()


def _rank():
    import torch.distributed as dist

    return dist.get_rank()


def _die(rank):
    if _rank() == rank:
        os._exit(4)


def test_what_ranks_return_comes_by_rank():
    assert run_ranks(2, _answer_then_die, None) == [0, 1]


def test_a_rank_that_dies_after_its_answer_fails():
    with pytest.raises(RankFailure, match=r"Rank 1 gave an answer, then ended with exit code 3\."):
        run_ranks(2, _answer_then_die, 1)


def test_a_rank_that_dies_before_its_answer_fails():
    with pytest.raises(RankFailure, match="Rank 1 died without a word"):
        run_ranks(2, _die, 1)
