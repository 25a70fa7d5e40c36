"""Fields beside a tokenizer.json: ids as transformers makes them, a refusal, or a warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from distca.data import tokenizer_fields
from distca.data.find_recipe import find_recipe
from distca.data.tokenizer_fields import INERT
from distca.errors import DataError
from tests.models.tokenizer import CHAT, write_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
TALK = [{"role": "user", "content": "hi ab"}, {"role": "assistant", "content": "ab, no"}]
TEMPLATE = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
END = {"content": "<|end|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
DECODER = {"257": END}


def write(folder: Path, **said: Any) -> None:
    write_tokenizer(folder, TEMPLATE)
    usual = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(usual | said))


SERVED: list[dict[str, Any]] = [
    {},
    *({name: 7} for name in INERT if name.startswith(("model_max", "max_len", "name"))),
    {"add_eos_token": False},
    {"add_bos_token": True},
    {"add_bos_token": None},
    {"add_prefix_space": False},
    {"clean_up_tokenization_spaces": True},
    {"legacy": False},
    {"legacy": True},
    {"split_special_tokens": False},
    {"fix_mistral_regex": False},
    {"padding_side": "left", "truncation_side": "left"},
    {"extra_special_tokens": ["<|begin|>"]},
    {"additional_special_tokens": ["<|end|>"]},
    {"extra_special_tokens": {"image_token": "<|image|>"}},
    {"added_tokens_decoder": DECODER},
    {"pad_token": "<|pad|>"},
]


@pytest.mark.parametrize("said", SERVED, ids=json.dumps)
def test_what_is_served_has_transformers_ids(tmp_path: Path, said: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    write(tmp_path, **said)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ((ids, _),) = find_recipe(str(tmp_path), conversations=True).open().encode([TALK])
    assert ids.tolist() == theirs.apply_chat_template(TALK, tokenize=True)["input_ids"]
    ((ids, _),) = find_recipe(str(tmp_path), end_token="").open().encode(["hi ab"])
    assert ids.tolist() == theirs("hi ab")["input_ids"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"add_bos_token": False}, "add_bos_token false, but tokenizer.json puts it before texts; set `begin_token`"),
        ({"add_bos_token": "false"}, "add_bos_token 'false', which is no bool"),
        ({"add_prefix_space": True}, "add_prefix_space True, but tokenizer.json has False"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex True, but texts are split as tokenizer.json says"),
        ({"do_lower_case": True}, "do_lower_case True, but texts are changed"),
        ({"extra_special_tokens": 5}, "extra_special_tokens 5, which is no list or dict"),
        ({"added_tokens_decoder": {"258": {"content": "ab", "special": False}}}, "adds the token 'ab'"),
        ({"added_tokens_decoder": {"257": END | {"lstrip": True}}}, "another lstrip of the token '<|end|>'"),
        ({"added_tokens_decoder": {"256": END}}, "another id of the token '<|end|>'"),
    ],
)
def test_what_would_change_ids_is_refused(tmp_path: Path, said: dict[str, Any], reason: str) -> None:
    write(tmp_path, **said)
    with pytest.raises(DataError) as error:
        find_recipe(str(tmp_path))
    assert reason in str(error.value)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"split_special_tokens": True}, "with which control tokens of a chat template are text"),
        ({"extra_special_tokens": ["message"]}, "the token 'message' as extra_special_tokens, which the chat template"),
        ({"eos_token": "role"}, "the token 'role' as eos_token, which the chat template writes"),
    ],
)
def test_what_would_change_ids_of_conversations_alone(tmp_path: Path, said: dict[str, Any], reason: str) -> None:
    write(tmp_path, **said)
    find_recipe(str(tmp_path), end_token="")
    with pytest.raises(DataError) as error:
        find_recipe(str(tmp_path), conversations=True)
    assert reason in str(error.value)


def test_begin_token_settles_what_two_files_say(tmp_path: Path) -> None:
    write(tmp_path, add_bos_token=False)
    assert find_recipe(str(tmp_path), begin_token="").open().encode(["a"])[0][0][0] != 256
    assert find_recipe(str(tmp_path), begin_token="<|begin|>").open().encode(["a"])[0][0][0] == 256
    find_recipe(str(tmp_path), conversations=True)


def test_unknown_fields_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, of_nobody=1, image_token="<|image|>", **dict.fromkeys(INERT))
    with caplog.at_level(logging.WARNING):
        find_recipe(str(tmp_path))
        find_recipe(str(tmp_path))
    (said,) = (each.message for each in caplog.records)
    assert "has of_nobody, which nobody reads here" in said


def test_spaces_of_llama_classes_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Version 5 of transformers makes other ids of such a folder than tokenizer.json and version 4."""
    from tests.data.templates.test_tokens import spaced

    for kind, legacy, warned in (("legacy", False, 1), ("first", False, 1), ("first", True, 2), ("legacy", True, 2)):
        folder = tmp_path / f"{kind} {legacy}"
        folder.mkdir()
        write(folder, legacy=legacy, tokenizer_class="LlamaTokenizer", bos_token="<s>", eos_token="</s>")
        spaced(kind).save(str(folder / "tokenizer.json"))
        with caplog.at_level(logging.WARNING, tokenizer_fields.__name__):
            find_recipe(str(folder), conversations=True)
        assert len(caplog.records) == warned
        assert "puts spaces behind control tokens otherwise than tokenizer.json" in caplog.text


def test_tokens_before_texts_that_no_field_names_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for begin, warned in (("<|begin|>", 0), ("<|end|>", 1)):
        write(tmp_path, bos_token=begin)
        with caplog.at_level(logging.WARNING, tokenizer_fields.__name__):
            ((ids, _),) = find_recipe(str(tmp_path)).open().encode(["a"])
        assert (ids[0] == 256) != warned and len(caplog.records) == warned
    assert "puts <|begin|> before texts, which is not bos_token" in caplog.text
    find_recipe(str(tmp_path), begin_token="<|begin|>")
    assert len(caplog.records) == 1
