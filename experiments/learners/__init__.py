"""Learners that were tried beside the product's own: one small problem, many ways to solve it."""
