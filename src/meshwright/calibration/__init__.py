"""Reads tables of published training runs and predicts their times with the cost model.

The main commands do not import it.
"""
