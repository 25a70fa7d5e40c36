"""Reading a YAML file that a user wrote: what it cannot mean is a sentence."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from distca.errors import DistcaError


def read_yaml(path: Path, refused: type[DistcaError]) -> Any:
    """The content of a file; None of an empty one.

    Args:
        path: the file.
        refused: the error to raise.

    Raises:
        DistcaError: as ``refused``: it is no YAML, is nested too deep, or has two entries of one name.
        OSError: it cannot be read.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _OnceLoader)
    except (yaml.YAMLError, ValueError) as error:  # of a date such as 2026-02-30, or what is no UTF-8
        raise refused(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise refused(f"{path} is YAML nested too deep to be read.") from None


class _OnceLoader(yaml.SafeLoader):
    """YAML silently keeps the last of two entries of one name; here they are refused. Numbers such as 1e12, which are
    text in YAML 1.1, are read as jsonargparse reads them in configuration files."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        names = [self.construct_object(key, deep=True) for key in given]  # type: ignore[no-untyped-call]
        for number, (name, key) in enumerate(zip(names, given, strict=True)):
            if name in names[:number]:
                again = key.start_mark.line + 1
                raise yaml.YAMLError(f"{name} is there twice, again in line {again}; put both together")
        return super().construct_mapping(node, deep)


_OnceLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)
