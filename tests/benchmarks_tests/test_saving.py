"""Result files: nothing measured is lost, and what is unknown says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from benchmarks import saving


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(saving, 'RESULTS', str(tmp_path))
    return tmp_path


def read(folder, name):
    return json.loads((folder / f'{name}.json').read_text())


class TestRows:
    def test_each_row_is_saved_at_once(self, results):
        rows = saving.Rows('some', limit_bytes=5)
        rows.add({'planner': 'one'})
        assert read(results, 'some')['rows'] == [{'planner': 'one'}]
        rows.add({'planner': 'two'})
        rows.tell(seconds=1.5)
        body = read(results, 'some')
        assert [row['planner'] for row in body['rows']] == ['one', 'two']
        assert (body['limit_bytes'], body['seconds']) == (5, 1.5)
        assert body['environment']['python']

    def test_a_row_takes_the_place_of_an_earlier_one(self, results):
        rows = saving.Rows('some')
        for name in ('one', 'two'):
            rows.put({'planner': name, 'seconds': 1}, 'planner')
        rows = saving.Rows('some')
        rows.keep_earlier()
        rows.put({'planner': 'one', 'seconds': 2}, 'planner')
        rows.put({'planner': 'three', 'seconds': 3}, 'planner')
        found = read(results, 'some')['rows']
        assert [row['planner'] for row in found] == ['one', 'two', 'three']
        assert [row['seconds'] for row in found] == [2, 1, 3]
        about = saving.environment()
        assert {row['commit'] for row in found} == {about['commit']}
        assert {row['date'] for row in found} == {about['date']}

    def test_what_is_added_to_an_earlier_result_is_of_today(self, results):
        saving.save('some', {'cases': 1, 'environment': {'commit': 'of old'}})
        saving.save('some', {**saving.read('some'), 'cases': 2})
        assert read(results, 'some')['environment'] == saving.environment()

    def test_a_second_folder(self, results, tmp_path, monkeypatch):
        monkeypatch.setenv('RESULTS_COPY', str(tmp_path / 'copy' / 'of it'))
        saving.Rows('some').add({'planner': 'one'})
        assert read(tmp_path / 'copy' / 'of it', 'some') == read(results, 'some')

    def test_what_json_does_not_know_is_no_reason_to_lose_a_row(self, results):
        saving.Rows('some').add({'path': results})
        assert read(results, 'some')['rows'] == [{'path': str(results)}]

    def test_a_file_half_written_is_not_seen(self, results, monkeypatch):
        rows = saving.Rows('some')
        rows.add({'planner': 'one'})
        monkeypatch.setattr(saving.os, 'replace', lambda *paths: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rows.add({'planner': 'two'})
        assert read(results, 'some')['rows'] == [{'planner': 'one'}]

    def test_a_killed_process_leaves_its_rows(self, tmp_path):
        code = (
            'import os\nfrom benchmarks import saving\n'
            'saving.RESULTS = os.environ["FOLDER"]\n'
            'saving.Rows("some").add({"planner": "one"}); os.kill(os.getpid(), 9)'
        )
        environment = {**os.environ, 'FOLDER': str(tmp_path), 'PYTHONPATH': saving.ROOT}
        done = subprocess.run([sys.executable, '-c', code], env=environment)
        assert done.returncode == -signal.SIGKILL
        assert read(tmp_path, 'some')['rows'] == [{'planner': 'one'}]


class TestCommit:
    @pytest.fixture(autouse=True)
    def no_clone(self, tmp_path, monkeypatch):
        monkeypatch.setattr(saving, 'ROOT', str(tmp_path))
        monkeypatch.setattr(saving, 'COMMIT_FILE', str(tmp_path / 'commit.txt'))
        monkeypatch.delenv('BENCHMARK_COMMIT', raising=False)

    def test_nobody_knows(self):
        assert saving.commit_and_clean() == ('unknown', None)

    def test_without_git(self, tmp_path, monkeypatch):
        (tmp_path / '.git').mkdir()
        monkeypatch.setenv('PATH', str(tmp_path))
        assert saving.commit_and_clean() == ('unknown', None)

    def test_a_variable(self, monkeypatch):
        monkeypatch.setenv('BENCHMARK_COMMIT', 'abc1234')
        assert saving.commit_and_clean() == ('abc1234', None)

    @pytest.mark.parametrize(
        ('text', 'expected'),
        [
            ('abc1234\n', ('abc1234', True)),
            ('abc1234\n M chainer_hybridmem/units.py\n', ('abc1234', False)),
            ('', ('unknown', None)),
        ],
    )
    def test_a_file(self, tmp_path, text, expected):
        (tmp_path / 'commit.txt').write_text(text)
        assert saving.commit_and_clean() == expected
