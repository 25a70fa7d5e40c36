"""What users may do between CAD.attach and a step: each ends in a sentence before anything waits, or does no harm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from distca.errors import DataError, SupportError
from distca.testing.ranks import run_ranks
from tests.megatron_patches import small_cases

LENGTHS = (13, 7, 1, 29, 3)


def _said(function: Any, *arguments: Any, **options: Any) -> str:
    try:
        function(*arguments, **options)
    except (SupportError, DataError) as error:
        return str(error)
    return ""


def _config(**fields: Any) -> tuple[Any, Any]:
    from distca.parity.cases import ParityShape
    from megatron_patches.model.gpt import transformer_config

    shape = ParityShape()
    return replace(transformer_config(shape, torch.float32, cpu_initialization=True), **fields), shape


def _built(cad: Any, config: Any, vocabulary: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    torch.manual_seed(1)
    return GPTModel(config, cad.block_spec(), vocabulary, 0, position_embedding_type="rope")


def _attached(**options: Any) -> tuple[Any, Any, Any]:
    """A CAD, a model that it attached, and documents of a step, the same every time."""
    from distca import CAD

    config, shape = _config(**options.pop("fields", {}))
    cad = CAD(config, tokens_per_rank=60, **options)
    random = np.random.default_rng(1)
    documents: Any = [[random.integers(0, shape.vocabulary, length) for length in LENGTHS] for _ in range(2)]
    if not options.get("disaggregate", True):
        from distca import StepDocuments

        documents = StepDocuments(documents, [np.arange(len(LENGTHS)) % 2] * 2)
    return cad, cad.attach(_built(cad, config, shape.vocabulary)), documents


def _wrapped(distributed_optimizer: bool = False, **options: Any) -> tuple[Any, Any, Any]:
    cad, model, documents = _attached(**options)
    return cad, cad.data_parallel(model, distributed_optimizer=distributed_optimizer), cad.plan_step(documents)


def _trained(cad: Any, ddp: Any, step: Any) -> str:
    from megatron_patches.training.training_step import summed_loss_step

    return _said(cad.forward_backward, step, summed_loss_step, ddp)


def _gradients(ddp: Any) -> torch.Tensor:
    return torch.cat([weight.main_grad.flatten().clone() for weight in ddp.parameters()])


def _set(of: str, name: str, value: Any) -> Callable[[Any], Callable[[], None]]:
    """A change of a part of a model, which returns how it is undone."""

    def change(gpt: Any) -> Callable[[], None]:
        part = gpt.get_submodule(of) if of != "config" else gpt.config
        before = getattr(part, name)
        setattr(part, name, value(before) if callable(value) and of != "config" else value)
        return lambda: setattr(part, name, before)

    return change


def _hook(of: str, kind: str) -> Callable[[Any], Callable[[], None]]:
    def change(gpt: Any) -> Callable[[], None]:
        part = gpt.get_parameter(of) if of.endswith("weight") else gpt.get_submodule(of)
        undo: Callable[[], None] = getattr(part, f"register_{kind}")(lambda *_: None).remove
        return undo

    return change


def _compiled(part: Any) -> Callable[[], None]:
    with patch("torch.compile", lambda call, **_: call):  # the real one imports for seconds, and nothing is called
        part.compile()
    return partial(setattr, part, "_compiled_call_impl", None)


def _own_forward(part: Any) -> Callable[[], None]:
    part.forward = part.forward
    return partial(delattr, part, "forward")


LAYER = "decoder.layers.0"
CHANGES: dict[str, Callable[[Any], Callable[[], None]]] = {
    "scale": _set("config", "softmax_scale", 0.5),
    "activation": _set("config", "activation_func", torch.nn.functional.gelu),
    "recomputation": _set("config", "recompute_method", "block"),
    "module": _set(LAYER, "mlp", torch.nn.Sequential),
    "class": _set(f"{LAYER}.mlp.linear_fc1", "__class__", lambda kind: type("Own", (kind,), {})),
    "hook on a layer": _hook("decoder.layers.1", "forward_hook"),
    "hook on attention": _hook(f"{LAYER}.self_attention", "forward_pre_hook"),
    "hook on a gradient": _hook(f"{LAYER}.mlp.linear_fc1.weight", "hook"),
    "hook after it": _hook("output_layer.weight", "post_accumulate_grad_hook"),
    "compiled layer": lambda gpt: _compiled(gpt.get_submodule(LAYER)),
    "own forward": lambda gpt: _own_forward(gpt.get_submodule(f"{LAYER}.self_attention.core_attention")),
    "hook on an MLP": _hook(f"{LAYER}.mlp", "forward_hook"),
    "hook on a norm's gradient": _hook("decoder.final_layernorm.weight", "hook"),
    "another head": lambda gpt: (gpt.add_module("head", torch.nn.Identity()), partial(delattr, gpt, "head"))[1],
}


def _in_autocast(batches: Any, model: Any) -> Any:
    from megatron_patches.training.training_step import summed_loss_step

    with torch.autocast("cpu", dtype=torch.bfloat16):
        return summed_loss_step(batches, model)


def _changed() -> dict[str, str]:
    """What is said of training after each change to a model that was wrapped."""
    cad, ddp, step = _wrapped()
    said = {}
    for name, change in CHANGES.items():
        undo = change(ddp.module)
        said[name] = _trained(cad, ddp, step)
        undo()
    said["all undone"] = _trained(cad, ddp, step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        said["autocast"] = _trained(cad, ddp, step)
    with torch.inference_mode():
        said["inference"] = _trained(cad, ddp, step)
    for check_nan in (True, False):
        with torch.autograd.set_detect_anomaly(True, check_nan):
            said[f"anomaly {check_nan}"] = _trained(cad, ddp, step)
    said["autocast inside"] = _said(cad.forward_backward, step, _in_autocast, ddp)
    said["documents"] = _trained(cad, ddp, step.documents)
    ddp.module.output_layer.weight.requires_grad_(False)
    said["frozen"] = _trained(cad, ddp, step)
    cad, model, documents = _attached()
    model.output_layer.weight.requires_grad_(False)
    ddp, step = cad.data_parallel(model), cad.plan_step(documents)
    said["frozen before"] = _trained(cad, ddp, step)
    model.output_layer.weight.requires_grad_(True)
    said["set free"] = _trained(cad, ddp, step)
    cad, ddp, step = _wrapped(disaggregate=False)
    ddp.module.config.softmax_scale = 0.5
    said["scale at home"] = _trained(cad, ddp, step)
    cad, model, _ = _attached()
    said["cast"] = _said(cad.data_parallel, model.bfloat16())
    cad, model, _ = _attached(fields={"add_qkv_bias": True})
    model.decoder.layers[0].self_attention.linear_qkv.weight.requires_grad_(False)
    said["bias alone"] = _said(cad.data_parallel, model)
    cad, model, _ = _attached()
    model.output_layer.weight.requires_grad_(cad.rank == 0)
    said["frozen on one rank"] = _said(cad.data_parallel, model)
    said["elsewhere"] = _said(cad.data_parallel, model.float().to("meta"))
    cad, ddp, step = _wrapped(distributed_optimizer=True)
    weight = ddp.module.decoder.final_layernorm.weight
    weight.data = weight.data.clone()
    said["memory"] = _trained(cad, ddp, step)
    norm = ddp.module.decoder.final_layernorm
    norm.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
    said["replaced by a frozen one"] = _trained(cad, ddp, step)
    return said


def _called() -> dict[str, str]:
    """What is said of a model that is called with arguments of another batch, or with some that would be ignored."""
    cad, ddp, step = _wrapped()
    one, other = step.batches[0], cad.plan_step([[np.arange(40), np.arange(40)]]).batches[0]
    calls: dict[str, dict[str, Any]] = {
        "attention": {"attention_mask": other.attention},
        "labels": {"labels": other.labels},
        "ids": {"input_ids": one.tokens[0]},
        "inference": {"inference_context": object()},
        "mask": {"labels": one.labels, "loss_mask": one.loss_mask.float().requires_grad_(), "summed_loss": True},
        "processor": {"labels": one.labels, "log_probabilities": True, "output_processor": print},
    }
    usual = {"input_ids": one.tokens, "position_ids": one.positions, "attention_mask": one.attention}
    said = {name: _said(ddp, **usual | call) for name, call in calls.items()}
    said["labels by place"] = _said(ddp, *usual.values(), None, other.labels)
    return said | {"by place": _said(ddp, *usual.values(), None, None, object())}


def _hooked_experts() -> dict[str, tuple[str, bool]]:
    """What is said of a hook on each part of a layer with experts, and whether it ran."""
    fields = {"num_moe_experts": 2, "moe_ffn_hidden_size": 48, "moe_token_dispatcher_type": "alltoall"}
    cad, ddp, step = _wrapped(fields=fields)
    found = {}
    for part in (
        "mlp",
        "mlp.experts",
        "mlp.experts.local_experts.0",
        "mlp.router",
        "mlp.experts.local_experts.1.linear_fc2",
    ):
        ran: list[Any] = []
        hook = ddp.module.get_submodule(f"{LAYER}.{part}").register_forward_hook(lambda *_, ran=ran: ran.append(0))
        found[part] = _trained(cad, ddp, step), bool(ran)
        hook.remove()
    return found


def _trained_after_evaluation() -> str:
    """What is said of training experts whose first evaluation was inside of inference mode."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron_patches.training.training_step import summed_loss_step

    MoEAuxLossAutoScaler.main_loss_backward_scale = None
    fields = {"num_moe_experts": 2, "moe_ffn_hidden_size": 48, "moe_token_dispatcher_type": "alltoall"}
    cad, ddp, step = _wrapped(fields=fields)
    with torch.inference_mode():
        cad.forward_backward(step, summed_loss_step, ddp, forward_only=True)
    assert MoEAuxLossAutoScaler.main_loss_backward_scale.is_inference()
    return _trained(cad, ddp, step)


