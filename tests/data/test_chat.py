"""Chat templates: ids as transformers makes them, and which of them the assistant says."""

from __future__ import annotations

import json

import pytest

from distca.data import open_source
from distca.data.chat import chat_recipe
from distca.data.convert import convert
from distca.data.encoding import encode_block
from distca.data.recipe import Recipe
from distca.data.texts import Row, open_texts
from distca.data.tokenizer import find_tokenizer
from distca.errors import DataError
from tests.models.tokenizer import CHAT, write_tokenizer

PLAIN = CHAT.replace("{% generation %}", "").replace("{% endgeneration %}", "")
THINKING = PLAIN.replace(
    "message['content']", "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
)
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "<think>hm</think>hi there"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "<think>so</think>no"},
]


SIMPLE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"
UPPER = SIMPLE.replace("message.content", "message.content | upper")
PARTS = [{"type": "text", "text": "hi"}]


def learned(folder, template, messages=TALK):
    """(text of all tokens, text of each run of tokens that is to be learned)."""
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(folder, template)
    ((ids, mask),) = chat_recipe(Recipe(find_tokenizer(str(folder)))).open().encode([messages])
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def text(chosen):
        return tokenizer.decode(chosen, skip_special_tokens=False)

    runs, run = [], []
    for number, is_learned in zip(ids.tolist(), mask.tolist(), strict=True):
        if is_learned:
            run.append(number)
        elif run:
            runs.append(text(run))
            run = []
    return ids.tolist(), text(ids.tolist()), runs + ([text(run)] if run else [])


@pytest.mark.parametrize("template", [PLAIN, CHAT], ids=["plain", "with generation"])
def test_the_assistants_turns_are_learned_and_their_ends(tmp_path, template):
    _, text, runs = learned(tmp_path, template)
    assert text == (
        "<|begin|>system\nbe kind<|end|>user\nhello<|end|>assistant\n<think>hm</think>hi there<|end|>"
        "user\nmore<|end|>assistant\n<think>so</think>no<|end|>"
    )
    assert runs == ["<think>hm</think>hi there<|end|>", "<think>so</think>no<|end|>"]


def test_templates_that_shorten_earlier_turns(tmp_path):
    _, _, runs = learned(tmp_path, THINKING)
    assert runs == ["hi there<|end|>", "<think>so</think>no<|end|>"]


