"""Ids of tokenizers that put a space before texts, and control tokens in texts of messages."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from tests.data.templates.chats import byte_tokenizer, encoder, runs
from tests.data.templates.families.table import FIRST, ONE, said, template_of

tokenizers = pytest.importorskip("tokenizers")


def spaced(kind: str, **options: bool) -> Any:
    """Returns a tokenizer of letters that puts a space before texts as Llama 2's does, or its successors.

    Args:
        kind: legacy where the space is put before every part between control tokens, first where before the text alone.
        options: of the control tokens.
    """
    letters = [chr(each) for each in range(33, 127)]
    vocabulary = {each: at for at, each in enumerate(["<unk>", "<s>", "</s>", "▁", "\n", *letters])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    if kind == "legacy":
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        made.normalizer = tokenizers.normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.add_special_tokens([tokenizers.AddedToken(each, **options) for each in ("<unk>", "<s>", "</s>")])
    return made


@pytest.mark.parametrize("options", [{"normalized": False}, {"normalized": False, "rstrip": True, "lstrip": True}])
@pytest.mark.parametrize("kind", ["legacy", "first"])
def test_ids_are_those_of_the_whole_text(kind: str, options: dict[str, bool]) -> None:
    """Control tokens in a message are spelled with the letters beside them, without spaces that nobody wrote."""
    made = spaced(kind, **options)
    llama = encoder(made, template_of("llama-2"), bos_token="<s>", eos_token="</s>")
    ids, mask = llama.conversation([ONE, FIRST])
    whole = "<s>[INST] Question one? [/INST] Answer one. </s>"
    assert ids.tolist() == made.encode(whole, add_special_tokens=False).ids
    learned = [made.id_to_token(number) for number in ids[mask].tolist()]
    assert "".join(learned) in ("▁Answer▁one.▁</s>", "▁Answer▁one.</s>")  # the second where </s> takes the space
    held, _ = llama.conversation([said("user", "say <s>old</s> now"), said("assistant", "</s> <s>")])
    tokens = [made.id_to_token(number) for number in held.tolist()]
    assert (tokens.count("<s>"), tokens.count("</s>")) == (1, 1)
    text = "".join(tokens).replace("▁", " ")
    assert "say <s>old</s> now" in text and "</s> <s>" in text, "as it stands in the message"


def test_a_tokenizer_that_makes_control_tokens_of_text_is_refused() -> None:
    """A unigram model has them as pieces."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((each, -9.0) for each in "</s>abc\n")]
    made = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    made.add_special_tokens(["</s>"])
    chat = encoder(made, "{% for m in messages %}{{ m.content + '</s>' }}{% endfor %}")
    assert chat.conversation([said("user", "a"), said("assistant", "b")])[0].tolist().count(1) == 2
    with pytest.raises(ValueError, match="the tokenizer makes a control token of the text of a message"):
        chat.conversation([said("user", "a</s>"), said("assistant", "b")])


def test_a_token_that_two_speakers_share_is_refused() -> None:
    """A template without anything between messages lets a token reach over both."""
    made = byte_tokenizer(["<|end|>"], ["ab"])
    speaks = "{% if m.role == 'user' %}{{ m.content }}{% else %}{% generation %}{{ m.content + '<|end|>' }}"
    chat = encoder(made, f"{{% for m in messages %}}{speaks}{{% endgeneration %}}{{% endif %}}{{% endfor %}}")
    with pytest.raises(ValueError, match="a token holds what the assistant says together with what another"):
        chat.conversation([said("user", "a"), said("assistant", "b")])
    ids, mask = chat.conversation([said("user", "a"), said("assistant", "c")])
    assert runs(made, ids, mask) == ["c<|end|>"]


def test_names_of_control_tokens_are_chosen_anew_where_a_text_has_them() -> None:
    made = byte_tokenizer(["<|end|>", "<|begin|>"])
    chat = encoder(made, "<|begin|>{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}")
    for text in ("<|end|>", "<|end|>" + "\U00030000" * 7, "<|begin|>" + "\U00030002" * 7 + "\U00030001" * 9):
        ids, mask = chat.conversation([said("user", text), said("assistant", "b")])
        assert made.decode(ids.tolist(), skip_special_tokens=False) == f"<|begin|>{text}<|end|>b<|end|>"
        assert (ids == 256).sum() == 2 and (ids == 257).sum() == 1 and runs(made, ids, mask) == ["b<|end|>"]


def test_half_of_a_pair_of_surrogates_is_a_sentence() -> None:
    chat = encoder(byte_tokenizer(["<|end|>"]), "{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}")
    with pytest.raises(ValueError, match=r"it is no Unicode text \(surrogates not allowed at character 0\)"):
        chat.conversation([said("user", "\ud800"), FIRST])


def test_encoders_can_be_pickled() -> None:
    chat = encoder(byte_tokenizer(["<|end|>"]), "{% for m in messages %}{{ m.content + '<|end|>' }}{% endfor %}")
    talk = [said("user", "a<|end|>"), said("assistant", "b")]
    ids, mask = chat.conversation(talk)
    again, learned = pickle.loads(pickle.dumps(chat)).conversation(talk)
    assert again.tolist() == ids.tolist() and learned.tolist() == mask.tolist()
