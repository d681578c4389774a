"""chainer-chemistry: a graph network on drawn molecules of 8 to 17 atoms.

python chemistry.py METHOD ITERATIONS
"""

import sys

import chainer
import numpy as np
from chainer_chemistry.dataset.converters import concat_mols
from chainer_chemistry.models.prediction import Regressor, set_up_predictor

EDGE_TYPES = 4


def draw(rng, method):
    """Atoms, bonds and a target of one molecule."""
    atoms = rng.randint(1, 10, rng.randint(8, 18)).astype(np.int32)
    shape = (len(atoms), len(atoms))
    bonds = np.triu(rng.rand(*shape) < 0.3, 1)
    bonds = bonds | bonds.T
    if method in ('nfp', 'rsgcn', 'gin', 'weavenet'):
        matrix = bonds.astype(np.float32)
    elif method == 'schnet':
        matrix = rng.rand(*shape).astype(np.float32)
    else:
        kinds = np.triu(rng.randint(0, EDGE_TYPES, shape))
        kinds += kinds.T - np.diag(np.diag(kinds))
        matrix = np.stack([bonds & (kinds == k) for k in range(EDGE_TYPES)])
        matrix = matrix.astype(np.float32)
    return atoms, matrix, rng.rand(1).astype(np.float32)


method, iterations = sys.argv[1], int(sys.argv[2])
rng = np.random.RandomState(0)
np.random.seed(0)
molecules = [draw(rng, method) for _ in range(512)]
predictor = set_up_predictor(method, n_unit=64, conv_layers=4, class_num=1)
model = Regressor(predictor, lossfun=chainer.functions.mean_squared_error)
optimizer = chainer.optimizers.Adam().setup(model)
batches = chainer.iterators.SerialIterator(molecules, 32)
updater = chainer.training.StandardUpdater(batches, optimizer, converter=concat_mols)
for _ in range(iterations):
    updater.update()
    print(float(model.loss.array).hex())
