"""The end of a turn, found by comparing what a template writes when another message follows and when none does."""

from __future__ import annotations

import re


def closing(
    last: str | None, followed: str | None, is_last: bool, begin: int, control: re.Pattern[str]
) -> tuple[int, bool]:
    """Returns how many characters behind a text close its turn, and whether the model can stop at them.

    What stands there whether another message follows or not closes the turn, until its last control token. A template
    may have a token for the last turn alone, or none, where the next role's token is what the model stops at.

    Args:
        last: what stands behind the text if no message follows; None where that is not known.
        followed: what does if one follows; None where that is not known.
        is_last: whether the first of these is what the conversation has; the one that it has is known.
        begin: characters of it that are before the turn.
        control: matches control tokens.
    """
    actual = (last if is_last else followed) or ""
    ends = [match.end() for match in control.finditer(actual) if match.start() >= begin]
    if last is None or followed is None:
        if not ends:
            return len(actual) if is_last else begin, False
        return ends[-1] if is_last else ends[0], True
    both = alike(last, followed, control)
    common = [end for end in ends if end <= both]
    if both in common and all(both < len(text) and not control.match(text, both) for text in (last, followed)):
        common.pop()  # names of roles follow, so it begins another message
    if common:
        return common[-1], True
    if is_last:
        return (ends[-1], True) if ends else (both, False)
    marker = control.match(followed, both) if both == len(last) else None
    return (marker.end(), True) if marker else (both, False)


def alike(one: str, other: str, control: re.Pattern[str]) -> int:
    """Returns with how many characters both begin, without parts of a control token."""
    pairs = zip(one, other, strict=False)
    same = next((place for place, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))
    cut = [match.start() for text in (one, other) for match in control.finditer(text) if match.end() > same]
    return min([same, *cut])
