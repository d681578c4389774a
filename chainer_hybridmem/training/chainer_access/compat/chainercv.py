"""Makes chainercv 0.13 importable and usable on current NumPy.

chainercv was released for NumPy 1.16. It uses names of types that NumPy had until 1.24,
some of them while it is imported. Its only compiled module, which is of use on a GPU,
may be missing: pip builds it with tools that are gone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy

from chainer_hybridmem.training.chainer_access.compat import stand_ins
from chainer_hybridmem.training.chainer_access.compat.import_wrapper import (
    ImportWrapper,
)
from chainer_hybridmem.training.chainer_access.compat.patches import Overlay

NAME = 'chainercv'
COMPILED = 'chainercv.utils.bbox._nms_gpu_post'
# Those that use names which are gone; none of them asks `xp is numpy`.
MODULES = (
    'chainercv.datasets.coco.coco_instances_base_dataset',
    'chainercv.datasets.cub.cub_keypoint_dataset',
    'chainercv.datasets.voc.voc_bbox_dataset',
    'chainercv.datasets.voc.voc_utils',
    'chainercv.experimental.links.model.fcis.fcis',
    'chainercv.experimental.links.model.fcis.fcis_train_chain',
    'chainercv.experimental.links.model.fcis.utils.proposal_target_creator',
    'chainercv.links.model.fpn.mask_head',
    'chainercv.links.model.fpn.mask_utils',
    'chainercv.links.model.mobilenet.mobilenet_v2',
    'chainercv.utils.mask.scale_mask',
    'chainercv.visualizations.vis_point',
)
GONE = {'bool': bool, 'float': float, 'int': int}
_UNKNOWN_VERSION = '0.13'  # of a source tree, which is not installed


@contextlib.contextmanager
def repaired() -> Iterator[None]:
    """Around chainercv's own import, which imports all of its modules."""
    for name in MODULES:
        ImportWrapper.install(name, functools.partial(_with_names, name))
    with contextlib.ExitStack() as stack:
        if 'pkg_resources' not in sys.modules:
            stack.enter_context(stand_ins.stand_in_for_pkg_resources())
        stack.enter_context(_version_known())
        if not _has_compiled():
            sys.modules[COMPILED] = _make_compiled()
        yield


@contextlib.contextmanager
def _with_names(name: str) -> Iterator[None]:
    """Around the import of one module: NumPy has the names, later for it alone."""
    with contextlib.ExitStack() as stack:
        for gone, kind in GONE.items():
            if not hasattr(numpy, gone):
                stack.enter_context(stand_ins.numpy_attribute(gone, kind))
        yield
    vars(sys.modules[name])['np'] = Overlay(numpy, **GONE)


@contextlib.contextmanager
def _version_known() -> Iterator[None]:
    """A source tree tells its version, which chainercv asks for."""
    resources: Any = importlib.import_module('pkg_resources')
    get_distribution = resources.get_distribution

    def find(name: str) -> Any:
        if name != NAME:
            return get_distribution(name)
        try:
            return types.SimpleNamespace(version=importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            return types.SimpleNamespace(version=_UNKNOWN_VERSION)

    resources.get_distribution = find
    try:
        yield
    finally:
        resources.get_distribution = get_distribution


# -- the compiled module --------------------------------------------------------
def _has_compiled() -> bool:
    """Whether the compiled module lies beside the others."""
    package = importlib.util.find_spec(NAME)
    folders = [] if package is None else package.submodule_search_locations or []
    inner = [f'{folder}/utils/bbox' for folder in folders]
    name = COMPILED.rpartition('.')[2]
    finder = importlib.machinery.PathFinder
    found = finder.find_spec(name, inner)
    return found is not None


def _make_compiled() -> types.ModuleType:
    module = types.ModuleType(COMPILED)
    vars(module)['_nms_gpu_post'] = select_boxes
    return module


def select_boxes(
    mask: Any, n_bbox: int, threads_per_block: int, col_blocks: int
) -> tuple[numpy.ndarray, int]:
    """Chooses boxes in order, each of which no earlier chosen one overlaps.

    Args:
        mask: (n_bbox * col_blocks,) uint64; bit ``b`` of word ``w`` of a box says that
            box ``w * threads_per_block + b`` overlaps it too much.
        n_bbox: Number of boxes.
        threads_per_block: Boxes of one word.
        col_blocks: Words of one box.

    Returns:
        (ndarray, int): Numbers of the chosen boxes, (n_bbox,) int32, and how many.
    """
    rows = numpy.asarray(mask, numpy.uint64).reshape(n_bbox, col_blocks)
    covered = numpy.zeros(col_blocks, numpy.uint64)
    chosen = numpy.zeros(n_bbox, numpy.int32)
    count = 0
    for box in range(n_bbox):
        word, bit = divmod(box, threads_per_block)
        if int(covered[word]) >> bit & 1:
            continue
        chosen[count] = box
        count += 1
        covered[word:] |= rows[box, word:]
    return chosen, count
