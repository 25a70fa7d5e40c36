"""A Transformer Engine that is here but cannot be used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distca.errors import SupportError
from megatron_patches.te import choice, installed


def install(folder: Path, version: str, *, torch_part: bool) -> None:
    package = folder / "transformer_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('no driver')\n")
    for name in ("transformer_engine", *(["transformer_engine_torch"] if torch_part else [])):
        told = folder / f"{name}-{version}.dist-info"
        told.mkdir()
        (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "torch_part", "said"),
    [
        ("2.11.0", True, "None"),
        ("2.20.2", True, "None"),
        ("2.21.0", True, "Transformer Engine is 2.21.0; versions >=2.11,<2.21 are supported"),
        ("2.10.0", True, "Transformer Engine is 2.10.0; versions >=2.11,<2.21 are supported"),
        (
            "2.11.0",
            False,
            "Transformer Engine 2.11.0 is installed without its part for PyTorch, transformer_engine_torch",
        ),
        ("2.9.0", True, "Transformer Engine is 2.9.0; versions >=2.11,<2.21 are supported"),
        ("3.0.0", True, "Transformer Engine is 3.0.0; versions >=2.11,<2.21 are supported"),
    ],
)
def test_which_one_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, torch_part: bool, said: str
) -> None:
    install(tmp_path, version, torch_part=torch_part)
    monkeypatch.syspath_prepend(tmp_path)
    assert str(installed.why_not_supported()) == said


def test_none_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "installed_version", lambda: None)
    assert installed.why_not_supported() == "Transformer Engine is not installed; versions >=2.11,<2.21 are supported"


def _config(**fields: object) -> object:
    from megatron.core.transformer import TransformerConfig

    from tests.megatron_patches.support.cases import LLAMA

    return TransformerConfig(**LLAMA, params_dtype=torch.bfloat16, bf16=True, **fields)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_local_layers_where_it_cannot_be_used() -> None:
    assert not choice.use_te("auto", _config(), CPU)
    assert not choice.use_te("local", _config(), CPU)


def test_narrow_moments_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choice.check_moments(torch.float32, CPU)
    with pytest.raises(
        SupportError, match=r"`moments` is bfloat16, which needs Transformer Engine's Adam, but .* GPUs"
    ):
        choice.check_moments(torch.bfloat16, CPU)
    monkeypatch.setattr(choice, "why_not_supported", lambda: "it is not installed")
    with pytest.raises(SupportError, match="Adam, but it is not installed: set `moments` to float32"):
        choice.check_moments(torch.bfloat16, GPU)
    monkeypatch.setattr(choice, "why_not_supported", lambda: None)
    choice.check_moments(torch.bfloat16, GPU)


@pytest.mark.parametrize(
    ("linears", "fields", "device", "said"),
    [
        ("te", {}, CPU, "`linears` is te, but Transformer Engine computes on GPUs only"),
        ("auto", {"fp8": "hybrid"}, CPU, "`fp8_recipe` is `delayed`, but Transformer Engine computes on GPUs only"),
        ("local", {"fp8": "hybrid"}, GPU, "`fp8_recipe` is `delayed`, but `linears` is local, and Megatron-Core's own"),
        (
            "auto",
            {"fp8": "e4m3", "fp8_recipe": "blockwise"},
            GPU,
            "`fp8_recipe` is `blockwise`, but A100 has compute cap",
        ),
    ],
)
def test_what_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, linears: choice.Linears, fields: dict[str, str], device: torch.device, said: str
) -> None:
    monkeypatch.setattr(choice, "why_not_supported", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(SupportError) as refused:
        choice.use_te(linears, _config(**fields), device)
    assert str(refused.value).startswith(said)


def test_fp8_weights_are_drawn_where_they_are_and_their_main_weights_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_patches.support.trained_weights import check_fp8_weights

    for name in ("why_not_te", "why_not_fp8"):
        monkeypatch.setattr(choice, name, lambda *_: None)
    config: Any = _config(fp8="hybrid", fp8_param=True)
    check_fp8_weights(config, distributed_optimizer=True)
    with pytest.raises(
        SupportError, match=r"fp8_param is True, but Megatron keeps .* set distributed_optimizer to True"
    ):
        check_fp8_weights(config, distributed_optimizer=False)
    delayed: Any = _config(fp8="hybrid", fp8_recipe="delayed", fp8_param=True, tp_only_amax_red=True)
    delayed.use_cpu_initialization = False
    with pytest.raises(SupportError, match="tp_only_amax_red is True, so data-parallel ranks have different scales"):
        choice.use_te("auto", delayed, GPU)
    config.use_cpu_initialization = True
    with pytest.raises(SupportError, match="fp8_param is True, but use_cpu_initialization draws weights after"):
        choice.use_te("auto", config, GPU)


def test_widths_that_do_not_fit_are_refused_in_the_words_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("why_not_te", "why_not_fp8"):
        monkeypatch.setattr(choice, name, lambda *_: None)
    monkeypatch.setattr(choice.parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)
    config: Any = _config(fp8="hybrid", fp8_recipe="tensorwise", kv_channels=6)
    said = r"^`fp8_recipe` is `tensorwise`, but .* is 72, .* or tensor_model_parallel_size, or set fp8 to None\.$"
    with pytest.raises(SupportError, match=said):
        choice.use_te("auto", config, GPU)


def test_a_transformer_engine_spec_is_refused_with_experts_because_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "why_not_te", lambda *_: None)
    config: Any = _config()
    config.num_moe_experts = 4
    with pytest.raises(SupportError, match="linear layers, but with experts or latent attention all linear layers are"):
        choice.refuse_te_spec(config, GPU)
