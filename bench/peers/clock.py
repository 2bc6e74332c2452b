"""Which processors are fast at the moment.

A processor of a virtual machine is slowed, for seconds, by what another guest runs on the other half of its core. Rows are put where
nobody does. What all rates are held against is the median of the best ones of all looks at every processor, and before there were
forty the best of them: a core is faster still for moments in which the whole machine is idle, and none can be waited for.
"""

import bisect
import time

# A processor below this fraction of the usual rate is slow.
SLOW = 0.85
# The number of samples from which the usual rate is a median.
MANY = 40
# Seconds between two scans of all processors if none was fast.
PAUSE = 0.03


class Clock:
    """Asks `meter` for rates: `each`, or the number of a processor, gives rows with the processor as parameter and its rate."""

    def __init__(self, meter, now=time.monotonic, sleep=time.sleep):
        self.meter, self.now, self.sleep = meter, now, sleep
        # The best rate of every scan, sorted.
        self.looks = []
        self.processor = None
        self.rate = None

    @property
    def usual(self):
        if not self.looks:
            return 0.0
        return self.looks[-1] if len(self.looks) < MANY else self.looks[len(self.looks) // 2]

    def forget(self):
        """What was measured is old."""
        self.rate = None

    def is_slow(self, rate):
        return rate < SLOW * self.usual

    def test(self):
        """The rate of the chosen processor."""
        self.rate = self._ask(self.processor)[self.processor]
        return self.rate

    def choose(self, patience):
        """A processor: the last one if it still is fast, or the fastest. Looks for a fast one for at most `patience` seconds, and at
        all of them once if none was ever chosen."""
        if self.processor is not None:
            if self.rate is None:
                self.test()
            if not self.is_slow(self.rate):
                return self.processor
        until = self.now() + patience
        while self.processor is None or self.now() < until:
            rates = self._ask("each")
            self.processor = max(rates, key=rates.get)
            self.rate = rates[self.processor]
            if not self.is_slow(self.rate):
                break
            self.sleep(PAUSE)
        return self.processor

    def several(self, count):
        """The fastest processors, so many of them where there are as many."""
        rates = self._ask("each")
        return set(sorted(rates, key=rates.get, reverse=True)[:count])

    def stop(self):
        self.meter.stop()

    def _ask(self, text):
        rates = {row.parameter: row.value for row in self.meter(text) if row.value}
        if not rates:
            raise ValueError(f"no rate of processor {text}")
        if text == "each":
            bisect.insort(self.looks, max(rates.values()))
        return rates
