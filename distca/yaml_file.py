"""Reads YAML files of users, where two entries of one name are an error and errors are sentences; and writes some."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from distca.errors import DistcaError


def read_yaml(path: Path, refused: type[DistcaError]) -> Any:
    """Returns the content of a YAML file; None if the file is empty.

    Args:
        path: the file.
        refused: the class of the error to raise.

    Raises:
        DistcaError: an error of class ``refused``: the file is no YAML, is nested too deep, or has two entries of one
            name.
        OSError: the file cannot be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2026-02-30, or no UTF-8
        raise refused(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise refused(f"{path} is YAML nested too deep to be read.") from None


def written_yaml(content: Any) -> str:
    """Returns content of plain types as YAML, from which :func:`read_yaml` reads the same."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, default_flow_style=None)
    return text


def is_null_by_chance(text: str) -> bool:
    """Whether jsonargparse reads a text as YAML's null, such as "~", a comment or "&name" that is no word for null."""
    if text in ("null", "Null", "NULL"):
        return False
    text = text.strip()
    # A plain text that begins so is null only as a word, which is not worth a parser's time.
    if text[:1].isalnum() or text[:1] in "/._":
        return text.lower() == "null"
    try:
        return text not in ("", "!") and yaml.safe_load(text) is None  # jsonargparse takes these two as they are
    except (yaml.YAMLError, ValueError, RecursionError):
        return False


class _OnceLoader(yaml.SafeLoader):
    """A loader that refuses two entries of one name, of which YAML would keep the last without a word.

    It also reads 1e12 as a number, as jsonargparse does; in YAML 1.1 that is a text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [self.construct_object(key, deep=True) for key in given]  # type: ignore[no-untyped-call]
        for number, (name, key) in enumerate(zip(names, given, strict=True)):
            if name in names[:number]:
                again = key.start_mark.line + 1
                raise yaml.YAMLError(f"{name} is there twice, again in line {again}; put both together")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes a text such as 1e12, which would come back as a number."""


for each in (_OnceLoader, _Dumper):
    each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
    )
