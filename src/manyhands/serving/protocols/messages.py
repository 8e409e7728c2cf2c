"""Protocol buffers from tables: the same bytes on the wire as the public definitions, and no generated code.

A table gives each message's fields as "name number type"; `*` repeats, `map` is from strings, another message is named.
They live in a pool of their own, so a client library in the same program is not disturbed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from ...core import RequestRefused

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}
Table = Mapping[str, Sequence[str]]
_SURELY_LIGHT, MAX_PARTS, MAX_NUMBERS = 16 << 10, 8192, 1 << 19
"""Bytes up to which a message is parsed unchecked; maximum parts of larger ones, and numbers in lists."""
MAX_OUTLINE = 16 << 10
"""Maximum bytes of the fields that say which model a message asks."""
_FIXED = {_Field.TYPE_FLOAT: 4, _Field.TYPE_DOUBLE: 8}


def make_messages(package: str, table: Table) -> dict[str, Any]:
    """Return message classes by name.

    >>> Point = make_messages("demo", {"Point": ["x 1 int64", "names 2 *string", "more 3 map Point"]})["Point"]
    >>> Point(x=150).SerializeToString()
    b'\\x08\\x96\\x01'
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for text in fields:
            _add_field(message, text, f".{package}.")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in table}


def _add_field(message: Any, text: str, prefix: str) -> None:
    name, number, *kind = text.split()
    field = message.field.add(name=name, number=int(number))
    if kind[0] == "map":
        entry = message.nested_type.add(name="".join(part.capitalize() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _add_field(entry, "key 1 string", prefix)
        _add_field(entry, f"value 2 {kind[1]}", prefix)
        field.label, field.type = _Field.LABEL_REPEATED, _Field.TYPE_MESSAGE
        field.type_name = f"{prefix}{message.name}.{entry.name}"
        return
    field.label = _Field.LABEL_REPEATED if kind[0].startswith("*") else _Field.LABEL_OPTIONAL
    plain = kind[0].removeprefix("*").removeprefix("?")
    if plain in _SCALARS:
        field.type = _SCALARS[plain]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, prefix + plain
    if kind[0].startswith("?"):
        # A member of a oneof: which one was set can be queried.
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0


def require_light(data: bytes, asked: Any) -> None:
    """Refuse a message that would take many times its bytes when it is parsed: two-byte parts, long lists.

    Numbers that are sent as one field of bytes cost nothing and are not counted.
    """
    if len(data) > _SURELY_LIGHT:
        _Walk(asked.DESCRIPTOR.name).over(memoryview(data), asked.DESCRIPTOR)


def outline(data: bytes, kept: Collection[int], name: str) -> bytes:
    """Return a message with only the fields in `kept`, by number; all other fields are skipped without decoding.

    >>> Point = make_messages("shown", {"Point": ["x 1 int64", "names 2 *string"]})["Point"]
    >>> outline(Point(x=150, names=["a" * 1000]).SerializeToString(), [1], "Point")
    b'\\x08\\x96\\x01'
    """
    return _Walk(name).outline(memoryview(data), kept)


class _Walk:
    """Walk over the tags of a message and its nested messages, and count parts and numbers."""

    def __init__(self, name: str) -> None:
        self._name, self._num_parts, self._num_numbers = name, 0, 0

    def over(self, data: memoryview, descriptor: Any) -> None:
        """Walk over one message."""
        fields = descriptor.fields_by_number
        for number, _, content in self._fields(data):
            if len(content):
                self._look_into(content, fields.get(number))

    def outline(self, data: memoryview, kept: Collection[int]) -> bytes:
        """Return the fields of some numbers, in their order."""
        found = bytearray()
        for number, whole, _ in self._fields(data):
            if number in kept:
                if len(found) + len(whole) > MAX_OUTLINE:
                    rule = f"the fields of a {self._name} that name a model may have {MAX_OUTLINE} bytes"
                    raise RequestRefused("INVALID_ARGUMENT", f"{rule}, but got more")
                found += whole
        return bytes(found)

    def _fields(self, data: memoryview) -> Iterator[tuple[int, memoryview, memoryview]]:
        """Yield every field's number, its bytes, and its content, which is empty for a single number."""
        position, size = 0, len(data)
        while position < size:
            self._count(1, 0)
            start = position
            tag, position = self._varint(data, position)
            kind, content = tag & 7, data[:0]
            if kind == 2:
                length, position = self._varint(data, position)
                if length > size - position:
                    raise self._broken()
                content = data[position : position + length]
                position += length
            elif kind == 0:
                _, position = self._varint(data, position)
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                raise self._broken()
            yield tag >> 3, data[start:position], content

    def _look_into(self, data: memoryview, field: Any) -> None:
        if field is None or field.type in (_Field.TYPE_BYTES, _Field.TYPE_STRING):
            return
        if field.message_type is not None:
            self.over(data, field.message_type)
        else:
            self._count(0, len(data) // _FIXED.get(field.type, 1))

    def _count(self, parts: int, numbers: int) -> None:
        self._num_parts += parts
        self._num_numbers += numbers
        if self._num_parts > MAX_PARTS:
            raise RequestRefused("INVALID_ARGUMENT", f"a {self._name} may have {MAX_PARTS} parts, but got more")
        if self._num_numbers > MAX_NUMBERS:
            rule = f"a {self._name} may have {MAX_NUMBERS} numbers in lists"
            raise RequestRefused("INVALID_ARGUMENT", f"{rule}, but got more; send them as bytes")

    def _varint(self, data: memoryview, position: int) -> tuple[int, int]:
        if position < len(data) and data[position] < 128:
            return data[position], position + 1
        value = shift = 0
        while position < len(data) and shift < 70:
            byte = data[position]
            value |= (byte & 127) << shift
            position += 1
            if byte < 128:
                return value, position
            shift += 7
        raise self._broken()

    def _broken(self) -> RequestRefused:
        return RequestRefused("INVALID_ARGUMENT", f"the message is not a valid {self._name}")
