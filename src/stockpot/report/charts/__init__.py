"""The charts of a report, one question each."""

from stockpot.report.charts.coefficients import weights_by_group, weights_by_method
from stockpot.report.charts.comparison import comparison
from stockpot.report.charts.cost import cost
from stockpot.report.charts.curves import curves
from stockpot.report.charts.distances import distances
from stockpot.report.charts.distribution import distribution
from stockpot.report.charts.growth import growth
from stockpot.report.charts.ingredients import score_against_weight

__all__ = [
    "comparison",
    "cost",
    "curves",
    "distances",
    "distribution",
    "growth",
    "score_against_weight",
    "weights_by_group",
    "weights_by_method",
]
