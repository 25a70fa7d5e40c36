"""``distca data``: look at a corpus, and convert one to token ids."""

from __future__ import annotations

import logging

from distca.commands.options import check_least
from distca.data.convert import check_output
from distca.data.convert import convert as convert_texts
from distca.data.corpus import Corpus
from distca.data.encoding import Bad, processes_for
from distca.data.find_recipe import find_recipe
from distca.data.left_out import BAD, LeftOut
from distca.data.lengths import KnownLengths, LengthKind, open_lengths
from distca.data.mixes import MIX_NAMES
from distca.data.sources import DocumentSource, passed_over
from distca.data.statistics import length_statistics
from distca.data.texts import TextKind, open_texts
from distca.errors import OptionError
from distca.words import count

__all__ = ["convert", "describe"]

logger = logging.getLogger(__name__)


def convert(
    path: str | None = None,
    *,
    output: str,
    source: TextKind = "text",
    tokenizer: str = "bytes",
    field: str | None = None,
    begin_token: str | None = None,
    end_token: str | None = None,
    conversations: bool = False,
    bad: Bad = "error",
    processes: int = 0,
) -> None:
    """Tokenize text into Megatron's .bin/.idx pair and a .json about it; if interrupted, go on where it was.

    Args:
        path: file or folder of the text.
        output: path of the files to write; a suffix .bin or .idx is taken off.
        source: text = a folder of text files; jsonl = JSON Lines, also .gz and .zst; parquet = Parquet files; arrow = a
            folder that the library datasets saved to disk; stdlib = Python's own source files.
        tokenizer: bytes, a tokenizer.json file of the package tokenizers, or a model's folder that holds one.
        field: of each JSON object, or column of each table, that holds the document; text by default.
        begin_token: a token of the tokenizer to put before every document, by default the one that a model's folder
            says; empty for none.
        end_token: the same for the end of every document.
        conversations: documents are conversations, by default in the field messages: lists of messages with role and
            content, or with from and value; or prompts and completions. They go through the folder's chat template,
            with the fields tools and system. A file .mask says which tokens are learned.
        bad: what happens to documents that cannot be read or tokenized: error ends the command; skip leaves them out,
            and says how many and names the first five.
        processes: that tokenize; 0 takes one per CPU, fewer for small texts.
    """
    from distca.data.progress import tokenizing_progress
    from distca.log import printer

    check_least(0, processes=processes)
    _check_used(source, field=field, conversations=conversations)
    prefix = check_output(output)
    recipe = find_recipe(tokenizer, field, conversations=conversations, begin_token=begin_token, end_token=end_token)
    texts = open_texts(source, path)
    if not conversations:
        logger.info(recipe.tokenizer.closing())
    with tokenizing_progress(texts.bytes) as advanced:
        done = convert_texts(
            texts, recipe, prefix, processes=processes or processes_for(texts.bytes), bad=bad, advanced=advanced
        )
    said = f"{prefix}.bin, .idx, .json: {count(done.documents, 'document')}, {count(done.tokens, 'token')}, "
    said += f"vocabulary {done.vocabulary:,}; {count(done.empty, 'document')} without a token to learn left out"
    printer().print(said, soft_wrap=True)
    if done.bad:
        printer().print(f"left out {LeftOut(done.bad, BAD, done.bad_named)}", soft_wrap=True)


def describe(
    path: str | None = None,
    *,
    source: LengthKind = "text",
    field: str | None = None,
    tokenizer: str = "bytes",
    conversations: bool = False,
    bad: Bad = "error",
    seed: int = 0,
) -> None:
    """Print how long the documents of a source are. Without a tokenizer a byte of text counts as a token.

    Args:
        path: folder, file, .bin/.idx prefix, or the name of a mix: pretrain, prolong, and their versions for contexts
            of 128K, pretrain-long and prolong-long.
        source: text = a folder of text files; jsonl = JSON Lines, also .gz and .zst; parquet = Parquet files; arrow = a
            folder that the library datasets saved to disk; blend = several of these, as a YAML file says, each document
            as often as an epoch has it; indexed = Megatron's .bin/.idx pair; stdlib = Python's own source files; mix =
            synthetic lengths.
        field: of each JSON object, or column of each table, that holds the document; text by default, with
            conversations messages.
        tokenizer: of texts: bytes, a tokenizer.json, or a model's folder that holds one.
        conversations: documents are conversations, which go through the folder's chat template.
        bad: what happens to documents that cannot be read or tokenized: error ends the command; skip leaves them out.
        seed: of the lengths that a mix draws, and of the documents that a blend uses once more than others.
    """
    from rich.table import Table

    from distca.log import printer

    check_least(0, seed=seed)
    how = {"tokenizer": tokenizer if tokenizer != "bytes" else None, "bad": bad if bad == "skip" else None}
    _check_used(source, field=field, conversations=conversations, **how)
    if not path and source != "stdlib":
        mixes = f", one of {', '.join(MIX_NAMES)}" if source == "mix" else ""
        raise OptionError(f"--source {source} needs --path{mixes}.")
    documents = open_lengths(
        source, path, field=field, seed=seed, tokenizer=tokenizer, conversations=conversations, bad=bad
    )
    longest = int(documents.lengths.max())
    statistics = length_statistics(Corpus(documents, longest, seed=seed).train.lengths)
    table = Table(title=f"Documents of {source}" + (f" {path}" if path else ""))
    table.add_column("")
    table.add_column("tokens", justify="right")
    for label, value in (
        (
            f"all {count(statistics.documents, 'document')}" if statistics.documents > 1 else "1 document",
            f"{statistics.tokens:,}",
        ),
        *_learned(documents),
        ("mean document", f"{statistics.mean:,.1f}"),
        ("shortest document", f"{statistics.shortest:,}"),
        *((f"{share:.0%} quantile", f"{value:,.0f}") for share, value in statistics.quantiles.items()),
        ("longest document", f"{statistics.longest:,}"),
        *(
            (f"tokens in documents over {limit // 1024}K", f"{share:.1%}")
            for limit, share in statistics.long_shares.items()
        ),
        *(
            (f"attention pairs in documents over {limit // 1024}K", f"{share:.1%}")
            for limit, share in statistics.attention_shares.items()
        ),
    ):
        table.add_row(label, value)
    printer().print(table)


def _learned(documents: DocumentSource) -> list[tuple[str, str]]:
    """The row of tokens that are learned, where that is only a part and known."""
    if isinstance(documents, KnownLengths) and documents.masked:
        share = documents.learned_tokens / int(documents.lengths.sum())
        return [("learned tokens", f"{documents.learned_tokens:,} ({share:.1%})")]
    return []


def _check_used(source: str, **given: object) -> None:
    """OptionError where the source would pass over an option."""
    for said in passed_over(source, **given):
        raise OptionError(said)
