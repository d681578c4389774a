"""Translates CuPy's ``runtime.pyx`` as CuPy's own build does.

python cythonize_runtime.py SOURCES RELEASE

RELEASE: fields of ``releases.Release`` as JSON.
"""

import json
import os
import sys

import Cython
from Cython.Build import cythonize
from setuptools import Extension

MODULE = 'cupy_backends.cuda.api.runtime'

release = json.loads(sys.argv[2])
os.chdir(sys.argv[1])
cythonize(
    [Extension(MODULE, [MODULE.replace('.', '/') + '.pyx'], language='c++')],
    compile_time_env={
        'CUPY_USE_CUDA_PYTHON': False,
        'CUPY_CUDA_VERSION': release['cuda'],
        'CUPY_HIP_VERSION': 0,
        'CUPY_CUFFT_STATIC': False,
        'CUPY_CYTHON_VERSION': Cython.__version__,
    },
    compiler_directives={
        'language_level': 3,
        'embedsignature': True,
        'c_api_binop_methods': True,
        'binding': False,
        **release['directives'],
    },
    force=True,
    quiet=True,
)
