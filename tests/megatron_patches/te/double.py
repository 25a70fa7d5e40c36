"""Stands for Transformer Engine on CPUs: its linear layer as far as wiring goes, with FP8 played by rounding.

What it does as Transformer Engine does, 2.11 or 2.20: a weight's quantised copy is kept until it is told that the
weights have changed; the product of a first micro-batch overwrites the weight's gradient, others add to it; FP8 is on
while a state says so; delayed scaling notes largest values, and scales by them after the update. 2.20 holds what was
registered for that update in a state of its own. Every other name that Megatron-Core imports is an empty class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.megatron_patches.te import fp8_tensor

NAME = "transformer_engine"
ABSENT = (f"{NAME}.pytorch.optimizers", f"{NAME}.pytorch.cpu_offload")


class Manager:
    """FP8GlobalStateManager."""

    state: tuple[Any, ...] = (False, False, None, None, False, False)
    autocast_arguments: dict[str, Any]
    quantization_state: SimpleNamespace
    delayed_layers: ClassVar[list[Linear]] = []
    updates: ClassVar[list[bool]] = []
    fp8_weights = False

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return bool(cls.state[0])

    @classmethod
    def get_autocast_state(cls) -> tuple[Any, ...]:
        return cls.state

    @classmethod
    def set_autocast_state(cls, state: tuple[Any, ...]) -> None:
        assert len(state) == 6
        cls.state = state

    @classmethod
    def get_unique_autocast_key(cls, recipe: Any, group: Any) -> str:
        return f"{recipe}:{hash(group)}"

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool) -> None:
        cls.updates.append(forward)
        if not forward:
            return
        held = getattr(cls, "quantization_state", cls).autocast_arguments
        for layer in cls.delayed_layers:
            assert held[layer.key] == (layer.recipe, layer.fp8_group)
            dist.all_reduce(layer.largest, dist.ReduceOp.MAX, group=layer.fp8_group)
            layer.scale = torch.where(layer.largest > 0, 448 / layer.largest, layer.scale)
            layer.largest = torch.zeros(())

    @classmethod
    def reset(cls) -> None:
        cls.delayed_layers.clear()
        cls.of_version(hasattr(cls, "quantization_state"))

    @classmethod
    def of_version(cls, newer: bool) -> None:
        """Hold what is registered as 2.20 does, or as 2.11 does."""
        if newer:
            cls.quantization_state = SimpleNamespace(autocast_arguments={})
        else:
            cls.autocast_arguments = {}


@contextmanager
def fp8_autocast(enabled: bool, fp8_recipe: Any, fp8_group: Any) -> Iterator[None]:
    before, Manager.state = Manager.state, (enabled, False, fp8_recipe, fp8_group, True, False)
    yield
    Manager.state = before


@contextmanager
def fp8_model_init(
    enabled: bool = True, recipe: Any = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    assert preserve_high_precision_init_val
    Manager.fp8_weights = enabled
    yield
    Manager.fp8_weights = False


class Recipe:
    def __init__(self, **given: Any) -> None:
        self.given = given

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)


class DelayedScaling(Recipe):
    pass


class Float8CurrentScaling(Recipe):
    pass


class Float8BlockScaling(Recipe):
    pass


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As an FP8 tensor of the same numbers and scale is."""
    numbers = (x.detach().float() * scale).to(torch.float8_e4m3fn)
    return (numbers.float() * (1 / scale)).to(x.dtype)


def current_scale(x: torch.Tensor) -> torch.Tensor:
    return fp8_tensor.scale_of(x.detach().abs().max())


def get_high_precision_init_val(weight: Any) -> Any:
    return getattr(weight, "_high_precision_init_val", None)


def clear_high_precision_init_val(weight: Any) -> None:
    if hasattr(weight, "_high_precision_init_val"):
        del weight._high_precision_init_val


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor, used: torch.Tensor, first: bool, fuse: bool) -> Any:
        ctx.save_for_backward(x, used)
        ctx.weight, ctx.first, ctx.fuse = weight, first, fuse
        plain = used.dequantize() if isinstance(used, fp8_tensor.Float8Tensor) else used
        return x @ plain.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, used = ctx.saved_tensors
        if isinstance(used, fp8_tensor.Float8Tensor):
            used.update_usage(columnwise_usage=True)
            assert used._transpose is not None
            columns = used._transpose.view(torch.float8_e4m3fn).float() * used._scale_inv
            used = columns.t().to(gradient.dtype)
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        if ctx.fuse:
            if ctx.first:
                ctx.weight.main_grad.zero_()
            ctx.weight.main_grad += of_weight
            ctx.weight.grad_added_to_main_grad = True
            of_weight = torch.empty_like(of_weight)
        return of_weight, gradient @ used, None, None, None


