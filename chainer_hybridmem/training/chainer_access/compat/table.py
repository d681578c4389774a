"""Every repair: what it is for, since when it is needed, and its test.

``docs/make_reference.py`` makes the page of it.
"""

from __future__ import annotations

import dataclasses

_COMPAT = 'chainer_access_tests/test_compat.py'
_FUNCTIONS = f'{_COMPAT}::TestFunctions'


@dataclasses.dataclass(frozen=True)
class Repair:
    """One repair.

    Attributes:
        what (str): That is repaired.
        since (str): Needed from this version on.
        reason (str): What happens without it.
        by (str): File and function in ``compat``.
        test (str): File and name in ``tests``.
    """

    what: str
    since: str
    reason: str
    by: str
    test: str


REPAIRS = (
    Repair(
        '`numpy.sctypes`',
        'NumPy 2.0',
        'the import fails; there while Chainer is imported, and for `F.as_strided`',
        'stand_ins.stand_in_for_sctypes',
        f'{_COMPAT}::TestImport::test_stand_ins_are_gone_after_the_import',
    ),
    Repair(
        '`numpy.distutils`',
        'Python 3.12',
        'the import fails, and is slow before; there while Chainer is imported',
        'stand_ins.stand_in_for_distutils',
        f'{_COMPAT}::TestImport::test_stand_ins_are_gone_after_the_import',
    ),
    Repair(
        '`pkg_resources`',
        'setuptools 82',
        'the import fails, and is slow before; there while Chainer is imported',
        'stand_ins.stand_in_for_pkg_resources',
        f'{_COMPAT}::TestImport::test_stand_ins_are_gone_after_the_import',
    ),
    Repair(
        '`Summary`, `LogReport`',
        'NumPy 2.0',
        'means lose digits, deviations become NaN, silently',
        'patches._patch_summary',
        f'{_COMPAT}::TestSummary::test_float_mean_is_accumulated_in_double',
    ),
    Repair(
        '`MicroAverage`',
        'NumPy 2.0',
        'sums lose digits, silently',
        'patches._patch_micro_average',
        f'{_COMPAT}::TestMicroAverage::test_float_sums_are_double',
    ),
    Repair(
        '`F.as_strided`',
        'NumPy 2.0',
        'backward fails for want of `numpy.sctypes`',
        'patches._patch_as_strided',
        f'{_FUNCTIONS}::test_as_strided_backward',
    ),
    Repair(
        '`F.resize_images`',
        'NumPy 1.24',
        'fails for want of `numpy.float`',
        'patches._patch_resize_images',
        f'{_FUNCTIONS}::test_resize_images',
    ),
    Repair(
        '`Categorical.log_prob`',
        'NumPy 2.0',
        'fails: `meshgrid` returns a tuple',
        'patches._patch_categorical',
        f'{_FUNCTIONS}::test_categorical_log_prob',
    ),
    Repair(
        '`F.pad_sequence`',
        'NumPy 2.0',
        'a padding outside of the range of the type is refused',
        'patches._patch_pad_sequence',
        f'{_FUNCTIONS}::test_pad_sequence',
    ),
    Repair(
        '`F.mean_squared_error`',
        'NumPy 2.0',
        'the error of more than 65,504 float16 is 0, silently',
        'patches._patch_mean_squared_error',
        f'{_FUNCTIONS}::test_mean_squared_error_in_float16',
    ),
    Repair(
        '`MultiprocessParallelUpdater`',
        'CuPy 14',
        'its kernels do not compile: float16 has a header of its own',
        'patches._patch_multiprocess_updater',
        f'{_FUNCTIONS}::test_gradients_of_two_types_on_their_way_to_other_gpus',
    ),
    Repair(
        'pooling through cuDNN',
        'any',
        'graphs of past iterations stay in memory until garbage is collected',
        'patches._patch_pooling_cycle',
        'chainer_access_tests/test_repairs.py::test_pooling_dies_with_its_graph',
    ),
    Repair(
        "ChainerMN's kernels and `double_buffering`",
        'CuPy 14, any',
        'the kernels do not compile; gradients may be wrong, silently',
        'chainermn.repair',
        f'{_COMPAT}::test_chainermn_is_repaired_whichever_comes_first',
    ),
    Repair(
        "CUDA's libraries in packages",
        'CuPy 13',
        'CuPy does not find cuDNN; advice that leads nowhere is not shown',
        'cuda.load_libraries',
        f'{_COMPAT}::TestLoadLibraries::test_before_chainer_is_imported',
    ),
    Repair(
        '`cupy.cudnn` and `cupy.cuda.cudnn`',
        'CuPy 14',
        'they are gone: Chainer convolves through matrices of patches',
        'repair.install',
        'cudnn_tests/test_modules.py::test_chainer_finds_cudnn',
    ),
    Repair(
        'chainercv 0.13',
        'NumPy 1.24',
        'names of types are gone; its compiled module may be missing',
        'chainercv.repaired',
        'chainer_access_tests/test_chainercv.py::test_names_that_numpy_no_longer_has',
    ),
    Repair(
        '`onnx_chainer`',
        'onnx 1.19',
        '`onnx.mapping` is gone, and nothing can be exported',
        'onnx.repaired',
        'chainer_access_tests/test_repairs.py::test_the_exporter_finds_its_tables',
    ),
)
