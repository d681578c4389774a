"""Where memory goes: arena, pools, layouts, host memory, forward passes."""

from __future__ import annotations

from benchmarks.tables.form import (
    Body,
    Section,
    megabytes,
    overhead,
    percent,
    ratio,
    seconds,
    table,
    yes,
)

POOLS = ('cnmem', 'cupy', 'smartpool', 'exact')


def arena(body: Body) -> str:
    """Returns resident memory and page faults with and without the arena."""
    head = ['network', 'limit', 'way', 'highest resident set', 'page faults']
    head += ['s / iteration', 'placed / not', 'same bits']
    lines = [
        [
            row['network'],
            megabytes(row['limit_bytes']),
            _way(row),
            megabytes(row['resident_bytes']),
            f'{row["page_faults"]:,}',
            seconds(row['iteration_seconds']),
            None if row['placed'] is None else f'{row["placed"]} / {row["unplaced"]}',
            yes(row['same_bits']),
        ]
        for row in body['footprint']
    ]
    timed = [
        [
            row['network'],
            row['allocations'],
            f'{row["mallocs"]:,}',
            *(
                f'{1e6 * row[key]:.1f} µs'
                for key in ('numpy_seconds', 'slab_seconds', 'arena_seconds')
            ),
        ]
        for row in body['allocation']
    ]
    columns = ['network', 'allocations', 'mallocs', 'NumPy', 'best fit', 'arena']
    return f'{table(head, lines)}\n\n{table(columns, timed)}'


def _way(row: Body) -> str:
    """Returns how a network was trained."""
    if row['way'] == 'plain':
        return 'plain Chainer'
    return 'session, `arena=False`' if not row['arena_bytes'] else 'session'


def pools(body: Body) -> str:
    """Returns footprints over peak loads: in-core, planned, relaxed."""
    head = ['network', 'as', 'peak load', *POOLS, 'proven optimal']
    lines = []
    for row in [*body['table1'], *body['planned']]:
        lines.append(
            [
                row['network'],
                row.get('planner', 'in-core, batch 100'),
                megabytes(row['peak_load_bytes']),
                *(f'{row[pool]:.4f}' for pool in POOLS),
                yes(row['optimal']),
            ]
        )
    return table(head, lines)


def layouts(body: Body) -> str:
    """Returns footprints of public instances over the bound, and seconds."""
    head = ['instance', 'buffers', 'capacity', 'smartpool', 'exact', 'proven optimal']
    head += ['CPU seconds', 'of MiniMalloc']
    return table(
        head,
        [
            [
                row['instance'],
                row['buffers'],
                row['capacity_bytes']
                and f'{row["capacity_bytes"] / row["bound_bytes"]:.4f}',
                f'{row["smartpool_bytes"] / row["bound_bytes"]:.4f}',
                f'{row["footprint_bytes"] / row["bound_bytes"]:.4f}',
                yes(row['optimal']),
                f'{row["cpu_seconds"]:.2f}',
                row['minimalloc_cpu_seconds']
                and f'{row["minimalloc_cpu_seconds"]:.2f}',
            ]
            for row in body['instances']
        ],
    )


def fitted(body: Body) -> str:
    """Returns what it costs that the layout fits, and not the load alone."""
    head = ['network', 'planner', 'over in-core, load fits', 'layout fits', 'plans']
    return table(
        head,
        [
            [
                row['network'],
                row['planner'],
                overhead(row['load_fits']),
                overhead(row['layout_fits']),
                row['rounds'],
            ]
            for row in body['fitted']
        ],
    )


def combined(body: Body) -> str:
    """Returns how far load and footprint can be cut."""
    head = ['network', 'speed', 'in-core load', 'load cut, no overhead', 'at most']
    head += ['footprint cut below 15 %, of CnMem', 'overhead there']
    lines = []
    for row in body['networks']:
        load, little = row['peak_load_bytes'], row['little_overhead']
        lines.append(
            [
                row['network'],
                row['speed'],
                megabytes(load),
                percent(1 - row['no_overhead']['least_load_bytes'] / load),
                percent(1 - row['no_overhead_bound_bytes'] / load),
                percent(1 - little['footprint_bytes'] / row['cnmem_bytes']),
                overhead(little['overhead']),
            ]
        )
    return table(head, lines)


def crossing(body: Body) -> str:
    """Returns least loads if states and parameters may leave, too."""
    head = ['speed', 'may leave', 'no overhead', 'up to 15 %', 'least']
    leaving = {'maps': 'feature maps', 'states': 'and states', 'all': 'and parameters'}
    return table(
        head,
        [
            [
                row['speed'],
                leaving.get(row['may_leave'], row['may_leave']),
                _cut(row, 'no_overhead_bytes'),
                _cut(row, 'little_overhead_bytes'),
                _cut(row, 'least_bytes'),
            ]
            for row in body['rows']
        ],
    )


