"""Versioned JSON: the only file format of the package for data it reads.

Files from strangers are data: bounded, checked, never executed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import enum
import functools
import gzip
import json
import os
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeVar

from chainer_hybridmem.errors import FormatError

T = TypeVar('T')
MAXIMUM_FILE_BYTES = 2**26  # 100 times ResNet-50's profile; parsed it may take 20 times
_GZIP = b'\x1f\x8b'
_CHUNK_BYTES = 2**20
_HEAD_BYTES = 200
_FORMAT = re.compile(rb'\s*\{\s*"format": "([\w/-]+)"')
LARGEST_SIZE = 2**53  # bytes; sums of many stay inside 64 bits
UNPACKING_ERRORS = (
    AttributeError,
    IndexError,
    KeyError,
    OverflowError,
    TypeError,
    ValueError,
)
"""What contents of another form than expected raise."""
WRITERS = {
    'chainer_hybridmem/profile': '`hybridmem profile -o`',
    'chainer_hybridmem/plan': '`hybridmem plan -o`',
    'chainer_hybridmem/timeline': '`hybridmem.save(session.timeline, ...)`',
    'chainer_hybridmem/samples': '`hybridmem estimate --samples`',
}
"""By format: what writes such files."""


@contextlib.contextmanager
def named(path: str) -> Iterator[None]:
    """Puts the file's name before what is wrong with its contents."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f'{path}: {error}') from error


def read_text(path: str, format_name: str | None = None) -> str:
    """Reads a text file of bounded size.

    Args:
        path: The file.
        format_name: What it should be, so that a missing one is not mistaken for a
            file of another format; None for what is no file of this package.

    Raises:
        FormatError: If it is missing, unreadable, too large or not text.
    """
    try:
        with open(path, 'rb') as file:
            data = read_bounded(file)
        text = data.decode('utf-8')
    except OSError as error:
        reason = error.strerror or error
        raise FormatError(
            f'{path or repr(path)} cannot be read: {reason}.'
            f'{_advice(path, error, format_name)}'
        ) from error
    except UnicodeDecodeError as error:
        what = f'it is no text, byte {error.start} is {data[error.start]:#04x}'
        next_step = 'Name another file'
        if data.startswith(_GZIP):
            what, next_step = 'it is compressed', 'Unpack it with gunzip'
        raise FormatError(f'{path} cannot be read: {what}. {next_step}.') from error
    if len(data) > MAXIMUM_FILE_BYTES:
        raise FormatError(f'{path} is larger than {MAXIMUM_FILE_BYTES} bytes.')
    return text


def _advice(path: str, error: OSError, format_name: str | None) -> str:
    """What to do about a file that cannot be opened."""
    if isinstance(error, IsADirectoryError):
        return ' Name a file in it.'
    if not isinstance(error, FileNotFoundError):
        return ''
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        there = os.listdir(folder or '.')
        for close in difflib.get_close_matches(name, there, len(there) or 1):
            found = os.path.join(folder, close)
            if os.path.isfile(found) and _peek_format(found) == format_name:
                return f' Did you mean {found}?'
    return ' Name a file that is there.'


def _peek_format(path: str) -> str | None:
    """The format that a file of this package begins with; None for other files."""
    try:
        with open(path, 'rb') as file:
            match = _FORMAT.match(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return match.group(1).decode() if match else None


def read_bounded(file: BinaryIO | gzip.GzipFile) -> bytes:
    """At most one byte more than allowed, and memory only for what there is."""
    data = bytearray()
    while chunk := file.read(min(_CHUNK_BYTES, MAXIMUM_FILE_BYTES + 1 - len(data))):
        data += chunk
    return bytes(data)


def parse(text: str, format_name: str, version: int) -> dict[str, Any]:
    """Parses versioned JSON and checks its header.

    Args:
        text: The file.
        format_name: What it should be.
        version: The one version that can be read.

    Raises:
        FormatError: With the expected and the found value.
    """
    expected = f'{format_name!r} was expected'
    if format_name in WRITERS:
        expected += f', as {WRITERS[format_name]} writes it'
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f'This is not JSON ({error}); a file of format {expected}.'
        ) from error
    if not isinstance(body, dict) or body.get('format') != format_name:
        found = f'is {type(body).__name__}, not an object'
        if isinstance(body, dict):
            found = 'has no format'
            if 'format' in body:
                found = f'has format {body["format"]!r}'
        raise FormatError(f'The file {found}; {expected}.')
    if type(body.get('version')) is not int or body['version'] != version:
        raise FormatError(
            f'The file has version {body.get("version")!r} of {format_name}; this '
            f'release reads version {version}. Record or plan it again.'
        )
    return body


