"""Two LSTM layers of small functions: python small_functions.py ITERATIONS."""

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np

STEPS, BATCH, UNITS, WORDS = 40, 64, 64, 100


class Network(chainer.Chain):
    """Reads a word at a time and tells the next one."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.words = L.EmbedID(WORDS, UNITS)
            self.first = L.LSTM(UNITS, UNITS)
            self.second = L.LSTM(UNITS, UNITS)
            self.out = L.Linear(UNITS, WORDS)

    def forward(self, x, t):
        self.first.reset_state()
        self.second.reset_state()
        loss = 0
        for now, then in zip(x, t, strict=True):
            told = self.out(self.second(self.first(self.words(now))))
            loss += F.softmax_cross_entropy(told, then)
        return loss


np.random.seed(0)
model = Network()
optimizer = chainer.optimizers.Adam().setup(model)
x, t = np.random.randint(0, WORDS, (2, STEPS, BATCH)).astype(np.int32)
for _ in range(int(sys.argv[1])):
    loss = model(x, t)
    model.cleargrads()
    loss.backward()
    optimizer.update()
