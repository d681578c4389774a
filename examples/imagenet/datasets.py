"""Labelled pictures for training: from list files, packages, or drawn on the spot.

Every data set gives pairs ``(picture, label)``: float32 of shape
``(3, insize, insize)``, normalised to about zero mean and unit deviation for each
channel, and int32. Pictures are decoded, cropped or drawn when they are asked for.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import chainer_hybridmem  # noqa: F401  (before chainer: prepares NumPy for it)

# isort: split
import chainer
import numpy as np
from picture_files import (
    DatasetError,
    centre_crop,
    import_pillow,
    open_picture,
    random_crop,
    read_idx,
    read_list,
    resize_shorter,
)

# Of ImageNet's training pictures: red, green, blue in 0..255.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_DEVIATION = (58.395, 57.12, 57.375)

# Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST_FOLDER = '/usr/share/datasets/fashion-mnist'

# Photographs in scikit-image's wheel, one class each: those that its documentation
# says are CC0, in the public domain, or without known copyright restrictions.
DEMO_PHOTOGRAPHS = (
    'astronaut.png',
    'brick.png',
    'camera.png',
    'chelsea.png',
    'coffee.png',
    'coins.png',
    'grass.png',
    'gravel.png',
    'hubble_deep_field.jpg',
    'ihc.png',
    'retina.jpg',
    'rocket.jpg',
)


class Pictures(chainer.dataset.DatasetMixin):
    """Base of the data sets: draws random numbers per picture and normalises.

    Args:
        insize: Height and width of the pictures, in pixels.
        seed: Seed of crops, flips and noise.
        mean: Mean of each channel, in 0..255.

    Attributes:
        n_class: Number of classes.
    """

    n_class: int

    def __init__(
        self, insize: int, seed: int = 0, mean: Sequence[float] = IMAGENET_MEAN
    ) -> None:
        self.insize = insize
        self.seed = seed
        self._mean = np.array(mean, np.float32).reshape(-1, 1, 1)
        self._deviation = np.array(IMAGENET_DEVIATION, np.float32).reshape(-1, 1, 1)
        self._draws = 0

    def random(self, i: int) -> np.random.Generator:
        """Returns a generator that is new at every call, in every loader process."""
        self._draws += 1
        return np.random.default_rng((self.seed, i, self._draws))

    def example(self, pixels: Any, label: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pair to train on.

        Args:
            pixels: A picture, or an array of shape ``(insize, insize, 3)``, 0..255.
            label: Its class.
        """
        planes = np.asarray(pixels, np.float32).transpose(2, 0, 1)
        return (planes - self._mean) / self._deviation, np.array(label, np.int32)


