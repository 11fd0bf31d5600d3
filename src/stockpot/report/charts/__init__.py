"""The charts of a report, one question each; none is made where a run cannot answer it."""
