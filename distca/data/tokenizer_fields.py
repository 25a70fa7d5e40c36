"""The fields of a tokenizer_config.json and what each does here; what would change ids and is not done is refused.

Ids are those of tokenizer.json. Fields beside it that ask transformers for other ids have to agree with it.
generation_config.json has no field that changes what is trained: it says how text is generated.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from distca.data.tokenizer import puts_first, read_settings, token_text
from distca.errors import DataError
from distca.json_file import read_object

logger = logging.getLogger(__name__)

_OFF: Final[tuple[Any, ...]] = (None, False, 0, "", [], {})
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_READ: Final = (*_NAMED, "add_bos_token", "chat_template", "added_tokens_decoder", "add_prefix_space", "legacy")
_MORE_TOKENS = ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens")
_DECODING = "It says how ids become text."
_LENGTHS = "It cuts or fills up what is called with it; a corpus keeps every token."
_FILES = "It names files; tokenizer.json is read."
_ORIGIN = "It says who made the files, and with what."
INERT: Final[dict[str, str]] = {
    "add_eos_token": "Texts end with eos_token in any case, unless end_token says otherwise.",
    "clean_up_tokenization_spaces": _DECODING,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": _DECODING,
    "spaces_between_special_tokens": _DECODING,
    "errors": _DECODING,
    "response_schema": _DECODING,
    "response_template": _DECODING,
    **dict.fromkeys(("model_max_length", "max_len", "max_length", "stride", "pad_to_multiple_of"), _LENGTHS),
    **dict.fromkeys(("padding_side", "truncation_side", "truncation_strategy", "pad_token_type_id"), _LENGTHS),
    **dict.fromkeys(("vocab_file", "merges_file", "tokenizer_file", "special_tokens_map_file", "vocab_size"), _FILES),
    **dict.fromkeys(("name_or_path", "_commit_hash", "transformers_version", "processor_class", "is_local"), _ORIGIN),
    **dict.fromkeys(
        ("backend", "use_fast", "trust_remote_code", "local_files_only", "from_slow", "_from_auto"), _ORIGIN
    ),
    "unsloth_version": _ORIGIN,
    "tokenizer_class": "Ids are made as tokenizer.json says.",
    "auto_map": "Code that comes with a tokenizer is never run; tokenizer.json is read.",
    "sp_model_kwargs": "It belongs to the file that tokenizer.json was made from.",
    "use_default_system_prompt": "The chat template says it.",
    "model_input_names": "It says what a call returns.",
    "return_token_type_ids": "It says what a call returns.",
}
"""Fields that change nothing of what is trained, with the reason."""
_ONLY: Final[dict[str, str]] = {
    "fix_mistral_regex": "texts are split as tokenizer.json says; save the tokenizer again with it mended",
    "do_lower_case": "texts are changed as tokenizer.json says; leave it out, or save the tokenizer again",
    "strip_accents": "texts are changed as tokenizer.json says; leave it out, or save the tokenizer again",
    "never_split": "texts are split as tokenizer.json says; leave it out, or save the tokenizer again",
}
"""Fields that are served where they ask for nothing, and why."""
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "add_bos_token": (bool,),
    "added_tokens_decoder": (dict,),
    "extra_special_tokens": (list, dict),
    "additional_special_tokens": (list, dict),
    "model_specific_special_tokens": (list, dict),
}
"""Types of fields that are read; null is as good as none."""
_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def check_fields(folder: Path, texts: Sequence[str] | None, begin_token: str | None = None) -> None:
    """Check what stands beside a tokenizer.json, and warn of what nobody knows.

    Args:
        folder: that holds both.
        texts: the sources of its chat templates; None where documents are no conversations.
        begin_token: that was asked for; None where the folder says it.

    Raises:
        DataError: a field asks for other ids than tokenizer.json makes.
    """
    where = folder / "tokenizer_config.json"
    said = read_settings(folder)
    try:
        content = read_object(folder / "tokenizer.json") if said else {}
    except (OSError, ValueError):
        return  # which is said where the file is opened
    for name, kinds in _KINDS.items():
        if name in said and not isinstance(said[name], kinds):
            raise DataError(
                f"{where} has {name} {said[name]!r}, which is no {' or '.join(each.__name__ for each in kinds)}."
            )
    for name, why in _ONLY.items():
        if said.get(name) not in _OFF:
            raise DataError(f"{where} has {name} {said[name]!r}, but {why}.")
    if texts is not None and said.get("split_special_tokens") not in _OFF:
        raise DataError(
            f"{where} has split_special_tokens, with which control tokens of a chat template are text; leave it out."
        )
    _check_prefix(said, content, where)
    _check_tokens(said, content, where, texts)
    if texts is None and begin_token is None:
        _check_begin(said, folder, where)
        _warn_of_others_before(said, content, folder / "tokenizer.json")
    if texts is not None:
        _warn_of_spaces(said, content, where)
    known = {*_READ, *_MORE_TOKENS, *INERT, *_ONLY, "split_special_tokens"}
    strange = sorted(name for name in said if name not in known and not name.endswith(("_token", "_token_id")))
    if strange:
        _warn(f"{where} has {', '.join(strange)}, which nobody reads here; ids are those of tokenizer.json.")


def _check_prefix(said: dict[str, Any], content: dict[str, Any], where: Path) -> None:
    """Refuse a space before texts that bytes of tokenizer.json do not have, and the other way round."""
    asked = said.get("add_prefix_space")
    made = [bool(each.get("add_prefix_space")) for each in _steps(content, "pre_tokenizer", "ByteLevel")]
    if asked is not None and made and bool(asked) != any(made):
        raise DataError(
            f"{where} has add_prefix_space {asked!r}, but tokenizer.json has {any(made)}; make both the same, as in "
            "the first training."
        )


def _check_begin(said: dict[str, Any], folder: Path, where: Path) -> None:
    """Refuse to guess whether texts begin with a token where two files disagree, as versions of transformers do."""
    asked, begin = said.get("add_bos_token"), token_text(said.get("bos_token"))
    if asked is None or begin is None:
        return
    put = puts_first(folder / "tokenizer.json", begin)
    if asked != put:
        does = "puts it" if put else "does not put it"
        raise DataError(
            f"{where} has add_bos_token {str(asked).lower()}, but tokenizer.json {does} before texts; set "
            f"`begin_token` to {begin!r} or to '', as in the first training."
        )


def _warn_of_others_before(said: dict[str, Any], content: dict[str, Any], file: Path) -> None:
    """Warn of tokens that the tokenizer's own template puts before texts, besides the begin token."""
    step = content.get("post_processor")
    steps = [step, *_objects(step.get("processors"))] if isinstance(step, dict) else []
    puts: list[str] = []
    for single in (each.get("single") for each in steps):
        parts: list[Any] = [each.get("SpecialToken") for each in _objects(single)]
        puts += [str(part.get("id")) for part in takewhile(lambda each: isinstance(each, dict), parts)]
    others = [each for each in puts if each != token_text(said.get("bos_token"))]
    if others:
        _warn(
            f"{file} puts {' '.join(others)} before texts, which is not bos_token of tokenizer_config.json, so texts "
            "begin without it here; set `begin_token` to a token that they shall begin with, or to ''."
        )


