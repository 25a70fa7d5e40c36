"""Is a training loop of one's own as fast as ``pretrain_llama.sh``? The same model on the same batches by both.

    torchrun --nproc-per-node=2 benchmarks/own_script.py --output FILE -- --config configs/llama-8b-cut.yaml

The trainer runs first, then the functions of ``examples/own_training_loop.py``, in one start of the ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from distca import join_world, leave_world
from distca.data.corpus import Corpus
from distca.log import setup_logging
from distca.train.config.cli import parse_run_config
from distca.train.config.schema import RunConfig
from distca.train.data.corpus import dealt, open_corpus, open_sampler
from distca.train.run.main import run_on
from distca.versions import command_line, header, write_report
from examples import own_training_loop as example
from megatron_patches.ranks.groups import destroy_model_parallel, initialize_model_parallel
from megatron_patches.ranks.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--warm-up", type=int, default=3, help="steps that do not count")
    parser.add_argument("settings", nargs="*", help="of the run, after --")
    asked = parser.parse_args()
    world = join_world()
    setup_logging(world.rank)
    box = [tempfile.mkdtemp() if world.rank == 0 else ""]
    dist.broadcast_object_list(box)
    settings = [
        "--output",
        box[0],
        "--name",
        "own",
        "--checkpoint.save_at_end",
        "false",
        "--data.validation_fraction",
        "0",
    ]
    config = parse_run_config([*asked.settings, *settings])
    corpus = open_corpus(config)
    theirs = _by_the_trainer(config, corpus, world)
    ours = _by_the_example(config, corpus, world)
    report: dict[str, Any] = {
        **header(command_line(f"torchrun --nproc-per-node={world.size} benchmarks/own_script.py"), world.size),
        "warm_up": asked.warm_up,
        "trainer": _summary(theirs, asked.warm_up),
        "own_script": _summary(ours, asked.warm_up),
    }
    report["ratio"] = report["own_script"]["tokens_per_s"] / report["trainer"]["tokens_per_s"]
    if world.rank == 0:
        write_report(asked.output, report)
        print(json.dumps(report["trainer"]), json.dumps(report["own_script"]), f"ratio {report['ratio']:.4f}", sep="\n")
    leave_world()


Steps = list[tuple[float, int, float]]
"""Figures of every step: seconds, tokens, loss."""


def _by_the_trainer(config: RunConfig, corpus: Corpus, world: World) -> Steps:
    folder = run_on(world, config, corpus)
    dist.barrier()
    lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    destroy_model_parallel()
    return [(line["step_s"], line["tokens"], line["loss"]) for line in lines]


def _by_the_example(config: RunConfig, corpus: Corpus, world: World) -> Steps:
    model, parallel = config.model, config.parallel
    initialize_model_parallel(parallel.tp, parallel.pp, config.train.seed)
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    shape = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "use_cpu_initialization": world.device.type != "cuda",
    }
    torch.manual_seed(config.train.seed)
    vocabulary = model.vocabulary or corpus.vocabulary
    cad, ddp = example.build(
        example.config_of(parallel.tp, parallel.pp, dtype, **shape), vocabulary, config.data.tokens_per_rank
    )
    adam = config.optimizer
    settings = OptimizerConfig(
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta2=adam.beta2,
        clip_grad=adam.clip_grad,
        use_distributed_optimizer=True,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
    )
    optimizer = get_megatron_optimizer(settings, [ddp])
    documents = dealt(corpus.train, open_sampler(config, corpus.train, cad.options.ranks), config.train.steps)
    steps: Steps = []
    began = time.perf_counter()
    for step in cad.plan_ahead(documents):
        reports = cad.forward_backward(step, example.forward_step, ddp)
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(reports).sum(dim=0) if reports else torch.zeros(2, dtype=torch.float64, device=world.device)
        dist.all_reduce(total)
        loss = float(total[0] / total[1])
        ended = time.perf_counter()
        steps.append((ended - began, step.plan.tokens, loss))
        began = ended
    return steps


def _summary(steps: Steps, warm_up: int) -> dict[str, Any]:
    counted = steps[warm_up:]
    seconds, tokens, _ = zip(*counted, strict=True)
    return {
        "tokens_per_s": sum(tokens) / sum(seconds),
        "median_s": statistics.median(seconds),
        "seconds": list(seconds),
        "losses": [loss for _, _, loss in steps],
    }


if __name__ == "__main__":
    main()
