"""waifu2x: one of its networks with its loss, on drawn patches.

python upscaling.py NETWORK ITERATIONS
"""

import importlib
import sys

import chainer
import numpy as np
import waifu2x.srcnn

# The package of the loss imports itself by a name that only a checkout has.
sys.modules['waifu2x.loss'] = type(sys)('waifu2x.loss')
sys.modules['waifu2x.loss'].__path__ = [f'{waifu2x.__path__[0]}/loss']
losses = importlib.import_module('waifu2x.loss.clipped_weighted_huber_loss')

name, iterations = sys.argv[1], int(sys.argv[2])
rng = np.random.RandomState(0)
np.random.seed(0)
model = getattr(waifu2x.srcnn, name)(3)
optimizer = chainer.optimizers.Adam().setup(model)
for _ in range(iterations):
    x = rng.rand(4, 3, 44, 44).astype(np.float32)
    y = model(x)
    t = rng.rand(*y.shape).astype(np.float32)
    weight = np.float32([[[[0.299]], [[0.587]], [[0.114]]]])
    loss = losses.clipped_weighted_huber_loss(y, t, weight)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.array).hex())
