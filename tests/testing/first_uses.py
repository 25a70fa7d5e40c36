"""What every rank of a test would do for the first time: done once, in the process that ranks are forked from."""

from distca.train.config.cli import parse_run_config

parse_run_config(["--data.source", "mix", "--data.path", "pretrain"])  # makes the parser
