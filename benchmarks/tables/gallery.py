"""The page of the gallery: each example with command, figures and picture."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables.form import Body, actions, megabytes, ratio, table, yes

COMMANDS = {'data_parallel': 'mpiexec -n 2 python examples/gallery/{name}.py'}
COMMAND = 'python examples/gallery/{name}.py'
HEAD = (
    '# Gallery',
    'What does training inside a limit look like for different kinds of networks? Each '
    'example trains the same network plain and inside a memory limit, and compares '
    'every loss and every parameter.',
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->',
    'The examples need the extras `plot` and `autoswap` (for the digits of '
    'scikit-learn), no GPU and no download. `--share 0.5` sets another limit, as a '
    'share of the peak of plain Chainer. `--device cuda` trains on a GPU, `--planner '
    'NAME` with another planner. `python -m benchmarks run gallery` runs all, with '
    '`--device cuda` at small sizes under four planners, to compare bits.',
)
FIGURES = (
    'CPU time is that of all threads over that of plain Chainer, the median of the '
    'last third of the iterations. A session keeps memory between iterations, which '
    'plain NumPy asks of the system again: so the ratio can be below 1. Many small '
    'functions, and lengths that never come again, cost the most.'
)
DECISIONS = (
    'The last column is the plan that was followed last; a GAN and double backprop '
    'consist of two iterations. On a CPU copies are cheap, so plans rather swap than '
    'recompute; `--link-bandwidth 100MB/s` slows copies down as a bus would.'
)
PICTURES = (
    'The pictures show the memory in use during the last iteration: plain Chainer in '
    'grey, the session in blue, the limit in red. An example writes picture and '
    'figures into the folder `result`, or that of `--out`.'
)


def page(body: Body, texts: Mapping[str, str]) -> list[str]:
    """Returns the paragraphs of the page.

    Args:
        body: Content of ``gallery.json``.
        texts: Docstring of each example; its first sentence begins with the title.
    """
    rows = body['rows']
    titles = {name: text.partition(':')[0] for name, text in texts.items()}
    lines = [
        [
            _link(titles[row['name']]),
            megabytes(row['plain_peak_bytes']),
            megabytes(row['limit_bytes']),
            megabytes(row['limited_peak_bytes']),
            ratio(row['ratio']),
            yes(row['equal']),
            actions(row['decisions']) if row['decisions'] else 'no plan',
        ]
        for row in rows
    ]
    head = ['example', 'plain peak', 'limit', 'peak', 'CPU time', 'same bits']
    head += ['keep / swap / recompute']
    parts = [*HEAD, table(head, lines), FIGURES, DECISIONS, PICTURES]
    for row in rows:
        parts += _section(row['name'], texts[row['name']])
    return parts


def _link(title: str) -> str:
    return f'[{title}](#{title.lower().replace(" ", "-")})'


def _section(name: str, text: str) -> list[str]:
    title, _, rest = text.partition(':')
    first = rest.strip().split('\n\n')[0]
    command = COMMANDS.get(name, COMMAND).format(name=name)
    return [
        f'## {title}',
        f'{first[0].upper()}{first[1:]} [Program](../../examples/gallery/{name}.py).',
        f'```sh slow\n{command}\n```',
        f'![Memory: {title}](../pictures/gallery/{name}.png)',
    ]
