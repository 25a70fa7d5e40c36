"""Parameters of lower layers get the names of a run's settings; nothing else in backquotes changes."""

import ast
import re
from pathlib import Path

from distca.train.config.cli import known_settings
from distca.train.config.names import SETTINGS, with_settings

ROOT = Path(__file__).parents[3]


def test_parameters_become_settings() -> None:
    assert with_settings("`fp8` is current") == "train.fp8 is current"
    assert with_settings("`fp8_recipe` is `tensorwise`: leave `fp8` out.") == (
        "train.fp8 is current: leave train.fp8 out."
    )
    said = "`transport` is 'x'; set `transport` to auto, or run `distca profile` or `unknown`."
    assert with_settings(said) == (
        "cad.transport is 'x'; set cad.transport to auto, or run `distca profile` or `unknown`."
    )


def test_every_setting_exists() -> None:
    named = {re.sub(r".*\((.*)\)", r"\1", setting) for setting in SETTINGS.values()}
    assert named <= set(known_settings())


def test_lower_layers_name_no_setting() -> None:
    settings = set(known_settings())
    prefixes = "|".join(sorted({name.split(".")[0] for name in settings if "." in name}))
    named = re.compile(rf"\b(?:{prefixes})\.[a-z_]+")
    found = []
    for folder in ("distca", "megatron_patches"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(ROOT / "distca" / "train") or path.is_relative_to(ROOT / "distca" / "commands"):
                continue
            source = path.read_text(encoding="utf-8")
            if not named.search(source):
                continue
            texts = [
                node.value
                for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
            found += [f"{path.name}: {name}" for text in texts for name in named.findall(text) if name in settings]
    assert found == []
