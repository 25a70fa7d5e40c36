"""Rows of data sets become conversations, and what a row says of what is learned is followed or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from distca.data.chat import chat_recipe
from distca.data.recipe import Recipe
from distca.data.rows import columns_beside, turns_of
from distca.data.texts import Row, open_texts
from distca.data.tokenizer import find_tokenizer
from tests.data.test_chat import PLAIN, learned
from tests.models.tokenizer import CHAT, write_tokenizer

USER, SAID = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TALK = [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}]
LONG = [USER, SAID | {"weight": 0}, USER, {"role": "assistant", "content": "b", "weight": 1}]


@pytest.mark.parametrize("template", [PLAIN, CHAT], ids=["plain", "with generation"])
def test_a_system_column_beside_turns_is_the_system_message(tmp_path: Any, template: str) -> None:
    _, text, runs = learned(tmp_path, template, Row(TALK, {"system": "be kind"}))
    assert text == "<|begin|>system\nbe kind<|end|>user\none<|end|>assistant\ntwo<|end|>"
    assert runs == ["two<|end|>"]


@pytest.mark.parametrize("template", [PLAIN, CHAT], ids=["plain", "with generation"])
@pytest.mark.parametrize("mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"loss": 0}])
def test_a_turn_that_is_marked_so_is_not_learned(tmp_path: Any, template: str, mark: dict[str, object]) -> None:
    messages = [USER, SAID | mark, USER, {"role": "assistant", "content": "b"}]
    _, text, runs = learned(tmp_path, template, messages)
    assert text == "<|begin|>user\nu<|end|>assistant\na<|end|>user\nu<|end|>assistant\nb<|end|>"
    assert runs == ["b<|end|>"]


@pytest.mark.parametrize(
    ("row", "messages", "asked"),
    [
        (Row("u", {"completion": "a"}), [USER, SAID], [True]),
        (Row("u", {"completion": "a", "label": True, "system": "s"}), [SYSTEM, USER, SAID], [True]),
        (Row([SYSTEM, USER, SAID, USER], {"completion": [SAID]}), [SYSTEM, USER, SAID, USER, SAID], [False, True]),
        (Row("u", {"output": "a", "input": ""}), [USER, SAID], [True]),
        (Row("u", {"output": "a", "input": "x"}), [{"role": "user", "content": "u\nx"}, SAID], [True]),
        (Row("u", {"output": "a", "history": [["u", "a"]], "system": "s"}), [SYSTEM, USER, SAID, USER, SAID], [1, 1]),
        (Row([USER, SAID], {"system": ""}), [USER, SAID], [True]),
        (Row([USER | {"weight": None}, SAID | {"train": True}], {}), [USER, SAID], [True]),
    ],
)
def test_rows_become_messages(row: Row, messages: object, asked: list[bool]) -> None:
    assert turns_of(row, "") == (messages, asked)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row([SYSTEM, USER, SAID], {"system": "other"}), "another in the column 'system' beside it; take one out"),
        (Row([USER, SAID], {"system": ["s"]}), "its system is no text"),
        (Row([USER, SAID | {"weight": 0.5}], {}), r"message 2 has weight 0\.5; a turn is learned \(1, true\) or not"),
        (Row([USER, SAID | {"train": "no"}], {}), "message 2 has train 'no'"),
        (Row([USER, SAID | {"weight": 1, "train": False}], {}), "weight 1 and train False, which contradict"),
        (Row([USER | {"train": True}, SAID], {}), "message 1, of 'user', asks to be learned"),
        (Row([USER, SAID | {"train_detail": [{"begin_offset": 0}]}], {}), "learned whole or not at all"),
        (Row([USER, SAID], {"functions": [{"name": "f"}]}), "'functions' stands beside it"),
        (Row([USER, SAID], {"chat_template_kwargs": {"a": 1}}), "'chat_template_kwargs' stands beside it"),
        (Row("u", {"completion": "a", "label": False}), "its label is false"),
        (Row("u", {"completion": "a", "label": 0}), "its label is false"),
        (Row("u", {"completion": [USER]}), "no message of the assistant"),
        (Row("u", {"completion": 5}), "its completion is neither a text nor a list of messages"),
        (Row("u", {"output": 5}), "its output is no text"),
        (Row("u", {"output": "a", "history": ["u", "a"]}), "its history is no list of pairs"),
        (Row("u", {}), "it is a text alone"),
        (Row(["u"], {}), "a conversation is a list of messages"),
    ],
)
def test_what_cannot_be_followed_is_a_sentence(row: Row, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        turns_of(row, "")


@pytest.mark.parametrize(
    ("field", "record"),
    [
        ("conversations", {"conversations": [USER, SAID], "system": "s", "id": 1}),
        ("prompt", {"prompt": "u", "completion": "a", "system": "s"}),
        ("instruction", {"instruction": "u", "input": "", "output": "a", "system": "s"}),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_files_of_rows(tmp_path: Any, field: str, record: dict[str, object], kind: str) -> None:
    file = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        file.write_text(json.dumps(record) + "\n")
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist([record]), file)
    write_tokenizer(tmp_path)
    recipe = chat_recipe(Recipe(find_tokenizer(str(tmp_path)), field))
    assert recipe.beside == columns_beside(field)
    (block,) = open_texts(kind, str(file)).blocks(recipe.field, recipe.beside)
    ((_, row),) = block.documents(recipe.field, recipe.beside)
    ((ids, mask),) = recipe.open().encode([row])
    ((expected, _),) = recipe.open().encode([[SYSTEM, USER, SAID]])
    assert ids.tolist() == expected.tolist() and mask is not None and mask.sum() == 2
