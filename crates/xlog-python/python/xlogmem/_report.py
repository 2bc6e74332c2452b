"""The report page of a log, in a notebook."""

import html
import os
import subprocess
import tempfile

from ._command import executable


class Report:
    """The report page of a log. A notebook shows it; `html` is the page."""

    def __init__(self, page, height):
        self.html = page
        self._height = height

    def save(self, path):
        """Writes the page to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.html)

    def _repr_html_(self):
        return (
            f'<iframe srcdoc="{html.escape(self.html, quote=True)}" width="100%" height="{self._height}" '
            'style="border: 0" sandbox="allow-scripts"></iframe>'
        )

    def __repr__(self):
        return f"<xlogmem.Report, {len(self.html)} characters>"


def report(path, *, height=800):
    """The report page of a log (`.xtrace`, CSV, or a snapshot of PyTorch): memory over time by tag, lifetimes, the largest blocks."""
    with tempfile.TemporaryDirectory() as folder:
        page = os.path.join(folder, "report.html")
        done = subprocess.run(
            [executable(), "report", os.fspath(path), "-o", page], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip() or f"xlogmem report ended with status {done.returncode}")
        with open(page, encoding="utf-8") as file:
            return Report(file.read(), int(height))
