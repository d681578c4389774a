"""The page of the gallery: each example with command, figures and picture."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.tables.form import Body, actions, megabytes, ratio, seconds, table, yes

COMMANDS = {'data_parallel': 'mpiexec -n 2 python examples/gallery/{name}.py'}
COMMAND = 'python examples/gallery/{name}.py'
HEAD = (
    '# Gallery',
    'What does training inside a limit look like for different kinds of networks? Each '
    'example trains the same network plain and inside a memory limit, and compares '
    'every loss and every parameter.',
    '<!-- python -m benchmarks render writes this page; edit what it is made of -->',
    '`python -m benchmarks run gallery` runs all examples and makes the pictures.',
    'The examples need the extras `plot` and `autoswap` (for the digits of '
    'scikit-learn), no GPU and no download. `--share 0.5` sets another limit, as a '
    'share of the peak of plain Chainer. Each program begins with what is special '
    'about its network.',
)
FIGURES = (
    'CPU time is that of all threads, per iteration, the median of the last third of '
    'the iterations. A session keeps memory between iterations, which plain NumPy asks '
    'of the system again: so the ratio can be below 1. Many small functions, and '
    'lengths that never come again, cost the most. In the example with two processes, '
    'waiting for the other one counts, too.'
)
DECISIONS = (
    'The last column says what the plan that was followed last decides; a GAN and '
    'double backprop consist of two iterations. A copy on a CPU is one from RAM to '
    'RAM, so plans rather swap than recompute; `--link-bandwidth 100MB/s` slows copies '
    'down to what a bus would do for a GPU.'
)
PICTURES = (
    'The pictures show the memory in use during the last iteration: plain Chainer in '
    'grey, the session in blue, the limit in red.'
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
            seconds(row['plain_cpu_seconds'], 3),
            seconds(row['limited_cpu_seconds'], 3),
            ratio(row['ratio']),
            yes(row['equal']),
            actions(row['decisions']) if row['decisions'] else 'no plan',
        ]
        for row in rows
    ]
    head = ['example', 'plain peak', 'limit', 'peak', 'plain CPU s', 'CPU s', 'ratio']
    head += ['same bits', 'keep / swap / recompute']
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
        f'![{title}: memory of one iteration](../pictures/gallery/{name}.png)',
    ]
