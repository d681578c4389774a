"""What a machine has is not installed again."""

from __future__ import annotations

from benchmarks.gpu import install_wheels


def test_only_what_lacks(tmp_path):
    for name in ('numpy-9.9-py3-none-any.whl', 'no_such_package-1.0-py3-none-any.whl'):
        (tmp_path / name).touch()
    (tmp_path / 'commit.txt').touch()
    assert [w.name.split('-')[0] for w in install_wheels.lacking(tmp_path)] == [
        'no_such_package'
    ]
