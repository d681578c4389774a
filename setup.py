"""Notes the commit in what is built, and puts START beside it; see setup.cfg."""

import pathlib
import runpy
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = pathlib.Path(__file__).resolve().parent
PACKAGE = 'chainer_hybridmem'
START = 'chainer_hybridmem.pth'  # for site-packages: Python reads it as it starts
VERSION = runpy.run_path(str(ROOT / PACKAGE / 'version.py'))


def note_commit(target):
    """Writes the commit into a copy of the package, never into the source tree."""
    folder = pathlib.Path(target, PACKAGE)
    commit = VERSION['find_commit'](ROOT / PACKAGE)
    if commit and folder.is_dir() and folder.resolve() != ROOT / PACKAGE:
        file = folder / VERSION['COMMIT_FILE']
        file.write_text(commit + '\n', encoding='ascii')


class BuildWithCommit(build_py):
    def run(self):
        super().run()
        if getattr(self, 'editable_mode', False):
            # What is installed then is no build_lib, but what the install names.
            target = pathlib.Path(self.get_finalized_command('install').install_lib)
        else:
            target = pathlib.Path(self.build_lib)
            note_commit(target)
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / START, target)


class SourceWithCommit(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        note_commit(base_dir)


setup(cmdclass={'build_py': BuildWithCommit, 'sdist': SourceWithCommit})