def _check_tokens(said: dict[str, Any], content: dict[str, Any], where: Path, texts: Sequence[str] | None) -> None:
    """Refuse tokens that transformers would add to those of tokenizer.json, where they change ids.

    A control token in a text is text here, so of those only what a chat template writes counts.
    """
    held = {token_text(each): each for each in _objects(content.get("added_tokens"))}
    for number, token in _entries(said.get("added_tokens_decoder")):
        name = token_text(token) or ""
        own = held.get(name)
        if own is None and not token.get("special"):
            raise DataError(f"{where} adds the token {name!r}, which tokenizer.json does not have; save both again.")
        if own is None:
            continue
        flags = [flag for flag in _FLAGS if flag in token and bool(token[flag]) != bool(own.get(flag))]
        if flags or number != str(own.get("id")):
            what = " and ".join(flags) or "id"
            raise DataError(f"{where} has another {what} of the token {name!r} than tokenizer.json; save both again.")
    for name, text in _special(said):
        written = [each for each in texts or () if text in each or name in each]
        if text not in held and written:
            raise DataError(
                f"{where} has the token {text!r} as {name}, which the chat template writes, but which is no added "
                "token of tokenizer.json; save both again."
            )


def _warn_of_spaces(said: dict[str, Any], content: dict[str, Any], where: Path) -> None:
    """Warn where a class of transformers puts spaces behind control tokens otherwise than tokenizer.json does."""
    if said.get("tokenizer_class") not in ("LlamaTokenizer", "LlamaTokenizerFast"):
        return
    spaces = [each.get("prepend_scheme") for each in _steps(content, "pre_tokenizer", "Metaspace")]
    spaces += ["always" for _ in _steps(content, "normalizer", "Prepend")]
    wanted = "always" if said.get("legacy") else "first"
    if any(each in ("always", "first") and each != wanted for each in spaces):
        _warn(
            f"{where} has tokenizer_class {said['tokenizer_class']}, for which version 5 of transformers puts spaces "
            "behind control tokens otherwise than tokenizer.json; conversations get the ids of tokenizer.json, as in "
            "version 4."
        )


def _special(said: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and texts of special tokens."""
    for name in _NAMED:
        if text := token_text(said.get(name)):
            yield name, text
    for field in _MORE_TOKENS:
        given = said.get(field)
        pairs = given.items() if isinstance(given, dict) else [(field, each) for each in given or ()]
        yield from ((name, text) for name, each in pairs if (text := token_text(each)))
    for number, token in _entries(said.get("added_tokens_decoder")):
        if text := token_text(token):
            yield f"token {number}", text


def _entries(given: Any) -> list[tuple[str, dict[str, Any]]]:
    pairs = given.items() if isinstance(given, dict) else ()
    return [(number, token) for number, token in pairs if isinstance(token, dict)]


def _steps(content: dict[str, Any], part: str, kind: str) -> Iterator[dict[str, Any]]:
    """Steps of a kind of a part of tokenizer.json, which may be one step or a sequence of them."""
    step = content.get(part)
    if not isinstance(step, dict):
        return
    several = next((step[name] for name in ("pretokenizers", "normalizers") if name in step), [step])
    yield from (each for each in _objects(several) if each.get("type") == kind)


def _objects(given: Any) -> list[dict[str, Any]]:
    """The objects of a list; none where it is no list, which is said where the file is opened."""
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []


@cache
def _warn(sentence: str) -> None:
    """Rank 0 says it once: a run opens its tokenizer several times."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(sentence)