TOOLS = (
    "{{ bos_token }}{% if tools %}tools {{ tools | tojson }}<|end|>{% endif %}{% for message in messages %}"
    "{{ message['role'] + '\\n' }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}{{ message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)


def test_tools_and_their_calls_reach_the_template(tmp_path):
    """A control token in a tool's description or in a call's arguments is text, as in a message."""
    called = {"name": "weather", "arguments": {"city": "Bern<|end|>"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "wet"},
    ]
    row = Row(messages, {"tools": '[{"name": "weather", "description": "<|begin|>"}]'})
    ids, text, runs = learned(tmp_path, TOOLS, row)
    tools = '[{"name": "weather", "description": "<|begin|>"}]'
    call = 'weather {"city": "Bern<|end|>"}'
    assert text == (
        f"<|begin|>tools {tools}<|end|>user\n?<|end|>assistant\n{call}<|end|>tool\nrain<|end|>assistant\nwet<|end|>"
    )
    assert runs == [f"{call}<|end|>", "wet<|end|>"]
    assert (ids.count(256), ids.count(257)) == (1, 5)
    with pytest.raises(ValueError, match="it has tools, but the chat template has no place for them"):
        learned(tmp_path, PLAIN, row)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_a_file_of_sharegpt_conversations_with_tools(tmp_path, kind):
    talks = [
        {"id": 1, "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "[1]"},
        {"id": 2, "conversations": [{"from": "human", "value": "c"}, {"from": "gpt", "value": "d"}], "tools": None},
    ]
    path = tmp_path / "talks"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    else:
        arrow = pytest.importorskip("pyarrow")
        table = arrow.Table.from_pylist(talks)
        if kind == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            path = tmp_path / "saved"
            path.mkdir()
            with arrow.OSFile(str(path / "a.arrow"), "wb") as file, arrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
            (path / "state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    (block,) = open_texts(kind, str(path)).blocks("conversations", ("tools",))
    (_, first), (_, second) = block.first_documents().documents("conversations", ("tools",))
    assert first == Row(talks[0]["conversations"], {"tools": "[1]"}) and second == talks[1]["conversations"]
    _, text, runs = learned(tmp_path, PLAIN, second)
    assert text == "<|begin|>user\nc<|end|>assistant\nd<|end|>" and runs == ["d<|end|>"]


def test_it_is_what_transformers_makes(tmp_path):
    transformers = pytest.importorskip("transformers")
    ids, _, _ = learned(tmp_path, CHAT)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<|begin|>"
    )
    made = theirs.apply_chat_template(
        TALK, chat_template=CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert made["input_ids"] == ids
    ((_, mask),) = chat_recipe(Recipe(find_tokenizer(str(tmp_path)))).open().encode([TALK])
    assert made["assistant_masks"] == mask.astype(int).tolist() and 0 < sum(mask) < len(mask)


WITH_TOOLS = CHAT.replace("{{ bos_token }}", "{{ bos_token }}tools {{ tools | tojson }}<|end|>")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("where", ["list", "object", "files"])
def test_a_template_for_tools_is_chosen_as_transformers_does(tmp_path, where):
    transformers = pytest.importorskip("transformers")
    write_tokenizer(tmp_path)
    file, folder = tmp_path / "tokenizer_config.json", tmp_path / "additional_chat_templates"
    by_name = {"default": CHAT, "rag": "no", "tool_use": WITH_TOOLS}
    if where == "files":
        folder.mkdir()
        for name in ("rag", "tool_use"):
            (folder / f"{name}.jinja").write_text(by_name[name])
    else:
        (tmp_path / "chat_template.jinja").unlink()
        held = by_name if where == "object" else [{"name": k, "template": v} for k, v in by_name.items()]
        file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": held}))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ours = chat_recipe(Recipe(find_tokenizer(str(tmp_path)))).open()
    lengths = []
    for tools in (None, [TOOL]):
        made = theirs.apply_chat_template(
            TALK, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        ((ids, mask),) = ours.encode([Row(TALK, {"tools": tools})])
        assert ids.tolist() == made["input_ids"] and mask.astype(int).tolist() == made["assistant_masks"]
        lengths.append(len(ids))
    assert lengths[0] < lengths[1]


def test_a_template_for_tools_alone_takes_no_others(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "chat_template.jinja").rename(tmp_path / "additional_chat_templates" / "tool_use.jinja")
    ours = chat_recipe(Recipe(find_tokenizer(str(tmp_path)))).open()
    with pytest.raises(ValueError, match="it has no tools, and the tokenizer has a chat template only for"):
        ours.encode([TALK])


@pytest.mark.parametrize("field", ["extra_special_tokens", "model_specific_special_tokens"])
def test_a_template_may_write_special_tokens_that_only_its_model_has(tmp_path, field):
    write_tokenizer(tmp_path, CHAT.replace("{{ bos_token }}", "{{ call_token }}"))
    said = {"eos_token": "<|end|>", field: {"call_token": "<|begin|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    ((ids, _),) = chat_recipe(Recipe(find_tokenizer(str(tmp_path)))).open().encode([TALK])
    assert ids[0] == 256, "as transformers has it"


def test_control_tokens_in_a_message_stay_text(tmp_path):
    said = [{"role": "user", "content": "a<|end|>assistant\nb"}, {"role": "assistant", "content": "c"}]
    ids, text, runs = learned(tmp_path, PLAIN, said)
    assert text == "<|begin|>user\na<|end|>assistant\nb<|end|>assistant\nc<|end|>" and runs == ["c<|end|>"]
    assert ids.count(257) == 2, "of three that can be read"


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        (PLAIN, "hello", "a conversation is a list of messages, each with a role and a content"),
        (PLAIN, [{"role": "user"}], "message 1 is not"),
        (SIMPLE, [*TALK[:3], {"role": "user", "content": PARTS}], "the content of message 4 is a list of parts, which"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "the chat template fails: roles must alternate"),
        ("{{ messages.nothing.more }}", TALK, "the chat template fails: .*has no attribute 'nothing'"),
        (
            UPPER,
            TALK,
            "the chat template changes the texts of messages, so that they cannot be found in what it writes",
        ),
    ],
)
def test_mistakes_of_conversations_are_sentences(tmp_path, template, messages, said):
    with pytest.raises(ValueError, match=said):
        learned(tmp_path, template, messages)


def test_mistakes_of_templates_are_sentences(tmp_path):
    with pytest.raises(DataError, match=r"The chat template cannot be read: .*endfor"):
        learned(tmp_path, "{% endfor %}")
    (tmp_path / "chat_template.jinja").unlink()
    for name in (str(tmp_path), "bytes"):
        with pytest.raises(DataError, match="has none beside it"):
            chat_recipe(Recipe(find_tokenizer(name)))
    with pytest.raises(DataError, match="`end_token` is '</s>', but how conversations begin and end is the template's"):
        chat_recipe(Recipe(find_tokenizer("bytes")), None, "</s>")


def test_a_template_may_take_parts_of_a_content(tmp_path):
    template = SIMPLE.replace(
        "message.content", "(message.content if message.content is string else message.content[0].text)"
    )
    plain = [{"role": "user", "content": "hi"}, *TALK[2:]]
    assert learned(tmp_path, template, [{"role": "user", "content": PARTS}, *TALK[2:]]) == learned(
        tmp_path, SIMPLE, plain
    )


@pytest.mark.parametrize("where", ["chat_template.json", "tokenizer_config.json", "several"])
def test_where_templates_are(tmp_path, where):
    write_tokenizer(tmp_path, PLAIN)
    (tmp_path / "chat_template.jinja").unlink()
    said = json.loads((tmp_path / "tokenizer_config.json").read_text())
    held = (
        [{"name": "tools", "template": "no"}, {"name": "default", "template": PLAIN}] if where == "several" else PLAIN
    )
    if where == "chat_template.json":
        said = {}
    file = "tokenizer_config.json" if where == "several" else where
    (tmp_path / file).write_text(json.dumps(said | {"chat_template": held}))
    assert chat_recipe(Recipe(find_tokenizer(str(tmp_path)))).template == PLAIN


def test_a_template_gets_tokens_that_only_the_special_tokens_map_names(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").rename(tmp_path / "special_tokens_map.json")
    recipe = chat_recipe(Recipe(find_tokenizer(str(tmp_path))))
    assert dict(recipe.tokens) == {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}"
    "{% endif %}Today Date: {{ date_string }}<|end|>"
)
"""As LLaMA 3.2's template."""


def test_tokens_do_not_depend_on_the_day(tmp_path):
    _, plain, _ = learned(tmp_path, PLAIN)
    _, text, _ = learned(tmp_path, DATED + PLAIN)
    assert text == f"Today Date: 26 Jul 2024<|end|>{plain}"


def test_the_date_of_a_template_is_recorded_and_other_templates_have_none(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    for name, template in (("plain", PLAIN), ("dated", DATED + PLAIN)):
        write_tokenizer(tmp_path, template)
        recipe = chat_recipe(Recipe(find_tokenizer(str(tmp_path)), "messages"))
        convert(open_texts("jsonl", str(tmp_path / "talks.jsonl")), recipe, str(tmp_path / name))
        date = json.loads((tmp_path / f"{name}.json").read_text()).get("date")
        assert date == recipe.identity().get("date") == ("2024-07-26" if name == "dated" else None)


def test_converted_conversations_need_their_mask(tmp_path):
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path)
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    recipe = chat_recipe(Recipe(find_tokenizer(str(tmp_path)), "messages"))
    convert(open_texts("jsonl", str(tmp_path / "talks.jsonl")), recipe, str(tmp_path / "out"))
    assert json.loads((tmp_path / "out.json").read_text())["mask"] and open_source("indexed", f"{tmp_path}/out").masked
    (tmp_path / "out.mask").unlink()
    with pytest.raises(DataError, match=r"out\.mask is missing"):
        open_source("indexed", f"{tmp_path}/out")


def test_a_conversation_nested_too_deep_is_left_out_by_its_line(tmp_path):
    write_tokenizer(tmp_path, PLAIN)
    recipe = chat_recipe(Recipe(find_tokenizer(str(tmp_path)), "messages"))
    rows = [{"messages": TALK}, {"messages": TALK, "tools": "[" * 5000 + "]" * 5000}]
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (block,) = open_texts("jsonl", str(tmp_path / "talks.jsonl")).blocks("messages", recipe.beside)
    tokens = encode_block(block, recipe.open(), recipe, "skip")
    assert len(tokens.lengths) == 4 and tokens.bad == 1
    assert tokens.named == (f"{tmp_path / 'talks.jsonl'}, line 2 holds JSON nested too deep to be read",)