def _cut(row: Body, key: str) -> str:
    share = 1 - row[key] / row['in_core_bytes']
    return f'{megabytes(row[key])} ({percent(share)})'


def host_limit(body: Body) -> str:
    """Returns iterations with less and less RAM for host copies."""
    head = ['planner', 'host limit', 's / iteration, predicted', 'measured', 'bound']
    head += ['RAM', 'disk', 'keep / swap / recompute', 'same numbers']
    return table(
        head,
        [
            [
                f'`{row["planner"]}`',
                row['host limit'],
                seconds(row['s / iteration predicted']),
                seconds(row['measured']),
                seconds(row['bound']),
                megabytes(row['RAM measured'], 1),
                megabytes(row['disk measured'], 1),
                row['keep / swap / recompute'],
                yes(row['same numbers']),
            ]
            for row in body['rows']
        ],
    )


def shared_link(body: Body) -> str:
    """Returns how evenly processes share a link, and how exactly it keeps its rate."""
    head = ['link', 'processes', 'copies', 'rate off by', 'worst']
    head += ['shares', 'worst share off by', "processor's time", 'without throttle']
    return table(
        head,
        [
            [
                f'{row["bandwidth"]}, {row["link"]}',
                row['processes'],
                'both ways' if row['both_ways'] else 'out',
                overhead(row['rate_error'], 2),
                overhead(row['worst_rate_error'], 2),
                f'{percent(row["least_share"])} to {percent(row["largest_share"])}',
                percent(row['worst_share_error']),
                percent(row['cpu_share']),
                percent(row['unthrottled_cpu_share']),
            ]
            for row in body['rows']
        ],
    )


def multiloading(body: Body) -> str:
    """Returns what a forward pass without backward saves of the sum of all blobs."""
    head = ['network', 'sum of all blobs', '`run`', '`last-use`', '`in-place`']
    head += ['`last-use` with workspaces, cuDNN', 'im2col', 'below CuPy pool']
    lines = []
    for row in body['networks']:
        cudnn = {item['lifetimes']: item for item in row['cudnn']['lifetimes']}
        im2col = {item['lifetimes']: item for item in row['im2col']['lifetimes']}
        layouts = {item['lifetimes']: item for item in row['cudnn']['layouts']}
        least = layouts['last-use']['footprint_bytes']
        lines.append(
            [
                f'{row["network"]} b{row["batchsize"]}',
                megabytes(row['blob_bytes']),
                *(
                    percent(cudnn[name]['blob_saving'])
                    for name in ('run', 'last-use', 'in-place')
                ),
                percent(cudnn['last-use']['saving']),
                percent(im2col['last-use']['saving']),
                percent(1 - least / row['cudnn']['cupy_run_bytes']),
            ]
        )
    return table(head, lines)


def forward_passes(body: Body) -> str:
    """Returns what processes take for forward passes, beside the layout."""
    head = ['device', 'network', 'same bits', 'plain Chainer', 'arena', 'layout']
    head += ['placed / missed', 'seconds, arena / plain']
    lines = []
    for row in body['rows']:
        plain, arena = row['plain'], row['arena']
        lines.append(
            [
                row['device'],
                row['network'],
                yes(row['equal']) if row['device'] == 'host' else 'not computed',
                megabytes(plain['process_bytes']),
                megabytes(arena['process_bytes']),
                megabytes(arena['layout_bytes']),
                f'{arena["placed"]} / {arena["missed"]}',
                f'{arena["seconds"] / plain["seconds"]:.2f}'
                if row['device'] == 'host'
                else '-',
            ]
        )
    return table(head, lines)


def os_limit(body: Body) -> str:
    """Returns who survives a memory control group."""
    children = body['children']
    rows = [
        [name, child['exit'], child['last_line'] or 'killed']
        for name, child in children.items()
    ]
    return (
        f'{body["arch"]} b{body["batchsize"]}: in-core peak '
        f'{megabytes(body["in_core_peak_bytes"])}, limit '
        f'{megabytes(body["limit_bytes"])}, judge: {body["judge"]} with '
        f'{megabytes(body["margin_bytes"])} more for what is no array.\n\n'
        + table(['process', 'exit status', 'last line'], rows)
    )


def overheads(body: Body) -> str:
    """Returns what iterations of sessions cost over those of plain Chainer."""
    return table(
        ['program', 'limit', 'plain Chainer, CPU s', 'session / plain'],
        [
            [
                row['program'],
                row['limit'],
                seconds(row['plain_cpu_seconds']),
                ratio(row['ratio']),
            ]
            for row in body['rows']
        ],
    )


