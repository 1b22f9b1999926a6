"""What a run is to reach."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass

FIGURES = ("pass_rate", "failed", "tokens", "wer", "cer")  # logged as gen/..., beside the rate of each check


@dataclass(frozen=True)
class Goal:
    """A bound for a logged metric, such as gen/pass_rate>=0.95."""

    metric: str
    sign: str
    value: float

    SIGNS = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

    @classmethod
    def read(cls, text: str) -> Goal:
        """Parse `METRIC>=NUMBER`; raises ValueError."""
        found = re.fullmatch(r"\s*([\w/.-]+)\s*(>=|<=|>|<)\s*(\S+)\s*", text)
        if not found or not math.isfinite(value := float(found[3])):
            raise ValueError(f"{text!r} is no goal: write it as gen/pass_rate>=0.95")
        return cls(found[1], found[2], value)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.value!r}"

    def met(self, value: float) -> bool:
        return self.SIGNS[self.sign](value, self.value)


def lower_is_better(metric: str) -> bool:
    """Whether a metric's name says that it is a loss or an error rate; `gen/max_wer` is the share that keeps to one."""
    return re.search(r"(^|(?<!max)[/_])(loss|wer|cer|perplexity|error|failed|entropy)$", metric) is not None
