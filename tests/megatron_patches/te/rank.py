"""One rank that trains a small model with the double's linear layers and with Megatron's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tests.megatron_patches.te import double

LENGTHS = ((13, 7, 1, 29, 3), (50, 2))
STEPS = 2
RECOMPUTED = ("none", "all")


def leave(folder: Path) -> None:
    """Leaves in ``folder`` what was found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store_of_one", rank=0, world_size=1)
    (folder / "linears.json").write_text(json.dumps(found()))
    dist.destroy_process_group()


def found() -> dict[str, Any]:
    """What :func:`train` says by kind of linear layers and what is recomputed."""
    from megatron_patches.te import choice

    choice.why_not_te = lambda device, dtype: None  # type: ignore[assignment]
    choice.why_not_fp8 = lambda device, blockwise: None  # type: ignore[assignment]
    results: dict[str, Any] = {"local": train("local", "none", "none"), "spec": spec()}
    for fp8 in ("none", "current", "delayed"):
        for recompute in RECOMPUTED:
            results[f"{fp8} {recompute}"] = train("te", fp8, recompute)
    results["history"] = history()
    results["packed"] = train("te", "current", "none", disaggregate=False)
    return results


def spec() -> dict[str, list[str]]:
    """By what ``linears`` asks for: whether layers get Transformer Engine's, and which linear layer a block has whose
    spec is Transformer Engine's own, or what is said."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from distca.errors import SupportError
    from distca.parity.cases import ParityShape
    from megatron_patches import api
    from megatron_patches.model.gpt import transformer_config
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    config = transformer_config(ParityShape(hidden=64, ffn=96, heads=4, kv_heads=2), torch.float32)
    answers = {}
    for linears in ("auto", "te", "local"):
        cad = api.CAD(config, tokens_per_rank=64, kernel="reference", linears=linears)
        try:
            (layer,) = cad.block_spec(get_gpt_layer_with_transformer_engine_spec()).layer_specs[:1]
            said = layer.submodules.self_attention.submodules.linear_qkv.__name__
        except SupportError as error:
            said = str(error)
        answers[linears] = [str(cad.te_linears), said]
    return answers


def history() -> dict[str, list[float]]:
    """Scales of a layer, forward and backward, and its history's sum, after it took the state of another whose history
    is as long, and of one whose history is longer."""
    from megatron_patches.te.linears import _Linear

    class Layer(_Linear):
        _recipe = double.DelayedScaling()

        def __init__(self, scale: float, rows: int) -> None:
            self.fp8_meta: dict[str, Any] = {
                key: SimpleNamespace(scale=torch.full((3,), scale), amax_history=torch.full((rows, 3), scale))
                for key in ("scaling_fwd", "scaling_bwd")
            }

        def init_fp8_meta_tensors(self, recipe: Any) -> None:
            assert recipe is self._recipe

        def says(self) -> list[float]:
            held = self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]
            return [float(each.scale.mean()) for each in held] + [float(held[1].amax_history.sum())]

    found = {}
    for name, rows in (("as long", 4), ("longer", 5)):
        layer = Layer(1.0, 4)
        layer.set_extra_state(Layer(2.0, rows).get_extra_state())
        found[name] = layer.says()
    return found


def train(linears: str, fp8: str, recompute: str, disaggregate: bool = True) -> dict[str, Any]:
    """Losses and gradient norms of a few steps, and how often weights were quantised."""
    from distca.parity.cases import ParityCase, ParityShape, case_documents
    from megatron_patches import api
    from megatron_patches.model.gpt import build_gpt, transformer_config
    from megatron_patches.ranks.groups import initialize_model_parallel
    from megatron_patches.training.training_step import sum_over_ranks, summed_loss_step

    shape = ParityShape(hidden=64, ffn=96, heads=4, kv_heads=2)
    case = ParityCase(micro_batches=LENGTHS, shape=shape)
    initialize_model_parallel(1, 1, 1)
    torch.manual_seed(1)
    config = transformer_config(
        shape, torch.float32, recompute_mlp=recompute == "mlp", cpu_initialization=True, fp8=fp8
    )
    cad = api.CAD(
        config,
        tokens_per_rank=64,
        kernel="reference",
        disaggregate=disaggregate,
        recompute="all" if recompute == "all" else "none",
        linears=linears,
    )
    model = cad.attach(build_gpt(shape, shape.vocabulary, config, cad.block_spec()))
    ddp = cad.data_parallel(model, distributed_optimizer=False)
    double.Manager.updates.clear()
    losses, norms = [], []
    for _ in range(STEPS):
        step = cad.plan_step(case_documents(case))
        total, tokens = sum_over_ranks(cad.forward_backward(step, summed_loss_step, ddp), cad.device)
        losses.append(float(total / tokens))
        norms.append(float(torch.stack([p.main_grad.norm() for p in model.parameters()]).norm()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.main_grad
    layer = model.decoder.layers[0].mlp.linear_fc1
    return {
        "losses": losses,
        "norms": norms,
        "quantised": getattr(layer, "quantised", 0),
        "copies": len(getattr(layer, "_fp8_workspaces", {})),
        "updates": len(double.Manager.updates),
        "kind": type(layer).__name__,
        "names": sorted(ddp.state_dict()),
    }
