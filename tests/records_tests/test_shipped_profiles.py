"""The shipped profiles: whole, small, honest about what they are."""

from __future__ import annotations

import gzip
import pathlib

import pytest

import chainer_hybridmem as hybridmem
from chainer_hybridmem import profiles
from chainer_hybridmem.errors import FormatError, UnknownNameError
from chainer_hybridmem.planning.search.candidates import least_memory
from chainer_hybridmem.planning.simulation import make_problem

FOLDER = pathlib.Path(profiles.__file__).parent
NAMES = hybridmem.shipped_profiles()
LARGEST_FILE_BYTES = 110_000

every_profile = pytest.mark.parametrize('name', NAMES)


def test_there_are_some() -> None:
    assert len(NAMES) == len(list(FOLDER.glob('*.json.gz'))) > 0
    assert all(name.startswith('shipped:') for name in NAMES)


@every_profile
def test_it_can_be_planned_below_its_in_core_peak(name: str) -> None:
    problem = make_problem(hybridmem.load_profile(name))
    least, peak = least_memory(problem)[0], problem.in_core_peak_bytes
    assert least < peak
    plan = hybridmem.make_plan(problem, (least + peak) // 2, 'swap-all')
    assert plan.lower_bound_seconds <= plan.predicted_seconds


@every_profile
def test_its_device_says_what_it_is(name: str) -> None:
    device = hybridmem.load_profile(name).device
    keys = {'name', 'date', 'arch', 'batchsize', 'insize', 'chainer', 'commit'}
    assert keys <= set(device)
    estimated = name.endswith('-estimated')
    assert device.get('estimated', False) is estimated
    assert device['name'].endswith('(estimated)') is estimated


@every_profile
def test_its_file_is_small_and_names_no_place(name: str) -> None:
    file = FOLDER / (name.removeprefix(profiles.PREFIX) + profiles.SUFFIX)
    assert file.stat().st_size < LARGEST_FILE_BYTES
    text = profiles.read_text(name)
    assert not any(place in text for place in ('/home', '/root', '/tmp'))


def test_an_unknown_name() -> None:
    with pytest.raises(UnknownNameError, match='no profile') as caught:
        hybridmem.load_profile(NAMES[0] + 'x')
    assert f'Did you mean {NAMES[0]!r}?' in str(caught.value)
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize(
    'contents',
    [b'', b'no gzip', gzip.compress(b'{}' * 99)[:-9], gzip.compress(b'{}')],
    ids=['empty', 'no gzip', 'cut off', 'no profile'],  # the time is in gzip's
)
def test_a_damaged_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, contents: bytes
) -> None:
    monkeypatch.setattr(profiles.resources, 'files', lambda package: tmp_path)
    (tmp_path / 'broken.json.gz').write_bytes(contents)
    with pytest.raises(FormatError, match='shipped:broken'):
        hybridmem.load_profile('shipped:broken')
