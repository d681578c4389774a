"""``hybridmem show`` draws a picture, or says in one line why not."""

from __future__ import annotations

import sys

from support import toys

from chainer_hybridmem import make_plan
from chainer_hybridmem.commands import main
from chainer_hybridmem.planning.records import library


def written(tmp_path, planner='pooch'):
    profile = toys.chain(6)
    plan = make_plan(profile, '60MiB', planner)
    paths = [str(tmp_path / name) for name in ('profile.json', 'plan.json')]
    library.save(profile, paths[0])
    library.save(plan, paths[1])
    return paths


def test_a_picture_is_written(tmp_path, capsys):
    output = tmp_path / 'picture.png'
    assert main(['show', *written(tmp_path), '-o', str(output)]) == 0
    assert output.read_bytes().startswith(b'\x89PNG')
    out = capsys.readouterr().out
    assert 'pooch' in out and 'bound' in out and 'gap' in out


def test_a_table_has_a_line_for_each_feature_map(tmp_path, capsys):
    output = tmp_path / 'plan.txt'
    paths = written(tmp_path)
    assert main(['show', *paths, '-o', str(output)]) == 0
    lines = output.read_text().splitlines()
    profile, plan = library.load_profile(paths[0]), library.load_plan(paths[1])
    assert len(lines) == len(plan.maps)
    for line, entry in zip(lines, plan.maps, strict=True):
        name, action = line.split(' -> ')
        layer, operation = (part.strip() for part in name.split(' :: '))
        storage = profile.storages[entry.storage]
        label = f'{storage.label}@{storage.producer}'
        assert f'{layer.rstrip("/")}/{operation}'.lstrip('/') == label.lstrip('/')
        assert action == entry.action.value
    assert {line.index(' -> ') for line in lines} == {lines[0].index(' -> ')}


def test_an_unknown_kind_of_picture(tmp_path, capsys):
    output = str(tmp_path / 'picture.quark')
    assert main(['show', *written(tmp_path), '-o', output]) == 1
    assert 'quark' in capsys.readouterr().err


def test_a_picture_of_no_kind(tmp_path, capsys):
    output = str(tmp_path / 'picture')
    assert main(['show', *written(tmp_path), '-o', output]) == 1
    assert 'picture.png' in capsys.readouterr().err


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib.figure', None)
    output = str(tmp_path / 'picture.png')
    assert main(['show', *written(tmp_path), '-o', output]) == 1
    assert 'pip install' in capsys.readouterr().err