class LabeledImages(Pictures):
    """Pictures named in a list file, as for Chainer's own ImageNet example.

    A line is ``path label``: a path relative to ``root``, which may contain spaces,
    and a class number from 0. In training a random crop, flipped half of the time,
    is taken; otherwise the centre.

    Args:
        list_file: The list file.
        root: Folder that the paths are relative to.
        insize: Height and width of the pictures, in pixels.
        mean: Mean of each channel, in 0..255.
        train: Whether to crop and flip at random.
        seed: Seed of crops and flips.

    Raises:
        DatasetError: The list file cannot be read, or a line is not as above.
    """

    def __init__(
        self,
        list_file: str | Path,
        root: str | Path,
        insize: int,
        mean: Sequence[float] = IMAGENET_MEAN,
        train: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(insize, seed, mean)
        import_pillow()
        self.train = train
        self._root = Path(root)
        self._pairs = read_list(Path(list_file))
        self.n_class = 1 + max(label for _, label in self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns picture ``i`` and its label."""
        path, label = self._pairs[i]
        picture = resize_shorter(open_picture(self._root / path), self._shorter_side())
        if self.train:
            return self.example(
                random_crop(picture, self.insize, self.random(i)), label
            )
        return self.example(centre_crop(picture, self.insize), label)

    def _shorter_side(self) -> int:
        # 256 for a crop of 224, as is usual.
        return math.ceil(self.insize * 256 / 224)


class FashionMnist(Pictures):
    """Fashion-MNIST: 28x28 grey pictures of clothes in 10 classes, scaled up.

    Args:
        insize: Height and width of the pictures, in pixels.
        folder: Folder with the four idx files, gzipped or not.
        train: Whether to use the 60,000 training or the 10,000 test pictures.

    Raises:
        DatasetError: A file is missing or is not what its name says.
    """

    n_class = 10

    def __init__(
        self,
        insize: int,
        folder: str | Path = FASHION_MNIST_FOLDER,
        train: bool = True,
    ) -> None:
        super().__init__(insize)
        import_pillow()
        prefix = Path(folder) / ('train' if train else 't10k')
        self._pictures = read_idx(f'{prefix}-images-idx3-ubyte', dimensions=3)
        self._labels = read_idx(f'{prefix}-labels-idx1-ubyte', dimensions=1)
        if len(self._pictures) != len(self._labels):
            raise DatasetError(
                f'{prefix}-*: {len(self._pictures)} pictures but {len(self._labels)} '
                f'labels; the two files do not belong together.'
            )

    def __len__(self) -> int:
        return len(self._labels)

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns picture ``i`` and its label."""
        image = import_pillow()
        picture = image.fromarray(self._pictures[i]).convert('RGB')
        picture = picture.resize((self.insize, self.insize), image.Resampling.BILINEAR)
        return self.example(picture, int(self._labels[i]))


class DemoPictures(Pictures):
    """Random crops of real photographs; the class is the photograph.

    The photographs are those that scikit-image ships inside its package, so that
    nothing is downloaded. With so few of them a network learns to recognise the
    pictures, not what they show: this is for trying out training, not for results.

    Args:
        insize: Height and width of the pictures, in pixels.
        n: Number of crops in an epoch.
        seed: Seed of crops and flips.
        folder: Folder with the photographs; None for scikit-image's.

    Raises:
        DatasetError: scikit-image is not installed.
    """

    n_class = len(DEMO_PHOTOGRAPHS)

    def __init__(
        self,
        insize: int,
        n: int = 1200,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        super().__init__(insize, seed)
        import_pillow()
        folder = _photograph_folder() if folder is None else Path(folder)
        self._n = n
        self._photographs = [open_picture(folder / name) for name in DEMO_PHOTOGRAPHS]

    def __len__(self) -> int:
        return self._n

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns a crop of photograph ``i % n_class`` and its label."""
        label = i % self.n_class
        random = self.random(i)
        # Between one and two insizes: crops show from a quarter to all of the height.
        shorter_side = int(self.insize * random.uniform(1, 2))
        picture = resize_shorter(self._photographs[label], shorter_side)
        return self.example(random_crop(picture, self.insize, random), label)


class SyntheticPictures(Pictures):
    """Noisy stripes whose direction, width and colour depend on the class.

    A picture depends on ``seed`` and its number only, and can be learnt.

    Args:
        insize: Height and width of the pictures, in pixels.
        n: Number of pictures.
        seed: Seed of classes, phases and noise.
        n_class: Number of classes.
    """

    def __init__(
        self, insize: int, n: int = 1280, seed: int = 0, n_class: int = 10
    ) -> None:
        super().__init__(insize, seed)
        self.n_class = n_class
        self._n = n

    def __len__(self) -> int:
        return self._n

    def get_example(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns picture ``i`` and its label."""
        random = np.random.default_rng((self.seed, i))
        label = int(random.integers(self.n_class))
        noise = random.normal(0, 20, (self.insize, self.insize, 3))
        stripes = self._stripes(label, random.uniform(0, 2 * math.pi))
        return self.example(
            stripes[..., np.newaxis] * self._colour(label) + noise, label
        )

    def _stripes(self, label: int, phase: float) -> np.ndarray:
        """Returns stripes between 0 and 1, of shape ``(insize, insize)``."""
        angle = math.pi * label / self.n_class
        waves = 3 + label % 3
        along = np.arange(self.insize) * (2 * math.pi * waves / self.insize)
        wave = math.cos(angle) * along[:, np.newaxis] + math.sin(angle) * along
        return (1 + np.sin(wave + phase)) / 2

    def _colour(self, label: int) -> np.ndarray:
        """Returns the class's brightest colour, of shape ``(3,)``, 55..255."""
        hues = 2 * math.pi * (label / self.n_class + np.arange(3) / 3)
        return 155 + 100 * np.cos(hues)


def demo_pictures(insize: int, n: int = 1200, seed: int = 0) -> Pictures:
    """Returns real pictures that are on this machine without any download.

    Fashion-MNIST where Debian's package has put it, else crops of scikit-image's
    photographs.

    Args:
        insize: Height and width of the pictures, in pixels.
        n: Number of crops in an epoch, for the photographs.
        seed: Seed of the crops.

    Raises:
        DatasetError: There is neither.
    """
    if Path(FASHION_MNIST_FOLDER).is_dir():
        return FashionMnist(insize)
    return DemoPictures(insize, n, seed)


def _photograph_folder() -> Path:
    # Looked up without importing it: scikit-image's import costs a second.
    spec = importlib.util.find_spec('skimage')
    if spec is None or spec.origin is None:
        raise DatasetError(
            'There are no demo pictures here. Install scikit-image, which ships some '
            "photographs (pip install scikit-image), or Debian's package "
            'dataset-fashion-mnist, or choose --dataset synthetic.'
        )
    return Path(spec.origin).parent / 'data'
