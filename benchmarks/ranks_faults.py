"""What becomes of the others when one of several processes fails or differs.

    python -m benchmarks run ranks_faults

Two processes train under a limit with ``communicator``, over MPI, and one of them is
killed, stopped for ten seconds, out of memory, or has another network or limit. Told
are the words, and the seconds from that moment until all have ended, or until all have
gone on for an iteration; with another network or limit, the seconds of all iterations
beyond those without a fault. Writes ``ranks_faults.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
import time
from typing import Any

from benchmarks import saving
from benchmarks.ranks_measured import run_ranks

KINDS = {
    # fault: what is done to the second process, in words
    'none': 'nothing: an iteration',
    'killed': 'killed by SIGKILL in an iteration',
    'stopped': 'stopped for 10 s in an iteration',
    'raises': 'raises a ValueError in an iteration',
    'memory': 'asks for more than its limit in an iteration',
    'absent': 'never calls optimize()',
    'limit': 'has another limit from the beginning',
    'network': 'has another batch size from the beginning',
}
MOST_SECONDS = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes the faults to try."""
    parser.add_argument('--faults', nargs='+', default=list(KINDS), choices=KINDS)


def main(options: argparse.Namespace) -> int:
    """Tries every fault and saves what has happened."""
    rows = saving.Rows('ranks_faults')
    usual_seconds = run('none')['whole_seconds']
    for fault in options.faults:
        row = run(fault)
        if fault in ('limit', 'network'):
            row['seconds'] = row['whole_seconds'] - usual_seconds
        rows.add(row)
        print(row, flush=True)
    return 0


def run(fault: str) -> dict[str, Any]:
    """What happens to two processes, one of which has this fault."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(
            'ranks_faults_worker',
            2,
            [fault, folder],
            MOST_SECONDS,
            capture_output=True,
        )
        end = time.time()
        moments, said = {}, []
        for rank in range(2):
            with open(os.path.join(folder, f'{rank}.json'), encoding='utf-8') as file:
                moments[rank] = json.load(file)
            with open(os.path.join(folder, f'{rank}.txt'), encoding='utf-8') as file:
                said.append(file.read())
    began, fault_at = (
        max(found.get(what, 0.0) for found in moments.values())
        for what in ('begin', 'fault')
    )
    goes_on = ended.returncode == 0
    if goes_on:
        end = max(found['after'] for found in moments.values())
    return {
        'fault': fault,
        'what': KINDS[fault],
        'ends': not goes_on,
        'exit_status': ended.returncode,
        'seconds': end - fault_at,
        'whole_seconds': end - began,
        'bits_equal': goes_on and moments[0]['bits'] == moments[1]['bits'],
        'states': [moments[rank].get('state') for rank in moments],
        'words': _words(said),
    }


def _words(said: list[str]) -> list[str]:
    """The last of what each process says that an engineer would look for."""
    wanted = re.compile(r'^\S*(?:Error|Signal).*|^hybridmem: rank .*', re.MULTILINE)
    return [''.join(wanted.findall(text)[-1:]) for text in said]
