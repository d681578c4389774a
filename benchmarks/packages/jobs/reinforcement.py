"""chainerrl: one of its agents in a drawn world.

python reinforcement.py AGENT STEPS
"""

import sys

import chainer
import chainer.functions as F
import chainer.links as L
import chainerrl
import numpy as np

SIZE, ACTIONS, WIDTH = 8, 3, 128


class World:
    """Moves by what is done, and ends after a drawn number of steps."""

    def __init__(self):
        self._rng = np.random.RandomState(0)
        self._turn = self._rng.randn(SIZE, SIZE).astype(np.float32) / 3

    def reset(self):
        self._left = self._rng.randint(20, 60)
        self._state = self._rng.randn(SIZE).astype(np.float32)
        return self._state

    def step(self, action):
        push = np.resize(np.float32(action), SIZE)
        self._state = np.tanh(self._turn @ self._state + 0.1 * push)
        self._left -= 1
        return self._state, float(self._state[0]), self._left <= 0, {}


def network(inputs, outputs):
    return chainer.Sequential(
        L.Linear(inputs, WIDTH), F.relu, L.Linear(WIDTH, WIDTH), F.relu,
        L.Linear(WIDTH, outputs),
    )  # fmt: skip


def join(state, action):
    return F.concat((state, action))


def critic():
    return chainer.Sequential(join, network(SIZE + ACTIONS, 1))


def adam(model):
    return chainer.optimizers.Adam(1e-3).setup(model)


def replay():
    return chainerrl.replay_buffer.ReplayBuffer(10_000)


def draw():
    return np.random.uniform(-1, 1, ACTIONS).astype(np.float32)


def choose():
    return np.random.randint(ACTIONS)


def make_dqn(kind):
    q = chainer.Sequential(
        network(SIZE, ACTIONS), chainerrl.action_value.DiscreteActionValue
    )
    explorer = chainerrl.explorers.ConstantEpsilonGreedy(
        0.3, lambda: np.random.randint(ACTIONS)
    )
    return kind(q, adam(q), replay(), 0.99, explorer, replay_start_size=256,
                minibatch_size=256, target_update_interval=50)  # fmt: skip


def make_a3c():
    class Model(chainer.Chain, chainerrl.agents.a3c.A3CModel):
        def __init__(self):
            super().__init__(pi=network(SIZE, ACTIONS), v=network(SIZE, 1))

        def pi_and_v(self, state):
            return chainerrl.distribution.SoftmaxDistribution(self.pi(state)), self.v(
                state
            )

    model = Model()
    return chainerrl.agents.A3C(model, adam(model), t_max=20, gamma=0.99)


def make_td3():
    policy = chainer.Sequential(
        network(SIZE, ACTIONS), F.tanh,
        chainerrl.distribution.ContinuousDeterministicDistribution,
    )  # fmt: skip
    first, second = critic(), critic()
    explorer = chainerrl.explorers.AdditiveGaussian(0.1)
    return chainerrl.agents.TD3(
        policy, first, second, adam(policy), adam(first), adam(second), replay(), 0.99,
        explorer, replay_start_size=256, minibatch_size=256, burnin_action_func=draw,
    )  # fmt: skip


def make_sac():
    def squash(x):
        mean, log_scale = F.split_axis(x, 2, axis=1)
        variance = F.exp(2 * F.clip(log_scale, -20.0, 2.0))
        return chainerrl.distribution.SquashedGaussianDistribution(mean, variance)

    policy = chainer.Sequential(network(SIZE, 2 * ACTIONS), squash)
    first, second = critic(), critic()
    return chainerrl.agents.SoftActorCritic(
        policy, first, second, adam(policy), adam(first), adam(second), replay(), 0.99,
        replay_start_size=256, minibatch_size=256, burnin_action_func=draw,
        entropy_target=-ACTIONS, temperature_optimizer=chainer.optimizers.Adam(1e-3),
    )  # fmt: skip


MAKERS = {
    'DQN': lambda: make_dqn(chainerrl.agents.DQN),
    'DoubleDQN': lambda: make_dqn(chainerrl.agents.DoubleDQN),
    'A3C': make_a3c,
    'TD3': make_td3,
    'SAC': make_sac,
}
name, steps = sys.argv[1], int(sys.argv[2])
np.random.seed(0)
agent, world = MAKERS[name](), World()
state, reward = world.reset(), 0.0
for _ in range(steps):
    state, reward, done, _ = world.step(agent.act_and_train(state, reward))
    if done:
        agent.stop_episode_and_train(state, reward, done)
        state, reward = world.reset(), 0.0
        print([float(value).hex() for _, value in agent.get_statistics()])
