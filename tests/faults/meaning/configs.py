"""Changed configurations: several fields of a config.json at once, within and beyond what its class takes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.folder_fields import MOVES, bases
from distca.models.families import COMPOSITES, FAMILIES

_ODD = 0.08
"""Share of the changes whose value is one that no class expects, or whose field is another model's."""
_SOUND: dict[str, tuple[Any, ...]] = {
    "hidden_size": (16, 32, 64),
    "intermediate_size": (40, 96),
    "num_hidden_layers": (1, 3, 4),
    "num_attention_heads": (2, 8),
    "num_key_value_heads": (1, 2, 4, None),
    "head_dim": (4, 8, 16, None),
    "vocab_size": (61, 100),
    "max_position_embeddings": (8, 39, 40, 41, 4096),
    "rms_norm_eps": (1e-8, 1e-2, 1.0),
    "tie_word_embeddings": (True, False),
    "rope_theta": (1.5, 500, 1e6),
    "sliding_window": (1, 2, 8, 39, 40, 41, None),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 28),
    "original_max_position_embeddings": (8, 16, 128),
    "partial_rotary_factor": (1.0,),
    "dtype": ("float32", "bfloat16"),
    "hidden_act": ("silu", "swish"),
    "pad_token_id": (None, 0, 5),
    "architectures": (None,),
    "use_cache": (False,),
}
_SCALING: dict[str, tuple[Any, ...]] = {
    "rope_theta": (2.0, 500.0, 1e6),
    "factor": (1.0, 2.0, 4, 8.0, 40.0, 0.5),
    "original_max_position_embeddings": (8, 16, 64, 128),
    "low_freq_factor": (1.0, 2.0),
    "high_freq_factor": (4.0, 1.5),
    "beta_fast": (32.0, 4.0, 1),
    "beta_slow": (1.0, 0.25),
    "attention_factor": (1.0, 1.3, 0.5),
    "mscale": (1.0, 0.707),
    "mscale_all_dim": (1.0, 0.5),
    "truncate": (True, False),
    "partial_rotary_factor": (1.0, 1.0, 0.5),
}
_KINDS = (*("default", "linear", "dynamic", "llama3", "yarn") * 3, "longrope", "proportional")
_NEEDED = {
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "linear": ("factor",),
    "dynamic": ("factor",),
}


def changed_configs(cases: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and configurations, of all served model types in turn."""
    kinds = bases()
    for number in range(cases):
        kind = list(kinds)[number % len(kinds)]
        randomly = random.Random(f"{seed} config {number}")
        config = dict(kinds[kind])
        inside = COMPOSITES[kind].text if kind in COMPOSITES else None
        for _ in range(randomly.choice((1, 2, 2, 3, 4))):
            if inside is not None and randomly.random() < 0.8:
                config[inside] = _moved(config[inside], randomly)
            else:
                config = _moved(config, randomly)
        yield f"{number}, {kind}", config


def _moved(config: dict[str, Any], randomly: random.Random) -> dict[str, Any]:
    """The same with another value of a field, or without a field."""
    drawn = randomly.random()
    if drawn < _ODD:
        field = randomly.choice(list(MOVES))
        return config | {field: randomly.choice(MOVES[field])}
    if drawn < 0.4:
        there = next((each for each in ("rope_parameters", "rope_scaling") if each in config), None)
        if there is None or randomly.random() < 0.1:
            there = randomly.choice(("rope_parameters", "rope_scaling"))
        return config | {there: _scaling(randomly)}
    family = FAMILIES.get(config.get("model_type", "mistral"))  # none for a model of several parts
    if drawn < 0.55 and family is not None and "layer_types" in family.fields:
        layers = config.get("num_hidden_layers", 2)
        kinds = randomly.choice((("full_attention",), ("sliding_attention",), ("full_attention", "sliding_attention")))
        return config | {"layer_types": [randomly.choice(kinds) for _ in range(int(layers))]}
    if drawn < 0.6:
        gone = randomly.choice([name for name in config if name not in ("model_type", "text_config")])
        return {name: value for name, value in config.items() if name != gone}
    field = randomly.choice(list(_SOUND))
    return config | {field: randomly.choice(_SOUND[field])}


def _scaling(randomly: random.Random) -> dict[str, Any]:
    kind = randomly.choice(_KINDS)
    chosen = {*_NEEDED.get(kind, ()), *randomly.sample(list(_SCALING), randomly.randint(0, 3))}
    if randomly.random() < 0.1:
        chosen.discard(randomly.choice(list(_SCALING)))
    name = "rope_type" if randomly.random() < 0.85 else "type"
    return {name: kind} | {each: randomly.choice(_SCALING[each]) for each in _SCALING if each in chosen}
