"""Runs the examples of docs/python.md that need no GPU and no framework. scripts/check-cluster runs those of docs/clusters.md."""

import pathlib
import re
import unittest

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "python.md"
CLUSTERS = DOCS.with_name("clusters.md")
README = pathlib.Path(__file__).resolve().parents[1] / "README.md"


def examples(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


class Docs(unittest.TestCase):
    def run_on_sim(self, page):
        runnable = [example for example in examples(page) if 'xlogmem.open("sim"' in example]
        self.assertTrue(runnable, f"{page} has no example for the simulated device")
        for example in runnable:
            exec(compile(example, str(page), "exec"), {})

    def test_the_examples_of_the_page_run(self):
        self.run_on_sim(DOCS)

    def test_the_examples_of_the_package_run(self):
        self.run_on_sim(README)

    def test_every_example_is_python(self):
        for page in (DOCS, CLUSTERS, README):
            for example in examples(page):
                compile(example, str(page), "exec")


if __name__ == "__main__":
    unittest.main()
