"""The recipe that settings and options ask for."""

from __future__ import annotations

from pathlib import Path

from distca.data.chat import chat_recipe
from distca.data.recipe import Recipe
from distca.data.tokenizer import find_tokenizer
from distca.data.tokenizer_fields import check_fields


def find_recipe(
    tokenizer: str,
    field: str | None = None,
    *,
    conversations: bool = False,
    begin_token: str | None = None,
    end_token: str | None = None,
) -> Recipe:
    """How documents become ids.

    Args:
        tokenizer: ``bytes``, a tokenizer.json, or a folder that holds one.
        field: that holds the document; None for text, or messages of conversations.
        conversations: documents go through the folder's chat template.
        begin_token: that texts begin with; None for the one that a folder says.
        end_token: that texts end with; None for the one that a folder says.

    Raises:
        DataError: there is no such tokenizer, token or chat template, or what stands beside it asks for other ids.
    """
    usual = "messages" if conversations else "text"
    recipe = Recipe(find_tokenizer(tokenizer, begin_token, end_token), field or usual)
    folder, templates = Path(tokenizer), None
    if conversations:
        recipe = chat = chat_recipe(recipe, begin_token, end_token)
        templates = (chat.template, chat.tool_use)
    if recipe.tokenizer.name != "bytes" and folder.is_dir():
        check_fields(folder, templates, begin_token)
    return recipe
