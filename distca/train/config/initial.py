"""The settings that a Hugging Face folder brings along: the model's shape, and its tokenizer."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from distca.models.description import ModelDescription
from distca.train.config.schema import ModelConfig


def model_config(model: ModelDescription) -> ModelConfig:
    """The shape of a described model."""
    values: dict[str, Any] = {
        item.name: getattr(model, item.name) for item in fields(ModelConfig) if hasattr(model, item.name)
    }
    return ModelConfig(**values)
