"""What a rank computes at home on one GPU: the output layer with its loss, and a layer before and after core attention.

    python -m benchmarks.home_compute --output benchmarks/results/home_compute.json

Each part is timed with CUDA events beside its matrix products alone, of the same shapes: the share of them in the
part's time says what elementwise work costs. The same parts as stock megatron-core computes them are timed, too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table

from distca.attention.reference import ReferenceKernel
from distca.commands.versions import versions
from distca.device.clock import Clock
from distca.log import console
from distca.profile.timing import median_seconds
from distca.runtime import AttentionPool
from distca.runtime.timeline import Timeline
from distca.train.config.schema import ModelConfig
from distca.transport import choose_transport

OLD_LOGITS_BYTES = 1 << 30  # float32 logits of one chunk, as they were limited where each chunk was recomputed

KERNELS = 12  # listed per part


@dataclass(frozen=True)
class Part:
    """Something to time.

    Attributes:
        name: what it is.
        run: does it once.
        products: does its matrix products alone.
        flops: of these products.
    """

    name: str
    run: Callable[[], object]
    products: Callable[[], object]
    flops: float


def main() -> None:
    arguments = _arguments()
    warnings.simplefilter("ignore")
    device, dtype = _world()
    bench = _Bench(arguments, device, dtype)
    figures = [bench.measure(part) for part in chain(bench.loss_parts(), bench.layer_parts())]
    shape = {name: getattr(arguments, name) for name in ("hidden", "ffn", "heads", "kv_heads", "vocabulary")}
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.home_compute", *sys.argv[1:]]),
        "hardware": torch.cuda.get_device_name()
        if device.type == "cuda"
        else f"{os.cpu_count()} cores, {platform.machine()}",
        "versions": versions(),
        "dtype": str(dtype).removeprefix("torch."),
        "shape": shape,
        "rows": {"loss": arguments.loss_rows, "layer": arguments.rows},
        "figures": figures,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    _show(figures)
    dist.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="the JSON to write")
    parser.add_argument("--loss-rows", type=int, default=65536, help="rows of the output layer and its loss")
    parser.add_argument("--rows", type=int, default=32768, help="rows of the layer: one nano-batch")
    parser.add_argument("--repeats", type=int, default=10, help="timed runs of each part")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=128256)
    return parser.parse_args()


def _world() -> tuple[torch.device, torch.dtype]:
    """A world of one rank, for megatron-core."""
    from megatron_patches.groups import initialize_model_parallel

    gpu = torch.cuda.is_available()
    if not gpu:
        from megatron_patches.patches.cpu import use_cpu

        use_cpu()
    dist.init_process_group("nccl" if gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    initialize_model_parallel(1, 1, 1)
    return (torch.device("cuda", 0), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)


class _Bench:
    """A model of two layers and everything that is timed of it."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> None:
        from megatron_patches.model import build_model, transformer_config

        self._sizes, self._device, self._dtype = arguments, device, dtype
        self._clock = Clock(device)
        sizes = {name: getattr(arguments, name) for name in ("hidden", "ffn", "heads", "kv_heads")}
        shape = ModelConfig(layers=2, **sizes)
        world = dist.group.WORLD
        assert world is not None, "ranks join it before they measure"
        pool = AttentionPool(choose_transport("auto", world), ReferenceKernel(), Timeline(device), "keep")
        config = transformer_config(shape, dtype, cpu_initialization=device.type == "cpu")
        self._gpt = build_model(shape, arguments.vocabulary, config, "disaggregated", pool=pool).to(device)
        self._gpt.rotary_pos_emb.set_positions(torch.arange(arguments.rows, device=device))

    def measure(self, part: Part) -> dict[str, Any]:
        """Median milliseconds of the part and of its products, and the memory that it takes on top."""
        gpu = self._device.type == "cuda"
        took = []
        for work in (part.run, part.products):
            for _ in range(3 if gpu else 1):
                work()
            took.append(median_seconds(work, self._clock, self._sizes.repeats))
        return {
            "part": part.name,
            "ms": took[0] * 1e3,
            "tflops": part.flops / took[0] / 1e12,
            "products_ms": took[1] * 1e3,
            "products_tflops": part.flops / took[1] / 1e12,
            "share_of_products": took[1] / took[0],
            **(_on_gpu(part.run) if gpu else {"peak_gib": None, "kernels": []}),
        }

    def loss_parts(self) -> Iterator[Part]:
        """Forward and backward of the output layer and its loss: fused, and as megatron-core computes it, in chunks."""
        from distca.ops.output_loss import LOGITS_BYTES, VocabularyShards, output_loss

        rows, vocabulary = self._sizes.loss_rows, self._sizes.vocabulary
        hidden = self._random(rows, self._sizes.hidden).requires_grad_()
        weight = self._gpt.output_layer.weight
        labels = torch.randint(vocabulary, (rows,), device=self._device)
        mask = torch.rand(rows, device=self._device) < 0.99
        shards = VocabularyShards(self._gpt.output_layer.tp_group, False)

        def fused() -> None:
            torch.autograd.grad(output_loss(hidden, weight, labels, mask, shards), (hidden, weight))

        def stock() -> None:
            step = max(OLD_LOGITS_BYTES // (4 * vocabulary), 1)
            losses = [
                torch.utils.checkpoint.checkpoint(self._stock_losses, h[:, None], label[None], use_reentrant=False)
                for h, label in zip(hidden.split(step), labels.split(step), strict=True)
            ]
            torch.autograd.grad((torch.cat(losses, 1)[0] * mask).sum(), (hidden, weight))

        limit = LOGITS_BYTES // (vocabulary * weight.element_size())
        step = -(-rows // -(-rows // limit))
        products = partial(_loss_products, hidden.detach(), weight.detach(), step)
        flops = 6.0 * rows * vocabulary * self._sizes.hidden
        yield Part("output layer + loss, fused", fused, products, flops)
        yield Part("output layer + loss, megatron-core's in recomputed chunks", stock, products, flops)

    def _stock_losses(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, _ = self._gpt.output_layer(hidden)
        return self._gpt.compute_language_model_loss(labels, logits)

    def layer_parts(self) -> Iterator[Part]:
        """Forward and backward of pre, post and post+pre, and of pre with megatron-core's rotation."""
        from distca.ops.rotary import Rotation

        sizes, rows = self._sizes, self._sizes.rows
        first, second = self._gpt.decoder.layers
        angles = self._gpt.rotary_pos_emb()
        rotation = Rotation.of(angles)
        dim = sizes.hidden // sizes.heads
        hidden = self._random(rows, 1, sizes.hidden).requires_grad_()
        o = self._random(rows, sizes.heads, dim).requires_grad_()
        pre_shapes = [(sizes.hidden, (sizes.heads + 2 * sizes.kv_heads) * dim)]
        post_shapes = [(sizes.hidden, sizes.hidden), (sizes.hidden, 2 * sizes.ffn), (sizes.ffn, sizes.hidden)]

        def post_pre() -> Any:
            between = first.post(o, hidden)
            return between, *second.pre(between, rotation)

        for name, run, inputs, shapes in (
            ("pre", lambda: first.pre(hidden, rotation), [hidden], pre_shapes),
            ("pre, megatron-core's rotation", lambda: _stock_pre(first, hidden, angles), [hidden], pre_shapes),
            ("post", lambda: (first.post(o, hidden),), [o, hidden], post_shapes),
            ("post+pre", post_pre, [o, hidden], post_shapes + pre_shapes),
        ):
            yield from self._both_directions(name, run, inputs, shapes)

    def _both_directions(
        self,
        name: str,
        run: Callable[[], Sequence[torch.Tensor]],
        inputs: list[torch.Tensor],
        shapes: list[tuple[int, int]],
    ) -> Iterator[Part]:
        flops = 2.0 * self._sizes.rows * sum(width * out for width, out in shapes)
        weights = [p for layer in self._gpt.decoder.layers for p in layer.parameters()]
        graph: list[Any] = []

        def backward() -> None:
            if not graph:
                outputs = run()
                graph.extend((outputs, [torch.randn_like(x) for x in outputs]))
            torch.autograd.grad(graph[0], [*inputs, *weights], graph[1], retain_graph=True, allow_unused=True)

        def forward() -> None:
            graph.clear()
            run()

        matrices = partial(self._matrices, shapes)
        yield Part(f"{name}, forward", forward, _lazily(matrices, _forward_products), flops)
        yield Part(f"{name}, backward", backward, _lazily(matrices, _backward_products), 2 * flops)

    def _matrices(self, shapes: list[tuple[int, int]]) -> list[tuple[torch.Tensor, ...]]:
        """(input, weight, gradient of the output) of each product."""
        rows = self._sizes.rows
        return [(self._random(rows, width), self._random(out, width), self._random(rows, out)) for width, out in shapes]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device, dtype=self._dtype)


def _on_gpu(run: Callable[[], object]) -> dict[str, Any]:
    """The memory that one run takes on top, and its kernels, longest first."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)[:KERNELS]
    return {
        "peak_gib": (torch.cuda.max_memory_allocated() - before) / 2**30,
        "kernels": [
            {"kernel": each.key[:100], "calls": each.count, "ms": each.device_time_total / 1e3} for each in kernels
        ],
    }


def _stock_pre(layer: Any, hidden: torch.Tensor, angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb

    attention = layer.self_attention
    query, key, value = attention.get_query_key_value_tensors(layer.input_layernorm(hidden), None)[:3]
    rotate = partial(apply_rotary_pos_emb, config=layer.config, cp_group=attention.pg_collection.cp)
    kv = torch.stack((rotate(key, angles).squeeze(1), value.squeeze(1)), dim=1)
    return rotate(query, angles).squeeze(1), kv


def _loss_products(hidden: torch.Tensor, weight: torch.Tensor, step: int) -> None:
    """The three products of the fused loss, chunk by chunk."""
    from distca.ops.cross_entropy import wide
    from distca.ops.output_loss import add_product

    total = torch.zeros_like(weight, dtype=wide(weight.dtype))
    for chunk in hidden.split(step):
        logits = chunk @ weight.t()
        logits @ weight
        add_product(total, logits.t(), chunk)
        del logits


def _lazily(matrices: Callable[[], Any], products: Callable[[Any], None]) -> Callable[[], None]:
    """``products`` of matrices that are made at the first call: not all parts' matrices fit at once."""
    made: list[Any] = []

    def run() -> None:
        if not made:
            made.append(matrices())
        products(made[0])

    return run


def _forward_products(matrices: list[tuple[torch.Tensor, ...]]) -> None:
    for x, weight, _ in matrices:
        x @ weight.t()


def _backward_products(matrices: list[tuple[torch.Tensor, ...]]) -> None:
    for x, weight, gradient in matrices:
        gradient @ weight
        gradient.t() @ x


def _show(figures: list[dict[str, Any]]) -> None:
    table = Table(title="compute at home: each part beside its matrix products alone", title_justify="left")
    for column in ("part", "ms", "TFLOP/s", "products, ms", "TFLOP/s", "share of products", "peak GiB"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for each in figures:
        table.add_row(
            each["part"],
            f"{each['ms']:.2f}",
            f"{each['tflops']:.1f}",
            f"{each['products_ms']:.2f}",
            f"{each['products_tflops']:.1f}",
            f"{each['share_of_products']:.1%}",
            "" if each["peak_gib"] is None else f"{each['peak_gib']:.2f}",
        )
    console().print(table)


if __name__ == "__main__":
    main()
