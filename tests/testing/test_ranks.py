"""The harness that runs ranks: a rank that goes wrong fails the test, whenever it does."""

import multiprocessing.util
import os
import time

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


def _fail_of_a_death(rank):
    """The other rank fails at once, long before the death of this one shows."""
    if _rank() == rank:
        time.sleep(0.3)
        os._exit(4)
    raise ConnectionError


def test_a_rank_that_dies_is_named_before_one_that_fails_of_it():
    with pytest.raises(RankFailure, match=r"Rank 1 died without a word, and then:\nRank 0 failed:"):
        run_ranks(2, _fail_of_a_death, 1)


def test_a_rank_that_dies_before_its_answer_fails():
    with pytest.raises(RankFailure, match="Rank 1 died without a word"):
        run_ranks(2, _die, 1)
