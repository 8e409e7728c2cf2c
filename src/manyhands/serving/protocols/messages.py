"""Protocol buffers from tables: the same bytes on the wire as the public definitions, and no generated code.

A table gives each message's fields as "name number type"; `*` repeats, `map` is from strings, another message is named.
They live in a pool of their own, so a client library in the same program is not disturbed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

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


def make_messages(package: str, table: Table) -> dict[str, Any]:
    """Message classes by name.

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
        # One of several: which one was set can be asked.
        if not message.oneof_decl:
            message.oneof_decl.add(name="one")
        field.oneof_index = 0
