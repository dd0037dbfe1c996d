"""Draws what a rank holds at each stage, by the formulas of the ZeRO paper.

    python -m benchmarks.stages docs/images/stages.svg

Bars are bytes a parameter, between backward and the optimizer's step: fp32 with Adam, 8 ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from zerofx.cost.memory import FP32_ADAM, PSI, W, formula

RANKS = 8
_LEFT, _TOP, _SCALE, _ROW = 60, 34, 36, 34
_KINDS = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer state"}
_STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1f2328 }
.params { fill: #3b7dd8 } .grads { fill: #e08e2b } .optimizer { fill: #4fa36c }
@media (prefers-color-scheme: dark) { text { fill: #d1d7e0 } }
"""


def held(stage: int) -> dict[str, float]:
    """Bytes that each parameter of the model costs a rank, by kind."""
    found = formula(stage, FP32_ADAM)
    return {kind: float(getattr(found, kind).subs({PSI: 1, W: RANKS})) for kind in _KINDS}


def draw() -> str:
    """The picture, as SVG."""
    parts: list[str] = []
    for place, (kind, label) in enumerate(_KINDS.items()):
        x = _LEFT + 150 * place
        parts.append(f'<rect class="{kind}" x="{x}" y="8" width="14" height="14"/>')
        parts.append(f'<text x="{x + 20}" y="20">{label}</text>')
    for stage in range(4):
        x, y = float(_LEFT), _TOP + _ROW * stage
        parts.append(f'<text x="8" y="{y + 18}">zero{stage}</text>')
        for kind, size in held(stage).items():
            width = _SCALE * size
            parts.append(f'<rect class="{kind}" x="{x:g}" y="{y}" width="{width:g}" height="26"/>')
            x += width
        total = sum(held(stage).values())
        parts.append(f'<text x="{x + 8:g}" y="{y + 18}">{total:g} Ψ</text>')
    width, height = _LEFT + 16 * _SCALE + 60, _TOP + 4 * _ROW
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{_STYLE}</style>'
    return "\n".join([head, *parts, "</svg>\n"])


def main() -> None:
    """Write it to a file."""
    parser = argparse.ArgumentParser(description="Draws what a rank holds at each stage.")
    parser.add_argument("file", type=Path)
    parser.parse_args().file.write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
