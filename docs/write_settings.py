"""Write docs/settings.md and docs/environment.md from the code: ``python docs/write_settings.py``."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from distca.train.config.environment import markdown
from distca.train.config.schema import RunConfig
from distca.words import takes

DOCS = Path(__file__).parent
_WRITTEN = "<!-- Written by docs/write_settings.py from {}; change it there. -->"


def settings_page() -> str:
    """Every dotted setting with its type, default and meaning: one section a group."""
    return "\n".join(
        [
            "# Settings",
            "",
            _WRITTEN.format("distca/train/config/schema.py"),
            "",
            "A run is one YAML file and dotted settings, which win over the file:",
            "",
            "```bash",
            "bash pretrain_llama.sh --config configs/tiny.yaml --train.steps 20 --optimizer.warmup_steps 5",
            "```",
            "",
            "In YAML `train.steps` is `steps` below `train`. A setting that does not exist, or values that cannot work "
            "together,",
            "stop the run before it starts. The usual settings can also be [environment variables](environment.md). "
            "Defaults are",
            "in bold.",
            *_section(RunConfig, "", "The run"),
            "",
        ]
    )


def environment_page() -> str:
    """Every environment variable of the launchers."""
    return f"""# Environment variables

{_WRITTEN.format("distca/train/config/variables.py")}

`pretrain_llama.sh` (training) and the benchmarks `run3d.sh` and `run4d.sh` read these. An empty variable counts as not
given. Give a variable or its [setting](settings.md), not both. Where no default is named it is the configuration's.
What only one kind of script takes is refused by the other.

```bash
TP_SIZE=2 STEPS=20 bash pretrain_llama.sh
```

{markdown()}

A variable that a script does not take is refused with what to do instead. So is a misspelling (`TP`, `NUM_NODES`), and
anything else that starts with `DISTCA_` or `EXPERIMENT_`.
"""


def _section(kind: Any, prefix: str, title: str) -> list[str]:
    """A group's own settings, and below them the groups in it."""
    hints, meanings = get_type_hints(kind), _meanings(kind)
    lines = ["", f"## {title}", "", _sentence(inspect.getdoc(kind) or ""), ""]
    lines += ["| setting, values | meaning |", "|---|---|"]
    groups = []
    own_first = sorted(fields(kind), key=lambda item: item.name not in kind.__annotations__)
    for item in own_first:
        hint = hints[item.name]
        if is_dataclass(hint):
            groups += _section(hint, f"{prefix}{item.name}.", f"`{prefix}{item.name}`")
        else:
            values = _values(_type(hint), _yaml(_default(item)))
            lines.append(f"| `{prefix}{item.name}` {values} | {meanings[item.name]} |")
    return lines + groups


def _type(hint: Any) -> str:
    """The values that a setting takes, in fewer words than in messages."""
    short = takes(hint).replace("a whole number", "integer").replace("true or false", "true, false")
    return short.removeprefix("one of ").removeprefix("a ").replace(" or null", ", null")


def _values(values: str, default: str) -> str:
    """The values that a setting takes, with its default in bold, which stands for a number alone."""
    words = re.split("(, | or )", values)
    if default in words:
        return "".join(f"**{word}**" if word == default else word for word in words)
    kind = "" if values in ("integer", "number") else f"{values}: "
    return f"{kind}**{default or '(empty)'}**"


def _default(item: Field[Any]) -> object:
    return item.default if item.default_factory is MISSING else item.default_factory()


def _sentence(docstring: str) -> str:
    return " ".join(docstring.partition("Attributes:")[0].split())


def _meanings(kind: Any) -> dict[str, str]:
    """Descriptions of a dataclass's fields, from the Attributes of its docstring and of those that it extends."""
    found: dict[str, str] = {}
    for each in filter(is_dataclass, kind.__mro__):
        listed = (inspect.getdoc(each) or "").partition("Attributes:\n")[2]
        entries = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", listed, re.MULTILINE)
        found |= {name: " ".join(text.split()) for name, text in entries}
    return found


def _yaml(value: object) -> str:
    words = {None: "null", True: "true", False: "false"}
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    return words[value] if value is None or isinstance(value, bool) else str(value)


PAGES = {"settings.md": settings_page, "environment.md": environment_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
