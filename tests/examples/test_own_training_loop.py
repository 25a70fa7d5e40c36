"""The examples' functions, of which README quotes some, against unmodified Megatron-Core; and one script as a whole."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from distca.testing.ranks import run_ranks
from tests.testing import programs

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LENGTHS = ((170, 13, 1, 40, 41), (83, 83, 2))


def _differences(layouts):
    warnings.filterwarnings("ignore")
    from megatron_patches.patches.cpu import use_cpu

    use_cpu()
    from distca import CAD
    from distca.parity import disaggregated, outcome, unmodified
    from distca.parity.cases import ParityCase, ParityShape, case_documents
    from examples import own_training_loop as example
    from megatron_patches.ranks.groups import initialize_model_parallel

    # Every rank has whole gradients to compare, and not its shard of them.
    wrapped = CAD.data_parallel
    CAD.data_parallel = lambda self, model: wrapped(self, model, distributed_optimizer=False)
    device, sizes = torch.device("cpu"), example.SHAPE
    shape = ParityShape(
        layers=sizes["num_layers"],
        hidden=sizes["hidden_size"],
        ffn=sizes["ffn_hidden_size"],
        heads=sizes["num_attention_heads"],
        kv_heads=sizes["num_query_groups"],
        head_dim=sizes["hidden_size"] // sizes["num_attention_heads"],
        rope_base=500000,
        vocabulary=example.VOCABULARY,
    )
    cases = [ParityCase(micro_batches=LENGTHS, tp=tp, pp=pp, shape=shape) for tp, pp in layouts]
    reference, weights = unmodified.run_unmodified(cases[0], torch.float32, device)
    found = []
    for case in cases:
        initialize_model_parallel(case.tp, case.pp, case.seed)
        cad, model = example.build(example.config_of(case.tp, case.pp))
        gpt = model.module
        disaggregated.load_weights(case, cad, gpt, weights)
        for step in cad.plan_ahead([case_documents(case)]):
            reports = cad.forward_backward(step, example.forward_step, model)
            found.append(outcome.difference(disaggregated.outcome_of(case, cad, gpt, reports, weights), reference))
            reports = cad.forward_backward(step, _policy(cad, step, model), model)
            found.append(outcome.difference(disaggregated.outcome_of(case, cad, gpt, reports, weights), reference))
    return found


def _policy(cad, step, model):
    """examples/rollouts.py with the policy as it was and an advantage of one for all, where the gradients are those of
    the summed loss."""
    sys.path.insert(0, str(ROOT / "examples"))
    import rollouts

    old = cad.log_probabilities(step, model)
    documents = step.documents.micro_batches
    old = old or [[0.0] * len(each) for each in documents]
    before = iter(
        [
            (rollouts.per_token(mine, each), rollouts.per_token([1.0] * len(each), each))
            for mine, each in zip(old, documents, strict=True)
        ]
    )
    return lambda batches, model: rollouts.policy_step(next(before), batches, model)


def test_its_losses_and_gradients_are_megatrons():
    differences = run_ranks(4, _differences, [(2, 1), (1, 2)])[0]
    assert len(differences) == 4
    for supervised, policy in zip(differences[::2], differences[1::2], strict=True):
        assert max(supervised.loss, supervised.gradient) <= 1e-5, supervised
        assert policy.gradient <= 1e-5, policy


def test_it_trains_on_cpu_ranks():
    """By itself in a process that imports what the script does, in its order, and as two stages of torchrun's."""
    words = ["-W", "ignore", "examples/own_training_loop.py", "--steps"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *words, "1"]
    alone = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    for steps, done in ((1, alone), (2, programs.torchrun(2, *words[2:], "2", "--pp", "2"))):
        assert done.returncode == 0, done.stderr[-3000:]
        assert all(f"step {step}: loss" in done.stdout for step in range(1, steps + 1))
        assert "RNG state" not in done.stderr