class Linear(torch.nn.Module):
    """transformer_engine.pytorch.Linear of one tensor-parallel rank."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        fuse_wgrad_accumulation: bool,
        params_dtype: torch.dtype,
        bias: bool,
        return_bias: bool,
        parallel_mode: str,
        tp_size: int,
        init_method: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        assert tp_size == 1 and not bias
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.fuse, self.parallel_mode, self.tp_size = fuse_wgrad_accumulation, parallel_mode, tp_size
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype))
        self.bias = torch.Tensor()
        init_method(self.weight)
        if Manager.fp8_weights:
            drawn = self.weight.detach()
            self.weight = torch.nn.Parameter(fp8_tensor.Float8Tensor.of(drawn))
            self.weight._high_precision_init_val = drawn  # type: ignore[attr-defined]
            for method in (get_high_precision_init_val, clear_high_precision_init_val):
                setattr(self.weight, method.__name__, MethodType(method, self.weight))
        self._fp8_workspaces: dict[str, torch.Tensor] = {}
        self.fp8_meta: dict[str, Any] = {}
        self.scale, self.largest, self.fp8_group = torch.ones(()), torch.zeros(()), None
        self.quantised = 0
        self.save_original_input = False

    def forward(self, x: torch.Tensor, is_first_microbatch: bool | None = None) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if Manager.is_fp8_enabled():
            assert x.numel() // x.shape[-1] % 16 == 0 and x.shape[-1] % 16 == 0, x.shape
            _, _, recipe, group, _, _ = Manager.state
            if recipe.delayed() and self not in Manager.delayed_layers:
                self.fp8_group, self.recipe, self.key = group, recipe, Manager.get_unique_autocast_key(recipe, group)
                Manager.delayed_layers.append(self)
            if isinstance(weight, fp8_tensor.Float8Tensor):
                weight.update_usage(columnwise_usage=weight._quantizer.columnwise_usage or None)
            copy = None if is_first_microbatch in (None, True) else self._fp8_workspaces.get("weight")
            if isinstance(weight, fp8_tensor.Float8Tensor):
                copy = weight
            elif copy is None:
                copy = rounded(weight, current_scale(weight))
                self.quantised += 1
                if is_first_microbatch is not None:
                    self._fp8_workspaces["weight"] = copy
            weight = copy
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
            rows = rounded(x, self.scale if recipe.delayed() else current_scale(x))
            x = x + (rows - x).detach()
        return _Product.apply(self.weight, x, weight, bool(is_first_microbatch), self.fuse)

    def get_extra_state(self) -> torch.Tensor:
        raise AssertionError("a pickle")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (torch.nn.Module,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if (name == NAME or name.startswith(f"{NAME}.")) and name not in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install(version: str = "2.11.0") -> None:
    """Put it in the place of Transformer Engine; to be called before Megatron-Core is imported."""
    Manager.of_version(version == "2.20.2")
    assert not any(name.startswith("megatron.core") for name in sys.modules)
    sys.meta_path.insert(0, _Finder())
    import transformer_engine
    import transformer_engine.common.recipe as recipe
    import transformer_engine.pytorch as te
    import transformer_engine.pytorch.distributed
    import transformer_engine.pytorch.fp8
    import transformer_engine.pytorch.module.base as base
    import transformer_engine.pytorch.ops
    import transformer_engine.pytorch.quantization
    import transformer_engine.pytorch.tensor as tensors
    import transformer_engine.pytorch.tensor.float8_tensor as float8
    import transformer_engine.pytorch.tensor.utils as utils

    transformer_engine.__version__ = version
    te.Linear, te.fp8_autocast, te.fp8_model_init = Linear, fp8_autocast, fp8_model_init
    tensors.QuantizedTensor = fp8_tensor.Float8Tensor
    float8.Float8Quantizer = fp8_tensor.Float8Quantizer
    for function in (
        fp8_tensor.replace_raw_data,
        fp8_tensor.cast_master_weights_to_fp8,
        fp8_tensor.post_all_gather_processing,
    ):
        setattr(utils, function.__name__, function)
    base.get_dummy_wgrad = lambda shape, dtype, zero=False: torch.zeros(shape, dtype=dtype)
    recipe.Format = type("Format", (), {"E4M3": 1, "HYBRID": 2})
    recipe.DelayedScaling, recipe.Float8CurrentScaling = DelayedScaling, Float8CurrentScaling
    recipe.Float8BlockScaling = Float8BlockScaling
    for name in ("fp8", "quantization"):
        sys.modules[f"{NAME}.pytorch.{name}"].FP8GlobalStateManager = Manager  # type: ignore[attr-defined]
