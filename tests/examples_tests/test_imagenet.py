"""The ImageNet example: its data sets and its training script."""

import gzip
import importlib
import itertools
import json
import re
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import chainer_hybridmem  # noqa: F401  (before chainer)

Image = pytest.importorskip('PIL.Image')

FOLDER = Path(__file__).parents[2] / 'examples' / 'imagenet'

TINY = """
import chainer.functions as F
import chainer.links as L
from chainer_hybridmem.architectures.classifier import PictureClassifier


class Tiny(PictureClassifier):
    insize = 16

    def __init__(self, n_class):
        super().__init__()
        with self.init_scope():
            self.conv = L.Convolution2D(3, 4, 3)
            self.fc = L.Linear(None, n_class)

    def logits(self, x):
        return self.fc(F.dropout(F.relu(self.conv(x))))
"""


def load(name):
    """Imports a module of the example as its script does: by its bare name."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


datasets = load('datasets')
picture_files = load('picture_files')
DatasetError = picture_files.DatasetError
train = load('train')
demo = load('demo')


def write_idx(path, array):
    header = struct.pack(f'>HBB{array.ndim}I', 0, 8, array.ndim, *array.shape)
    opener = gzip.open if path.suffix == '.gz' else open
    with opener(path, 'wb') as file:
        file.write(header + array.tobytes())


@pytest.fixture
def pictures(tmp_path):
    """Three pictures, of which one is grey and one has a blank in its name."""
    names = ['a.png', 'b c.jpg', 'grey.png']
    for name, colour in zip(names, [(255, 0, 0), (0, 255, 0), 128], strict=True):
        mode = 'RGB' if isinstance(colour, tuple) else 'L'
        Image.new(mode, (60, 40), colour).save(tmp_path / name)
    lines = [f'{name} {label}' for label, name in enumerate(names)]
    (tmp_path / 'list.txt').write_text('\n'.join(lines) + '\n\n')
    return tmp_path


class TestLabeledImages:
    @pytest.mark.parametrize('train_mode', [True, False])
    def test_examples(self, pictures, train_mode):
        data = datasets.LabeledImages(
            pictures / 'list.txt', pictures, 32, train=train_mode
        )

        assert len(data) == 3 and data.n_class == 3
        for i in range(3):
            x, t = data[i]
            assert x.shape == (3, 32, 32) and x.dtype == np.float32
            assert t == i and t.dtype == np.int32

    def test_is_normalised_with_the_mean(self, pictures):
        list_file = pictures / 'list.txt'
        data = datasets.LabeledImages(list_file, pictures, 8, mean=(128,) * 3)

        assert np.abs(data[2][0]).max() < 0.05

    @pytest.mark.parametrize('line', ['a.png', 'a.png one', 'a.png -1', '3'])
    def test_bad_line(self, pictures, line):
        (pictures / 'list.txt').write_text(f'a.png 0\n{line}\n')

        with pytest.raises(DatasetError, match='line 2: expected'):
            datasets.LabeledImages(pictures / 'list.txt', pictures, 8)

    def test_no_list_file(self, tmp_path):
        with pytest.raises(DatasetError, match='Cannot read the list file'):
            datasets.LabeledImages(tmp_path / 'list.txt', tmp_path, 8)

    def test_empty_list_file(self, tmp_path):
        (tmp_path / 'list.txt').write_text('\n')

        with pytest.raises(DatasetError, match='names no picture'):
            datasets.LabeledImages(tmp_path / 'list.txt', tmp_path, 8)

    @pytest.mark.parametrize('content', [None, b'no picture'])
    def test_unreadable_picture(self, pictures, content):
        (pictures / 'a.png').unlink()
        if content is not None:
            (pictures / 'a.png').write_bytes(content)
        data = datasets.LabeledImages(pictures / 'list.txt', pictures, 8)

        with pytest.raises(DatasetError, match='Cannot read the picture'):
            data[0]


class TestFashionMnist:
    @pytest.fixture(params=['', '.gz'])
    def folder(self, tmp_path, request):
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (5, 28, 28), np.uint8)
        write_idx(tmp_path / f'train-images-idx3-ubyte{request.param}', images)
        labels = np.arange(5, dtype=np.uint8)
        write_idx(tmp_path / f'train-labels-idx1-ubyte{request.param}', labels)
        return tmp_path

    def test_examples(self, folder):
        data = datasets.FashionMnist(32, folder)

        x, t = data[3]
        assert len(data) == 5 and data.n_class == 10
        assert x.shape == (3, 32, 32) and x.dtype == np.float32
        assert t == 3 and t.dtype == np.int32

    def test_keeps_the_pixels_at_their_own_size(self, folder):
        data = datasets.FashionMnist(28, folder)
        raw = picture_files.read_idx(folder / 'train-images-idx3-ubyte', 3)

        expected = (raw[1] - datasets.IMAGENET_MEAN[0]) / datasets.IMAGENET_DEVIATION[0]
        np.testing.assert_allclose(data[1][0][0], expected, rtol=1e-5)

    def test_missing_files_name_the_package(self, tmp_path):
        with pytest.raises(DatasetError, match='dataset-fashion-mnist'):
            datasets.FashionMnist(28, tmp_path)

    def test_numbers_differ(self, folder):
        for suffix in ('', '.gz'):
            (folder / f'train-labels-idx1-ubyte{suffix}').unlink(missing_ok=True)
        write_idx(folder / 'train-labels-idx1-ubyte', np.zeros(4, np.uint8))

        with pytest.raises(DatasetError, match='5 pictures but 4 labels'):
            datasets.FashionMnist(28, folder)


@pytest.mark.parametrize(
    'content, message',
    [
        (b'', 'starts with nothing'),
        (b'\x00\x00\x0d\x01\x00\x00\x00\x01\x00', 'not an idx file'),
        (b'\x00\x00\x08\x01\x00', 'inside its header'),
        (b'\x00\x00\x08\x01\x00\x00\x00\x05abc', '3 bytes follow the header'),
    ],
)
def test_damaged_idx_file(tmp_path, content, message):
    (tmp_path / 'labels').write_bytes(content)

    with pytest.raises(DatasetError, match=message):
        picture_files.read_idx(tmp_path / 'labels', dimensions=1)


class TestSyntheticPictures:
    def test_depends_on_seed_and_number_only(self):
        first = datasets.SyntheticPictures(16, n=4, seed=1)
        second = datasets.SyntheticPictures(16, n=4, seed=1)
        second[0]

        np.testing.assert_array_equal(first[2][0], second[2][0])
        assert not np.array_equal(
            first[2][0], datasets.SyntheticPictures(16, n=4, seed=2)[2][0]
        )

    def test_classes_differ_more_than_pictures_of_a_class(self):
        data = datasets.SyntheticPictures(16, n=60)
        mean_colours = {}
        for x, t in data[:]:
            mean_colours.setdefault(int(t), []).append(x.mean(axis=(1, 2)))

        within = np.mean([np.std(c, axis=0).mean() for c in mean_colours.values()])
        between = np.std([np.mean(c, axis=0) for c in mean_colours.values()], axis=0)
        assert within < 0.2 * between.mean()


class TestDemoPictures:
    @pytest.fixture
    def folder(self, tmp_path):
        for name in datasets.DEMO_PHOTOGRAPHS:
            Image.new('RGB', (50, 40), 'orange').save(tmp_path / name)
        return tmp_path

    def test_examples(self, folder):
        data = datasets.DemoPictures(32, n=30, folder=folder)

        assert len(data) == 30
        assert [int(data[i][1]) for i in (0, 11, 12)] == [0, 11, 0]
        assert data[29][0].shape == (3, 32, 32)

    def test_photographs_are_in_scikit_image(self):
        pytest.importorskip('skimage')

        assert datasets.DemoPictures(32)[0][0].std() > 0.1

    def test_without_scikit_image(self, monkeypatch):
        monkeypatch.setattr(datasets.importlib.util, 'find_spec', lambda name: None)

        with pytest.raises(DatasetError, match='pip install scikit-image'):
            datasets.DemoPictures(32)

    def test_fashion_mnist_is_preferred(self, tmp_path, monkeypatch):
        monkeypatch.setattr(datasets, 'FASHION_MNIST_FOLDER', str(tmp_path))
        monkeypatch.setattr(datasets, 'FashionMnist', lambda insize: 'Fashion-MNIST')

        assert datasets.demo_pictures(32) == 'Fashion-MNIST'


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, 'PIL', None)

    with pytest.raises(DatasetError, match='pip install pillow'):
        picture_files.import_pillow()


class TestTrain:
    @pytest.fixture(autouse=True)
    def own_network(self, tmp_path, monkeypatch):
        (tmp_path / 'tiny_network.py').write_text(TINY)
        monkeypatch.syspath_prepend(tmp_path)
        yield
        sys.modules.pop('tiny_network', None)

    @staticmethod
    def run(out, *options, arch='tiny_network:Tiny', data='synthetic'):
        status = train.main(
            f'--arch {arch} --batchsize 4 --device cpu --no-hybridmem'.split()
            + ['--dataset', str(data), '--log-interval', '1', '--out', str(out)]
            + [str(option) for option in options]
        )
        assert status == 0
        return json.loads((out / 'log').read_text())

    def test_two_iterations_of_resnet18(self, tmp_path, capsys):
        options = ['--insize', '32', '--iterations', '2', '--snapshot-interval', '0']

        log = self.run(tmp_path / 'out', *options, arch='resnet18')

        assert [entry['iteration'] for entry in log] == [1, 2]
        assert np.isfinite([entry['main/loss'] for entry in log]).all()
        assert 'resnet18 on 1280 pictures' in capsys.readouterr().out

    def test_resumed_training_goes_on_as_if_not_interrupted(self, tmp_path):
        out = tmp_path / 'out'
        every = ('--snapshot-interval', 2)
        whole = self.run(out, '--iterations', 4, '--seed', 1, *every)
        self.run(tmp_path / 'first', '--iterations', 2, '--seed', 1, *every)

        log = self.run(
            tmp_path / 'second',
            *('--iterations', 4, '--seed', 1, *every),
            *('--resume', tmp_path / 'first' / 'snapshot_iter_2'),
        )

        assert [entry['iteration'] for entry in log] == [1, 2, 3, 4]
        # Dropout draws other numbers after resuming, as always in Chainer.
        assert log[1]['main/loss'] == whole[1]['main/loss']
        assert log[3]['epoch'] == whole[3]['epoch']

    def test_validates_after_an_epoch(self, tmp_path, pictures):
        log = self.run(
            tmp_path / 'out',
            *('--epoch', 1, '--root', pictures, '--val', pictures / 'list.txt'),
            data=pictures / 'list.txt',
        )

        assert np.isfinite(log[-1]['validation/main/loss'])

    @pytest.mark.parametrize(
        'options, message',
        [
            ('--arch resnet5', "Did you mean 'resnet50'"),
            ('--dataset none.txt', "no list file 'none.txt'"),
            ('--dataset fashion-mnist --root /nowhere', 'Cannot read /nowhere'),
            ('--batchsize 0', '0 is not above zero'),
            ('--epoch 1 --iterations 1', 'not allowed with argument'),
            ('--device nonsense', '--device'),
            ('--resume none.npz', "no snapshot 'none.npz'"),
        ],
    )
    def test_bad_options(self, options, message, tmp_path, capsys):
        base = ['--arch', 'tiny_network:Tiny', '--dataset', 'synthetic']
        base += ['--device', 'cpu', '--no-hybridmem', '--out', str(tmp_path / 'out')]

        with pytest.raises(SystemExit) as raised:
            train.main(base + options.split())

        assert raised.value.code == 2
        assert message in capsys.readouterr().err

    @pytest.mark.parametrize(
        ('options', 'message'),
        [
            ('--time-budget 0', '0.0 is not above zero'),
            ('--time-budget 5 --planner pooch', 'Planners with it: exact, hybrid'),
            ('--planner nobody', "no planner 'nobody'"),
        ],
    )
    def test_bad_planning_options(self, options, message, tmp_path, capsys):
        base = ['--arch', 'tiny_network:Tiny', '--dataset', 'synthetic']
        base += ['--device', 'cpu', '--memory-limit', '1GB']
        base += ['--out', str(tmp_path / 'out')]

        with pytest.raises(SystemExit) as raised:
            train.main(base + options.split())

        assert raised.value.code == 2
        assert message in capsys.readouterr().err

    def test_memory_limit_is_needed(self, capsys):
        with pytest.raises(SystemExit):
            train.main(['--dataset', 'synthetic'])

        assert 'give --memory-limit' in capsys.readouterr().err

    def test_demo_changes_only_what_is_not_given(self):
        argv = ['--demo', '--device', 'cpu', '--batchsize', '3']

        args = train.parse_arguments(train.make_parser(), argv)

        assert args.batchsize == 3
        assert args.memory_limit == train.DEMO_CPU['memory_limit']


class TestDemo:
    @staticmethod
    def run(out, *options):
        own = '--arch tiny_network:Tiny --dataset synthetic --insize 32 --batchsize 16 '
        own += '--device cpu --memory-limit 3MB --iterations 9 --learning-rate 0.01'
        return demo.main([*own.split(), '--out', str(out), *options])

    @pytest.fixture(autouse=True)
    def own_network(self, tmp_path, monkeypatch):
        (tmp_path / 'tiny_network.py').write_text(TINY)
        monkeypatch.syspath_prepend(tmp_path)
        yield
        sys.modules.pop('tiny_network', None)

    def test_trains_as_often_without_the_limit_and_compares(
        self, tmp_path, capsys, monkeypatch
    ):
        clock = itertools.count(0.0, 2.0)  # an iteration takes two seconds
        time = types.SimpleNamespace(perf_counter=clock.__next__)
        monkeypatch.setattr(demo, 'time', time)

        assert self.run(tmp_path / 'out') == 0

        lines = capsys.readouterr().out.splitlines()
        for name in ('plain', 'limited'):
            own = [line for line in lines if line.startswith(f'{name} ')]
            assert [line.split()[1:4] for line in own] == [
                [str(i), 'of', '9'] for i in range(1, 10)
            ]
            losses = [line.split()[5] for line in own]
            assert len(set(losses)) > 1
            left = [line.split('  ')[-1].strip() for line in own]
            assert len(set(left)) >= 3
            assert [text == 'done' for text in left] == [
                name == 'limited' and i == 9 for i in range(1, 10)
            ]
        same, cost, then = lines[-3:]
        assert same.startswith('The same 9 losses, bit for bit; from ')
        peaks = re.match(r'Peak ([\d.]+) MiB, plain ([\d.]+) MiB; ', cost)
        assert float(peaks[1]) < float(peaks[2])
        assert (tmp_path / 'out' / 'report.html').stat().st_size > 10_000
        assert str(tmp_path / 'out' / 'report.html') in then
        assert 'hybridmem run --memory-limit' in then

    def test_other_losses_are_told_and_fail(self, tmp_path, capsys, monkeypatch):
        train_limited = demo.train_limited

        def differing(*arguments):
            run, session = train_limited(*arguments)
            return run._replace(losses=[0.0, *run.losses[1:]]), session

        monkeypatch.setattr(demo, 'train_limited', differing)

        assert self.run(tmp_path / 'out') == 1
        assert 'OTHER LOSSES in 1 of 9' in capsys.readouterr().out

    @pytest.mark.parametrize(
        'option', [('--no-hybridmem',), ('--resume', 'x'), ('--val', 'x')]
    )
    def test_options_of_one_training_alone_are_refused(self, option, tmp_path, capsys):
        with pytest.raises(SystemExit):
            self.run(tmp_path, *option)

        assert f'{option[0]} is for train.py' in capsys.readouterr().err

    @pytest.mark.parametrize(
        ('seconds', 'text'),
        [
            (0, 'done'),
            (0.1, '5 s left'),
            (61, '1 min  5 s left'),
            (120, '2 min  0 s left'),
        ],
    )
    def test_what_is_left(self, seconds, text):
        assert demo.left_text(seconds) == text
