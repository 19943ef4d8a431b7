"""The course's charts: roofline, memory traffic, bars with their spread, lines over a size.

Each function takes measured objects (`timing.Measurement`, `records.Figures`, `timing.Ceilings`, byte counts) and
returns a `show.Picture`: a matplotlib figure and a description in words that is generated from the same data.
Colours are Okabe and Ito's palette, told apart by readers who cannot tell red from green; hatches and markers repeat
what colour says. Figures are made without pyplot, so a notebook never shows one twice.
"""

from .charts import Moved, bars, climb, ladder, lines, search, traffic
from .flow import flowchart
from .grid import launch
from .roofs import Point, attainable, compute_roof, datasheet, roofline
from .spans import Span, timeline
from .style import BLUE, VERMILION, known, number

__all__ = ["BLUE", "VERMILION", "Moved", "Point", "Span", "attainable", "bars", "climb", "compute_roof"]
__all__ += ["datasheet", "flowchart", "known", "ladder", "launch", "lines", "number", "roofline", "search", "timeline"]
__all__ += ["traffic"]
