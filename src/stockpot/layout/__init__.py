from stockpot.layout.layout import EXCLUDED, FROZEN, INTEGER, STATISTIC, Layout, mixing_dtype

__all__ = ["EXCLUDED", "FROZEN", "INTEGER", "STATISTIC", "Layout", "mixing_dtype"]
