"""Renders chat templates in a process of its own with limited memory and time, since templates come with models.

The process is started as a script and imports nothing of ours. It reads requests and writes answers as JSON, each
behind its length in eight bytes, until its input ends.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import date
from typing import Any

TODAY = date(2024, 7, 26)
"""The day that templates get when they ask for today's, so that tokens do not depend on the day; LLaMA's take it too
where they cannot ask."""
_MEMORY = 1 << 30
"""Bytes that the process may have; a template that needs more gets a MemoryError."""
_OLDEST = (3, 1, 6)
"""Version of Jinja2 before which a template could leave its sandbox."""


def environment(marks: list[str]) -> Any:
    """Returns a sandboxed Jinja environment as transformers has it, without what depends on chance or on the day.

    Args:
        marks: texts that stand before and behind what a template marks as generated; read whenever it renders.
    """
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    from jinja2.utils import Namespace

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: what the assistant says."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

    class PublicNamespace(Namespace):
        """A namespace without names that Python itself uses."""

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"a namespace takes no name that begins with an underscore, such as {name!r}")
            super().__setitem__(name, value)

    def namespace(*args: Any, **values: Any) -> Namespace:
        made = PublicNamespace()
        for name, value in dict(*args, **values).items():
            made[name] = value
        return made

    def raise_exception(message: str) -> None:
        raise ValueError(message)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    for name in ("lipsum", "joiner", "cycler"):
        del made.globals[name]
    del made.filters["random"]
    made.globals |= {"raise_exception": raise_exception, "strftime_now": TODAY.strftime, "namespace": namespace}
    made.globals["dict"] = lambda *args, **values: dict(*args, **values)
    return made


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns a value as JSON; no other options of ``json.dumps`` are taken, since some of them call what they get."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _constants(source: str, jinja: Any) -> list[str]:
    """Returns the texts that a template compares with and splits at."""
    from jinja2.nodes import Const

    return sorted({node.value for node in jinja.parse(source).find_all(Const) if isinstance(node.value, str)})


class Renderer:
    """Answers requests; templates stay compiled."""

    def __init__(self) -> None:
        self._marks = ["", ""]
        self._jinja = environment(self._marks)
        self._compiled: dict[str, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns {"text": ...} or {"constants": ...}, or what failed by kind: unreadable or error.

        Args:
            request: "source" of the template, "seconds" it may take, and "variables" with "marks" if it is to be
                rendered.
        """
        from jinja2 import TemplateError

        # The kernel ends the process when its time is over, whatever it is doing then.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            source = request["source"]
            if source not in self._compiled:
                self._compiled[source] = self._jinja.from_string(source)
            if "variables" not in request:
                return {"constants": _constants(source, self._jinja)}
        except (TemplateError, RecursionError) as error:
            return {"unreadable": str(error)}
        except MemoryError:
            return {"error": _too_much()}
        try:
            self._marks[:] = request["marks"]
            return {"text": self._compiled[source].render(**request["variables"])}
        except MemoryError:
            return {"error": _too_much()}
        except Exception as error:  # whatever a template does with what it is given
            return {"error": str(error) or type(error).__name__}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _too_much() -> str:
    return f"it needs more than {_MEMORY >> 30} GiB of memory"


def _jinja_problem() -> str | None:
    """Returns what is wrong with the installed Jinja2, None where nothing is."""
    try:
        import jinja2
    except ImportError:
        return "Chat templates need the package jinja2"
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    return (
        None if version >= _OLDEST else f"Chat templates need jinja2 3.1.6 or newer, and {jinja2.__version__} is here"
    )


def main() -> None:
    """Answers what comes until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which is the parent's to act on
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    problem = _jinja_problem()
    renderer = None if problem else Renderer()
    while head := source.read(8):
        request = json.loads(source.read(int.from_bytes(head, "little")).decode("utf-8", "surrogatepass"))
        try:
            answer = renderer.answer(request) if renderer else {"jinja": problem}
            written = json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            written = json.dumps({"error": _too_much()}).encode()
        sink.write(len(written).to_bytes(8, "little") + written)
        sink.flush()


if __name__ == "__main__":
    main()
