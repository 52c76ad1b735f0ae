"""Stop strings over streamed text.

Contract, for every way of cutting the text into deltas:

- the first stop string to be *complete* ends the text; of several complete at the same character, the longest;
- text given out never holds a stop string nor a part of one that the text to come could complete, and text that
  cannot become one any more is given out at once;
- the text given out is the text up to the stop string, or up to its end with ``include_stop_str_in_output``;
- a character costs time in proportion to the number of stop strings, however long they are (Knuth, Morris and Pratt,
  "Fast pattern matching in strings", 1977).

``min_tokens`` is the caller's: it does not push the text of tokens before which stops do nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class StopMatcher:
    """Holds text back while it may be the start of a stop string; one object a choice.

    Args:
        stops: the stop strings, none empty.
        include_stop_str_in_output: keep the stop string at the end of the text.

    Attributes:
        matched: the stop string that ended the text, or None. Once it is set, ``push`` and ``flush`` give "".
    """

    def __init__(self, stops: Iterable[str], *, include_stop_str_in_output: bool = False) -> None:
        self._patterns = [_Pattern(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._first_characters = {pattern.stop[0] for pattern in self._patterns}
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Take more text; return what is safe to give out now."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_characters.isdisjoint(delta):
            return delta  # nothing starts here: most text
        text = self._held + delta
        for end in range(len(self._held), len(text)):
            char = text[end]
            # Every pattern must see every character; the longest comes first.
            complete = [pattern.stop for pattern in self._patterns if pattern.advance(char)]
            if complete:
                self.matched, self._held = complete[0], ""
                return text[: end + 1 if self._include else end + 1 - len(complete[0])]
        return self._hold(text)

    def flush(self) -> str:
        """The text ends here, without a stop string: return what was held back."""
        text, self._held = self._held, ""
        return text

    def _hold(self, text: str) -> str:
        safe = len(text) - max(pattern.num_matched for pattern in self._patterns)
        self._held = text[safe:]
        return text[:safe]


class _Pattern:
    """One stop string, and how many of its characters the text seen so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.num_matched = 0
        # _fallback[n]: the longest proper prefix of the stop string that its first n characters end with.
        self._fallback = [0, 0]
        length = 0
        for char in stop[1:]:
            while length and stop[length] != char:
                length = self._fallback[length]
            length += stop[length] == char
            self._fallback.append(length)

    def advance(self, char: str) -> bool:
        """Take one character; True when the stop string is complete."""
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched]
        self.num_matched += self.stop[self.num_matched] == char
        return self.num_matched == len(self.stop)