def _biases_of_experts(failures: int) -> torch.Tensor:
    """The biases of routers' scores after a step, before which steps on other documents failed."""
    from megatron_patches.training.training_step import summed_loss_step

    def fails(batches: Any, model: Any) -> Any:
        summed_loss_step(batches, model)
        raise SupportError("the user's own")

    fields = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_token_dispatcher_type": "alltoall"}
    fields |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    cad, ddp, _ = _wrapped(fields=fields)
    other, step = cad.plan_step([[np.full(110, 5)]]), cad.plan_step([[np.arange(9)]])
    for _ in range(failures):
        assert _said(cad.forward_backward, other, fails, ddp) == "the user's own"
    assert _trained(cad, ddp, step) == ""
    return torch.cat([each for name, each in ddp.named_buffers() if name.endswith("expert_bias")])


def _hooked_at_home(multiplier: float) -> dict[str, tuple[str, bool]]:
    """What is said of a hook on each part of a layer, and whether it ran. With 1.0 the layers are Megatron's own."""
    from distca import ModelOptions

    cad, ddp, step = _wrapped(disaggregate=False, model_options=ModelOptions(residual_multiplier=multiplier))
    found = {}
    for part in ("", ".self_attention", ".self_attention.core_attention"):
        ran: list[Any] = []
        hook = ddp.module.get_submodule(LAYER + part).register_forward_hook(lambda *_, ran=ran: ran.append(0))
        found[part] = _trained(cad, ddp, step), bool(ran)
        hook.remove()
    return found