def broken(what: str, why: str) -> FormatError:
    """An error about contradictory contents."""
    return FormatError(f'The {what} cannot be used: {why}. Record or plan it again.')


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns the usual errors of unpacking into one clear error."""
    try:
        yield
    except UNPACKING_ERRORS as error:
        if isinstance(error, FormatError):
            raise
        why = f'{type(error).__name__}: {error}'
        if isinstance(error, KeyError):
            why = f'it lacks {error}'
        raise broken(what, why) from error


def serialise(item: Any, format_name: str, version: int) -> str:
    """A record as versioned JSON.

    Records in it have their fields by name; those in its tuples are rows.
    """
    body = {name: getattr(item, name) for name in _fields(item)}
    for name, value in body.items():
        is_record = dataclasses.is_dataclass(value)
        body[name] = dataclasses.asdict(value) if is_record else _plain(value)
    return json.dumps({'format': format_name, 'version': version, **body})


def read_record(cls: type[T], text: str, format_name: str, version: int) -> T:
    """Reads what :func:`serialise` has written, checking every field's type.

    Raises:
        FormatError: If the text is no such file.
    """
    body, what = parse(text, format_name, version), format_name.rpartition('/')[2]
    with reading(what):
        return _from_names(cls, body, what)


def _from_names(cls: type[T], body: dict[str, Any], what: str) -> T:
    found = {}
    for name, hint in _hints(typing.cast(Any, cls)).items():
        inner = functools.partial(_read_inner, what=what, name=name)
        try:
            found[name] = _typed(hint, body[name], inner)
        except TypeError as error:
            raise TypeError(f'{name}: {error}') from None
    return cls(**found)


def _read_inner(cls: type[T], body: Any, what: str, name: str) -> T:
    """A record in another one, as its field of this name."""
    inner, names = name.replace('_', ' '), _fields(cls)
    for field in names:
        if not isinstance(body, dict) or field not in body:
            raise broken(what, f'its {inner} lacks {field}')
    for field in body:
        if field not in names:
            raise broken(what, f'its {inner} has an unknown figure {field!r}')
    return _from_names(cls, body, what)


def row(item: Any) -> list[Any]:
    """A dataclass as a list of its fields, nested ones included."""
    return [_plain(getattr(item, field.name)) for field in dataclasses.fields(item)]


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(element) for element in value]
    if dataclasses.is_dataclass(value):
        return row(value)
    return value


def unrow(cls: type[T], values: list[Any]) -> T:
    """Rebuilds a record from :func:`row`, checking every field's type.

    Args:
        cls: A dataclass or a named tuple.
        values: One for each field.
    """
    hints = _hints(typing.cast(Any, cls))
    if not isinstance(values, list) or len(values) != len(hints):
        raise ValueError(f'{cls.__name__} needs {len(hints)} values, got {values!r}')
    pairs = zip(hints.values(), values, strict=True)
    return cls(*(_typed(hint, value) for hint, value in pairs))


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Types of the fields in order; looked up for every row, found out once."""
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in _fields(cls)}


def _fields(cls: Any) -> tuple[str, ...]:
    """Names of a record's fields; none of what is no record."""
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return tuple(getattr(cls, '_fields', ()))


@functools.cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of a type; asked for with every value."""
    return typing.get_origin(hint), typing.get_args(hint)


def _typed(hint: Any, value: Any, read: Callable[[type[Any], Any], Any] = unrow) -> Any:
    """A value of a type, records in it as they are read; those in lists are rows."""
    origin, kinds = _shape(hint)
    if origin is tuple:
        is_pair = kinds[-1] is not Ellipsis
        if not isinstance(value, list) or (is_pair and len(value) != len(kinds)):
            raise TypeError(f'a list was expected, got {value!r}')
        if kinds[0] is int and all(type(item) is int for item in value):
            return tuple(value)
        return tuple(_typed(kinds[0], item) for item in value)
    if origin is typing.Union or origin is types.UnionType:
        if kinds[-1] is type(None):
            return None if value is None else _typed(kinds[0], value, read)
        if not isinstance(value, kinds):
            raise TypeError(f'one of {kinds} was expected, got {value!r}')
        return value
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    if _fields(hint):
        return read(hint, value)
    if hint is float and isinstance(value, int | float):
        return float(value)
    hint = origin or hint
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise TypeError(f'{hint.__name__} was expected, got {value!r}')
    return value
