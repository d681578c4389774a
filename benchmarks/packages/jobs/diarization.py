"""EEND: its trainer for who speaks when, on drawn sounds.

python diarization.py MODEL EPOCHS

MODEL is Transformer or attractor (with encoder and decoder of attractors). Options are
those of its recipe for mini_librispeech, with fewer and shorter sounds. Its program
imports ``cupy.cuda.cudnn`` to print a version, and ends where there is no cuDNN: what
it calls then, ``train()``, is called here.
"""

import argparse
import pathlib
import sys
import tempfile

import numpy as np
import soundfile
from eend.chainer_backend.train import train

RATE = 8000
SECONDS = 12
RECORDINGS, VALIDATED = 40, 4
SPEAKERS = 2
TURN_SECONDS = 2.0

OPTIONS = {
    'backend': 'chainer',
    'initmodel': '',
    'resume': '',
    'gpu': -1,
    'input_transform': 'logmel23_mn',
    'lr': 0.001,
    'optimizer': 'noam',
    'num_speakers': SPEAKERS,
    'gradclip': 5,
    'num_frames': 120,
    'batchsize': 8,
    'label_delay': 0,
    'hidden_size': 256,
    'context_size': 7,
    'subsampling': 10,
    'frame_size': 200,
    'frame_shift': 80,
    'sampling_rate': RATE,
    'noam_scale': 1.0,
    'noam_warmup_steps': 100,
    'transformer_encoder_n_heads': 4,
    'transformer_encoder_n_layers': 2,
    'transformer_encoder_dropout': 0.1,
    'gradient_accumulation_steps': 2,  # its own updater
    'seed': 777,
    'shuffle': False,  # its processes would draw in an order that varies
    'attractor_loss_ratio': 1.0,
    'attractor_encoder_dropout': 0.1,
    'attractor_decoder_dropout': 0.1,
}


def draw(rng, folder, recordings):
    """A data folder of Kaldi: tones of speakers that take turns, in noise."""
    folder.mkdir()
    tables = {name: [] for name in ('wav.scp', 'reco2dur', 'segments', 'utt2spk')}
    said = {f'speaker{i}': [] for i in range(SPEAKERS)}
    for number in range(recordings):
        recording = f'recording{number}'
        sound = 0.01 * rng.standard_normal(RATE * SECONDS)
        for i, speaker in enumerate(said):
            begin, turn = rng.uniform(0, 1), 0
            while begin + TURN_SECONDS < SECONDS:
                end = begin + rng.uniform(0.5, TURN_SECONDS)
                span = np.arange(int(begin * RATE), int(end * RATE))
                sound[span] += 0.1 * np.sin(2 * np.pi * 200 * (i + 1) * span / RATE)
                spoken = f'{recording}-{speaker}-{turn}'
                tables['segments'].append(f'{spoken} {recording} {begin} {end}')
                tables['utt2spk'].append(f'{spoken} {speaker}')
                said[speaker].append(spoken)
                begin, turn = end + rng.uniform(0, TURN_SECONDS), turn + 1
        path = folder / f'{recording}.wav'
        soundfile.write(path, sound.astype(np.float32), RATE)
        tables['wav.scp'].append(f'{recording} {path}')
        tables['reco2dur'].append(f'{recording} {SECONDS}')
    tables['spk2utt'] = [' '.join([name, *spoken]) for name, spoken in said.items()]
    for name, lines in tables.items():
        (folder / name).write_text('\n'.join(lines) + '\n')


def main():
    model, epochs = sys.argv[1:]
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        draw(rng, folder / 'train', RECORDINGS)
        draw(rng, folder / 'valid', VALIDATED)
        options = argparse.Namespace(
            **OPTIONS,
            model_type='Transformer',
            use_attractor=model == 'attractor',
            train_data_dir=str(folder / 'train'),
            valid_data_dir=str(folder / 'valid'),
            model_save_dir=str(folder / 'models'),
            max_epochs=int(epochs),
        )
        train(options)
        trained = np.load(folder / f'models/snapshot_epoch-{epochs}')
        for key in sorted(trained.files):
            if key.startswith('updater/model'):
                print(key, trained[key].tobytes().hex()[:16])


if __name__ == '__main__':
    main()