SECTIONS = (
    Section(
        ('host_arena',),
        'The arena on a CPU',
        """Half the memory (AlexNet: 65 % of what can move), swapping to a file, one
        process for each row, 9 iterations. Page faults are those of the whole run.
        The second table is the time of a malloc with its free, NumPy's array around
        it included.""",
        arena,
    ),
    Section(
        ('host_os_limit',),
        'The operating system as the judge',
        """Plain Chainer and a session that swaps to a file, in a memory control
        group. A limit on the address space is harsher, because it counts what
        fragmentation has reserved: there, 448 MiB more did not suffice (no result
        file).""",
        os_limit,
    ),
    Section(
        ('host_overhead',),
        'What an iteration of a session costs',
        """CPU seconds of plain Chainer and of sessions whose limits are shares of its
        peak, with updates in turns. Below 1, the session is faster: its heap faults
        no page twice.""",
        overheads,
    ),
    Section(
        ('host_limit',),
        'Less and less RAM for host copies',
        """ResNet-50, batch 4 at 96x96, copies at 75 MB/s to RAM and 15 MB/s to disk.
        The host limit is a share of what `swap-all` swaps. Some measured times are
        far from the prediction; the file does not say why.""",
        host_limit,
    ),
    Section(
        ('shared_link',),
        'Processes that share a link',
        """Each process copies 64 MiB in maps of 4 MiB, all at the same time, on a link
        throttled with `link_bandwidth` and shared with `shared_link`. *Rate*: of all
        together, from the first beginning to the last end, over the throttle, in the
        worse direction. *Shares*: of what the link carries until the first process is
        done; *off by* is relative to the equal share. *Processor's time*: of all
        processes, per second of copying, beside what the same copies take without a
        throttle. Medians, and the worst runs. The machine was busy with other work.""",
        shared_link,
    ),
    Section(
        ('crossing',),
        'Optimizer states and parameters that leave',
        """VGG-16 on CIFAR-10 shapes, batch 100, modelled GTX 1080 Ti, planner
        `hybrid`: the least load without overhead, with up to 15 %, and at all; in
        brackets the cut from the in-core peak.""",
        crossing,
    ),
    Section(
        ('combined',),
        'Plan and layout together',
        """CIFAR-10 shapes, batch 100, modelled GTX 1080 Ti, planner `hybrid`, layout
        `exact`. *At most* is what the bound does not exclude. Zhang et al. publish
        30.9 % (VGG-16) and 34.2 % (ResNet-50) of the load, and at least 60 % of the
        footprint of CnMem below 15 % overhead. VGGs stop short of that because
        nothing smaller can be planned: parameters, gradients and momentum stay, where
        AutoSwap moves weights, too. More:
        [combined.md](../benchmarks/results/combined.md),
        [picture](../benchmarks/results/combined.png).""",
        combined,
    ),
    Section(
        ('pools',),
        'Footprint of pools and layouts',
        """Above: plain Chainer in the setting of Zhang et al., Table I. Below:
        iterations on a modelled V100 with 16 GB, in-core, as planned and with relaxed
        positions. All pools: [pools.md](../benchmarks/results/pools.md).""",
        pools,
    ),
    Section(
        ('layouts',),
        'Layouts of public instances',
        """Footprint over the bound. A to K: MiniMalloc's, where a layout inside the
        capacity is enough, as it is for its own program (last column, run in turns
        with ours). `somas_`: MindSpore's, as small as can be found.""",
        layouts,
    ),
    Section(
        ('pools',),
        'What it costs that the layout fits 16 GB',
        """Predicted time over in-core time where only the load must fit and where the
        layout must fit, and how many plans were needed.""",
        fitted,
    ),
    Section(
        ('multiloading',),
        'Forward passes without backward',
        """Part saved of the sum of all blobs, for three assumptions on how long a
        blob lives ([explained](guide/inference.md)). The last column compares the
        smallest layout with CuPy's pool for plain Chainer. More:
        [multiloading.md](../benchmarks/results/multiloading.md).""",
        multiloading,
    ),
    Section(
        ('forward_passes',),
        'Forward passes in their arena',
        """Peak of a process, above what it has held before the network was made, with
        plain Chainer and with `optimize_inference` ([explained](guide/inference.md)),
        beside the layout and what lies outside of it: parameters, the batch, what is
        returned. On the host the resident set from the sixth pass on; for CuPy what
        the emulated driver has given, kernels left out.""",
        forward_passes,
    ),
)