def _mixed() -> dict[str, Any]:
    """Steps and models of another CAD than the one that runs them, or that no CAD wrapped."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from distca import CAD
    from megatron_patches.model.model_options import ModelOptions, Rotary

    (cad, ddp, step), (resends, resending, resent) = _wrapped(), _wrapped(backward="resend")
    whole = _wrapped(ping_pong=False)[2]
    said = {
        "resent": _trained(cad, ddp, resent),
        "kept": _trained(resends, resending, step),
        "whole": _trained(cad, ddp, whole),
        "model": _trained(cad, resending, step),
        "own": _trained(cad, ddp, step),
        "of a CAD alike": _trained(cad, ddp, _wrapped()[2]),
    }
    config, shape = _config()
    other, _ = _config()
    other.softmax_scale = 0.5
    cad = CAD(config, tokens_per_rank=60)
    said["configuration"] = _said(cad.attach, _built(cad, other, shape.vocabulary))
    rotations = (Rotary(base=500.0),) * config.num_layers
    rotated = CAD(config, tokens_per_rank=60, model_options=ModelOptions(rotations=rotations))
    for name, more in {"fewer layers": -1, "more layers": 1}.items():
        other, _ = _config(num_layers=config.num_layers + more)
        said[name] = _said(rotated.attach, _built(rotated, other, shape.vocabulary))
    early = cad.plan_step([[np.arange(5)]])
    large = cad.attach(_built(cad, config, 100))
    said["early"] = _trained(cad, cad.data_parallel(large), early)
    of_large = cad.plan_step([[np.arange(5)]])
    small = cad.data_parallel(cad.attach(_built(cad, config, 50)))
    said["large"] = _trained(cad, small, of_large)
    said["both"] = _said(cad.plan_step, [[np.full(5, 60)]])
    by_hand = DistributedDataParallel(config, DistributedDataParallelConfig(), cad.attach(_built(cad, config, 50)))
    said["wrapped by hand"] = _trained(cad, by_hand, of_large)
    return said


def _failing(ddp: Any, at: int) -> Any:
    """A hook that raises in backward, when the layer's gradient comes by for the time ``at``."""
    seen = [0]

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
            seen[0] += 1
            if seen[0] == at:
                raise SupportError("the user's own")
            return gradient

    mlp = ddp.module.decoder.layers[0].mlp
    return mlp.register_forward_hook(lambda _, __, output: (Fails.apply(output[0]), output[1]))


