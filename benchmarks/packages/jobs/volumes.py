"""livermask: its network for volumes, on drawn ones.

python volumes.py ITERATIONS
"""

import sys

import chainer
import chainer.functions as F
import numpy as np
from livermask.utils.unet3d import UNet3D

iterations = int(sys.argv[1])
rng = np.random.RandomState(0)
np.random.seed(0)
model = UNet3D(2)
optimizer = chainer.optimizers.MomentumSGD(0.01).setup(model)
for _ in range(iterations):
    x = rng.rand(8, 1, 8, 8, 8).astype(np.float32)
    t = (rng.rand(8, 8, 8, 8) < 0.2).astype(np.int32)
    y = model(x)
    y = F.transpose(y, (0, 2, 3, 4, 1)).reshape(-1, 2)
    loss = -F.average(F.log(F.select_item(y, t.reshape(-1)) + 1e-7))
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.array).hex())
