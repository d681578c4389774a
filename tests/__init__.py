"""The tests; a package, so that benchmarks find ``tests.support``."""

import os

# Before NumPy is imported: threads of several processes that multiply wait for each
# other, and the tests take twice as long.
for name in ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'):
    os.environ.setdefault(name, '1')
