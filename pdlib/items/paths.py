"""Patterns over the keys of leaves: literals, captures, `*` in a key, `**` for any number; knows no contract."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Keys = tuple[str, ...]

CAPTURE = re.compile(r"\{([A-Za-z]\w*)\}")


def match_keys(segments: Keys, keys: Keys, found: Mapping[str, Keys] | None = None) -> Iterator[dict[str, Keys]]:
    """Every way in which a path pattern matches keys: capture → the key it took; `**` → those that its first took."""
    found = found or {}
    if not segments:
        if not keys:
            yield {**found}
        return
    head, rest = segments[0], segments[1:]
    if head == "**":
        for taken in range(len(keys) + 1):
            yield from match_keys(rest, keys[taken:], {"**": keys[:taken], **found})
        return
    if not keys:
        return
    capture = CAPTURE.fullmatch(head)
    if capture:
        if found.get(capture[1], keys[:1]) == keys[:1]:
            yield from match_keys(rest, keys[1:], {**found, capture[1]: keys[:1]})
    elif head == keys[0] or ("*" in head and _glob(head, keys[0])):
        yield from match_keys(rest, keys[1:], found)


def fill_keys(segments: Keys, captures: Mapping[str, Keys]) -> Keys:
    """The path that a pattern gives for these captures; what is not captured stays as it stands."""
    parts: list[Keys] = []
    for segment in segments:
        capture = CAPTURE.fullmatch(segment)
        parts.append(captures.get(capture[1] if capture else segment, (segment,)))
    return tuple(key for part in parts for key in part)


def _glob(pattern: str, key: str) -> bool:
    return re.fullmatch(".*".join(re.escape(part) for part in pattern.split("*")), key, re.DOTALL) is not None