def _harmless() -> dict[str, list[tuple[str, bool]]]:
    """What is said of steps, and whether gradients are those of an undisturbed model."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    found: dict[str, list[tuple[str, bool]]] = {}

    def note(name: str, cad: Any, ddp: Any, step: Any, usual: torch.Tensor) -> None:
        said = _trained(cad, ddp, step)
        found.setdefault(name, []).append((said, torch.equal(_gradients(ddp), usual)))

    for name, options in {"recomputed": {}, "recomputed at home": {"disaggregate": False}}.items():
        cad, ddp, step = _wrapped(recompute="all", **options)
        assert _trained(cad, ddp, step) == ""
        usual = _gradients(ddp)
        cad, ddp, step = _wrapped(recompute="all", **options)
        for mode in (False, True, False):
            ddp.train(mode)
            note(name, cad, ddp, step, usual)

    with torch.no_grad():  # attached and wrapped
        cad, ddp, step = _wrapped()
    assert _trained(cad, ddp, step) == ""
    usual = _gradients(ddp)
    for at in (1, 3):
        cad, ddp, step = _wrapped()
        hook = _failing(ddp, at)
        assert _trained(cad, ddp, step) == "the user's own"
        hook.remove()
        note("failed", cad, ddp, step, usual)
        hook = _failing(ddp, at)
        assert _trained(cad, ddp, step) == "the user's own"
        hook.remove()
        note("failed", cad, ddp, step, usual)

    cad, ddp, step = _wrapped()
    settings = OptimizerConfig(lr=0.0, weight_decay=0.0, use_distributed_optimizer=False, params_dtype=torch.float32)
    optimizer = get_megatron_optimizer(settings, [ddp])
    for _ in range(3):  # no optimizer.zero_grad()
        note("not zeroed", cad, ddp, step, usual)
        optimizer.step()

    for default in (torch.bfloat16, torch.float64, torch.float32):
        torch.set_default_dtype(default)
        note("default dtype", cad, ddp, step, usual)
    return found


def _uses() -> list[str]:
    """What is said of a step that runs the model twice, after one that ran it once, where every run is backward's own;
    then with the reduction after backward."""
    from megatron_patches.training.training_step import summed_loss_step

    cad, ddp, _ = _wrapped(recompute="all")
    step = cad.plan_step([[np.arange(9)]])

    def twice(batches: Any, model: Any) -> Any:
        batch = next(batches)
        (one, loss), (other, _) = (summed_loss_step(iter((batch,)), model) for _ in range(2))
        return one + other, loss

    assert _trained(cad, ddp, step) == ""
    said = [_said(cad.forward_backward, step, twice, ddp)]
    ddp.ddp_config.overlap_grad_reduce = False
    return [*said, _said(cad.forward_backward, step, twice, ddp)]


def _unlike() -> list[str]:
    import torch.distributed as dist

    from distca import CAD

    said, rank, functional = [], dist.get_rank(), torch.nn.functional
    unlike = {
        "softmax_scale": (0.5, 1.5),
        "no_rope_freq": ([0, 1], [1, 0]),
        "activation_func": (functional.silu, functional.gelu),
    }
    for name, values in unlike.items():
        config, _ = _config()
        setattr(config, name, values[rank])
        said.append(_said(CAD, config, tokens_per_rank=60))
    options: Any = ({}, {"recompute": "all"})
    return [*said, _said(CAD, _config()[0], tokens_per_rank=60, **options[rank])]


def _all() -> dict[str, Any]:
    small_cases.on_cpu()
    from distca import CAD
    from megatron_patches.ranks.groups import initialize_model_parallel

    initialize_model_parallel(1, 1, 1)
    levels = ({}, {"disaggregate": False}, {"backward": "keep"})
    return {
        "changed": _changed(),
        "called": _called(),
        "hooked": {multiplier: _hooked_at_home(multiplier) for multiplier in (1.0, 0.5)},
        "experts": _hooked_experts(),
        "after evaluation": _trained_after_evaluation(),
        "biases": [_biases_of_experts(failures) for failures in (0, 3)],
        "mixed": _mixed(),
        "harmless": _harmless(),
        "uses": _uses(),
        "unlike": _unlike(),
        "level": [_said(CAD, _config()[0], tokens_per_rank=60, level="time", **options) for options in levels],
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(2, _all)


def test_what_changed_after_attach_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["changed"]
        for name in ("scale", "scale at home"):
            assert said[name].startswith("softmax_scale of the model's configuration is 0.5, but was None when CAD att")
        assert said["activation"].startswith("activation_func of the model's configuration is ")
        assert said["recomputation"].startswith("recompute_method of the model's configuration is 'block', but was")
        assert said["frozen"].startswith("output_layer.weight was frozen after CAD.data_parallel")
        assert said["set free"].startswith("output_layer.weight was added, replaced or unfrozen after CAD")
        assert said["module"].startswith("decoder.layers.0.mlp of the model was replaced, removed or given anoth")
        assert said["class"].startswith(
            "decoder.layers.0.mlp.linear_fc1 of the model was replaced, removed or given anoth"
        )
        assert said["hook on a layer"].startswith("decoder.layers.1 has a hook, which would never run")
        assert said["hook on attention"].startswith("decoder.layers.0.self_attention has a hook, which would never")
        fc1 = "decoder.layers.0.mlp.linear_fc1.weight has a hook on its gradient, which would see memory that nobody"
        assert said["compiled layer"].startswith(f"{LAYER} has a compiled forward, which would never run")
        own = f"{LAYER}.self_attention.core_attention has a forward of its own, which would never run"
        assert said["own forward"].startswith(own)
        assert said["hook on a gradient"].startswith(fc1)
        assert said["hook after it"].startswith("output_layer.weight has a hook on its gradient")
        assert said["cast"].startswith(
            "embedding.word_embeddings.weight has type torch.bfloat16, but the configuration"
        )
        assert said["elsewhere"].startswith("embedding.word_embeddings.weight is on meta, but CAD is for cpu")
        qkv = "decoder.layers.0.self_attention.linear_qkv"
        assert said["bias alone"].startswith(f"{qkv}.bias is trained and {qkv}.weight is frozen, but Megatron")
        assert said["inference"].startswith("torch.inference_mode is on, in which nothing can be trained")
        assert said["anomaly True"].startswith("torch.autograd.set_detect_anomaly is on, which would find nan in dummy")
        assert said["anomaly False"] == ""
        assert said["frozen on one rank"].startswith(
            "output_layer.weight is frozen on some ranks, and trained on others"
        )
        for name in ("autocast", "autocast inside"):
            assert said[name].startswith("The model was called inside of torch.autocast, but activations have")
        assert said["documents"] == (
            "The step is a StepDocuments; give a step that CAD.plan_ahead or CAD.plan_step returned."
        )
        gone = said["replaced by a frozen one"]
        assert gone.startswith("A weight of shape [") and "was removed, or replaced by a frozen one, after CAD." in gone
        assert said["memory"].startswith("decoder.final_layernorm.weight has other memory than CAD.data_parallel gave")


def test_arguments_of_another_batch_or_without_effect_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["called"]
        assert said["attention"].startswith("The model was called with input_ids of shape [1, ")
        for name in ("labels", "labels by place"):
            assert said[name].startswith("The model was called with labels of shape [1, 40], and the batch of its `att")
        assert "pass the tensors of one batch as they are" in said["ids"]
        for name in ("inference", "by place"):
            assert said[name].startswith("The model was called with inference_context, which would be ignored")
        assert said["mask"].startswith("loss_mask requires a gradient, which summed_loss would not compute: pass loss")
        assert said["processor"].startswith("The model was called with output_processor, which summed_loss and log_pro")


def test_experts_train_after_a_first_evaluation_in_inference_mode(found: list[dict[str, Any]]) -> None:
    assert [rank["after evaluation"] for rank in found] == ["", ""]


def test_rows_of_a_failed_step_change_no_bias_of_experts(found: list[dict[str, Any]]) -> None:
    for usual, after_failures in (rank["biases"] for rank in found):
        assert usual.any() and torch.equal(after_failures, usual)


def test_a_hook_at_home_runs_or_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        megatrons, own = rank["hooked"][1.0], rank["hooked"][0.5]
        said, ran = own.pop(".self_attention")
        assert said.startswith(f"{LAYER}.self_attention has a hook, which would never run") and not ran
        assert len(megatrons) == 3 and len(own) == 2
        assert {*megatrons.values(), *own.values()} == {("", True)}


def test_a_hook_in_a_layer_with_experts_runs_or_is_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for part, (said, ran) in rank["experts"].items():
            refused = said.startswith(f"{LAYER}.{part} has a hook, which would never run")
            assert refused == (part in ("mlp", "mlp.experts", "mlp.experts.local_experts.0")) and ran == (not said)


@pytest.mark.parametrize(
    "name", ["hook on an MLP", "hook on a norm's gradient", "another head", "all undone", "frozen before"]
)
def test_what_does_no_harm_is_served(found: list[dict[str, Any]], name: str) -> None:
    assert [rank["changed"][name] for rank in found] == ["", ""]


def test_steps_and_models_of_another_cad_are_refused_where_something_differs(found: list[dict[str, Any]]) -> None:
    for rank in found:
        said = rank["mixed"]
        for name, setting in {"resent": "backward", "kept": "backward", "whole": "ping_pong"}.items():
            assert said[name].startswith(f"The step was planned by a CAD whose `{setting}` is not that of the model's")
        assert said["model"] == "The model was attached by another CAD: run it with the CAD that attached it."
        assert said["own"] == said["of a CAD alike"] == ""
        assert said["configuration"].startswith("The model was built with softmax_scale 0.5, but the CAD with None")
        for name in ("fewer layers", "more layers"):
            assert said[name].startswith("The model was built with num_layers ")
        assert said["early"].startswith("The step was planned before any model was attached, and the model has 100")
        assert said["large"].startswith("The step was planned for 100 token ids, and the model has 50")
        assert said["wrapped by hand"].endswith(
            "would not be reduced and divided: train what CAD.data_parallel returns."
        )
        assert "has token 60, but the model has ids 0 to 49" in said["both"], "of two models the smaller one counts"


@pytest.mark.parametrize("name", ["recomputed", "recomputed at home", "failed", "not zeroed", "default dtype"])
def test_gradients_are_those_of_an_undisturbed_model(found: list[dict[str, Any]], name: str) -> None:
    """In eval() and train() by turns, after a backward that failed, where nobody zeroed ``grad``, and with other
    default dtypes of torch."""
    for rank in found:
        assert len(rank["harmless"][name]) >= 3
        assert all(each == ("", True) for each in rank["harmless"][name]), rank["harmless"][name]


def test_gradients_that_come_too_late_to_be_reduced_are_refused(found: list[dict[str, Any]]) -> None:
    for rank in found:
        refused, served = rank["uses"]
        assert "got 4 gradients in the last micro-batch of this step, and 2 are due as in the first step" in refused
        assert served == ""


def test_ranks_with_unlike_configurations_all_say_so(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["unlike"] == [
            f"{what}: give every rank the same."
            for what in (
                "softmax_scale is 1.5 on rank 1 and 0.5 on rank 0",
                "no_rope_freq is [1, 0] on rank 1 and [0, 1] on rank 0",
                "activation_func is gelu on rank 1 and silu on rank 0",
                "recompute is 'all' on rank 1 and 'none' on rank 0",
            )
        ]


def test_time_is_levelled_with_stages_only(found: list[dict[str, Any]]) -> None:
    for rank in found:
        no_stages, at_home, keep = rank["level"]
        assert no_stages == keep
        assert keep == (
            "level is 'time', but there are no pipeline stages, servers or speeds, so no rank is ever idle: set level "
            "to 'auto'."
        )
        assert at_home == "level is 'time', but disaggregate is False: set level to 'auto'."
