"""What a scenario expects: comparisons of its figures, as `loaded.light.ttft.p95 <= 4 * quiet.light.ttft.p95`."""

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, float | None]
"""The figures of a run by their dotted names; None: nothing was measured."""

_ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ORDER: dict[type, Callable[[float, float], bool]] = {
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
}


class UnknownFigure(ValueError):
    """An expectation names a figure that the run has not."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An expectation, and its two sides in one run; None: one of their figures was not measured."""

    expected: str
    left: float | None
    right: float | None
    is_met: bool

    def __str__(self) -> str:
        sides = ["nothing measured" if side is None else f"{side:.4g}" for side in (self.left, self.right)]
        return f"{'met ' if self.is_met else 'MISS'}  {self.expected}   ({' against '.join(sides)})"


class Expectation:
    """A comparison of two sums, products or quotients of figures and numbers. Raises `ValueError` for anything else."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:
            tree = None
        if not isinstance(tree, ast.Compare) or len(tree.ops) != 1 or type(tree.ops[0]) not in _ORDER:
            raise ValueError(f"{text!r} is no comparison, such as: slow.light.ttft.p95 <= 4 * quiet.light.ttft.p95")
        self._left, self._right = tree.left, tree.comparators[0]
        self._holds = _ORDER[type(tree.ops[0])]
        for side in (self._left, self._right):
            self._value(side, None)

    def judge(self, figures: Figures) -> Verdict:
        """Raises `UnknownFigure`. A figure that was not measured meets nothing."""
        left, right = (self._value(side, figures) for side in (self._left, self._right))
        return Verdict(self.text, left, right, left is not None and right is not None and self._holds(left, right))

    def _value(self, node: ast.expr, figures: Figures | None) -> float | None:
        """The value of one side; without figures only its form is checked."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            left, right = self._value(node.left, figures), self._value(node.right, figures)
            if left is None or right is None or (isinstance(node.op, ast.Div) and not right):
                return None
            return _ARITHMETIC[type(node.op)](left, right)
        name = self._name(node)
        if figures is None:
            return None
        if name not in figures:
            raise UnknownFigure(f"{self.text!r}: there is no figure {name}; there are {_near(name, figures)}")
        return figures[name]

    def _name(self, node: Any) -> str:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            return f"{self._name(node.value)}.{node.attr}"
        raise ValueError(f"{self.text!r} has more than figures, numbers and + - * /")


def _near(name: str, figures: Figures) -> str:
    head = name.rpartition(".")[0]
    return ", ".join(sorted(one for one in figures if one.startswith(head))) or ", ".join(sorted(figures))
