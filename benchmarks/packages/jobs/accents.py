"""tdmelodic: its network for accents, on drawn words of a few lengths.

python accents.py ITERATIONS
"""

import sys

import chainer
import chainer.functions as F
import numpy as np
from tdmelodic.nn.net import Net

WORDS, BATCH = 32, 32  # a batch is padded to its longest word
SYMBOLS = (40, 40, 40, 8, 8, 8)  # vowel, consonant, part of speech, accents, origin

iterations = int(sys.argv[1])
rng = np.random.RandomState(0)
np.random.seed(0)
model = Net(64)
optimizer = chainer.optimizers.Adam().setup(model)
for _ in range(iterations):
    surface, kana = (2 * max(rng.geometric(0.4, WORDS).clip(1, 8)) + 8 for _ in 'sk')
    surfaces = [rng.randint(0, n, (BATCH, surface)).astype(np.int32) for n in SYMBOLS]
    morae = [rng.randint(0, 40, (BATCH, kana)).astype(np.int32) for _ in range(2)]
    accents = rng.randint(0, 3, (BATCH, kana)).astype(np.int32)
    h_surface, h_kana = model.enc_surface(surfaces), model.enc_yomigana(morae)
    with chainer.using_config('train', False):  # version 1.0.0 cannot call its own loss
        attended, _, _ = model.att(h_kana, h_surface)
    loss = F.softmax_cross_entropy(model.dec(attended), accents)
    model.cleargrads()
    loss.backward()
    optimizer.update()
    print(float(loss.array).hex())
