"""Published figures of newer systems, and every planner in the same setting.

    python -m benchmarks run rivals.published [--samples FOLDER] [--only SETTING ...]
                                          [--redraw]

Each setting is a network, a batch size, a GPU and a limit on the axes of one published
figure, modelled by ``estimate`` (docs/guide/estimate.md); compute is not calibrated.
Limits that a paper gives in its own bytes are taken as the same share of our
in-core peak, but for vDNN's.
Published losses of throughput are turned into time: -23 % of the speed is +30 % time.
One kernel replays what a session replays in one pass; ``hybrid (whole)`` is the default
planner where every replay runs a whole forward.
Writes ``rivals_published.json`` and ``.md`` to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from typing import Any

from benchmarks import common, saving
from chainer_hybridmem.commands.compare import compare_one
from chainer_hybridmem.forecasting.estimation import Estimator, load_device_model
from chainer_hybridmem.planning.planners import names
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import Problem, make_problem

Row = dict[str, Any]

NAME = 'rivals_published'
LEFT_OUT = ('manual', 'exact')  # one does what it is told, one starts from hybrid
DEFAULT, WHOLE = 'hybrid', 'hybrid (whole)'


@dataclasses.dataclass(frozen=True)
class Setting:
    """One published figure.

    Attributes:
        name (str): System and condition.
        arch (str): Network.
        batchsize (int): Pictures.
        gpu (str): Device model.
        published (str): What was reported, as it was reported.
        overhead (float): The same as time over in-core time, minus 1.
        share (float): Limit as a share of the in-core peak; 0 for another rule.
        activations (float): Or as what stays and this share of the feature maps.
        in_core_batch (int): Or as the in-core peak at this batch size.
        limit_bytes (int): Or as it is.
        different (str): Which conditions are not theirs.
    """

    name: str
    arch: str
    batchsize: int
    gpu: str
    published: str
    overhead: float
    share: float = 0.0
    activations: float = 0.0
    in_core_batch: int = 0
    limit_bytes: int = 0
    different: str = ''


def slower(loss: float) -> float:
    """Time overhead of a loss of throughput."""
    return 1 / (1 - loss) - 1


SETTINGS = (
    Setting(
        'MONeT, 8.0 of 15.06 GB', 'resnet50', 184, 'p100', '+5.6 %', 0.056,
        share=8.0 / 15.06,
        different='recomputes and chooses convolution algorithms, no swaps',
    ),
    Setting(
        'MONeT, 5.0 of 15.06 GB', 'resnet50', 184, 'p100', '+12 %', 0.12,
        share=5.0 / 15.06,
        different='recomputes and chooses convolution algorithms, no swaps',
    ),
    Setting(
        'MAGIS, 40 % of the memory', 'resnet50', 64, 'rtx3090', 'at most 15 %', 0.15,
        share=0.4,
        different='also splits operations; several networks',
    ),
    Setting(
        'POFO, 40 % (in MAGIS)', 'resnet50', 64, 'rtx3090', 'at most 40 %', 0.40,
        share=0.4,
        different='as measured by MAGIS',
    ),
    Setting(
        'DTR, 40 % (in MAGIS)', 'resnet50', 64, 'rtx3090', 'at most 45 %', 0.45,
        share=0.4,
        different='as measured by MAGIS; plans while it runs',
    ),
    Setting(
        'POFO, activations / 4', 'resnet152', 64, 'v100-16gb-pcie3', 'below 20 %', 0.20,
        activations=1 / 4,
        different='chains of blocks',
    ),
    Setting(
        'POFO, activations / 6', 'resnet152', 64, 'v100-16gb-pcie3', 'below 20 %', 0.20,
        activations=1 / 6,
        different='chains of blocks',
    ),
    Setting(
        'Rockmate, activations / 5', 'resnet50', 64, 'v100-16gb-pcie3', '10 to 20 %',
        0.20,
        activations=1 / 5,
        different='recomputes only; P100 and V100',
    ),
    Setting(
        'Paddle, batch 380 to 780', 'resnet50', 780, 'v100-16gb-pcie3',
        '-23 % images/s', slower(0.23),
        in_core_batch=380,
        different='a larger V100; limit: what batch 380 needs in-core',
    ),
    Setting(
        'Sony, 7.5 x the memory', 'resnet50', 640, 'v100-16gb-pcie3',
        '55 % of the speed', slower(0.45),
        share=1 / 7.5,
        different='limit: in-core peak / 7.5',
    ),
    Setting(
        'Sony, at 6 x the memory', 'resnet50', 640, 'v100-16gb-pcie3',
        '55 % of the speed', slower(0.45),
        share=1 / 6,
        different='limit: in-core peak / 6; theirs is 7.5',
    ),
    Setting(
        'vDNN, VGG-16 batch 256 in 12 GB', 'vgg16', 256, 'titan-x', '-18 % images/s',
        slower(0.18),
        limit_bytes=12_000_000_000,
        different='28 GB in-core in the paper',
    ),
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what the benchmark takes."""
    parser.add_argument('--samples', metavar='FOLDER', help='keeps the recordings')
    parser.add_argument('--only', nargs='+', default=[''], metavar='SETTING')
    parser.add_argument(
        '--redraw', action='store_true', help='table from the JSON file'
    )


