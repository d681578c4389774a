"""Reads pictures, idx files and list files, and crops pictures."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_IDX_UNSIGNED_BYTE = 8


class DatasetError(ValueError):
    """A data set cannot be read; the message says which file and what to do."""


def import_pillow() -> Any:
    """Returns the module ``PIL.Image``, or says how to get it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DatasetError(
            'Reading pictures needs Pillow; install it: pip install pillow'
        ) from error
    return Image


def resize_shorter(picture: Image, side: int) -> Image:
    """Returns the picture scaled so that its shorter side has ``side`` pixels."""
    scale = side / min(picture.size)
    width, height = (max(side, round(length * scale)) for length in picture.size)
    return picture.resize((width, height), import_pillow().Resampling.BILINEAR)


def random_crop(picture: Image, size: int, random: np.random.Generator) -> Image:
    """Returns a random square of ``size`` pixels, flipped half of the time."""
    left = int(random.integers(picture.width - size + 1))
    top = int(random.integers(picture.height - size + 1))
    crop = picture.crop((left, top, left + size, top + size))
    if random.random() < 0.5:
        crop = crop.transpose(import_pillow().Transpose.FLIP_LEFT_RIGHT)
    return crop


def centre_crop(picture: Image, size: int) -> Image:
    """Returns the square of ``size`` pixels in the middle."""
    left, top = (picture.width - size) // 2, (picture.height - size) // 2
    return picture.crop((left, top, left + size, top + size))


def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """Reads an idx file of unsigned bytes, or the same with ``.gz`` appended.

    Args:
        path: Path of the file, without ``.gz``.
        dimensions: Number of dimensions that it must have.

    Returns:
        A uint8 array with the shape that the file's header says.

    Raises:
        DatasetError: There is no such file, or it holds something else.
    """
    path, content = _read_maybe_gzipped(Path(path))
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, _IDX_UNSIGNED_BYTE, dimensions)):
        raise DatasetError(
            f'{path}: not an idx file of unsigned bytes with {dimensions} dimensions '
            f'(it starts with {content[:4].hex() or "nothing"}).'
        )
    if len(content) < header:
        raise DatasetError(f'{path}: the file ends inside its header.')
    shape = np.frombuffer(content[4:header], '>u4').tolist()
    if len(content) - header != math.prod(shape):
        raise DatasetError(
            f'{path}: {len(content) - header} bytes follow the header of a shape '
            f'{tuple(shape)}; the file is damaged.'
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_maybe_gzipped(path: Path) -> tuple[Path, bytes]:
    gzipped = path.with_name(f'{path.name}.gz')
    try:
        if path.exists():
            return path, path.read_bytes()
        with gzip.open(gzipped) as file:
            return gzipped, file.read()
    except (OSError, EOFError) as error:
        raise DatasetError(
            f"Cannot read {path} or {gzipped.name} ({error}); Debian's package "
            f'dataset-fashion-mnist has the files of Fashion-MNIST.'
        ) from error


def read_list(path: Path) -> list[tuple[str, int]]:
    """Reads paths and labels from a list file.

    Raises:
        DatasetError: The file cannot be read, or a line is not ``path label``.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f'Cannot read the list file {path} ({error}).') from error
    pairs = [
        _parse_line(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not pairs:
        raise DatasetError(f'The list file {path} names no picture.')
    return pairs


def _parse_line(path: Path, number: int, line: str) -> tuple[str, int]:
    picture, _, label = line.strip().rpartition(' ')
    if not picture or not label.isdecimal():
        raise DatasetError(
            f"{path}, line {number}: expected 'path label' with a class number from 0, "
            f'not {line!r}.'
        )
    return picture.strip(), int(label)


def open_picture(path: Path) -> Image:
    """Returns a picture in red, green and blue.

    Raises:
        DatasetError: It cannot be read.
    """
    image = import_pillow()
    try:
        with image.open(path) as file:
            return file.convert('RGB')
    except OSError as error:
        raise DatasetError(f'Cannot read the picture {path} ({error}).') from error
