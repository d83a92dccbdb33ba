"""Where a JSON object ends in a text that is still growing. Pure."""

from __future__ import annotations


class ObjectScanner:
    """Reads a text that begins with `{`, in any pieces; says where its closing brace is.

    It matches braces outside strings and checks nothing else: what a model writes between them is
    its own.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self._is_done = False

    @property
    def is_closed(self) -> bool:
        return self._is_done

    def read(self, text: str) -> int:
        """How many of the characters belong to the object; all of them until it is closed."""
        for index, char in enumerate(text):
            if self._is_in_string:
                self._read_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._is_done = True
                    return index + 1
        return len(text)

    def _read_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
