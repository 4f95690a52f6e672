"""Reads tables of published training runs and prices them with the cost model. The main commands do not import it."""
