"""Templates run in a sandbox, with limits of time and memory, and leave the process that asks them as it was."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distca.data.templates import template as templates
from distca.data.templates.template import ChatTemplate
from distca.errors import DataError

pytest.importorskip("jinja2")
TALK = [{"role": "user", "content": "hello"}]


def rendered(source: str) -> str:
    return ChatTemplate(source).render(TALK)[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 7**(10**8) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(60) }}",
    ],
)
def test_templates_have_a_limit_of_time(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    with pytest.raises(ValueError, match=r"(fails|cannot be read): it takes more than 0\.2 seconds"):
        rendered(source)
    assert rendered("{{ messages[0].content }}") == "hello", "the next one is answered"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content * 10**10 }}",
        "{{ 'a'.center(10**10) }}",
        "{{ '%*d' % (10**10, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{% set ns = namespace(text='aaaaaaaa') %}{% for a in range(99) %}{% set ns.text = ns.text ~ ns.text %}"
        "{% endfor %}",
        "{{ 'a' * 10**10 }}",
    ],
)
def test_templates_have_a_limit_of_memory(source: str) -> None:
    with pytest.raises(ValueError, match=r"(fails|cannot be read): it needs more than 1 GiB of memory"):
        rendered(source)
    assert rendered("{{ messages[0].content }}") == "hello"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0] | tojson(default=raise_exception) }}", "unexpected keyword argument 'default'"),
        ("{{ messages[0] | tojson(cls=dict) }}", "unexpected keyword argument 'cls'"),
        ("{% set ns = namespace() %}{% set ns._x = 1 %}", "no name that begins with an underscore"),
        ("{{ namespace(__init__=1) }}", "no name that begins with an underscore"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ raise_exception('never') }}", "never"),
    ],
)
def test_what_templates_may_not_do(source: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template fails: .*{said}"):
        rendered(source)


@pytest.mark.parametrize("source", ["{% endfor %}", "{{ 1 | random }}", "{{ " + "(" * 5000 + ")" * 5000 + " }}"])
def test_templates_that_cannot_be_read(source: str) -> None:
    with pytest.raises(DataError, match="The chat template cannot be read: "):
        rendered(source)


def test_options_of_json() -> None:
    source = "{{ {'b': 'ü', 'a': 1} | tojson(indent=1, sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}"
    assert rendered(source) == '{\n "a":1,\n "b":"\\u00fc"\n}' and rendered("{{ 'ü<' | tojson }}") == '"ü<"'


def test_the_process_sees_no_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTCA_SECRET", "secret")
    templates._beside.close()
    assert rendered("a") == "a"
    running = templates._beside._process
    assert running is not None
    with open(f"/proc/{running.pid}/environ", "rb") as file:
        assert b"DISTCA_SECRET" not in file.read()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_threads_and_forks_get_their_own_answers() -> None:
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        for _ in range(20):
            found[number] = rendered(f"{{{{ messages[0].content }}}} {number}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: f"hello {number}" for number in range(4)}
    before = templates._beside._process
    if (child := os.fork()) == 0:
        os._exit(int(rendered("{{ messages[0].content }}") != "hello" or templates._beside._process is before))
    assert os.waitpid(child, 0)[1] == 0 and templates._beside._process is before
    assert rendered("{{ messages[0].content }}") == "hello"


def test_what_is_no_json_is_a_sentence() -> None:
    with pytest.raises(ValueError, match="the chat template fails: the conversation holds what JSON has no word for"):
        ChatTemplate("a").render([{"role": "user", "content": b"bytes"}])


ENDS = """
import os, sys
from distca.data.templates.template import ChatTemplate, _beside
assert ChatTemplate("a").render([])[0] == "a"
print(_beside._process.pid, flush=True)
os._exit(0) if sys.argv[1] == "killed" else None
"""


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_the_process_ends_with_the_one_that_started_it(how: str) -> None:
    said = subprocess.run([sys.executable, "-c", ENDS, how], check=True, capture_output=True, text=True)
    stat = Path(f"/proc/{said.stdout.strip()}/stat")
    for _ in range(200):
        if not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("it is still there")
    assert said.stderr == ""
