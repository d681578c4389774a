"""chainercv is repaired while it is imported, in an interpreter of its own.

The package here has modules of the names, imports and attributes that chainercv 0.13.1
has; the real one is trained by ``benchmarks/programs``.
"""

from __future__ import annotations

import os
import pathlib
import textwrap

import numpy as np
import pytest
from chainer_access_tests.test_compat import run_python

from chainer_hybridmem.training.chainer_access.compat import chainercv, patches

FILES = {
    '__init__.py': """
        import pkg_resources
        __version__ = pkg_resources.get_distribution('chainercv').version
        from chainercv.links.model.mobilenet import mobilenet_v2
        from chainercv.utils.mask import scale_mask
        from chainercv.utils.bbox import non_maximum_suppression
    """,
    'links/model/mobilenet/mobilenet_v2.py': """
        import numpy as np
        MEAN = np.array([128] * 3, dtype=np.float)
    """,
    'utils/mask/scale_mask.py': """
        import numpy as np
        def make(shape):
            return np.zeros(shape, dtype=np.bool), np.ones(shape).astype(np.int)
    """,
    'utils/bbox/non_maximum_suppression.py': """
        from chainercv.utils.bbox._nms_gpu_post import _nms_gpu_post
    """,
}


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    for name, text in FILES.items():
        path = tmp_path / 'chainercv' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        for parent in path.relative_to(tmp_path).parents[:-2]:
            (tmp_path / parent / '__init__.py').touch()
    return str(tmp_path)


def import_it(folder: str, code: str, **options: object) -> str:
    path = os.pathsep.join([folder, os.environ.get('PYTHONPATH', '')])
    lines = ['import chainer_hybridmem', 'import chainercv', *code.split('; ')]
    return run_python('\n'.join(lines), PYTHONPATH=path, **options)


def test_names_that_numpy_no_longer_has(folder):
    code = (
        'import numpy; zeros, ones = chainercv.scale_mask.make(2); '
        'print(zeros.dtype, ones.dtype, chainercv.mobilenet_v2.MEAN.dtype); '
        'print(hasattr(numpy, "int"), hasattr(numpy, "float"))'
    )
    assert import_it(folder, code).splitlines() == [
        'bool int64 float64',
        'False False',
    ]


def test_a_source_tree_has_a_version_without_setuptools(folder):
    found = import_it(
        folder, 'print(chainercv.__version__)', missing=('pkg_resources',)
    )
    assert found.startswith('0.13')


def test_boxes_are_chosen_without_the_compiled_module(folder):
    name = 'chainercv.non_maximum_suppression._nms_gpu_post.__module__'
    assert import_it(folder, f'print({name})').endswith('compat.chainercv')


def test_a_compiled_module_is_left_alone(folder):
    path = pathlib.Path(folder) / 'chainercv/utils/bbox/_nms_gpu_post.py'
    path.write_text('_nms_gpu_post = "its own"\n')
    name = 'chainercv.non_maximum_suppression._nms_gpu_post'
    assert import_it(folder, f'print({name})') == 'its own'


@pytest.mark.parametrize('count', [1, 63, 64, 65, 200])
def test_no_chosen_box_overlaps_an_earlier_one(count):
    rng = np.random.RandomState(count)
    overlaps = np.triu(rng.rand(count, count) < 0.05, 1)
    words = -(-count // 64)
    mask = np.zeros((count, words), np.uint64)
    for i, j in zip(*np.nonzero(overlaps), strict=True):
        mask[i, j // 64] |= np.uint64(1 << int(j % 64))
    expected: list[int] = []
    for box in range(count):
        if not any(overlaps[other, box] for other in expected):
            expected.append(box)
    chosen, number = chainercv.select_boxes(mask.ravel(), count, 64, words)
    assert number == len(expected)
    assert chosen[:number].tolist() == expected


def test_what_has_old_names_is_numpy_to_who_compares():
    """``if xp != np`` asks for a GPU in FCIS and others."""
    overlay = patches.Overlay(np, **chainercv.GONE)
    assert np == overlay and overlay == np and (np != overlay) is False
    assert overlay != os and overlay.float is float
    assert {np: 1}[overlay] == 1