def main(options: argparse.Namespace) -> int:
    if options.redraw:
        publish(saving.read(NAME)['settings'])
        return 0
    rows = []
    for setting in SETTINGS:
        if any(setting.name.startswith(name) for name in options.only):
            rows.append(measure(setting, options.samples))
            common.save(NAME, {'settings': rows})
    publish(rows)
    beaten = [r['name'] for r in rows if r['best_rival_overhead'] < r['overhead']]
    print(f'rivals faster than {DEFAULT}: {beaten or "none"}')
    return 1 if beaten else 0


def measure(setting: Setting, folder: str | None) -> Row:
    """All planners in one setting."""
    pair = common.recordings(setting.arch, folder)
    model = load_device_model(setting.gpu)
    estimator = Estimator.make(pair, model)
    problem = make_problem(estimator.profile(setting.batchsize))
    limit_bytes = limit(setting, estimator, problem)
    where = setting.arch, setting.batchsize, setting.gpu
    found = everyone(*where, 'pass', limit_bytes, folder)
    by_name = {row['planner']: row for row in found if row['fits']}
    (whole,) = everyone(*where, 'whole', limit_bytes, folder, (DEFAULT,))
    rivals = [row for name, row in by_name.items() if name != DEFAULT]
    best = min(rivals, key=lambda row: row['overhead'], default=None)
    ours = by_name.get(DEFAULT, {})
    return {
        **dataclasses.asdict(setting),
        'published_overhead': setting.overhead,
        'limit_bytes': limit_bytes,
        'in_core_peak_bytes': problem.in_core_peak_bytes,
        'least_memory_bytes': least_memory(problem)[0],
        'overhead': ours.get('overhead', float('inf')),
        'bound_overhead': bound_overhead(ours),
        'whole_overhead': whole.get('overhead'),
        'best_rival': best and best['planner'],
        'best_rival_overhead': best['overhead'] if best else float('inf'),
        'planners': found,
    }


@functools.cache
def everyone(
    arch: str,
    batchsize: int,
    gpu: str,
    recompute: str,
    limit_bytes: int,
    folder: str | None,
    planners: tuple[str, ...] = (),
) -> list[Row]:
    """Rows of planners, by default of all; several settings share a problem."""
    pair, model = common.recordings(arch, folder), load_device_model(gpu)
    estimator = Estimator.make(pair, model)
    estimator = dataclasses.replace(estimator, recompute=recompute)
    problem = make_problem(estimator.profile(batchsize))
    rows = []
    for planner in planners or [name for name in names() if name not in LEFT_OUT]:
        rows.append(compare_one(problem, limit_bytes, planner))
        print(arch, limit_bytes, planner, rows[-1].get('overhead'), file=sys.stderr)
    return rows


def limit(setting: Setting, estimator: Estimator, problem: Problem) -> int:
    """Bytes of the setting's limit."""
    peak = problem.in_core_peak_bytes
    if setting.limit_bytes:
        return setting.limit_bytes
    if setting.share:
        return int(peak * setting.share)
    if setting.activations:
        maps = sum(s.nbytes for s in problem.maps)
        return int(peak - maps * (1 - setting.activations))
    other = make_problem(estimator.profile(setting.in_core_batch))
    return other.in_core_peak_bytes


def bound_overhead(row: Row) -> float | None:
    if not row:
        return None
    return row['lower_bound_seconds'] / row['in_core_seconds'] - 1


def publish(rows: list[Row]) -> None:
    """Writes and prints the tables."""
    text = markdown(rows)
    saving.save_text(NAME, text)
    print(text)


def percent(value: float | None) -> str:
    if value is None or value == float('inf'):
        return 'none'
    return f'{value:+.1%}'


def markdown(rows: list[Row]) -> str:
    """Ours beside what was published, and every planner in every setting."""
    gigabytes = lambda n: f'{n / 1e9:.2f} GB'  # noqa: E731
    columns = {
        'name': str,
        'published': str,
        'as time': percent,
        'limit_bytes': gigabytes,
        'in_core_peak_bytes': gigabytes,
        'least_memory_bytes': gigabytes,
        DEFAULT: percent,
        'bound': percent,
        WHOLE: percent,
        'best rival': str,
        'different': str,
    }
    shown = [
        {
            **row,
            'as time': row['published_overhead'],
            DEFAULT: row['overhead'],
            'bound': row['bound_overhead'],
            WHOLE: row['whole_overhead'],
            'best rival': ' '.join(
                [percent(row['best_rival_overhead']), row['best_rival'] or '']
            ),
        }
        for row in rows
    ]
    return '\n\n'.join(
        [
            '# Published figures and every planner in the same setting',
            'Time over in-core time, predicted on modelled devices; none: no plan '
            'fits. Least memory: that of the largest single operation, below which '
            'there is no plan.',
            common.table(shown, columns),
            '## Every planner',
            everybody(rows),
            '',
        ]
    )


def everybody(rows: list[Row]) -> str:
    """One row for each planner, one column for each different problem."""
    problems = {
        (r['arch'], r['batchsize'], r['gpu'], r['limit_bytes']): r for r in rows
    }
    titles = {
        key: f'{key[0]} b{key[1]}, {key[2]}, {key[3] / 1e9:.2f} GB' for key in problems
    }
    table = []
    for planner in [row['planner'] for row in rows[0]['planners']]:
        line: Row = {'planner': planner}
        for key, row in problems.items():
            found = next(r for r in row['planners'] if r['planner'] == planner)
            line[titles[key]] = found['overhead'] if found['fits'] else None
        table.append(line)
    return common.table(
        table, {'planner': str, **dict.fromkeys(titles.values(), percent)}
    )
