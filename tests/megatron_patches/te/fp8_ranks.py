"""Two ranks that train with weights held as FP8 numbers alone, and with bfloat16 ones, by the double."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.megatron_patches.te.fp8_tensor import Float8Quantizer

STEPS, SAVED_AFTER = 4, 2


def leave(rank: int, folder: Path) -> None:
    """Leaves in ``folder`` what runs found; both ranks call it."""
    _stand_in()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    _Runs(folder).all()
    dist.destroy_process_group()


def _stand_in() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    from megatron_patches.model import gpt as model
    from megatron_patches.te import choice

    choice.why_not_te = lambda device, dtype: None  # type: ignore[assignment]
    choice.why_not_fp8 = lambda device, blockwise: None  # type: ignore[assignment]
    config, coalesced = model.transformer_config, param_and_grad_buffer._coalescing_manager
    # On GPUs weights are drawn there.
    model.transformer_config = lambda *given, **fields: config(*given, **fields | {"cpu_initialization": False})  # type: ignore[assignment]
    # gloo gathers FP8 and bfloat16 numbers together as if all were of one type; NCCL does not.
    param_and_grad_buffer._coalescing_manager = lambda group, async_ops=False: (
        coalesced(group, async_ops=True) if async_ops else nullcontext()
    )


class _Runs:
    def __init__(self, folder: Path) -> None:
        from distca.train.run import builder
        from megatron_patches.training.optimizer import OptimizerAndSchedule

        self._folder, self._build, self._trainer = folder, builder.build_trainer, None
        builder.build_trainer = self._built  # type: ignore[assignment]
        self._columns, step = 0, OptimizerAndSchedule.step

        def counted(optimizer: OptimizerAndSchedule) -> tuple[float, float]:
            self._columns += sum(weight.get_usages()["columnwise"] for weight in self._fp8_weights())
            return step(optimizer)

        OptimizerAndSchedule.step = counted  # type: ignore[method-assign]

    def _built(self, *given: Any) -> Any:
        self._trainer = self._build(*given)
        return self._trainer

    def all(self) -> None:
        self._run("plain", fp8_weights=False)
        self._run("fp8", checkpoint__export=self._folder / "exported")
        for name, source, fp8_weights in (("again", "fp8", True), ("wide", "fp8", False), ("narrow", "plain", True)):
            self._resume(name, source, fp8_weights=fp8_weights)
        from tests.megatron_patches.checkpoint.fused_adam import use_fused_adam

        use_fused_adam()
        self._resume("fewer", "fp8", train__gradients="bfloat16", train__moments="bfloat16")

    def _resume(self, name: str, source: str, **settings: Any) -> None:
        if dist.get_rank() == 0:
            shutil.copytree(self._folder / source, self._folder / name)
            shutil.rmtree(self._folder / name / "checkpoints" / f"step_{STEPS:06d}")
        dist.barrier()
        self._run(name, checkpoint__resume=self._folder / name, checkpoint__save_at_end=False, **settings)

    def _run(self, name: str, fp8_weights: bool = True, **settings: Any) -> None:
        from tests.train.small_runs import arguments, train_all

        own: dict[str, Any] = {
            "output": self._folder,
            "data__path": self._folder / "texts",
            "data__validation_fraction": 0,
            "train__steps": STEPS,
            "train__precision": "bf16",
            "train__fp8": "current",
            "train__fp8_weights": fp8_weights,
            "checkpoint__save_every": SAVED_AFTER,
        }
        train_all([arguments(name=name, **own | settings)])
        found = self._found() | {"left": self._left()}
        if dist.get_rank() == 0:
            (self._folder / name / "found.json").write_text(json.dumps(found))

    def _fp8_weights(self) -> list[Any]:
        from megatron_patches.te.fp8_weights import is_fp8

        assert self._trainer is not None
        return [weight for weight in self._trainer.model.parameters() if is_fp8(weight)]

    def _found(self) -> dict[str, Any]:
        assert self._trainer is not None
        fp8, (columns, self._columns) = self._fp8_weights(), (self._columns, 0)
        main = [weight.main_param for weight in fp8 if weight.main_param is not None]
        return {
            "fp8": len(fp8) / sum("linear_" in name for name, _ in self._trainer.model.named_parameters()),
            "columns before updates": columns,
            "rows transposed": Float8Quantizer.rows_transposed,
            "main": sorted({str(each.dtype) for each in main}),
        }

    def _left(self) -> int:
        """FP8 weights that are still there when their model is gone and garbage was collected once."""
        weights = [weakref.ref(weight) for weight in self._fp8_weights()]
        self._trainer = None
        gc.collect()
        return sum(weight() is not None for weight in weights)
