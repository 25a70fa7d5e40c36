"""Names of fields of transformers' configuration classes: python -m tests.models.known_fields writes those that are
installed into the package, which reads them without transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import distca.models.families

FILE = Path(distca.models.families.__file__).parent / "known_fields.json"


def fields_of(model_type: str) -> set[str]:
    """The fields of one class, and the names that it takes for some of them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    return {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map)


def installed_fields() -> set[str]:
    """The fields of all classes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return set().union(*(fields_of(model_type) for model_type in CONFIG_MAPPING))


if __name__ == "__main__":
    written = set(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.is_file() else set()
    FILE.write_text(json.dumps(sorted(written | installed_fields()), indent=0) + "\n", encoding="utf-8")
