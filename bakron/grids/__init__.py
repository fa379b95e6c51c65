"""Grids: which numbers a weight may become. A grid is data (tensors and integers), not a callback, so compiled kernels specialise on it.

One definition of rounding for all scalar grids, shared by every solver and every test, in the dtype of the sweep:

    x = t / scale        code = the level nearest to x, of two equally near ones the even one (counted from the level nearest to 0)

For a uniform grid that is `code = clamp(round_half_even(x) + zero, low, high)` and `value = (code - zero) * scale`.
"""

from bakron.grids.codebook import TABLES, CodebookGrid
from bakron.grids.e8 import E8Grid
from bakron.grids.offset import OffsetGrid
from bakron.grids.scalar import Grid, ScalarGrid, check_group, check_groups
from bakron.grids.scales import FORMATS, SCALES
from bakron.grids.uniform import UniformGrid, code_range

__all__ = [
    "FORMATS",
    "SCALES",
    "TABLES",
    "CodebookGrid",
    "E8Grid",
    "Grid",
    "OffsetGrid",
    "ScalarGrid",
    "UniformGrid",
    "check_group",
    "check_groups",
    "code_range",
]
