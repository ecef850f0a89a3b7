"""Which series and labels a PromQL expression speaks of, by a real parser of PromQL."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser


@dataclass(frozen=True, slots=True)
class Selector:
    """One selector: the series' name, and what it says of labels as (name, operator, value)."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """All selectors in an expression. Grafana's variables stand for some duration or text."""
    text = re.sub(r"\$__rate_interval|\$__interval|\$__range", "5m", expression)
    return list(_selectors(promql_parser.parse(text)))


def _selectors(node: Any) -> Iterator[Selector]:
    if isinstance(node, promql_parser.VectorSelector):
        matchers = tuple((each.name, str(each.op), each.value) for each in node.matchers.matchers)
        yield Selector(node.name, matchers)
    for name in ("expr", "lhs", "rhs", "vector_selector", "args"):
        child = getattr(node, name, None)
        for each in child if isinstance(child, list) else [child]:
            if isinstance(each, promql_parser.Expr):
                yield from _selectors(each)
