"""One tool call written as a JSON object, read character by character: {"name": …, "arguments": {…}}."""

from __future__ import annotations

import json

_ARGUMENT_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "name")
_SPACE = " \t\r\n"


class CallScanner:
    """Reads a call's object in any order of keys. Feed characters until `done` or `broken`.

    name       known once its value is complete
    take()     JSON text of the arguments since the last call of it, as the model wrote it (a JSON string holding
               an object is unpacked); "{}" at the end where there were none
    broken     what came is not such an object. With `names`, a name outside of it breaks the scan too
    """

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._names = names
        self._state = self._start
        self._arguments: list[str] = []  # not taken yet
        self._key = ""
        self._value: list[str] = []  # characters of the string or value being read
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._has_arguments = False

    def feed(self, char: str) -> None:
        self._state(char)

    def take(self) -> str:
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _break(self) -> None:
        self.broken = True

    def _start(self, char: str) -> None:
        if char == "{":
            self._state = self._key_or_end
        elif char not in _SPACE:
            self._break()

    def _key_or_end(self, char: str) -> None:
        if char == '"':
            self._value = [char]
            self._state = self._in_key
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self._break()

    def _in_key(self, char: str) -> None:
        self._value.append(char)
        if not self._string_ends(char):
            return
        self._key = self._decoded()
        if self._key not in _ARGUMENT_KEYS + _OTHER_KEYS:
            self._break()
        self._state = self._colon

    def _colon(self, char: str) -> None:
        if char == ":":
            self._state = self._value_start
        elif char not in _SPACE:
            self._break()

    def _value_start(self, char: str) -> None:
        if char in _SPACE:
            return
        self._value = []
        self._depth = 0
        is_arguments = self._key in _ARGUMENT_KEYS
        if char == '"':
            self._value.append(char)
            self._state = self._string_value
        elif char == "{" and is_arguments and not self._has_arguments:
            self._has_arguments = True
            self._state = self._object_value
            self._object_value(char)
        elif char in "{[,}" or self._key == "name" or (is_arguments and self._has_arguments):
            self._break()
        else:
            self._value.append(char)
            self._state = self._scalar_value

    def _string_value(self, char: str) -> None:
        self._value.append(char)
        if not self._string_ends(char):
            return
        text = self._decoded()
        if self._key == "name":
            self.name = text
            if not text or (self._names is not None and text not in self._names):
                self._break()
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._arguments.append(text)
        self._state = self._comma_or_end

    def _object_value(self, char: str) -> None:
        self._arguments.append(char)
        if self._in_string:
            if self._string_ends(char):
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._state = self._comma_or_end

    def _scalar_value(self, char: str) -> None:
        if char not in ",}" and char not in _SPACE:
            self._value.append(char)
            return
        if "".join(self._value) not in ("null", "true", "false") and not self._value[0].isdigit():
            self._break()
            return
        self._state = self._comma_or_end
        self._comma_or_end(char)

    def _comma_or_end(self, char: str) -> None:
        if char == ",":
            self._state = self._key_or_end
        elif char == "}":
            self._end()
        elif char not in _SPACE:
            self._break()

    def _end(self) -> None:
        if self.name is None:
            self._break()
            return
        if not self._has_arguments:
            self._arguments.append("{}")
        self.done = True

    def _string_ends(self, char: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        else:
            return char == '"'
        return False

    def _decoded(self) -> str:
        try:
            return str(json.loads("".join(self._value), strict=False))
        except ValueError:
            self._break()
            return ""
