"""Parts of scripts/check-cluster that read text: metrics by another parser, and the examples of docs/clusters.md."""

import os
import re
import subprocess
import sys

from .common import MIB, ROOT, check


def metrics_part(folder, kind):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    import xlog_ledger
    from xlogmem import cluster

    ledgers = folder / "metric-ledgers"
    ledgers.mkdir(mode=0o700)
    os.environ["XLOG_EXEC_LEDGER"] = str(ledgers)
    try:
        quota = xlog_ledger.Quota(limit=64 * MIB, guaranteed=MIB, name='a "job"\\')
        with xlog_ledger.Ledger(str(ledgers / "GPU-0.ledger"), limit=960 * MIB, quota=quota) as ledger:
            ledger.charge(5 * MIB)
            families = list(text_string_to_metric_families(cluster.openmetrics(cluster.rows(own=True))))
    finally:
        del os.environ["XLOG_EXEC_LEDGER"]
    check([family.name for family in families] == [name for name, _, _ in cluster.METRICS], f"{families}")
    for family in families:
        check((family.type, family.unit) == ("gauge", "bytes") and family.name.endswith("_bytes"), f"{family}")
        [sample] = family.samples
        check(tuple(sample.labels) == cluster.LABELS and sample.labels["tag"] == 'a "job"\\', f"{sample}")
    values = {family.name: family.samples[0].value for family in families}
    check(values["xlogmem_used_bytes"] == 5 * MIB and values["xlogmem_quota_bytes"] == 64 * MIB, f"{values}")
    return f"{len(families)} gauges with the labels {', '.join(cluster.LABELS)}"


def docs_part(folder, kind):
    """Each example of the page as a program of its own, as it is written."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs/clusters.md").read_text(encoding="utf-8"), re.DOTALL)
    outputs = []
    for number, example in enumerate(examples):
        program = folder / f"example-{number}.py"
        program.write_text(example)
        done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, cwd=folder)
        check(done.returncode == 0, f"example {number}: {done.stdout}{done.stderr}")
        outputs.append(done.stdout)
    check(any("granted" in text and "out of budget" in text for text in outputs), f"no example is refused: {outputs}")
    return f"{len(examples)} examples of docs/clusters.md run as they are written"
