"""chainercv2: one of its classifiers, on drawn pictures.

python classifiers.py NETWORK ITERATIONS
"""

import sys

import chainer
import chainer.links as L
import numpy as np
from chainercv2 import model_provider

name, iterations = sys.argv[1], int(sys.argv[2])
rng = np.random.RandomState(0)
np.random.seed(0)
model = L.Classifier(model_provider.get_model(name))
optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
for _ in range(iterations):
    x = rng.rand(16, 3, 32, 32).astype(np.float32)
    optimizer.update(model, x, rng.randint(0, 10, 16).astype(np.int32))
    print(float(model.loss.array).hex())
