"""The benchmarks by name: what they show, what they write, what they need."""

from __future__ import annotations

import dataclasses
import sys


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        name: Module in this package.
        help: What it shows, in one line.
        results: Files that it writes to ``results``.
        needs: What a machine needs beside a processor; empty if nothing.
    """

    name: str
    help: str
    results: tuple[str, ...] = ()
    needs: str = ''


GPU = 'a GPU'
BENCHMARKS = (
    Benchmark(
        'host_methods',
        'planners of Ito et al. (Fig. 14) and hybrid on a CPU, measured and predicted',
        ('host_methods.json',),
    ),
    Benchmark(
        'draw_methods', 'the picture of host_methods.json', ('host_methods.png',)
    ),
    Benchmark('pairs', 'hybrid against pooch, in turns', ('host_pairs.json',)),
    Benchmark(
        'exactness', 'every planner in half the memory, bits', ('host_exactness.json',)
    ),
    Benchmark(
        'os_limit',
        'a memory control group kills plain Chainer and not a session',
        ('host_os_limit.json',),
    ),
    Benchmark('host_limit', 'less and less RAM for host copies', ('host_limit.json',)),
    Benchmark(
        'shared_link',
        'rates and shares of processes that share a throttled link',
        ('shared_link.json',),
    ),
    Benchmark(
        'ranks_faults',
        'what becomes of the others when one of several processes fails',
        ('ranks_faults.json',),
        'an MPI',
    ),
    Benchmark('draw_ranks', 'the lanes of two processes on one link'),
    Benchmark(
        'ranks_measured',
        'processes that share a link and know of each other, measured over MPI',
        ('ranks_measured.json',),
        'an MPI',
    ),
    Benchmark(
        'overhead',
        'CPU seconds of a session over plain Chainer, in turns',
        ('host_overhead.json',),
    ),
    Benchmark(
        'predicted.run',
        'what `hybridmem run` predicts, beside CPU seconds over plain Chainer',
        ('predicted.json', 'predicted_before.json'),
    ),
    Benchmark(
        'public_reports',
        'programs after public bug reports: bits, guided share, CPU time',
        ('public_reports.json',),
    ),
    Benchmark(
        'referee',
        'what a change of the structure must not change: plans, scenarios, calls',
        ('referee.json',),
    ),
    Benchmark(
        'varying_lengths',
        'a language model of varying lengths beside a fixed length',
        ('varying_lengths.json',),
    ),
    Benchmark(
        'memory_profile', 'cost of watching the memory pool', ('memory_profile.json',)
    ),
    Benchmark(
        'checked_replays',
        'cost of comparing every recomputed map',
        ('checked_replays.json',),
    ),
    Benchmark('recompute', 'forward, whole replay and pass', ('recompute.json',)),
    Benchmark(
        'splitting',
        'ResNet-50 below the working set of single functions',
        ('splitting.json',),
    ),
    Benchmark('planning', 'evaluations per second, seconds per planner'),
    Benchmark(
        'first_plan',
        'CPU seconds of a first plan and session, which compile; plans beside before',
        ('first_plan.json',),
    ),
    Benchmark(
        'pools',
        'footprint of pools and layouts over the peak load',
        ('pools.json', 'pools.md'),
    ),
    Benchmark('arena', 'the arena on a CPU: footprint, speed', ('host_arena.json',)),
    Benchmark(
        'layouts',
        "layouts of MiniMalloc's and MindSpore's instances, beside MiniMalloc",
        ('layouts.json',),
        'their files',
    ),
    Benchmark(
        'multiloading',
        "a forward pass without backward, beside Caffe's multiloading",
        ('multiloading.json', 'multiloading.md'),
    ),
    Benchmark(
        'forward_passes',
        'forward passes without backward in their arena: peak of the process, bits',
        ('forward_passes.json',),
    ),
    Benchmark(
        'combined',
        'plan and layout together, beside Zhang et al.',
        ('combined.json', 'combined.md', 'combined.png'),
    ),
    Benchmark(
        'crossing',
        'least memory if states and parameters may leave',
        ('crossing.json',),
    ),
    Benchmark(
        'many_allocations',
        'a detector with up to 100,000 small allocations an iteration',
        ('many_allocations.json',),
    ),
    Benchmark(
        'ranks',
        'several GPUs on one link: plans that know it, plans that do not, the bound',
        ('ranks.json',),
    ),
    Benchmark(
        'largest_batch',
        'the largest batch trains and one example more does not, over drawn cases',
        ('largest_batch.json',),
    ),
    Benchmark(
        'scale',
        'planning time and gap of hybrid for five networks',
        ('planning_scale.json',),
    ),
    Benchmark(
        'cuda_counts',
        'what every iteration calls of CUDA',
        ('cuda_counts.json',),
        'the emulator',
    ),
    Benchmark(
        'kernel_rounding',
        "instructions that NVIDIA's compiler makes of fused replays",
        ('kernel_rounding.json',),
        "the emulator and NVIDIA's compiler",
    ),
    Benchmark(
        'gallery',
        'the examples of the gallery, plain against limited',
        ('gallery.json', 'gallery_gpu.json'),
    ),
    Benchmark('house', 'the shape of the code: files, classes, functions'),
    Benchmark(
        'paper.ito',
        'Ito et al., Figs. 14 to 17, on a modelled V100',
        ('paper_ito.json', 'paper_ito.md', 'paper_ito.png'),
    ),
    Benchmark(
        'paper.gap',
        'gap to the bound against planning time',
        ('paper_gap.json', 'paper_gap.md', 'paper_gap.png'),
    ),
    Benchmark(
        'paper.evaluations',
        'evaluations per second by network and kind of candidate',
        ('evaluations.json',),
    ),
    Benchmark(
        'rivals.compare',
        'every planner on every shipped profile',
        ('rivals_compare.json', 'rivals_compare.md', 'rivals_compare.png'),
    ),
    Benchmark(
        'contest',
        'planners and layouts against the best published answers',
        ('arena.json', 'arena.md', 'arena.html'),
        'files of others',
    ),
    Benchmark(
        'chains',
        'drawn chains with a closed optimum: bounds and plans over it',
        ('chains.json',),
    ),
    Benchmark(
        'least_limits',
        'shipped profiles at their least limits: plans over proven bounds',
        ('least_limits.json',),
    ),
    Benchmark(
        'checkmate_batches',
        "Checkmate's largest batches (Figure 6) beside ours and a bound",
        ('checkmate_batches.json',),
        'files of others',
    ),
    Benchmark(
        'tilings',
        'drawn layouts whose optimum is known by construction',
        ('tilings.json',),
    ),
    Benchmark(
        'drawn_cells',
        'drawn cells of the arena: limits, trivial answers, bounds, monotony, reuse',
        ('drawn_cells.json',),
    ),
    Benchmark(
        'rivals.published',
        'figures of eight papers beside every planner',
        ('rivals_published.json', 'rivals_published.md'),
    ),
    Benchmark(
        'rivals.autoswap',
        "AutoSwap's experiments",
        ('rivals_autoswap.json', 'rivals_autoswap.md', 'rivals_autoswap.png'),
    ),
    Benchmark(
        'rivals.forget', "Chainer's F.forget beside plans", ('rivals_forget.json',)
    ),
    Benchmark(
        'rivals.record_profiles', 'makes the shipped profiles, with --gpu of a GPU'
    ),
    Benchmark(
        'programs.run',
        "Chainer's example programs below and above their peak",
        ('programs_LABEL.json', 'programs_LABEL.md'),
        "Chainer's source",
    ),
    Benchmark(
        'packages.run',
        'packages of other people, unmodified, trained by hybridmem run',
        ('packages.json',),
        'a package index',
    ),
    Benchmark(
        'programs.costs',
        "where the cost of an iteration goes in Chainer's example programs",
        ('programs_costs.json',),
        "Chainer's source",
    ),
    Benchmark(
        'programs.first',
        'what iterations cost before a plan is followed',
        ('programs_first.json',),
        "Chainer's source",
    ),
    Benchmark(
        'upstream.run',
        "Chainer's own tests with every feature map leaving",
        (
            *('upstream_tests.json', 'upstream_tenth.json'),
            *('upstream_gpu.json', 'upstream_gpu_cudnn.json'),
        ),
        "Chainer's source",
    ),
    Benchmark('gpu.install_wheels', 'installs what a GPU machine lacks'),
    Benchmark('gpu.look', 'which GPU and packages a run has', needs=GPU),
    Benchmark('gpu.warm', 'compiles what the next ones need'),
    Benchmark(
        'gpu.cudnn_on_gpu',
        'functions of cuDNN beside those without, and in-core speeds',
        ('gpu_cudnn.json',),
        GPU,
    ),
    Benchmark('gpu.smoke', 'a loop in half its memory, bits', ('gpu_smoke.json',), GPU),
    Benchmark(
        'gpu.exactness_on_gpu',
        'small networks in less memory, bits',
        ('gpu_exactness.json',),
        GPU,
    ),
    Benchmark(
        'gpu.methods_on_gpu',
        'planners at a limit, measured and predicted',
        ('gpu_methods.json', 'gpu_large.json'),
        GPU,
    ),
    Benchmark(
        'gpu.small_on_gpu', 'a program of small functions', ('gpu_small.json',), GPU
    ),
    Benchmark(
        'gpu.arena_on_gpu', 'the arena as the driver sees it', ('gpu_arena.json',), GPU
    ),
    Benchmark(
        'gpu.torch_on_gpu',
        "PyTorch's own ways in the same memory",
        ('gpu_torch.json', 'gpu_torch_compile.json'),
        'a GPU and PyTorch',
    ),
    Benchmark(
        'gpu.summarize', 'sums up what a run has saved', ('gpu.md', 'gpu_tests.json')
    ),
)
BY_NAME = {benchmark.name: benchmark for benchmark in BENCHMARKS}


def command(name: str) -> list[str]:
    """The command line of a benchmark, for a process of its own."""
    return [sys.executable, '-m', 'benchmarks', 'run', name]
