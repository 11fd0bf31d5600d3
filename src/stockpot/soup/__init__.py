from stockpot.soup.soup import Soup, rebuild

__all__ = ["Soup", "rebuild"]
