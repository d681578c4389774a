"""The packages, what each needs, and the jobs that train something of it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Package:
    """A package of other people.

    Attributes:
        name: On the package index, or that of its repository.
        version: The one that is tried; of a repository the commit.
        jobs: Command lines of scripts in ``jobs``, or of programs in its source.
        needs: Requirements beside those that it names itself.
        alone: Whether it is installed without what it names: it pins what is long gone.
        old_names: Whether it uses names that NumPy or Python have removed.
        source: Whether its jobs are programs of its source, run as they are beside
            drawn data.
        repository: Where it is cloned from, if no index has it; it is imported from its
            folder.
        note: What a user has to know.
    """

    name: str
    version: str
    jobs: tuple[str, ...]
    needs: tuple[str, ...] = ()
    alone: bool = False
    old_names: bool = False
    source: bool = False
    repository: str = ''
    note: str = ''


PACKAGES = (
    Package(
        'chainer-chemistry',
        '0.7.1',
        tuple(
            f'chemistry.py {method} 100'
            for method in ('ggnn', 'nfp', 'relgcn', 'relgat', 'gin', 'rsgcn', 'schnet')
        ),
        needs=('joblib', 'matplotlib', 'pandas', 'scikit-learn', 'tqdm', 'rdkit'),
        alone=True,
        old_names=True,
        note='its regressor uses `numpy.asscalar`',
    ),
    Package(
        'chainerrl',
        '0.8.0',
        (
            'reinforcement.py DQN 400',
            'reinforcement.py DoubleDQN 400',
            'reinforcement.py TD3 400',
            'reinforcement.py SAC 400',
            'reinforcement.py A3C 2000',
        ),
        needs=('gym==0.17.3', 'cloudpickle', 'numpy<2.4', 'pillow', 'cached-property'),
        alone=True,
        note='needs gym ≤ 0.21, and NumPy < 2.4 for A3C',
    ),
    Package(
        'tdmelodic',
        '1.0.0',
        ('accents.py 100',),
        alone=True,
        note='its command needs MeCab and a dictionary',
    ),
    Package(
        'waifu2x',
        '2024.0.1',
        ('upscaling.py VGG7 40', 'upscaling.py UpResNet10 30'),
        needs=('pillow',),
        alone=True,
    ),
    Package(
        'livermask',
        '1.4.1',
        ('volumes.py 40',),
        alone=True,
        note='the network of its vessel stage; the other one is TensorFlow',
    ),
    Package(
        'chainercv2',
        '0.0.62',
        (
            'classifiers.py resnet20_cifar10 30',
            'classifiers.py densenet40_k12_cifar10 20',
        ),
        needs=('requests',),
        alone=True,
    ),
    Package(
        'EEND',
        'b851eecd8d7a966487ed3e4ff934a1581a73cc9e',
        (
            'diarization.py Transformer 12',
            'diarization.py attractor 12',
        ),
        needs=('librosa==0.9.2', 'soundfile', 'matplotlib', 'numpy<2', 'cupy-cuda12x'),
        repository='https://github.com/hitachi-speech/EEND',
        note='needs librosa 0.9 and NumPy < 2, and CuPy also on a CPU; its own program '
        'tells the version of cuDNN, and so needs nvidia-cudnn-cu12',
    ),
    Package(
        'chainer',
        '7.8.1',
        (
            'mnist/train_mnist.py -e 8 -b 500 -u 100',
            'mnist/train_mnist_custom_loop.py -e 8 -b 500 -u 100',
            'cifar/train_cifar.py -e 1 -b 8',
            'cifar/train_cifar_custom_loop.py -e 1 -b 8',
            'dcgan/train_dcgan.py -e 2 -b 8',
            'vae/train_vae.py -e 8 -b 500',
            'ptb/train_ptb.py -e 2 -u 200',
            'ptb/train_ptb_custom_loop.py -e 2 -u 200',
            'word2vec/train_word2vec.py -e 2 -b 500',
            'sentiment/train_sentiment.py -e 4 -b 10',
            'sentiment/train_recursive_minibatch.py -e 4 -b 10',
            'memnn/train_memnn.py train.txt test.txt -e 10 -b 40',
            'seq2seq/seq2seq.py source.txt target.txt source-vocabulary.txt '
            'target-vocabulary.txt -e 4 -b 10 -u 128 -l 2',
            'glance/glance.py',
            'static_graph_optimizations/mnist/train_mnist_custom_loop.py -e 1 -u 200',
        ),
        needs=('matplotlib', 'nltk', 'pillow', 'progressbar2'),
        alone=True,
        source=True,
        note='its own examples; data for them is drawn',
    ),
)
