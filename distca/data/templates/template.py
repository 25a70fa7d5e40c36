"""Chat templates of model folders, rendered in a process beside this one (:mod:`distca.data.templates.process`)."""

from __future__ import annotations

import atexit
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from distca.data.templates import process
from distca.errors import DataError, VersionError

Spans = list[tuple[int, int]]
"""Ranges of characters of a text, each from its first to behind its last."""
SECONDS = 10.0
"""CPU seconds that one rendering of a template may take."""
_VARIABLES = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""Variables of the environment that the process gets; a template that leaves its sandbox finds no others."""
_MARKS = [f"\ue000{secrets.token_hex(8)}{end}" for end in "[]"]
"""Stand around what a template marks as generated. No text can hold them, since every process draws its own."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template in Jinja, as model folders have them.

    Attributes:
        source: of the template; empty for none.
        tokens: special tokens that it may name, such as bos_token.
    """

    source: str
    tokens: tuple[tuple[str, str], ...] = ()

    @cached_property
    def constants(self) -> list[str]:
        """Texts that the template compares with and splits at; DataError if it cannot be read."""
        answer = self._ask({})["constants"]
        return [each for each in answer if isinstance(each, str)]

    @property
    def marks_turns(self) -> bool:
        """Whether the template says itself what the assistant generates."""
        return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source) is not None

    def render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None = None, prompt: bool = False
    ) -> tuple[str, Spans]:
        """Returns a conversation as text, and what of it the template marks as generated.

        Args:
            messages: of the conversation.
            tools: that the assistant may call.
            prompt: whether what asks the assistant to speak follows.

        Raises:
            ValueError: the template refuses the conversation, or takes too much time or memory.
            DataError: it cannot be read.
            VersionError: Jinja2 is missing or too old.
        """
        variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        answer = self._ask({"variables": dict(self.tokens) | variables, "marks": _MARKS})
        if "error" in answer:
            raise ValueError(f"the chat template fails: {answer['error']}")
        return _unmarked(str(answer["text"]))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = _beside.ask({"source": self.source, "seconds": SECONDS} | request)
        if "jinja" in answer:
            raise VersionError(f"{answer['jinja']}: pip install 'distca[data]'.")
        if "unreadable" in answer:
            raise DataError(f"The chat template cannot be read: {answer['unreadable']}; correct it.")
        if "error" in answer and "variables" not in request:
            raise DataError(f"The chat template cannot be read: {answer['error']}; correct it.")
        return answer


def _unmarked(marked: str) -> tuple[str, Spans]:
    """Returns a text without the marks of what is generated, and where that is."""
    if _MARKS[0] not in marked:
        return marked, []
    texts: list[str] = []
    spans, length, start = [], 0, 0
    for part in re.split("|".join(f"({re.escape(mark)})" for mark in _MARKS), marked):
        if part == _MARKS[0]:
            start = length
        elif part == _MARKS[1]:
            spans.append((start, length))
        elif part is not None:
            texts.append(part)
            length += len(part)
    return "".join(texts), spans


class _Beside:
    """The process beside this one, which is started when it is first asked, and anew after a template ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the process's answer, which is an error where the request ended the process."""
        try:
            written = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": f"the conversation holds what JSON has no word for ({error})"}
        with self._lock:
            running = self._running()
            assert running.stdin is not None and running.stdout is not None
            try:
                running.stdin.write(len(written).to_bytes(8, "little") + written)
                running.stdin.flush()
                answer = running.stdout.read(int.from_bytes(running.stdout.read(8), "little"))
            except BrokenPipeError:
                answer = b""
            except BaseException:  # such as KeyboardInterrupt: what is asked next must not get this answer
                self.close()
                raise
            if answer:
                return dict(json.loads(answer.decode("utf-8", "surrogatepass")))
            running.kill()
            ended = running.wait()
            self._process = None
        if ended == -signal.SIGPROF:
            return {"error": f"it takes more than {request['seconds']:g} seconds"}
        return {"error": f"it ended the process that renders it (exit status {ended})"}

    def _running(self) -> subprocess.Popen[bytes]:
        # A process that was forked must not read the answers that its parent asked for.
        if self._process is None or self._owner != os.getpid():
            paths = os.pathsep.join(path for path in sys.path if path)
            file = Path(process.__file__)
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ} | {"PYTHONPATH": paths},
            )
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()
            self._process.wait()
        self._process = None


_beside = _Beside()
atexit.register(_beside.close)
